"""TensorBoard events, read back with TensorBoard's own loader."""

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_runs import make_failing_frames, make_frames, make_result, make_test
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from shadowsync.errors import SaveError
from shadowsync.metrics.history import Frame
from shadowsync.report.measures import final_scalars, scalars
from shadowsync.report.result import TaskSection
from shadowsync.report.tensorboard import TensorBoardLog

TEST_TAGS = ["test/auc", "test/ne", "test/calibration", "test/logloss"]


def read(folder: Path) -> list[list[Any]]:
    """The events of each file, in the order of the names."""
    return [list(LegacyEventFileLoader(str(path)).Load()) for path in sorted((folder / "tensorboard").iterdir())]


def written(folder: Path, frames: list[Frame], resumed_at: int | None = None) -> None:
    with closing(TensorBoardLog(folder, resumed_at, wall_clock=lambda: 1_700_000_000.0)) as log:
        for frame in frames:
            log.append(frame)


def test_every_frame_comes_back_at_its_number_of_samples(tmp_path: Path) -> None:
    frames = make_frames(3)
    written(tmp_path, frames)
    ((version, *events),) = read(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert [event.step for event in events] == [frame.samples for frame in frames]
    for event, frame in zip(events, frames, strict=True):
        found = {value.tag: value.simple_value for value in event.summary.value}
        assert found == pytest.approx(dict(scalars(frame)))
        assert event.wall_time == 1_700_000_000.0


def test_the_end_of_a_run_has_the_test_and_the_hyper_parameters(tmp_path: Path) -> None:
    log, result = TensorBoardLog(tmp_path, wall_clock=lambda: 1_700_000_000.0), make_result(3)
    log.append(make_frames(1)[0])
    log.finish(result)
    log.close()
    assert result.test is not None
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    for name in ("auc", "ne", "logloss", "calibration"):
        (point,) = accumulator.Scalars(f"test/{name}")
        assert (point.step, point.value) == (result.data.trained_samples, pytest.approx(getattr(result.test, name)))
    found = accumulator.summary_metadata
    starts = HParamsPluginData.FromString(found["_hparams_/session_start_info"].plugin_data.content)
    given = starts.session_start_info.hparams
    assert (given["train.trainers"].number_value, given["sync.method"].string_value) == (3, "easgd")
    assert given["data.shuffle"].number_value == 1
    assert not any(name.startswith("report.") for name in given)
    experiment = HParamsPluginData.FromString(found["_hparams_/experiment"].plugin_data.content).experiment
    assert [metric.name.tag for metric in experiment.metric_infos] == TEST_TAGS


def test_a_run_without_a_test_has_no_measures_of_one() -> None:
    assert list(final_scalars(make_result(test=None))) == []
    assert [tag for tag, _ in final_scalars(make_result(test=make_test(auc=None)))] == TEST_TAGS[1:]


def test_later_labels_have_measures_under_their_names() -> None:
    first = TaskSection(auc=0.8, ne=0.9, logloss=0.4, calibration=1.0, measures={"pr_auc": 0.3})
    watched = TaskSection(auc=None, ne=0.5, logloss=None, calibration=1.1, loss="mse", measures={"rmse": 2.0})
    test = make_test(measures=first.measures, tasks={"label": first, "watched": watched})
    found = dict(final_scalars(make_result(test=test)))
    assert list(found)[:5] == [*TEST_TAGS, "test/pr_auc"]
    later = {name: value for name, value in found.items() if name.count("/") > 1}
    assert later == {"test/watched/ne": 0.5, "test/watched/calibration": 1.1, "test/watched/rmse": 2.0}


def test_tags_cover_the_frame_and_leave_out_what_is_none() -> None:
    frame = make_frames(2)[0]
    tags = dict(scalars(frame))
    assert {"quality/auc", "quality/ne_window", "speed/eps", "speed/eps_trainer_1", "wire/pull_bytes"} < set(tags)
    assert "recovery/failures" not in tags
    cluster = msgspec.structs.replace(frame, roles={"driver": "alive"}, queue_depth={"dense-0": 4})
    assert dict(scalars(cluster))["recovery/failures"] == 0
    assert dict(scalars(cluster))["queue/dense-0"] == 4
    assert "quality/auc" not in dict(scalars(msgspec.structs.replace(frame, auc=None)))


def test_what_recovery_costs_has_tags_that_say_when_it_is_emulated() -> None:
    frame = make_failing_frames()[-1]
    told = {"recovery/failures": 3, "recovery/pls": frame.pls, "recovery/target_pls": 0.1, "recovery/wait_s": 18.0}
    assert told.items() <= dict(scalars(frame)).items()
    emulated = dict(scalars(msgspec.structs.replace(frame, emulated_job_s=72_000.0)))
    assert emulated["recovery/emulated_wait_s"] == 18.0
    assert "recovery/wait_s" not in emulated
    quiet = dict(scalars(msgspec.structs.replace(frame, failures=0, pls=0.0)))
    assert (quiet["recovery/failures"], quiet["recovery/pls"]) == (0, 0.0)
    assert not {"recovery/pls", "recovery/save_s"} & set(dict(scalars(make_frames(1)[0])))


def test_a_resumed_run_writes_a_new_file_that_hides_what_was_lost(tmp_path: Path) -> None:
    frames = make_frames(4)
    written(tmp_path, frames)
    written(tmp_path, frames[3:], resumed_at=frames[1].samples)
    assert len(read(tmp_path)) == 2
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("quality/auc")] == [
        *(frame.samples for frame in frames[:2]),
        frames[3].samples,
    ]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(SaveError, match="tensorboard"):
        TensorBoardLog(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file of Linux that is always full")
def test_a_full_disk_is_a_save_error(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    log._writer.close()
    log._writer._writer = Path("/dev/full").open("wb")  # noqa: SIM115 the log's from now on
    with pytest.raises(SaveError, match="No space left"):
        log.append(make_frames(1)[0])
    with pytest.raises(SaveError):
        log.close()
