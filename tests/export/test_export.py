"""One file with tables and module: equal to the job, for any batch, and safe against bad input."""

import copy
import json
import resource
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from export_cases import (
    CASES,
    FEATURES,
    ROW_BYTES,
    SHARED,
    SUMS,
    Case,
    Own,
    Plain,
    export,
    job_logits,
    make_inputs,
    make_rows,
)
from torch import Tensor, nn

from shadowsync.embedding.table import Table
from shadowsync.errors import ConfigError, SaveError
from shadowsync.export import ExportSpec, export_model
from shadowsync.training.kernels import accelerate, onednn_runs, parse_kernels

SIMPLE = CASES["own module"]


@pytest.mark.parametrize("name", CASES)
def test_the_file_predicts_what_the_job_predicts(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    module = export(case, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for samples, longest in ((1, 3), (2, 1), (3, 0), (64, 3)):
        inputs = make_inputs(case, samples, longest)
        answer = loaded(*inputs)
        wanted = job_logits(case, module, inputs)
        assert answer["logits"].shape == answer["probabilities"].shape == (samples,)
        torch.testing.assert_close(answer["logits"], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(answer["probabilities"], wanted.sigmoid(), rtol=1e-6, atol=1e-6)
        assert not answer["logits"].requires_grad or torch.__version__.startswith("2.9.")  # whose loader forgets it


@pytest.fixture(scope="module")
def simple(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "model.pt2"
    export(SIMPLE, path)
    return path


def test_the_names_stand_in_the_file(simple: Path) -> None:
    found = {"metadata.json": ""}
    torch.export.load(simple, extra_files=found)
    metadata = json.loads(found["metadata.json"])
    assert metadata["format"] == 1
    assert metadata["dense"] == ["number 0", "number 1", "number 2"]
    assert metadata["weighted"] is False
    assert [feature["name"] for feature in metadata["features"]] == list(FEATURES)
    assert metadata["features"][1] == {"name": "user", "table": "user", "rows": 50, "dim": 8, "pooling": "sum"}


def test_no_object_is_pickled(simple: Path) -> None:
    with zipfile.ZipFile(simple) as archive:
        payloads = {name.rsplit("/", 1)[0].split("/", 1)[1]: name for name in archive.namelist() if "/data/" in name}
        assert set(payloads) == {"data/weights", "data/constants", "data/sample_inputs"}
        weights = [name for name in archive.namelist() if name.endswith("weights_config.json")]
        assert '"use_pickle": true' not in archive.read(weights[0]).decode()
        with archive.open(payloads["data/sample_inputs"]) as sample:
            torch.load(sample, weights_only=True)


def bad_inputs() -> dict[str, tuple[tuple[Tensor, ...], str]]:
    dense, values, offsets = make_inputs(SIMPLE, 4)
    above, below, foreign = values.clone(), values.clone(), values.clone()
    above[-1], below[0], foreign[0] = 30, -1, 31
    return {
        "id above": ((dense, above, offsets), "an id is not a row of its feature's table"),
        "id below": ((dense, below, offsets), "an id is not a row of its feature's table"),
        "id of another table's rows": ((dense, foreign, offsets), "an id is not a row of its feature's table"),
        "offsets end early": ((dense, values, offsets - (offsets == offsets[-1]).long()), "offsets must begin with 0"),
        "offsets end late": ((dense, values[:-1], offsets), "offsets must begin with 0"),
        "offsets begin late": ((dense, values, offsets.clamp(min=1)), "offsets must begin with 0"),
        "offsets fall": ((dense, values, torch.cat([offsets[:2], offsets[2:-1].flip(0), offsets[-1:]])), "never fall"),
        "one offset less": ((dense, values, offsets[:-1]), "Guard failed"),
        "fewer samples": ((dense[:-1], values, offsets), "Guard failed"),
        "fewer columns": ((dense[:, :-1], values, offsets), "Guard failed"),
    }


@pytest.mark.parametrize("name", bad_inputs())
def test_bad_input_is_refused(simple: Path, name: str) -> None:
    inputs, message = bad_inputs()[name]
    loaded = torch.export.load(simple).module()
    with pytest.raises((RuntimeError, AssertionError), match=message):
        loaded(*inputs)


def test_the_module_stays_as_it_was(tmp_path: Path) -> None:
    module = SIMPLE.build().train()
    flat = torch.randn(sum(p.numel() for p in module.parameters()))
    start = 0
    for parameter in module.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    before = copy.deepcopy(module.state_dict())
    rows = make_rows(SHARED)
    export_model(module, SIMPLE.spec, lambda name, a, b: rows[name][a:b], tmp_path / "model.pt2")
    assert module.training
    assert all(p.requires_grad and p.untyped_storage().data_ptr() == flat.data_ptr() for p in module.parameters())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    inputs = make_inputs(SIMPLE, 5)
    answer = torch.export.load(tmp_path / "model.pt2").module()(*inputs)
    torch.testing.assert_close(answer["logits"], job_logits(SIMPLE, module, inputs), rtol=1e-6, atol=1e-6)


def test_the_layers_of_training_become_plain_ones(tmp_path: Path) -> None:
    case = CASES["dlrm"]
    plain, fast = case.build(), case.build()
    accelerate(fast, parse_kernels("onednn" if onednn_runs(torch.float32) else "torch"))
    rows = make_rows(case.tables)
    export_model(fast, case.spec, lambda name, a, b: rows[name][a:b], tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2")
    assert "mkldnn" not in str(program.graph)
    inputs = make_inputs(case, 5)
    torch.testing.assert_close(
        program.module()(*inputs)["logits"], job_logits(case, plain, inputs), rtol=1e-6, atol=1e-6
    )


def test_rows_are_asked_for_in_bounded_pieces(tmp_path: Path) -> None:
    case = Case(Own(), SUMS, chunk_bytes=30 * ROW_BYTES)
    rows = make_rows(case.tables)
    asked: list[tuple[str, int, int]] = []

    def read(name: str, start: int, stop: int) -> Tensor:
        asked.append((name, start, stop))
        return rows[name][start:stop]

    export_model(case.build(), case.spec, read, tmp_path / "model.pt2")
    assert max(stop - start for _, start, stop in asked) == 30
    for table in case.tables:
        spans = [(start, stop) for name, start, stop in asked if name == table.name]
        assert [row for start, stop in spans for row in range(start, stop)] == list(range(table.rows))


class Branching(Plain):
    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return super().forward(dense, embeddings) if dense.sum() > 0 else dense[:, 0]


class Failing(Plain):
    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return embeddings["no such feature"][:, 0]


class WrongShape(Plain):
    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return super().forward(dense, embeddings)[:, None]


class OneBatchSize(Plain):
    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return super().forward(dense, embeddings) * torch.ones(5)


class Counting(Plain):
    """Freezes into the file what Python computes anew in every call."""

    calls = 0

    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return super().forward(dense, embeddings) + self.calls


UNEXPORTABLE: Mapping[type[Plain], str] = {
    Branching: r"torch.export cannot trace the model \(.*data-dependent",
    Failing: r"torch.export cannot trace the model \(.*no such feature",
    WrongShape: "for a batch of 1: its forward must return logits",
    OneBatchSize: r"torch.export cannot trace the model \(",
    Counting: "does not compute what the model does for a batch of 1",
}


@pytest.mark.parametrize("kind", UNEXPORTABLE)
def test_a_module_that_cannot_be_exported_says_why(kind: type[Plain], tmp_path: Path) -> None:
    rows = make_rows(SHARED)
    module = kind(3, dict.fromkeys(FEATURES, 8))
    with pytest.raises(ConfigError, match=UNEXPORTABLE[kind]) as caught:
        export_model(module, SIMPLE.spec, lambda name, a, b: rows[name][a:b], tmp_path / "model.pt2")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_name_torch_would_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.bin: .* write to .*model.bin.pt2"):
        export(SIMPLE, tmp_path / "model.bin")


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"the old one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(SaveError, match=r"model.pt2 could not be written \(File too large\): make room"):
            export(SIMPLE, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]


class NoFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        assert not embeddings
        return self.layer(dense).squeeze(1)


def test_a_model_without_categorical_features_exports(tmp_path: Path) -> None:
    module = NoFeatures()
    export_model(module, ExportSpec((), (), ("a", "b", "c")), lambda name, a, b: torch.empty(0), tmp_path / "m.pt2")
    loaded = torch.export.load(tmp_path / "m.pt2").module()
    dense = torch.randn(6, 3)
    answer = loaded(dense, torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(answer["logits"], module(dense, {}).detach())


def test_a_model_of_a_single_feature_exports(tmp_path: Path) -> None:
    class Single(nn.Module):
        def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
            return embeddings["user"].sum(1)

    rows = torch.randn(20, 8)
    spec = ExportSpec((Table("user", 20, 8, ("user",)),), ("user",), ())
    export_model(Single(), spec, lambda name, start, stop: rows[start:stop], tmp_path / "m.pt2")
    loaded = torch.export.load(tmp_path / "m.pt2").module()
    for samples in (1, 2, 5):
        ids = torch.arange(samples) * 3
        answer = loaded(torch.zeros(samples, 0), ids, torch.arange(samples + 1))
        torch.testing.assert_close(answer["logits"], rows[ids].sum(1))
