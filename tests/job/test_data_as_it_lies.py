"""Each kind of input as a user has it, from its first line to test AUC: all rows are trained, the planted is learnt."""

import gzip
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from job_helpers import SMALL_DLRM, checkpoints, error_of, fails, result_of, weights
from typer.testing import CliRunner

from shadowsync import Job, Trained
from shadowsync.cli import app
from shadowsync.errors import CheckpointError, ConfigError, DataError

TRAIN, TEST = 3000, 600
COLUMNS: dict[str, Any] = {
    "label": "clicked",
    "dense": ["price"],
    "categorical": ["user", "item"],
    "rows": {"item": 50},
    "hash_size": {"user": 1000},
}


def clicks(rows: int, seed: int) -> pl.DataFrame:
    """A user clicks on what is cheap, and on items of the parity that the user likes."""
    draw = np.random.default_rng(seed)
    user, item, price = draw.integers(0, 30, rows), draw.integers(0, 50, rows), draw.normal(size=rows)
    logit = 3.0 * (user % 2 == 0) + 1.5 * (item % 2 == 0) - price - 2.0
    clicked = (draw.logistic(size=rows) < logit).astype(np.int64)
    day = [f"2024-01-{1 + number * 3 // rows:02}" for number in range(rows)]
    names = [f"user {number}" for number in user]
    return pl.DataFrame({"clicked": clicked, "price": price, "user": names, "item": item, "day": day})


TRAINING, TESTING = clicks(TRAIN, 0), clicks(TEST, 1)


def config(**data: Any) -> dict[str, Any]:
    return {
        "data": {**COLUMNS, "slice_rows": 512, **data},
        "model": {**SMALL_DLRM, "embedding_dim": 4},
        "embedding": {"storage": "torch"},
        "train": {"trainers": 1, "batch_size": 16, "precision": "fp32", "kernels": "torch", "lr": 0.02},
        "sync": {"method": "none"},
        "report": {"html": False, "tensorboard": False},
    }


def learnt(out: Path, settings: Mapping[str, Any], **given: Any) -> None:
    result = Job(settings, out=out, **given).run()
    assert (result.data.train_samples, result.data.trained_samples, result.data.test_samples) == (TRAIN, TRAIN, TEST)
    assert (result.test.auc or 0) > 0.8
    assert Trained(out).evaluate().auc == result.test.auc  # by the folder alone


# --- files -----------------------------------------------------------------------------------------------------------


def as_text(ending: str) -> Callable[[pl.DataFrame, Path], None]:
    def write(frame: pl.DataFrame, path: Path) -> None:
        tabs = ".tsv" in ending
        text = frame.write_ndjson() if "jsonl" in ending else frame.write_csv(separator="\t" if tabs else ",")
        path.write_bytes(gzip.compress(text.encode()) if ending.endswith(".gz") else text.encode())

    return write


FILES = {end: as_text(end) for end in (".csv.gz", ".tsv", ".jsonl.gz")}


@pytest.mark.parametrize("ending", FILES)
def test_files(tmp_path: Path, ending: str) -> None:
    """The ending of the name says what they are."""
    for part in range(2):
        FILES[ending](TRAINING[part::2], tmp_path / f"part-{part}{ending}")
    FILES[ending](TESTING, tmp_path / f"test{ending}")
    places = {"path": f"{tmp_path}/part-*{ending}", "test_path": f"{tmp_path}/test{ending}"}
    learnt(tmp_path / "out", config(**places))


