"""Failures of a run on a testbed: what is to come, how it strikes, and what the run's own files say of it."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from namespaces import ip
from testbed import Testbed

ROLES = ("trainer", "reader", "embedding", "dense")
KINDS = (*ROLES, "host", "cut")
POLL_S = 0.05
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Failure:
    """One failure to come.

    Attributes:
        share: of an undisturbed run's training time, after which it strikes.
        kind: of `KINDS`.
        draw: in [0, 1); chooses among those it may strike.
        seconds: until a host comes back or a cable is plugged in; nothing to a process.
    """

    share: float
    kind: str
    draw: float
    seconds: float


def schedules(seed: int, runs: int, per_run: int) -> list[list[Failure]]:
    """The failures of every run, in the order of their time; each kind as often as any other, give or take one."""
    chance = random.Random(seed)
    deck = [KINDS[index % len(KINDS)] for index in range(runs * per_run)]
    chance.shuffle(deck)
    drawn = [_draw(chance, kind) for kind in deck]
    return [sorted(drawn[at : at + per_run], key=lambda failure: failure.share) for at in range(0, len(drawn), per_run)]


def _draw(chance: random.Random, kind: str) -> Failure:
    seconds = {"host": chance.uniform(2, 8), "cut": chance.uniform(2, 20)}.get(kind, 0.0)
    return Failure(chance.uniform(0.1, 0.8), kind, chance.random(), seconds)


@dataclass
class Struck:
    """A failure that has happened, and what came of it.

    Attributes:
        kind: of `KINDS`.
        target: the role or the host.
        at_s: since training began.
        victims: the roles whose process it took, with the incarnation they were in.
        noticed_s: after the failure, the run said something about a victim.
        back_s: after the failure, every victim had a new process.
    """

    kind: str
    target: str
    at_s: float
    victims: Mapping[str, int] = field(default_factory=dict)
    noticed_s: float | None = None
    back_s: float | None = None


class RunFiles:
    """What a run's folder says of its roles while it runs; files may be missing, or about to be written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events = 0

    def roles(self) -> dict[str, dict[str, Any]]:
        """By name: `pid`, `host`, `incarnation`."""
        with contextlib.suppress(OSError, json.JSONDecodeError):
            found: dict[str, dict[str, Any]] = json.loads((self._folder / "roles.json").read_text())
            return found
        return {}

    def training(self) -> bool:
        """Samples have been trained."""
        return any(json.loads(line).get("samples", 0) for line in self._lines("metrics.jsonl"))

    def new_events(self) -> list[dict[str, Any]]:
        """The events written since the last call."""
        lines = self._lines("events.jsonl")
        fresh, self._events = lines[self._events :], len(lines)
        return [json.loads(line) for line in fresh]

    def _lines(self, name: str) -> list[str]:
        """The whole lines of a file."""
        with contextlib.suppress(OSError):
            return (self._folder / name).read_text().split("\n")[:-1]
        return []


class Chaos:
    """Strikes a run in a testbed by its schedule, and watches.

    Args:
        testbed: with Ray in it, if the run needs it.
        files: of the run.
        restart: brings the Ray node of a host back.
        silent: a host is lost with its network.
    """

    def __init__(self, testbed: Testbed, files: RunFiles, restart: Callable[[int], None], silent: bool = True) -> None:
        self._testbed, self._files, self._restart, self._silent = testbed, files, restart, silent
        self._repairs: list[tuple[float, Callable[[], None]]] = []
        self._repairers = ThreadPoolExecutor(1)  # starting a node takes seconds, in which there is much to see
        self._under_repair: list[Future[None]] = []
        self.struck: list[Struck] = []

    def watch(
        self,
        process: "subprocess.Popen[Any]",
        failures: Sequence[Failure],
        expected_s: float,
        limit_s: float = TIMEOUT_S,
    ) -> float:
        """Until the run ends, or is ended.

        Args:
            process: the run's.
            failures: in the order of their time.
            expected_s: training time of an undisturbed run.
            limit_s: after so long the run is killed.

        Returns:
            Seconds from the first samples to the end.
        """
        began: float | None = None
        deadline = time.monotonic() + limit_s
        coming = list(failures)
        while process.poll() is None and time.monotonic() < deadline:
            now = time.monotonic()
            if began is None:
                began = now if self._files.training() else None
            else:
                while coming and now - began >= coming[0].share * expected_s and self._strike(coming[0], now - began):
                    coming.pop(0)
                self._observe(now - began)
            self._repair(now)
            time.sleep(POLL_S)
        ended = time.monotonic()
        self._end(process)
        return ended - (began or ended)

    def _end(self, process: "subprocess.Popen[Any]") -> None:
        if process.poll() is None:
            process.kill()
        process.wait()
        self._repair(float("inf"))
        self._repairers.shutdown(wait=True)
        for repair in self._under_repair:
            repair.result()

    def _strike(self, failure: Failure, now_s: float) -> bool:
        """False if there is nobody to strike now; it is tried again."""
        if failure.kind in ROLES:
            return self._kill_role(failure, now_s)
        # The driver's host dies only with the job; its cable may be pulled.
        first = 1 if failure.kind == "host" else 0
        host = first + int(failure.draw * (len(self._testbed.hosts) - first))
        inside = self._roles_in(host)
        repair_at = time.monotonic() + failure.seconds
        if failure.kind == "host":
            self._testbed.kill_host(host, self._silent)
            self._repairs.append((repair_at, lambda: self._bring_back(host)))
        else:
            self._testbed.cut(host)
            self._repairs.append((repair_at, lambda: self._testbed.restore(host)))
            inside = {}  # nobody dies of it
        self.struck.append(Struck(failure.kind, f"host {host}", now_s, inside))
        return True

    def _kill_role(self, failure: Failure, now_s: float) -> bool:
        roles = self._files.roles()
        alive = [name for name in sorted(roles) if name.startswith(failure.kind) and _runs(roles[name])]
        if not alive:
            return False
        name = alive[int(failure.draw * len(alive))]
        os.kill(roles[name]["pid"], signal.SIGKILL)
        self.struck.append(Struck(failure.kind, name, now_s, {name: roles[name]["incarnation"]}))
        return True

    def _roles_in(self, host: int) -> dict[str, int]:
        pids = {int(pid) for pid in ip("netns", "pids", self._testbed.hosts[host].namespace).split()}
        return {name: role["incarnation"] for name, role in self._files.roles().items() if role.get("pid") in pids}

    def _bring_back(self, host: int) -> None:
        self._testbed.restart_host(host)
        self._restart(host)

    def _repair(self, now: float) -> None:
        due = [repair for at, repair in self._repairs if at <= now]
        self._repairs = [(at, repair) for at, repair in self._repairs if at > now]
        self._under_repair += [self._repairers.submit(repair) for repair in due]

    def _observe(self, now_s: float) -> None:
        spoken_of = {event["role"] for event in self._files.new_events()}
        roles = self._files.roles()
        for struck in self.struck:
            if struck.noticed_s is None and spoken_of & set(struck.victims):
                struck.noticed_s = now_s - struck.at_s
            if struck.back_s is None and struck.victims and _all_new(struck.victims, roles):
                struck.back_s = now_s - struck.at_s


def _runs(role: Mapping[str, Any]) -> bool:
    pid = role.get("pid") or 0
    if pid > 1:  # smaller ones are whole groups, ours among them
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            return True
    return False


def _all_new(victims: Mapping[str, int], roles: Mapping[str, Mapping[str, Any]]) -> bool:
    return all(name in roles and roles[name]["incarnation"] > before for name, before in victims.items())
