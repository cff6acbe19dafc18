"""Jobs that are validated: they end early, keep the best state and use it, and lower their learning rates."""

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from job_helpers import (
    SMALL_DLRM,
    Ledger,
    Witness,
    beside_own_model,
    by_gradients,
    checkpoints,
    decided,
    fails,
    result_of,
    settings,
    train_counted,
    write_rows,
)
from test_resume import SignalAt

from shadowsync import Job, Result, Trained
from shadowsync.checkpoint.snapshot import GivenUp, Snapshot
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.choices import choose_all
from shadowsync.config import merge, parse
from shadowsync.data.reader import batches
from shadowsync.data.splits import open_parts
from shadowsync.errors import ConfigError, ShadowSyncError
from shadowsync.metrics.history import Frame
from shadowsync.report.files import read_frames
from shadowsync.report.result import read_result

ROWS = 300
VALID = {"valid": {"fraction": 0.3}}


def overfitting(data: Path, **sections: Any) -> dict[str, Any]:
    """Learns 200 rows by heart: the validation is at its best after an epoch or few."""
    base: dict[str, Any] = {
        "data": {"epochs": 30, "slice_rows": 16, **VALID},
        "model": SMALL_DLRM,
        "train": {"batch_size": 8, "lr": 0.05, "best_by": "logloss"},
        "embedding": {"lr": 0.5},
    }
    return settings(data, data, **{name: base.get(name, {}) | sections.get(name, {}) for name in {**base, **sections}})


def validations(out: Path) -> list[Frame]:
    """A frame of each validation."""
    return list({frame.samples: frame for frame in read_frames(out) if frame.valid_samples == frame.samples}.values())


def loss_of(trained: Trained, data: Path) -> float:
    loss = trained.evaluate(data).logloss
    assert loss is not None
    return loss


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Result]:
    """A job that ended early, its data, and its result."""
    folder = tmp_path_factory.mktemp("stopped")
    data, out = write_rows(folder / "rows.parquet", ROWS), folder / "out"
    config = overfitting(data, train={"batch_size": 8, "lr": 0.05, "best_by": "logloss", "patience": 4})
    return data, out, Job(config, out=out).run()


def test_a_model_that_overfits_is_stopped_and_the_result_says_why_and_when(stopped: tuple[Path, Path, Result]) -> None:
    _, out, result = stopped
    validation = result.validation
    assert validation is not None
    rows = result.data.train_samples
    assert (rows + validation.rows, result.data.valid_samples) == (ROWS, validation.rows)
    assert validation.validations < 30
    assert validation.stopped_samples == result.data.trained_samples == rows * validation.validations
    assert validation.best_samples == rows * (validation.validations - 4)
    assert validation.stopped is not None
    assert "validation logloss was not better than" in validation.stopped
    assert "the last 4 time(s) (train.patience)" in validation.stopped
    assert (result.ended.why, validation.stopped in result.ended.detail) == ("early_stopping", True)
    assert (read_result(out).validation, read_result(out).ended) == (validation, result.ended)
    assert any(told.startswith("training ends early, after") for told in decided(out))


def test_each_validation_is_in_the_history(stopped: tuple[Path, Path, Result]) -> None:
    _, out, result = stopped
    frames, validation = validations(out), result.validation
    assert [frame.samples for frame in frames] == [
        result.data.train_samples * number for number in range(1, validation.validations + 1)
    ]
    losses = [frame.valid["logloss"] for frame in frames]
    assert losses.index(min(losses)) == validation.validations - 5
    assert min(losses) == validation.best
    assert frames[-1].valid == validation.last
    assert {*frames[0].valid} == {"auc", "ne", "logloss", "calibration"}


def test_the_best_state_is_kept_tested_and_loaded_and_the_newest_is_there_to_go_on(
    stopped: tuple[Path, Path, Result],
) -> None:
    _, out, result = stopped
    names = [folder.name for folder in checkpoints(out)]
    assert names[0] == result.validation.checkpoint == f"samples-{result.validation.best_samples:012d}"
    assert names[-1] == f"samples-{result.data.trained_samples:012d}"
    assert Trained(out).evaluate() == Trained(out, newest=False).evaluate()
    assert Trained(out).evaluate().logloss == pytest.approx(result.test.logloss, abs=1e-6)
    assert Trained(out, newest=True).evaluate().logloss != pytest.approx(result.test.logloss, abs=1e-3)