def test_the_types_of_a_text_stay_those_of_the_training(tmp_path: Path) -> None:
    """Users that look like numbers in the rows to predict are the text that they were in the training."""
    users = [f"{number}" if number % 30 else "none" for number in range(TRAIN)]
    numbered = TRAINING.with_columns(user=pl.Series(users))
    numbered.write_csv(tmp_path / "train.csv")
    Job(config(path=f"{tmp_path}/train.csv"), out=tmp_path / "out").run()
    assert result_of(tmp_path / "out")["config"]["data"]["types"]["user"] == "String"
    predictions = []
    for rows in (numbered[:90], numbered[:90].filter(pl.col("user") != "none")):
        rows.write_csv(tmp_path / "rows.csv")
        Trained(tmp_path / "out").predict(tmp_path / "rows.csv", tmp_path / "out.csv", keep=["user"])
        predictions.append(pl.read_csv(tmp_path / "out.csv", schema_overrides={"user": pl.String}))
    there, here = predictions[0].filter(pl.col("user") != "none"), predictions[1]
    assert here["user"].to_list() == there["user"].to_list()
    assert here["logit"].to_list() == pytest.approx(there["logit"].to_list(), rel=1e-4)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"path": "rows"},
            "data.path=rows does not say by its ending what is in it: set data.name to one of criteo, csv",
        ),
        ({"path": ["rows.txt"]}, "data.path=rows.txt does not say"),
        ({"path": "rows.csv", "lable": "x"}, "data.lable is not an option of data.name=csv, did you mean label?"),
    ],
)
def test_files_that_do_not_say_what_they_are(tmp_path: Path, data: dict[str, Any], said: str) -> None:
    fails(lambda: Job({"data": {**COLUMNS, **data}}, out=tmp_path / "out"), ConfigError, said)


# --- in memory -------------------------------------------------------------------------------------------------------


IN_MEMORY: dict[str, Callable[[pl.DataFrame], Any]] = {
    "arrow reader": lambda frame: frame.to_arrow().to_reader(max_chunksize=100),
    "columns": lambda frame: {name: frame[name].to_numpy() for name in frame.columns},
}


@pytest.mark.parametrize("kind", IN_MEMORY)
def test_rows_in_memory(tmp_path: Path, kind: str) -> None:
    make = IN_MEMORY[kind]
    learnt(tmp_path / "out", config(), data=make(TRAINING), test_data=make(TESTING))


def test_rows_in_memory_are_a_run_like_any_other(tmp_path: Path) -> None:
    """Equal to that of the same rows in a file; the folder may be moved, predict, and be gone on with from anywhere."""
    TRAINING.write_parquet(tmp_path / "train.parquet")
    Job(config(path=f"{tmp_path}/train.parquet"), out=tmp_path / "file").run()
    Job(config(), data=TRAINING, test_data=TESTING, out=tmp_path / "a").run()
    before = weights(tmp_path / "a")
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(tmp_path / "file").items())
    auc = Trained(tmp_path / "a").evaluate().auc
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert Trained(tmp_path / "b").evaluate().auc == auc
    assert Trained(tmp_path / "b").predict(tmp_path / "train.parquet", tmp_path / "p.csv") == TRAIN
    done = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "b"), "data.epochs=2"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert result_of(tmp_path / "b")["data"]["trained_samples"] == 2 * TRAIN
    for epochs, given in ((3, {}), (4, {"data": TRAINING, "test_data": TESTING})):
        result = Job(config(epochs=epochs), resume=tmp_path / "b", **given).run()
        assert (result.data.trained_samples, result.data.test_samples) == (epochs * TRAIN, TEST)
    error = error_of(lambda: Job(config(epochs=5), resume=tmp_path / "b", data=TRAINING.reverse()).run())
    assert "train.parquet holds other rows than data: leave data out to go on with those" in str(error)
    assert len(checkpoints(tmp_path / "b")) > 0


def test_a_corrected_call_in_the_same_folder_takes_the_corrected_rows(tmp_path: Path) -> None:
    wrong = TRAINING.rename({"price": "prise"})
    job = Job(config(), data=(part for part in wrong.iter_slices(100)), out=tmp_path / "out")
    fails(job.run, DataError, "no column 'price' (data.dense), did you mean prise?")
    result = Job(config(), data=TRAINING, test_data=TESTING, out=tmp_path / "out").run()
    assert (result.data.trained_samples, result.data.test_samples) == (TRAIN, TEST)
    assert pl.read_parquet(tmp_path / "out" / "data" / "train.parquet").columns == TRAINING.columns


def test_a_run_whose_rows_are_gone_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    Job(config(), data=TRAINING, out=out).run()
    (out / "data" / "train.parquet").unlink()
    said = f"{out}/data/train.parquet is not there, where a run keeps rows that are given as data: give them again, or"
    fails(lambda: Job(config(epochs=2), resume=out), ConfigError, said)
    done = CliRunner().invoke(app, ["train", "--resume", str(out), "data.epochs=2"])
    assert said in str(done.exception)
    assert Job(config(epochs=2), data=TRAINING, resume=out).run().data.trained_samples == 2 * TRAIN


