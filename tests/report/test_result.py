"""result.json: the keys of the design, whole or not at all, and what a broken one says."""

import json
import math
import os
from pathlib import Path

import pytest
from fake_runs import make_result, make_test

from shadowsync.errors import DataError, SaveError
from shadowsync.report.result import (
    AggregationSection,
    DataSection,
    EndedSection,
    RecoverySeconds,
    RecoverySection,
    Result,
    ThroughputSection,
    read_result,
    write_result,
)


def whole_result() -> Result:
    return make_result(
        ended=EndedSection(why="time_limit", detail="train.time_limit=30m was over after 5 of 9 samples"),
        aggregation=AggregationSection(global_steps=10, dropped=1, mean_staleness=0.5, max_staleness=3),
        recovery=RecoverySection(
            failures=1,
            pls=0.001,
            saves=4,
            seconds=RecoverySeconds(save=1.0, load=0.5, lost=2.0, wait=0.1),
            interval_s=30.0,
            mode="partial",
        ),
    )


def test_the_keys_are_those_of_the_design(tmp_path: Path) -> None:
    found = json.loads(write_result(tmp_path, whole_result()).read_text())
    assert read_result(tmp_path) == whole_result()
    assert set(found) == {
        *("config", "seed", "versions", "machine", "data", "test", "train", "throughput", "sync", "wire"),
        *("aggregation", "recovery", "ended"),
    }
    assert set(found["data"]) == {"train_samples", "trained_samples", "test_samples"}
    assert {"auc", "ne", "logloss", "calibration"} < set(found["test"])
    assert set(found["train"]) == {"ne_window", "ne_lifetime"}
    assert set(found["throughput"]) == {"seconds", "eps", "elp", "eps_per_trainer", "startup_seconds"}
    assert set(found["sync"]) == {"method", "schedule", "count", "average_gap"}
    assert set(found["wire"]["bytes"]) == set(found["wire"]["raw_bytes"]) == {"pull", "push", "dense"}
    assert set(found["aggregation"]) == {"global_steps", "dropped", "mean_staleness", "max_staleness"}
    assert set(found["ended"]) == {"why", "detail"}
    assert set(found["recovery"]) == {"failures", "pls", "saves", "seconds", "interval_s", "mode"}
    assert set(found["recovery"]["seconds"]) == {"save", "load", "lost", "wait"}


def test_sections_that_do_not_apply_are_absent(tmp_path: Path) -> None:
    result = Result(
        config={},
        seed=3,
        versions={},
        data=DataSection(train_samples=1, trained_samples=1, test_samples=0),
        throughput=ThroughputSection(seconds=0.0, eps=0.0, elp=1, eps_per_trainer=(0.0,)),
    )
    found = json.loads(write_result(tmp_path, result).read_text())
    assert set(found) == {"config", "seed", "versions", "data", "throughput"}
    assert read_result(tmp_path) == result


def test_an_undefined_measure_is_null(tmp_path: Path) -> None:
    write_result(tmp_path, make_result(test=make_test(auc=None, ne=math.nan)))
    assert json.loads((tmp_path / "result.json").read_text())["test"]["auc"] is None
    assert read_result(tmp_path).test.ne is None


def test_keys_of_a_later_version_are_read_over(tmp_path: Path) -> None:
    path = write_result(tmp_path, make_result())
    path.write_text(json.dumps({**json.loads(path.read_text()), "invented_later": {"x": 1}}))
    assert read_result(tmp_path) == make_result()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"config": 3}'])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(DataError, match=r"result\.json: not a result of shadowsync train: ") as caught:
        read_result(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_is_cut_in_half_missing_or_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"result\.json: there is no such file; give the --out folder") as caught:
        read_result(tmp_path)
    assert caught.value.exit_status == 2
    path = write_result(tmp_path, make_result())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match="not a result"):
        read_result(tmp_path)
    (tmp_path / "x").write_text("")
    with pytest.raises(DataError, match="cannot be read: Not a directory"):
        read_result(tmp_path / "x")


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_result(tmp_path, make_result())
    before = (tmp_path / "result.json").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveError, match=r"result\.json: cannot be written: No space left on device"):
        write_result(tmp_path, make_result(1))
    assert (tmp_path / "result.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    with pytest.raises(SaveError, match=r"none/result\.json: cannot be written: No such file or directory"):
        write_result(tmp_path / "none", make_result())