def test_best_beats_last_on_the_rows_that_were_validated_on(stopped: tuple[Path, Path, Result], tmp_path: Path) -> None:
    data, out, _ = stopped
    losses = [frame.valid["logloss"] for frame in validations(out)]
    assert losses[-1] > min(losses) + 0.02
    valid = tmp_path / "valid.parquet"
    write_split(data, valid)
    assert loss_of(Trained(out), valid) == pytest.approx(min(losses), abs=1e-5)
    assert loss_of(Trained(out, newest=True), valid) == pytest.approx(losses[-1], abs=1e-5)


def write_split(data: Path, to: Path) -> None:
    """The validation rows of a file."""
    config = parse(overfitting(data))
    part = open_parts(choose_all(config, own_model=False).source, config.data, "valid")["valid"]
    rows = [round(number * 1024) for batch in batches(part, 64) for number in batch.dense[:, 0].tolist()]
    pl.read_parquet(data)[rows].write_parquet(to)


def test_a_run_that_ended_early_goes_on_when_it_may(stopped: tuple[Path, Path, Result], tmp_path: Path) -> None:
    data, out, result = stopped
    copied = tmp_path / "out"
    shutil.copytree(out, copied)
    config = overfitting(data, train={"batch_size": 8, "lr": 0.05, "best_by": "logloss", "patience": 4})
    again = Job(config, out=copied, resume=copied).run()
    assert (again.data.trained_samples, again.test) == (result.data.trained_samples, result.test)
    assert again.validation.stopped == result.validation.stopped
    more = Job(merge(config, {"train": {"patience": 6}}, []), out=copied, resume=copied).run()
    assert more.data.trained_samples == result.data.trained_samples + 2 * result.data.train_samples
    assert more.validation.best == result.validation.best
    assert more.test == result.test


@pytest.mark.parametrize("every", ["epoch", 37, 64])
def test_an_interrupted_run_decides_what_an_uninterrupted_one_does(tmp_path: Path, every: Any) -> None:
    data = write_rows(tmp_path / "rows.parquet", ROWS)
    train = {"batch_size": 8, "validate_every": every, "patience": 5, "plateau_patience": 2, "best_by": "ne"}
    config = merge(overfitting(data), {"train": train}, [])
    whole = Job(config, out=tmp_path / "whole").run()
    resume, out = None, tmp_path / "parts"
    for iteration in (11, 7):
        script = SignalAt(iteration)
        script.run(Job(config, out=out, resume=resume, failures=script))
        resume = out
    parts = Job(config, out=out, resume=out).run()
    assert parts.data == whole.data
    for name in ("best", "best_samples", "validations", "last", "lr_scale", "stopped", "stopped_samples"):
        assert getattr(parts.validation, name) == getattr(whole.validation, name), name
    assert [frame.valid for frame in validations(out)] == [frame.valid for frame in validations(tmp_path / "whole")]
    assert parts.validation.lr_scale < 1
    assert parts.test == whole.test


def test_the_best_comes_along_into_a_new_folder(stopped: tuple[Path, Path, Result], tmp_path: Path) -> None:
    data, out, result = stopped
    config = overfitting(data, train={"batch_size": 8, "lr": 0.05, "best_by": "logloss", "patience": 5})
    more = Job(config, out=tmp_path / "new", resume=out).run()
    assert more.data.trained_samples == result.data.trained_samples + result.data.train_samples
    assert (more.validation.best, more.test) == (result.validation.best, result.test)
    assert Trained(tmp_path / "new").evaluate() == Trained(out).evaluate()


FAMILIES: dict[str, dict[str, Any]] = {
    "easgd": {"sync": {"method": "easgd"}},
    "ma every k": {"sync": {"method": "ma", "schedule": "every_k", "k": 2}},
    "bmuf": {"sync": {"method": "bmuf"}},
    "sync": {"aggregation": {"method": "sync"}},
    "gba": {"aggregation": {"method": "gba"}},
    "hop_bs": {"aggregation": {"method": "hop_bs"}},
    "auto": {"aggregation": {"method": "auto"}},
}


