"""Jobs whose roles are processes, which are really killed."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_jobs import events_of
from job_helpers import checkpoints

from shadowsync import Job, Result

ROWS, EPOCHS = 300, 2
DEADLINE_S = 500.0


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


@dataclass(frozen=True)
class SlowUntil:
    """Up to a second for each step after the first few until there is a file: processes that a slow machine takes
    long to start are to find a job.
    """

    file: Path

    def __call__(self, rank: int, iteration: int) -> None:
        for _ in range(10 if iteration > 5 else 0):
            if self.file.exists():
                return
            threading.Event().wait(0.1)


def run_and_kill(
    config: dict[str, Any], out: Path, *roles: str, meanwhile: Callable[[], None] = lambda: None
) -> Result:
    """Runs a job; kills the processes of roles, each once the one before is back and there is a checkpoint.

    Args:
        config: of the job; it saves every half second.
        out: its folder.
        roles: in their order.
        meanwhile: called while the first one is started again.
    """
    done = out.with_suffix(".killed")

    def disturb() -> None:
        wait_until(lambda: samples_of(out) > 20)
        for role in roles:
            kill(out, role)
            if role == roles[0]:
                meanwhile()
            wait_until(lambda role=role: "restored" in events_of(out).get(role, []))
            wait_until(lambda: checkpoints(out))

    def disturb_and_let_go() -> None:
        try:
            disturb()
        finally:
            done.touch()

    with ThreadPoolExecutor(1) as pool:
        disturbing = pool.submit(disturb_and_let_go)
        result = Job(config, out=out, failures=SlowUntil(done)).run()
        disturbing.result(DEADLINE_S)
    assert result.data.trained_samples == ROWS * EPOCHS
    assert result.recovery.failures == len(roles)
    for role in roles:
        assert events_of(out)[role][:4] == ["alive", "dead", "restarted", "restored"]
    assert {role for role, place in places_of(out).items() if place["incarnation"]} == set(roles)
    assert result.test is not None
    assert result.test.auc is not None
    assert result.test.auc > 0.7
    return result
