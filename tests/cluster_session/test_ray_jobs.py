"""Whole jobs on a Ray of their own: processes that are really killed are replaced."""

import contextlib
import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import killed_jobs
import pytest
from cluster_jobs import cluster_settings
from job_helpers import write_rows
from killed_jobs import EPOCHS, ROWS, places_of, run_and_kill

from shadowsync.errors import RunError
from shadowsync.rpc.errors import PeerLost
from shadowsync.runtime import ray_runtime
from shadowsync.runtime.ray_runtime import RayRuntime
from shadowsync.runtime.runtime import LaunchRequest

pytest.importorskip("ray", reason="install the extra to test it: pip install 'shadowsync[ray]'")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves its files and processes to the collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


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
        train={"trainers": 2, "batch_size": 4, "emulate_step_ms": 5.0, "save_every_s": 0.5},
        embedding={"servers": 2},
        sync={"method": "ma", "max_share": 1.0},
        compression={"dense": {"name": "threshold", "keep": 0.05, "values": "int8"}},
        cluster={"trainer_cpus": 0.1},
    )
    cloudpickle.register_pickle_by_value(killed_jobs)  # a role's process does not find that file
    watch = partial(check_that_only_this_user_gets_in, out)  # while another one starts
    result = run_and_kill(config, out, "trainer-1", "embedding-0", meanwhile=watch)
    log = Path(places_of(out)["trainer-0"]["log"])
    assert log.read_text()
    assert not (log.parent.parent / "sockets").exists()
    assert result.wire is not None
    assert 0 < result.wire.kept_share["dense"] < 1
    assert result.wire.bytes["dense"] < result.wire.raw_bytes["dense"]
    places = places_of(out)
    assert len({place["pid"] for place in places.values()}) == len(places)


class FakeRay:
    """As much of Ray as reservations need: two groups may not have one name."""

    def __init__(self) -> None:
        self.names = set[str]()
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        self.util = SimpleNamespace(placement_group=self._reserve)

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[Any]:
        return []

    def _reserve(self, bundles: Any, strategy: str, name: str) -> object:
        if name in self.names:
            raise RuntimeError(f"Failed to create placement group because name '{name}' already exists.")
        self.names.add(name)
        return object()


def test_roles_that_move_at_once_each_get_a_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a lost machine would end the job."""
    ray = FakeRay()
    monkeypatch.setattr(ray_runtime, "_ray", lambda: ray)
    monkeypatch.setattr(RayRuntime, "_host", lambda *_: None)
    runtime = RayRuntime(None)
    for rank in range(3):
        runtime.start(LaunchRequest(f"trainer-{rank}", "machine", 1.0))


def test_what_ray_refuses_is_the_loss_of_a_role_and_not_the_end_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setattr(ray_runtime, "_ray", lambda: ray)
    monkeypatch.setattr(RayRuntime, "_host", lambda *_: None)
    monkeypatch.setattr(ray.util, "placement_group", lambda *_, **__: 1 / 0)
    ray.exceptions.RayError = ZeroDivisionError
    with pytest.raises(PeerLost, match="nothing can be had for trainer-0: division by zero"):
        RayRuntime(None).start(LaunchRequest("trainer-0", "machine", 1.0))