@pytest.mark.parametrize(
    ("name", "runtime"),
    [*((name, "inprocess") for name in FAMILIES), ("easgd", "processes"), ("gba", "processes")],
)
def test_learning_rates_fall_on_a_plateau_for_all_trainers(tmp_path: Path, name: str, runtime: str) -> None:
    """Nothing is ever better by so much, so that they fall after each validation but the first."""
    data, out, family = write_rows(tmp_path / "rows.parquet", 200), tmp_path / "out", FAMILIES[name]
    train = {"trainers": 2, "workers": 2 if runtime == "inprocess" else 1, "batch_size": 4, "min_delta": 10.0}
    train |= {"validate_every": 50, "plateau_patience": 1, "plateau_factor": 0.1, "lr": 0.01}
    config = settings(
        data, data, data={"slice_rows": 8, "epochs": 2, "valid": {"last": 40}}, model=SMALL_DLRM, train=train
    )
    config |= {"cluster": {"runtime": runtime}}
    config = by_gradients(config, family["aggregation"]["method"]) if "aggregation" in family else config | family
    result = Job(config, out=out).run()
    frames = validations(out)
    assert [frame.samples for frame in frames] == [50, 100, 150, 200, 250, 300, 320]
    assert [frame.learning_rates["dense"] for frame in frames] == pytest.approx([0.01 * 0.1**n for n in range(7)])
    assert result.validation.lr_scale == pytest.approx(1e-6)
    assert result.data.trained_samples == 320
    assert result.validation.best_samples == 50


def test_a_fallen_learning_rate_reaches_dense_part_and_rows(tmp_path: Path) -> None:
    """Rates that fall to nothing after the second validation leave the model as it was then."""
    data, out = write_rows(tmp_path / "rows.parquet", 200), tmp_path / "out"
    train = {"batch_size": 4, "min_delta": 10.0, "validate_every": 40, "plateau_patience": 1, "plateau_factor": 1e-12}
    config = settings(data, data, data={"slice_rows": 8, "valid": {"last": 40}}, model=SMALL_DLRM, train=train)
    Job(config, out=out).run()
    frames = validations(out)
    assert frames[0].valid != frames[1].valid
    assert frames[1].valid == pytest.approx(frames[3].valid, abs=1e-6)