def test_rows_of_another_format_are_read_by_their_ending(tmp_path: Path) -> None:
    """Users that look like numbers in a CSV are the text that the model was trained on."""
    users = [str(number % 30) for number in range(TRAIN)]
    rows = TRAINING.with_columns(user=pl.Series(users))
    Job(config(), data=rows, out=tmp_path / "out").run()
    places = [tmp_path / f"rows.{ending}" for ending in ("parquet", "csv", "tsv", "jsonl")]
    rows.write_parquet(places[0])
    rows.write_csv(places[1])
    rows.write_csv(places[2], separator="\t")
    rows.with_columns(pl.col("user").cast(pl.Int64)).write_ndjson(places[3])
    trained = Trained(tmp_path / "out")
    assert len({trained.evaluate(place).auc for place in places}) == 1
    rows.drop("clicked").write_csv(tmp_path / "bare.csv")
    assert trained.predict(tmp_path / "bare.csv", tmp_path / "p.csv", keep=["user"]) == TRAIN


def test_lists_are_not_looked_for_in_a_csv_of_a_run_of_another_format(tmp_path: Path) -> None:
    tags = TRAINING.with_columns(tags=pl.concat_list("user", "user"))
    columns = {"categorical": ["user", "item", "tags"], "hash_size": {"user": 99, "tags": 99}}
    Job(config(**columns), data=tags, out=tmp_path / "out").run()
    TRAINING.with_columns(tags=pl.lit("user 1;user 2")).write_csv(tmp_path / "rows.csv")
    trained = Trained(tmp_path / "out")
    fails(lambda: trained.evaluate(tmp_path / "rows.csv"), DataError, "feature tags has lists, and the run")
    tags.write_ndjson(tmp_path / "rows.jsonl")
    assert trained.evaluate(tmp_path / "rows.jsonl").samples == TRAIN


@pytest.mark.parametrize(
    ("data", "given", "kind", "said"),
    [
        (
            {"path": "x.parquet"},
            {"data": TRAINING},
            ConfigError,
            "both data.path and data are given: leave one of them",
        ),
        (
            {"test_path": "x"},
            {"data": TRAINING, "test_data": TESTING},
            ConfigError,
            "both data.test_path and test_data",
        ),
        ({"name": "csv"}, {"data": TRAINING}, ConfigError, "data.name=csv does not go with data: leave it out"),
        ({}, {"data": 5}, ConfigError, "data is a int: give a polars, pandas or Hugging Face table"),
        ({}, {"data": "rows.csv"}, ConfigError, "data='rows.csv' is a path and not rows"),
        ({}, {"test_data": TESTING}, ConfigError, "test rows and none to train on: give data beside test_data"),
        ({}, {"data": []}, DataError, "data holds no rows"),
        ({}, {"data": [TRAINING[:5], TRAINING[:5].drop("user")]}, DataError, "data: batch 2 lacks the column 'user'"),
        ({}, {"data": TRAINING, "test_data": TESTING.drop("user")}, DataError, "no column 'user' (data.categorical)"),
    ],
)
def test_rows_that_cannot_be_used(
    tmp_path: Path, data: dict[str, Any], given: dict[str, Any], kind: type[ConfigError], said: str
) -> None:
    fails(lambda: Job(config(**data), out=tmp_path / "out", **given).run(), kind, said)


def test_other_rows_of_as_many_are_refused_when_a_run_is_resumed(tmp_path: Path) -> None:
    Job(config(), data=TRAINING, out=tmp_path / "a").run()
    flipped = TRAINING.with_columns(1 - pl.col("clicked"))
    job = Job(config(epochs=2), data=flipped, resume=tmp_path / "a", out=tmp_path / "b")
    fails(job.run, CheckpointError, "was trained on other data")


def test_roles_in_other_processes_read_what_the_driver_found_out(tmp_path: Path) -> None:
    TRAINING.write_csv(tmp_path / "train.csv")
    apart = {"cluster": {"runtime": "processes"}, "sync": {"method": "easgd"}}
    for name, settings, given in (
        ("text", config(path=f"{tmp_path}/train.csv"), {}),
        ("memory", config(), {"data": iter([TRAINING])}),
    ):
        two = {**settings, **apart, "train": {**settings["train"], "trainers": 2}}
        result = Job(two, out=tmp_path / name, test_data=TESTING if given else None, **given).run()
        assert result.data.trained_samples == TRAIN
