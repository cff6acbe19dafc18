"""Runs that fail while they are under way, and folders and checkpoints that cannot be used."""

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from command_line import CommandLine, assert_sentence, cut_in_half, everything_in, train
from msgspec.structs import replace
from torch import Tensor, nn

from shadowsync import Job
from shadowsync.checkpoint.files import LocalFiles
from shadowsync.checkpoint.format import MANIFEST, RowTensor, decode, encode
from shadowsync.config import load


def test_results_of_a_run_are_not_overwritten(trained: CommandLine) -> None:
    before = digest(trained.folder / "out")
    assert_sentence(trained(*train()), 2, ["out holds a run already", "--resume out", "--out"])
    assert digest(trained.folder / "out") == before


def test_only_a_run_whose_servers_move_is_drained(trained: CommandLine) -> None:
    assert_sentence(trained("drain", "nowhere", "host-1"), 2, ["nowhere", "is not the folder of a run"])
    assert_sentence(trained("drain", "out", "host-1"), 2, ["stay where they are", "cluster.max_servers is not set"])
    assert not (trained.folder / "out" / "drain.json").exists()


def test_the_remains_of_a_run_without_a_checkpoint(trained: CommandLine) -> None:
    shutil.rmtree(trained.folder / "out" / "checkpoints")
    assert_sentence(trained(*train()), 2, ["out holds a run already", "remove it"])
    assert_sentence(trained("train", "--resume", "out"), 2, ["out", "no checkpoint"])
    assert_sentence(trained("evaluate", "out"), 2, ["out", "no checkpoint"])


@pytest.mark.parametrize("victim", ["rows-00000.safetensors", "dense.safetensors", "manifest.json"])
def test_a_checkpoint_cut_in_half(trained: CommandLine, victim: str) -> None:
    (checkpoint,) = (trained.folder / "out" / "checkpoints").iterdir()
    cut_in_half(checkpoint / victim)
    before = digest(trained.folder / "out")
    for command in (("train", "--resume", "out", "data.epochs=2"), ("evaluate", "out")):
        assert_sentence(trained(*command), 2, [checkpoint.name, victim])
        assert digest(trained.folder / "out") == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("model.top=[16]", "top.0.weight"),
        ("model.name=deepfm", "parameter"),
        ("model.embedding_dim=8", "item"),
        ("train.optimizer=adam", "train.optimizer"),
        ("embedding.optimizer=adam", "embedding.optimizer"),
        ("data.rows=99", "99"),
        ("data.path=test.parquet", "60 rows"),
        ("data.categorical=[shop,item,recent]", "shop, item, recent"),
        ("data.dense=[]", "none"),
    ],
)
def test_a_checkpoint_of_another_model(trained: CommandLine, change: str, named: str) -> None:
    before = digest(trained.folder / "out")
    assert_sentence(trained("train", "--resume", "out", "data.epochs=2", change), 2, [named])
    assert digest(trained.folder / "out") == before


def test_a_checkpoint_whose_optimizer_state_has_another_form(trained: CommandLine) -> None:
    (checkpoint,) = (trained.folder / "out" / "checkpoints").iterdir()
    written = decode((checkpoint / MANIFEST).read_bytes(), MANIFEST)
    pieces = tuple(replace(piece, tensors=tuple(map(reshaped, piece.tensors))) for piece in written.pieces)
    (checkpoint / MANIFEST).write_bytes(encode(replace(written, pieces=pieces)))
    before = digest(trained.folder / "out")
    for command in (
        ("train", "--resume", "out", "data.epochs=2"),
        ("evaluate", "out"),
        ("predict", "out", "--data", "test.parquet", "--out", "p.parquet"),
    ):
        assert_sentence(trained(*command), 2, ["momentum", ", 1]"])
        assert digest(trained.folder / "out") == before


def reshaped(tensor: RowTensor) -> RowTensor:
    """The same bytes with one dimension more, of the optimizer's state."""
    return replace(tensor, shape=(*tensor.shape, 1)) if tensor.name == "momentum" else tensor


def digest(folder: Path) -> dict[str, bytes]:
    """Every file of a run, but for the configuration and the history, which a resumed run writes anew."""
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.suffix in (".safetensors", ".json", ".parquet")
    }


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_place_for_checkpoints_that_cannot_be_written_is_found_before_training(shadowsync: CommandLine) -> None:
    (shadowsync.folder / "file").write_text("in the way")
    run = shadowsync(*train("train.checkpoint_dir=file/checkpoints", "data.epochs=1000000"))
    assert_sentence(run, 1, ["file/checkpoints", "nothing was trained", "train.checkpoint_dir"])


def test_a_full_disk_is_a_failure_of_the_run(shadowsync: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFiles, "write", no_space)
    assert_sentence(shadowsync(*train()), 1, ["out/checkpoints", "No space left on device", "train.checkpoint_dir"])
    out = shadowsync.folder / "out"
    assert not (out / "result.json").exists()
    assert list((out / "checkpoints").glob("*")) == []


