"""A resumed job knows its data again; numbers that nothing can be learnt from are told of, or end the run."""

import dataclasses
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from job_helpers import SMALL_DLRM, error_of, fails, result_of, set_cells, settings, train_counted, write_rows
from rich.console import Console

from shadowsync import Job
from shadowsync.checkpoint.snapshot import Snapshot
from shadowsync.errors import CheckpointError, RunError
from shadowsync.recovery_controller import take_snapshot

ROWS = 60


def told(config: dict[str, Any], out: Path, **own: Any) -> str:
    """What a job says."""
    said = io.StringIO()
    Job(config, out=out, **own).run(Console(file=said, width=1000))
    return said.getvalue()


def finished(folder: Path) -> tuple[dict[str, Any], Path]:
    """A configuration, and a run of it that is done."""
    config, out = settings(write_rows(folder / "rows.parquet", ROWS)), folder / "out"
    train_counted(config, out)
    return config, out


def with_data(config: dict[str, Any], **data: Any) -> dict[str, Any]:
    return {**config, "data": config["data"] | {key: str(value) for key, value in data.items()}}


def refused(config: dict[str, Any], out: Path) -> str:
    before = (out / "result.json").read_bytes()
    error = fails(lambda: train_counted(config, out, resume=out), CheckpointError)
    assert (out / "result.json").read_bytes() == before
    return str(error)


def flip_labels(path: Path) -> None:
    pl.read_parquet(path).with_columns(1 - pl.col("label")).write_parquet(path)


def test_other_data_of_as_many_rows_is_refused_and_may_be_accepted(tmp_path: Path) -> None:
    config, out = finished(tmp_path)
    others = with_data(config, path=write_rows(tmp_path / "new.parquet", ROWS, seed=1))
    others["data"]["epochs"] = 2
    said = refused(others, out)
    assert "samples-000000000060 was trained on other data: it was rows.parquet, this is new.parquet; give" in said
    word = said.partition("data.accept=")[2].partition(" ")[0]
    accepted = with_data(others, accept=word)
    _, trained = train_counted(accepted, out, resume=out)
    assert trained == dict.fromkeys(range(ROWS), 1)
    flip_labels(tmp_path / "new.parquet")
    assert "new.parquet" in refused(accepted, out)  # only the very data that was meant


def test_changed_labels_are_noticed(tmp_path: Path) -> None:
    config, out = finished(tmp_path)
    flip_labels(tmp_path / "rows.parquet")
    assert "was trained on other data: rows.parquet " in refused(config, out)


def test_moved_data_is_the_same_and_a_finished_run_says_that_nothing_is_left(tmp_path: Path) -> None:
    config, out = finished(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "rows.parquet").rename(tmp_path / "elsewhere" / "rows.parquet")
    os.utime(moved, ns=(1, 1))
    _, trained = train_counted(with_data(config, path=moved), out, resume=out)
    assert not trained
    small = settings(moved, model=SMALL_DLRM)
    Job(small, out=tmp_path / "dlrm").run()
    said = told(small, tmp_path / "dlrm", resume=tmp_path / "dlrm")
    left = "nothing is left to train: every row of the 1 epoch(s) was trained before; to train on, set data.epochs=2"
    assert left in said


def test_a_checkpoint_from_before_says_nothing_of_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def old(*of_the_job: Any) -> Snapshot:
        new = take_snapshot(*of_the_job)
        return dataclasses.replace(new, extra={key: value for key, value in new.extra.items() if key != "data"})

    monkeypatch.setattr("shadowsync.recovery_controller.take_snapshot", old)
    config, out = finished(tmp_path)
    manifest = next((out / "checkpoints").glob("samples-*/manifest.json"))
    assert "data" not in json.loads(manifest.read_text())["body"]["extra"]
    monkeypatch.undo()
    flip_labels(tmp_path / "rows.parquet")
    _, trained = train_counted(config, out, resume=out)
    assert not trained


def unscaled(path: Path, numbers: Any) -> dict[str, Any]:
    rows = len(numbers)
    table = {"label": np.arange(rows) % 3 == 0, "x": numbers, "c0": np.arange(rows) % 40}
    pl.DataFrame(table).write_parquet(path)
    return settings(
        path,
        data={"dense": ["x"], "categorical": ["c0"], "slice_rows": 4096},
        model={"name": "dlrm", "bottom": [64], "top": [64]},
        train={"batch_size": 512},
    )


def test_ids_among_dense_columns_are_told_of_and_end_the_run(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 1 << 62, 12_000)
    said = io.StringIO()
    job = Job(unscaled(tmp_path / "rows.parquet", ids), out=tmp_path / "out")
    fails(
        lambda: job.run(Console(file=said, width=400)),
        RunError,
        "training NE is ",
        "nothing can be learnt like that: scale the dense columns (|x| is up to 4.61e+18) to about −1",
    )
    assert "dense columns with numbers beyond ±10,000, which drown the others: x (4.6" in said.getvalue()
    assert not (tmp_path / "out" / "result.json").exists()


def test_a_few_extreme_rows_are_told_of_and_do_not_end_the_run(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=12_000)
    numbers[5000:5004] = 1e12, -1e12, 1e12, -1e12
    said = told(unscaled(tmp_path / "rows.parquet", numbers), tmp_path / "out")
    assert result_of(tmp_path / "out")["data"]["trained_samples"] == len(numbers)
    assert said.count("look for extreme values in the dense columns (|x| is up to 1e+12), or lower") == 1
    assert "beyond ±10,000" not in said


def test_a_loss_that_no_dense_column_can_have_made_names_what_did(tmp_path: Path) -> None:
    config = unscaled(tmp_path / "rows.parquet", np.zeros(12_000))
    config["data"]["dense"] = []
    config |= {"model": {"name": "deepfm"}, "embedding": config["embedding"] | {"lr": 1e6, "optimizer": "sgd"}}
    error = error_of(lambda: told(config, tmp_path / "out"))
    assert isinstance(error, RunError)
    assert "nothing can be learnt like that: lower embedding.lr, model.embedding_dim or train.lr" in str(error)
    assert "dense columns" not in str(error)


@pytest.mark.parametrize("label", [0, 1, None])
def test_labels_that_are_all_the_same_are_told_of(tmp_path: Path, label: int | None) -> None:
    path = write_rows(tmp_path / "rows.parquet", ROWS)
    same = {} if label is None else {"label": pl.lit(label)}
    pl.read_parquet(path).with_columns(**same).rename({"label": "clicked"}).write_parquet(path)
    said = told(settings(path, path, model=SMALL_DLRM, data={"label": "clicked"}), tmp_path / "out")
    if label is None:
        assert "labels so far" not in said
    else:
        assert said.count(f"labels so far are {label}: is data.label (clicked) the right column?") == 1
        assert f"AUC and NE of the test rows are not defined, as all 60 labels are {label}: give rows of both" in said


@pytest.mark.parametrize(("bad", "many"), [(6, False), (7, True)])
def test_many_rows_that_were_left_out_are_told_of(tmp_path: Path, bad: int, many: bool) -> None:
    path = set_cells(write_rows(tmp_path / "rows.parquet", ROWS), "label", 7, range(bad))
    said = told(settings(path, path, model=SMALL_DLRM, data={"on_bad_row": "skip"}), tmp_path / "out")
    for kind in ("training rows", "test rows"):
        assert (
            f"7 of 60 {kind} (12 %) were left out by data.on_bad_row=skip, for instance {path}, row " in said
        ) == many
    assert ("were left out" in said) == many
