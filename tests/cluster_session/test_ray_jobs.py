"""Whole jobs on a Ray of their own: processes that are really killed are replaced."""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import cluster_settings, events_of
from job_helpers import SMALL_DLRM, by_gradients, checkpoints, write_rows

from shadowsync import Job, Result
from shadowsync.errors import RunError
from shadowsync.runtime.ray_runtime import RayRuntime

pytest.importorskip("ray", reason="install the extra to test it: pip install 'shadowsync[ray]'")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves its files and processes to the collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROWS, EPOCHS = 1500, 2
DEADLINE_S = 500.0
STEP_MS = 40.0  # so that a job is not over before a process on a slow machine has been replaced


def wait_until(seen: Callable[[], Any]) -> Any:
    """Looks every 50 ms, for some minutes at most."""
    pause, deadline = threading.Event(), time.monotonic() + DEADLINE_S
    while not (found := seen()):
        assert time.monotonic() < deadline, "it did not get so far"
        pause.wait(0.05)
    return found


def places_of(out: Path) -> dict[str, Any]:
    file = out / "roles.json"
    places: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return places


def samples_of(out: Path) -> int:
    file = out / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return max((json.loads(line)["samples"] for line in lines if line.endswith("\n")), default=0)


def kill(out: Path, role: str) -> None:
    os.kill(places_of(out)[role]["pid"], signal.SIGKILL)


def processes_below(pid: int) -> set[int]:
    """All processes that a process has started, and that they have."""
    children: dict[int, set[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, set()).add(int(stat.parent.name))
    found, new = set(), {pid}
    while new := {child for parent in new for child in children.get(parent, ())} - found:
        found |= new
    return found


def listening(pids: set[int]) -> set[str]:
    """Addresses, as the kernel writes them in hexadecimal, on which these processes listen with TCP."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(str(file.readlink()))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


def environment(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_text().split("\0")
    return []


def check_that_only_this_user_gets_in(out: Path) -> None:
    """What the job has started listens on loopback, asks for a token, and has its sockets where nobody else may go."""
    below = processes_below(os.getpid())
    assert listening(below) <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert listening(below)
    assert "RAY_AUTH_TOKEN" not in os.environ
    asked = {line for pid in below for line in environment(pid)}
    assert "RAY_AUTH_MODE=token" in asked
    assert any(line.startswith("RAY_AUTH_TOKEN=") for line in asked)
    log = Path(places_of(out)["trainer-0"]["log"])
    (own,) = [folder for folder in log.parents if folder.name.startswith("shadowsync-")]
    assert own.stat().st_mode & 0o777 == 0o700
    assert any(path.is_socket() for path in own.iterdir())
    assert (log.parent.parent / "sockets" / "raylet").is_socket()


@dataclass(frozen=True)
class SlowUntil:
    """Half a second for each step until there is a file: a process may take a minute to start, and is to find a job."""

    file: Path

    def __call__(self, rank: int, iteration: int) -> None:
        if not self.file.exists():
            threading.Event().wait(0.5)


def run_and_kill(config: dict[str, Any], out: Path, first: str, then: str) -> Result:
    """Runs a job; kills the process of one role, and once it is back and there is a checkpoint that of another."""
    import ray  # noqa: PLC0415 an extra

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a role's process does not find this file
    done = out.with_suffix(".killed")

    def disturb() -> None:
        wait_until(lambda: samples_of(out) > 100)
        kill(out, first)
        check_that_only_this_user_gets_in(out)  # while another one starts
        wait_until(lambda: "restored" in events_of(out).get(first, []))
        wait_until(lambda: checkpoints(out))
        kill(out, then)
        done.touch()

    with ThreadPoolExecutor(1) as pool:
        disturbing = pool.submit(disturb)
        result = Job(config, out=out, failures=SlowUntil(done)).run()
        disturbing.result(DEADLINE_S)
    log = Path(places_of(out)["trainer-0"]["log"])
    assert log.read_text()
    assert not (log.parent.parent / "sockets").exists()
    return result


@pytest.mark.parametrize(
    "inside", ["ray._raylet.AuthenticationTokenLoader", "ray._private.ray_constants.ENABLE_RAY_CLUSTER"]
)
def test_a_ray_that_cannot_be_closed_to_others_is_not_started(monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    import ray  # noqa: PLC0415 an extra

    monkeypatch.delattr(inside)
    before = dict(os.environ)
    with pytest.raises(RunError, match=re.escape(f"Ray {ray.__version__} has no {inside}")) as caught:
        RayRuntime(None)
    assert "pip install 'ray[default]>=" in str(caught.value)
    assert not ray.is_initialized()
    assert dict(os.environ) == before


def test_processes_that_are_killed_are_replaced_and_every_row_is_trained(tmp_path: Path) -> None:
    """A trainer, and once it is back and there is a checkpoint an embedding server; averages cross as differences."""
    data, out = write_rows(tmp_path / "rows.parquet", ROWS), tmp_path / "out"
    config = cluster_settings(
        data,
        data,
        data={"slice_rows": 16, "epochs": EPOCHS},
        model={"name": "dlrm", "bottom": [64], "top": [64]},
        train={"trainers": 2, "batch_size": 4, "emulate_step_ms": STEP_MS, "save_every_s": 0.5},
        embedding={"servers": 2},
        sync={"method": "ma", "max_share": 1.0},
        compression={"dense": {"name": "threshold", "keep": 0.05, "values": "int8"}},
        cluster={"trainer_cpus": 0.1},
    )
    result = run_and_kill(config, out, "trainer-1", "embedding-0")
    assert result.data.trained_samples == ROWS * EPOCHS
    assert result.recovery.failures == 2
    events = events_of(out)
    assert events["trainer-1"][:4] == ["alive", "dead", "restarted", "restored"]
    assert events["embedding-0"][:4] == ["alive", "dead", "restarted", "restored"]
    places = places_of(out)
    assert {role for role, place in places.items() if place["incarnation"]} == {"trainer-1", "embedding-0"}
    assert result.wire is not None
    assert 0 < result.wire.kept_share["dense"] < 1
    assert result.wire.bytes["dense"] < result.wire.raw_bytes["dense"]
    assert len({place["pid"] for place in places.values()}) == len(places)
    assert result.test is not None
    assert result.test.auc is not None
    assert result.test.auc > 0.7


@pytest.mark.parametrize("method", ["gba"])
def test_gradient_methods_survive_a_killed_trainer_and_a_killed_dense_server(tmp_path: Path, method: str) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", ROWS), tmp_path / "out"
    config = cluster_settings(
        data,
        data,
        data={"slice_rows": 16, "epochs": EPOCHS},
        model=SMALL_DLRM,
        train={"trainers": 2, "batch_size": 4, "emulate_step_ms": STEP_MS, "save_every_s": 0.5},
        embedding={"servers": 1},
        aggregation={"global_batch": 16},
        cluster={"trainer_cpus": 0.1},
    )
    config = by_gradients(config, method)
    result = run_and_kill(config, out, "trainer-1", "dense-0")
    assert result.data.trained_samples == ROWS * EPOCHS
    assert result.recovery.failures == 2
    assert result.aggregation is not None
    assert result.aggregation.global_steps >= ROWS * EPOCHS // 16
    assert method != "sync" or result.aggregation.max_staleness == 0
    events = events_of(out)
    assert events["trainer-1"][:4] == ["alive", "dead", "restarted", "restored"]
    assert events["dense-0"][:4] == ["alive", "dead", "restarted", "restored"]
    assert result.test is not None
    assert result.test.auc is not None
    assert result.test.auc > 0.7
