"""What the yardstick trains on, and the tables of the comparison."""

import json
import sys
from pathlib import Path

import pytest
import testbed as library
import torch
import vs_torchrec
from clustered import Cells, in_sentences
from shares import read_all, share_of

from shadowsync.config import parse
from shadowsync.data.synthetic import Synthetic


@pytest.mark.parametrize(("rows", "world"), [(1000, 2), (1001, 2), (1025, 2), (997, 3), (64, 4)])
def test_the_shares_of_all_processes_are_the_batches_that_shadowsync_reads(rows: int, world: int) -> None:
    config = parse({"train": {"batch_size": 64}, "data": {"slice_rows": 256, "epochs": 2}})
    source = Synthetic(rows=rows, features=3, table_rows=50).open("train", "error")
    assert source is not None
    whole = [batch.dense for batch in read_all(config, source)]
    shares = [share_of(config, source, rank, world) for rank in range(world)]
    assert len({len(mine) for mine in shares}) == 1, "every process takes part in every step"
    for step in zip(*shares, strict=True):
        sizes = [len(batch) for batch in step]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) > 0
    together = [batch.dense for step in zip(*shares, strict=True) for batch in step]
    assert torch.equal(torch.cat(together), torch.cat(whole)), "each sample once an epoch, in the same order"


def test_results_are_kept_a_line_each(tmp_path: Path) -> None:
    kept = Cells(tmp_path / "new")
    assert kept.read("one") is None
    kept.write("two", {"eps": 2.0})
    kept.write("one", {"eps": 1.0})
    kept.write("one", {"eps": 1.5})
    assert Cells(tmp_path / "new").read("one") == {"eps": 1.5}
    assert kept.all() == [{"eps": 1.5}, {"eps": 2.0}]
    with (tmp_path / "new" / "runs.jsonl").open("a") as file:
        file.write('{"cell": "one", "result": {"eps": 3.0}')  # and then the machine went down
    assert kept.read("one") == {"eps": 1.5}


def test_what_keeps_a_testbed_from_being_made_ends_a_script_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def main() -> None:
        raise library.TestbedError("it cannot be")

    with pytest.raises(SystemExit, match="it cannot be"):
        in_sentences(main)


def test_names_of_runs_are_files_and_differ() -> None:
    cells = [
        vs_torchrec.Cell(task, rate, variant, number)
        for task in vs_torchrec.TASKS
        for rate in vs_torchrec.RATES
        for variant in vs_torchrec.ALL
        for number in (0, 1)
    ]
    names = {cell.name for cell in cells}
    assert len(names) == len(cells)
    assert not any(set(name) & set(" ,/") for name in names)


def test_ratios_are_of_the_same_round_and_incomplete_rounds_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {"shadowsync, bf16": [80_000.0, 40_000.0, 60_000.0], "TorchRec, fp32": [20_000.0, 20_000.0]}
    kept = Cells(tmp_path)
    for variant, found in speeds.items():
        for number, eps in enumerate(found):
            cell = vs_torchrec.Cell("speed", "1gbit", variant, number)
            row = {"task": "speed", "rate": "1gbit", "variant": variant, "round": number, "eps": eps}
            kept.write(cell.name, row)
        demo = {"task": "demo", "rate": "1gbit", "variant": variant, "round": 0, "eps": 1.0, "auc": 0.94, "ne": 0.5}
        kept.write(f"demo-{variant}", demo | {"samples": 1_325_700})
    monkeypatch.setattr(sys, "argv", ["vs", "--out", str(tmp_path), "--report", "--rates", "1gbit"])
    vs_torchrec.main()
    said = capsys.readouterr().out.splitlines()
    assert "1gbit, 2 rounds" in "\n".join(said)
    ours = [line.split() for line in said if line.startswith("shadowsync, bf16")]
    assert ours[0][2:] == ["60,000", "40,000", "80,000", "3.00"]
    assert ours[1][2:] == ["1", "1,325,700", "0.9400", "0.5000", "1"]


def test_a_speed_run_is_as_long_as_its_variant_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fake(cell: vs_torchrec.Cell, setup: vs_torchrec.Setup, overrides: list[str]) -> dict[str, float]:
        asked.append([override for override in overrides if override.startswith(("data.rows", "train.seed"))])
        return {"eps": 10_000.0}

    monkeypatch.setattr(vs_torchrec, "_train_theirs", fake)
    setup, speeds = vs_torchrec.Setup("python", (), 20.0), {}
    for number in (0, 1):
        vs_torchrec.measure(vs_torchrec.Cell("speed", "1gbit", "TorchRec, fp32", number), setup, speeds)
    vs_torchrec.measure(vs_torchrec.Cell("demo", "1gbit", "TorchRec, fp32", 1), setup, speeds)
    assert asked == [
        ["train.seed=0", "data.rows=60000"],
        ["train.seed=0", "data.rows=200000"],
        ["train.seed=1", "data.rows=200000"],
        ["train.seed=1"],
    ]
    assert json.loads(json.dumps(list(speeds.values()))) == [10_000.0]


def fake_python(folder: Path, script: str) -> vs_torchrec.Setup:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return vs_torchrec.Setup(str(path), (), 1.0)


def test_the_yardstick_runs_in_both_hosts_and_rank_0_is_heard(tmp_path: Path) -> None:
    if (reason := library.obstacle()) is not None:
        pytest.skip(reason)
    cell = vs_torchrec.Cell("demo", "1gbit", "TorchRec, bf16", 0)
    script = f'echo "$*" > {tmp_path}/$3; [ $3 = 0 ] && echo noise && echo "{{\\"eps\\": 5.0}}"'
    assert vs_torchrec.measure(cell, fake_python(tmp_path, script), {}) == {"eps": 5.0}
    given = [(tmp_path / rank).read_text().split() for rank in "01"]
    assert all("--master 10.0.0.1 --wire=bf16" in " ".join(words) for words in given)
    assert all("train.batch_size=1024" in words for words in given)
    with pytest.raises(library.TestbedError, match="TorchRec, bf16 printed no result: it broke"):
        vs_torchrec.measure(cell, fake_python(tmp_path, "echo it broke >&2"), {})
