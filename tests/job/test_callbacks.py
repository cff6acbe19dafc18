"""What is told of a run: to callbacks, to MLflow and Weights & Biases, and when time is up."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from job_helpers import SMALL_DLRM, checkpoints, decided, fails, result_of, settings, train_counted, write_rows

from shadowsync import Callback, Job, Result, Trained
from shadowsync.errors import ConfigError
from shadowsync.metrics.history import Frame
from shadowsync.report.result import FILE_NAME


class Diary(Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_start(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.told.append(("start", folder.name, config["train"]["batch_size"], config["train"]["eps"]))

    def on_frame(self, frame: Frame) -> None:
        self.told.append(("frame", frame.samples))

    def on_validation(self, samples: int, measures: Mapping[str, float]) -> None:
        self.told.append(("validation", samples, sorted(measures)))

    def on_checkpoint(self, place: str, samples: int) -> None:
        assert (Path(place) / "manifest.json").exists()
        self.told.append(("checkpoint", samples))

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        self.told.append(("end", result is not None, type(error)))


class Clumsy(Callback):
    """Fails whenever it is told of a line."""

    frames = 0

    def on_frame(self, frame: Frame) -> None:
        type(self).frames += 1
        raise LookupError("no such table")


def config(folder: Path, **sections: Any) -> dict[str, Any]:
    path = folder / "rows.parquet"
    return settings(path if path.exists() else write_rows(path, 60), model=SMALL_DLRM, **sections)


def test_callbacks_are_told_of_everything_in_its_order(tmp_path: Path) -> None:
    diary = Diary()
    Job(config(tmp_path, data={"valid": {"last": 20}}), out=tmp_path / "out", callbacks=[diary]).run()
    assert diary.told[0] == ("start", "out", 2, 1e-8)
    assert ("validation", 40, ["auc", "calibration", "logloss", "ne"]) in diary.told
    assert ("checkpoint", 40) in diary.told
    assert diary.told[-2:] == [("frame", 40), ("end", True, type(None))] or diary.told[-1] == ("end", True, type(None))


def test_a_run_that_fails_is_told_to_have_ended(tmp_path: Path) -> None:
    diary = Diary()

    def refuse(frame: Frame) -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        Job(config(tmp_path), out=tmp_path / "out", callbacks=[diary]).run(on_frame=refuse)
    assert diary.told[-1] == ("end", False, ValueError)


def test_a_callback_that_fails_is_one_warning_and_never_ends_a_run(tmp_path: Path) -> None:
    Job(config(tmp_path, report={"every_s": 0.001}), out=tmp_path / "out", callbacks=[Clumsy()]).run()
    warnings = [told for told in decided(tmp_path / "out") if "callback" in told]
    assert len(warnings) == 1
    assert "the callback Clumsy failed in on_frame: LookupError: no such table (" in warnings[0]
    assert "test_callbacks.py, line " in warnings[0]
    assert Clumsy.frames > 0
    assert result_of(tmp_path / "out")["data"]["trained_samples"] == 60


OWN = """from shadowsync import Callback


class Told(Callback):
    def on_end(self, result, error):
        open("told", "w").close()