def test_rows_are_trained_once_per_epoch_whatever_is_validated(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 150)
    config = settings(
        data,
        data={"slice_rows": 16, "epochs": 3, "valid": {"fraction": 0.2}, "test": {"last": 20}},
        train={"trainers": 3, "workers": 2, "validate_every": 35, "batch_size": 4},
        sync={"method": "ma"},
    )
    result, rows = train_counted(config, tmp_path / "out")
    assert {*rows.values()} == {3}
    assert len(rows) == result.data.train_samples == 150 - 20 - result.data.valid_samples
    assert result.data.test_samples == 20
    assert not {*rows} & {*range(130, 150)}
    assert result.validation.validations == -(-3 * len(rows) // 35)


def test_the_trained_model_reads_its_test_rows_from_the_split(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 150), tmp_path / "out"
    config = settings(data, data={"test": {"last": 0.2}}, model=SMALL_DLRM)
    result = Job(config, out=out).run()
    assert result.data.test_samples == 30
    assert Trained(out).evaluate().logloss == pytest.approx(result.test.logloss, abs=1e-6)


def test_rows_that_a_program_gives_are_split_too(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 100), tmp_path / "out"
    config = settings(data, data={"valid": {"column": "c0", "from": 20}, "test": {"last": 10}}, model=SMALL_DLRM)
    del config["data"]["path"], config["data"]["name"]
    result = Job(config, data=pl.read_parquet(data), out=out).run()
    frame = pl.read_parquet(data).head(90)
    assert result.data.valid_samples == len(frame.filter(pl.col("c0") >= 20))
    assert result.data.train_samples == len(frame.filter(pl.col("c0") < 20))
    assert Trained(out).evaluate().logloss == pytest.approx(result.test.logloss, abs=1e-6)


def test_another_split_is_refused_on_resume(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 60), tmp_path / "out"
    config = settings(data, data={"valid": {"last": 20}})
    train_counted(config, out)
    for valid in ({"last": 19}, {"fraction": 0.3}, None):
        other = {**config, "data": {**config["data"], "valid": valid}}
        said = "was trained with {last: 20}"
        fails(lambda config=other: train_counted(config, out, resume=out), ConfigError, "data.valid=", said)


def test_a_best_state_whose_save_was_given_up_is_saved_again(
    stopped: tuple[Path, Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _, result = stopped
    save, given_up = CheckpointStore.save, []

    def once(store: CheckpointStore, snapshot: Snapshot) -> str:
        if snapshot.samples == result.validation.best_samples and not given_up:
            given_up.append(snapshot.samples)
            raise GivenUp("somebody could not wait")
        return save(store, snapshot)

    monkeypatch.setattr(CheckpointStore, "save", once)
    config = overfitting(data, train={"batch_size": 8, "lr": 0.05, "best_by": "logloss", "patience": 4})
    again = Job(config, out=tmp_path / "out").run()
    assert given_up == [result.validation.best_samples]
    assert (again.validation.checkpoint, again.test) == (result.validation.checkpoint, result.test)


def test_on_other_validation_rows_the_best_begins_anew(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", ROWS), tmp_path / "out"
    valid = {number: write_rows(tmp_path / f"valid-{number}.parquet", 80, number) for number in (1, 2)}

    def run(epochs: int, number: int) -> Result:
        config = overfitting(data)
        config["data"] |= {"epochs": epochs, "valid": {"path": str(valid[number])}}
        return Job(config, out=out, resume=out if out.exists() else None).run()

    def told() -> list[str]:
        return [told for told in decided(out) if "was on other rows (data.valid) and counts no more" in told]

    first, other = run(9, 1).validation, run(10, 2).validation
    assert first.best_samples < first.validations * ROWS, "it has overfitted"
    assert [told.split(", ")[1] for told in told()] == [f"logloss {first.best:.6g}"]
    assert (other.validations, other.best, other.best_samples) == (10, other.last["logloss"], 10 * ROWS)
    assert run(11, 2).validation.validations == 11
    assert len(told()) == 1


def test_the_first_rows_are_trained_in_each_epoch_and_their_number_stays(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 100), tmp_path / "out"
    config = settings(data, data={"max_rows": 33, "epochs": 2}, train={"trainers": 2})
    result, rows = train_counted(config, out)
    assert rows == dict.fromkeys(range(33), 2)
    assert result.data.train_samples == 33
    for most in (None, 34):
        other = {**config, "data": {**config["data"], "max_rows": most}}
        said = f"data.max_rows={most or 0}: ", "was trained with 33, which decides what is left to train"
        fails(lambda config=other: train_counted(config, out, resume=out), ConfigError, *said)
    _, rows = train_counted({**config, "data": {**config["data"], "epochs": 3}}, out, resume=out)
    assert rows == dict.fromkeys(range(33), 1)


def test_another_measure_is_refused_on_resume(stopped: tuple[Path, Path, Result]) -> None:
    data, out, _ = stopped
    config = overfitting(data, train={"batch_size": 8, "lr": 0.05, "best_by": "auc", "patience": 6})
    fails(lambda: Job(config, out=out, resume=out).run(), ConfigError, "train.best_by=auc", "by logloss")


@pytest.mark.parametrize(
    ("train", "part"),
    [
        ({"patience": 3}, "train.patience has no effect without rows to validate on: give data.valid"),
        ({"validate_every": "epoch"}, "train.validate_every has no effect without rows"),
        ({"validate_every": "week"}, "train.validate_every=week: it must be a number of rows, or epoch"),
        ({"validate_every": 0}, "train.validate_every"),
        ({"patience": 0}, "train.patience=0"),
        ({"best_by": "gauc"}, "train.best_by has no effect without rows"),
        ({"plateau_factor": 1.5, "plateau_patience": 1}, "train.plateau_factor=1.5"),
    ],
)
def test_a_wrong_value_is_one_sentence(train: dict[str, Any], part: str) -> None:
    fails(lambda: Job({"data": {"name": "synthetic"}, "train": train}), ConfigError, part)


def test_a_plateau_factor_alone_is_refused() -> None:
    data = {"name": "synthetic", "valid": {"last": 5}}
    fails(lambda: Job({"data": data, "train": {"plateau_factor": 0.1}}), ConfigError, "without train.plateau_patience")


def test_validation_rows_of_one_label_are_told_of_once(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 60)
    config = settings(data, data={"epochs": 3, "valid": {"column": "label", "from": 1}}, model=SMALL_DLRM)
    result = Job(config, out=tmp_path / "out").run()
    assert (result.validation.best, result.validation.validations) == (None, 3)
    told = [told for told in decided(tmp_path / "out") if "validation rows are not defined" in told]
    assert len(told) == 1


def test_a_failing_validation_names_what_to_do(tmp_path: Path) -> None:
    data, ledger = write_rows(tmp_path / "rows.parquet", 40), Ledger()
    model = Witness(ledger)

    class Sick(Witness):
        def forward(self, dense: torch.Tensor, embeddings: Any) -> torch.Tensor:
            found = super().forward(dense, embeddings)
            return found if self.training else found / 0.0

    config = beside_own_model(settings(data, data={"valid": {"last": 10}}))
    sick = Sick(ledger)
    sick.load_state_dict(model.state_dict())
    fails(Job(config, model=sick, out=tmp_path / "out").run, ShadowSyncError, "a prediction on the validation rows")


def test_nothing_is_told_of_validations_where_there_are_none(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 40), tmp_path / "out"
    train_counted(settings(data), out)
    assert "validation" not in result_of(out)
    assert all(not frame.valid and not frame.learning_rates for frame in read_frames(out))
