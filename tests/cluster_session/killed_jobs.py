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

ROWS, EPOCHS = 750, 2
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


@dataclass(frozen=True)
class SlowUntil:
    """A second for each step until there is a file: a process may take a minute to start, and is to find a job."""

    file: Path

    def __call__(self, rank: int, iteration: int) -> None:
        if not self.file.exists():
            threading.Event().wait(1.0)


def run_and_kill(
    config: dict[str, Any], out: Path, first: str, then: str, meanwhile: Callable[[], None] = lambda: None
) -> Result:
    """Runs a job; kills the process of one role, and once it is back and there is a checkpoint that of another.

    Args:
        config: of the job; it saves every half second.
        out: its folder.
        first, then: the roles.
        meanwhile: called while the first one is started again.
    """
    done = out.with_suffix(".killed")

    def disturb() -> None:
        wait_until(lambda: samples_of(out) > 20)
        kill(out, first)
        meanwhile()
        wait_until(lambda: "restored" in events_of(out).get(first, []))
        wait_until(lambda: checkpoints(out))
        kill(out, then)
        wait_until(lambda: "restored" in events_of(out).get(then, []))

    def disturb_and_let_go() -> None:
        try:
            disturb()
        finally:
            done.touch()

    with ThreadPoolExecutor(1) as pool:
        disturbing = pool.submit(disturb_and_let_go)
        result = Job(config, out=out, failures=SlowUntil(done)).run()
        disturbing.result(DEADLINE_S)
    return result
