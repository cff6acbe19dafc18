"""Whole jobs on a cluster whose processes are in this one, and scripts of what happens to them."""

import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from job_helpers import Ledger, Witness, beside_own_model, checkpoints, error_of, settings
from safetensors.torch import load_file
from torch import Tensor, nn
from wired_roles import Wired

import shadowsync.job
from shadowsync import Interrupted, Job, Trained
from shadowsync.cluster.context import EventLog
from shadowsync.cluster.session import Session
from shadowsync.config import Config
from shadowsync.metrics.history import RoleEvent
from shadowsync.report.files import read_events
from shadowsync.rpc.connection import JobKeys

DEADLINE_S = 120.0
CLUSTER = {"runtime": "ray"}


class Cluster:
    """Stands in for Ray: the sessions of jobs, their processes, and what has happened to them.

    Attributes:
        runtime, session: of the newest job.
        machines: how many a runtime pretends to have.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machines = 1
        self.make: Callable[[], Wired] = lambda: Wired(JobKeys.make(), self.machines)
        self.runtime: Wired
        self.session: Session
        self._told: list[tuple[str, str]] = []
        self._changed = threading.Condition()
        monkeypatch.setattr(shadowsync.job, "Session", self._make_session)
        add = EventLog.add

        def told(events: EventLog, role: str, event: Any, *more: Any) -> None:
            add(events, role, event, *more)
            with self._changed:
                self._told.append((role, event))
                self._changed.notify_all()

        monkeypatch.setattr(EventLog, "add", told)

    def _make_session(self, config: Config, *given: Any) -> Session:
        on_cluster = config.cluster.runtime == "ray"
        *given, make_runtime, newest = given
        session = Session(config, *given, self._start if on_cluster else make_runtime, newest)
        if on_cluster:
            self.session = session
        return session

    def _start(self) -> Wired:
        self.runtime = self.make()
        return self.runtime

    def wait_for(self, role: str, event: str) -> bool:
        """Waits until that has happened; False if it does not."""
        with self._changed:
            return self._changed.wait_for(lambda: (role, event) in self._told, DEADLINE_S)

    def happened(self, role: str, event: str) -> bool:
        """Whether it has happened yet."""
        with self._changed:
            return (role, event) in self._told

    def kill(self, role: str) -> None:
        """As `kill -9` of the role's present process."""
        process = next(process for process in reversed(self.runtime.processes) if process.request.role == role)
        threading.Thread(target=process.kill, name=f"kill-{role}", daemon=True).start()


def soon(when: Callable[[], bool]) -> bool:
    """Looks again and again, for half a second only: a worker that waits for longer holds up a checkpoint."""
    nothing = threading.Event()
    return any(when() or nothing.wait(0.005) for _ in range(100))


class Killing:
    """Kills processes once, before an iteration of any worker; everybody waits then until all that was seen.

    Args:
        cluster: whose.
        roles: to kill, at once.
        iteration: before which.
        until: what has to happen to each of them before anybody goes on.
        when: is asked too; until it is so, steps take half a second each, so that the job does not end before.
    """

    def __init__(
        self,
        cluster: Cluster,
        roles: Sequence[str],
        iteration: int = 5,
        until: str = "dead",
        when: Callable[[], bool] = lambda: True,
    ) -> None:
        self.cluster, self.roles, self.iteration, self.until, self.when = cluster, roles, iteration, until, when
        self.done = False
        self._lock = threading.Lock()

    def __call__(self, rank: int, iteration: int) -> None:
        if iteration < self.iteration or not soon(self.when):
            return
        with self._lock:
            first, self.done = not self.done, True
        if first:
            self.strike()
        for role in self.roles:
            assert self.cluster.wait_for(role, self.until), f"{role} is not {self.until}"

    def strike(self) -> None:
        """Kills all of them."""
        for role in self.roles:
            self.cluster.kill(role)


class SignalInCluster:
    """Sends a signal to this process before an iteration, and holds everybody until it was seen."""

    def __init__(self, iteration: int = 4) -> None:
        self.iteration = iteration
        self.sent, self.seen = threading.Event(), threading.Event()

    def __call__(self, rank: int, iteration: int) -> None:
        if iteration >= self.iteration and not self.sent.is_set():
            self.sent.set()
            signal.raise_signal(signal.SIGTERM)
        if self.sent.is_set():
            assert self.seen.wait(DEADLINE_S), "nobody asked the workers to stop"

    def run(self, job: Job) -> str:
        """Runs a job of which this is the script until the signal; returns what was said."""
        original = Session.stop

        def stop(session: Any) -> None:
            original(session)
            self.seen.set()

        with mock.patch.object(Session, "stop", stop):
            error = error_of(job.run)
        assert isinstance(error, Interrupted), error
        return str(error)


def interrupted(config: dict[str, Any], out: Path, iteration: int = 4, **own: Any) -> tuple[Counter[int], str]:
    """Trains the witness until a signal; returns what was trained and what was said."""
    ledger, script = Ledger(), SignalInCluster(iteration)
    said = script.run(Job(beside_own_model(config), model=Witness(ledger), out=out, failures=script, **own))
    assert not (out / "result.json").exists()
    return ledger.rows, said


class Tower(nn.Module):
    """A small model of one's own with two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(14, 8), nn.Linear(8, 1)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        vectors = [embeddings[name] for name in ("c0", "c1", "many")]
        return self.out(self.hidden(torch.cat([dense, *vectors], dim=1)).relu()).squeeze(1)


def everything(out: Path) -> dict[str, Tensor]:
    """Every number of the newest checkpoint of a run of the tower, optimizer state included."""
    trained = Trained(out, model=Tower())
    rows = {f"{part.table.name}.{name}": t for part in trained.server.state() for name, t in part.tensors.items()}
    return rows | load_file(checkpoints(out)[-1] / "dense.safetensors")


def cluster_settings(path: Path, test_path: Path | None = None, **sections: Any) -> dict[str, Any]:
    """As `settings`, on the cluster."""
    cluster = CLUSTER | dict(sections.pop("cluster", {}))
    return settings(path, test_path, cluster=cluster, **sections)


def events_of(out: Path) -> dict[str, list[str]]:
    """What happened to each role, in order, but for silences, which a slow machine adds."""
    found: dict[str, list[str]] = {}
    for event in read_events(out):
        assert isinstance(event, RoleEvent)
        if event.event in ("unreachable", "reachable"):
            continue
        found.setdefault(event.role, []).append(event.event)
    return found