def test_results_that_cannot_be_written(shadowsync: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target.name == "result.json":
            no_space()
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    assert_sentence(shadowsync(*train()), 1, ["out/result.json", "No space left on device"])
    assert [path.name for path in (shadowsync.folder / "out").glob("*result*")] == []
    monkeypatch.undo()
    monkeypatch.chdir(shadowsync.folder)
    assert shadowsync("train", "--resume", "out").status == 0


WRITING = [(("predict", "out", "--data", "test.parquet"), "csv"), (("export", "out"), "pt2")]


@pytest.mark.parametrize(("command", "ending"), WRITING)
def test_a_place_where_nothing_can_be_written(trained: CommandLine, command: Sequence[str], ending: str) -> None:
    before = everything_in(trained.folder)
    assert_sentence(trained(*command, "--out", f"run.yaml/file.{ending}"), 1, [f"run.yaml/file.{ending}"])
    assert everything_in(trained.folder) == before


def test_the_rows_that_are_read_are_not_written_over(trained: CommandLine) -> None:
    before = digest(trained.folder)
    rows = ("data.path=train.parquet", "data.categorical=[item]", "data.rows=50")
    for command in (("predict", "out", "--data", "*.parquet"), ("data", "parquet", *rows)):
        said = trained(*command, "--out", "train.parquet")
        assert_sentence(said, 2, ["--out train.parquet", "rows that are read"])
        assert digest(trained.folder) == before


@pytest.mark.parametrize(("command", "ending"), WRITING)
def test_a_folder_or_a_device_is_not_replaced(trained: CommandLine, command: Sequence[str], ending: str) -> None:
    folder, pipe = f"folder.{ending}", f"pipe.{ending}"
    (trained.folder / folder).mkdir()
    os.mkfifo(trained.folder / pipe)
    before = everything_in(trained.folder)
    for name in (folder, pipe):
        assert_sentence(trained(*command, "--out", name), 1, [name, "folder or a device"])
    assert everything_in(trained.folder) == before
    assert (trained.folder / pipe).is_fifo()


@pytest.mark.parametrize("out", ["p.parquet", "p.csv"])
def test_predictions_on_a_full_disk(trained: CommandLine, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.setattr("pyarrow.parquet.ParquetWriter.write_table", no_space)
    monkeypatch.setattr("polars.DataFrame.write_csv", no_space)
    before = everything_in(trained.folder)
    said = trained("predict", "out", "--data", "test.parquet", "--out", out)
    assert_sentence(said, 1, [out, "No space left"])
    assert everything_in(trained.folder) == before


def test_a_resumed_section_that_is_none(trained: CommandLine) -> None:
    for section, value in (("model", "3"), ("data", "[1]"), ("sync", "easgd")):
        assert_sentence(trained("train", "--resume", "out", f"{section}={value}"), 2, [section])


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_broken_line_of_the_history_is_left_out_of_a_resumed_run(trained: CommandLine, name: str) -> None:
    history = trained.folder / "out" / name
    good = history.read_bytes()
    history.write_bytes(b"garbage\n" + good)
    said = trained("train", "--resume", "out", "data.epochs=2")
    assert (said.status, said.err) == (0, "")
    assert f"{name}: line 1 is not " in said.out
    assert "the line is left out" in said.out
    assert history.read_bytes().startswith(good)


def test_a_loss_that_explodes(shadowsync: CommandLine) -> None:
    said = shadowsync(*train("train.lr=1e30", "embedding.lr=1e30", "data.epochs=20"))
    assert_sentence(said, 1, ["finite", "train.lr", "train.clip_norm"])
    assert not (shadowsync.folder / "out" / "result.json").exists()


class OwnModel(nn.Module):
    """A module of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(1 + 3 * 4, 1)

    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return self.tower(torch.cat([dense, *embeddings.values()], dim=1)).squeeze(1)


def test_a_module_of_ones_own_is_not_known_to_the_command_line(shadowsync: CommandLine) -> None:
    config = load(Path("run.yaml"), []).model_dump(exclude_unset=True)
    config["model"] = {"embedding_dim": 4}
    Job(config, model=OwnModel(), out="out").run()
    for command in (
        ("evaluate", "out"),
        ("predict", "out", "--data", "test.parquet", "--out", "p.parquet"),
        ("export", "out", "--out", "m.pt2"),
        ("train", "--resume", "out", "data.epochs=2"),
    ):
        assert_sentence(shadowsync(*command), 2, ["module of your own", "out", "model=module"])


def test_an_interruption_before_training_starts(shadowsync: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shadowsync.job.open_sources", interrupted)
    assert_sentence(shadowsync(*train()), 130, ["interrupted; nothing was saved"])
    assert not (shadowsync.folder / "out").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: …"),
        RuntimeError("can't start new thread"),
    ],
    ids=["python", "torch", "threads"],
)
def test_too_little_memory_is_one_sentence(
    shadowsync: CommandLine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(OwnModel, "forward", fail)
    monkeypatch.setattr("shadowsync.cluster.session.make_module", lambda *_: OwnModel())
    assert_sentence(shadowsync(*train()), 1, ["memory", "train.batch_size", "ulimit"])
    assert not (shadowsync.folder / "out" / "result.json").exists()