"""


def test_a_callback_is_named_in_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "callback_of_mine.py").write_text(OWN)
    Job(config(tmp_path, report={"callbacks": ["callback_of_mine:Told"]}), out="out").run()
    assert (tmp_path / "told").exists()


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("mlfow", ("report.callbacks=mlfow is not known", "did you mean mlflow?")),
        ("nowhere.to:Find", ("report.callbacks=nowhere.to:Find: there is no module nowhere",)),
        ("pathlib:Path", ("pathlib:Path is no subclass of", "Callback")),
        ("pathlib:Pat", ("pathlib has no Pat, did you mean Path?",)),
    ],
)
def test_what_is_no_callback_is_one_sentence(tmp_path: Path, given: str, parts: tuple[str, ...]) -> None:
    fails(lambda: Job(config(tmp_path, report={"callbacks": [given]})), ConfigError, *parts)
    fails(lambda: Job(config(tmp_path), callbacks=[Diary]), ConfigError, "the class Diary: call it")  # type: ignore[list-item]
    for one in (Diary(), 5, "mlflow"):
        fails(lambda one=one: Job(config(tmp_path), callbacks=one), ConfigError, "is no list: give callbacks=")


@pytest.mark.parametrize(("name", "package"), [("mlflow", "mlflow-skinny"), ("wandb", "wandb")])
def test_a_client_that_is_not_installed_is_named(tmp_path: Path, name: str, package: str) -> None:
    with mock.patch.dict(sys.modules, {name: None}):
        fails(
            lambda: Job(config(tmp_path, report={"callbacks": [name]})),
            ConfigError,
            "not installed",
            f"install {package}",
        )


def test_mlflow_has_parameters_figures_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny to test it")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    given = config(
        tmp_path,
        report={"callbacks": ["mlflow"], "html": True},
        data={"test_path": str(tmp_path / "rows.parquet"), "valid": {"last": 20}},
        train={"measures": ["gauc(c0)"]},
    )
    result = Job(given, out=tmp_path / "out").run()
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FINISHED"
    assert run.data.params["train.batch_size"] == "2"
    assert result.test is not None
    assert run.data.metrics["test/auc"] == pytest.approx(result.test.auc)
    assert len(run.data.metrics) > 5
    assert "valid/gauc_c0_" in run.data.metrics, "MLflow takes no parentheses"
    files = {file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert files == {FILE_NAME, "report.html"}


def test_weights_and_biases_has_the_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install wandb to test it")
    for key, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(key, value)
    Job(config(tmp_path, report={"callbacks": ["wandb"]}), out=tmp_path / "lr=0.1").run()
    assert not [told for told in decided(tmp_path / "lr=0.1") if "callback" in told]
    assert list((tmp_path / "lr=0.1").rglob("*.wandb"))


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("valid", [{}, {"valid": {"last": 20}}])
def test_a_run_whose_time_is_up_ends_like_a_finished_one_and_goes_on(tmp_path: Path, valid: dict[str, Any]) -> None:
    data = write_rows(tmp_path / "rows.parquet", 220)
    given = settings(data, data, train={"time_limit": "0.2s", "emulate_step_ms": 40.0}, data=valid)
    result, first = train_counted(given, tmp_path / "out")
    left = 200 if valid else 220
    assert 0 < result.data.trained_samples < left
    assert result.test is not None
    assert result.ended is not None
    assert result.ended.why == "time_limit"
    assert result.ended.detail.startswith(f"train.time_limit=0.2s was over after {result.data.trained_samples} of ")
    assert any("train.time_limit=0.2s" in sentence for sentence in decided(tmp_path / "out"))
    assert len(checkpoints(tmp_path / "out")) >= 1
    if valid:
        assert result.validation is not None
        assert result.validation.validations == 1, "the state at the end is measured, too"
    given["train"] |= {"time_limit": None, "emulate_step_ms": None}
    result, after = train_counted(given, tmp_path / "out", resume=tmp_path / "out")
    assert result.data.trained_samples == left
    assert result_of(tmp_path / "out")["ended"] == {
        "why": "epochs",
        "detail": "data.epochs=1 came to the last row",
    }
    assert (first + after).total() == left


@pytest.mark.parametrize("limit", ["30", 30, "0m", "-1s", "ever", "1 h", True])
def test_a_time_limit_that_is_none_is_one_sentence(tmp_path: Path, limit: object) -> None:
    fails(
        lambda: Job(config(tmp_path, train={"time_limit": limit})), ConfigError, "train.time_limit", "for instance 30m"
    )


def test_a_generous_limit_changes_nothing(tmp_path: Path) -> None:
    Job(config(tmp_path, train={"time_limit": "1d"}), out=tmp_path / "out").run(progress=False)
    assert Trained(tmp_path / "out").config.train.limit_s == 86400
    assert result_of(tmp_path / "out")["data"]["trained_samples"] == 60
