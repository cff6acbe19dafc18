"""The shadow thread: synchronises a replica while the workers train."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from shadowsync.config import LONGEST_S
from shadowsync.sync.schedule import Schedule, Synchronisation
from shadowsync.training.worker import Driver

_LAST, _MOST_TIMES = 5, 4.0
"""Synchronisations of whose costs the median is taken, and how many times it one may count."""


@dataclass(frozen=True)
class Background(Schedule):
    """Back to back, or at most every `every_s` seconds (ShadowSync, arXiv 2003.03477).

    In the paper the network sets the pace. On one machine there is none, and a shadow thread that never pauses would
    take a core from the workers and synchronise replicas that have not moved. So ours adds two rules: it waits until
    its trainer has made an iteration since the last synchronisation, and it uses at most `max_share` of one core. CPU
    time is what counts, not waiting: on a slow network it still runs back to back. What it costs to move the vectors
    counts too, wherever that is done. One that was dear by chance counts in part (`counted_cost`).
    """

    name: ClassVar[str] = "background"
    foreground: ClassVar[bool] = False

    every_s: Annotated[
        float,
        Field(ge=0, le=LONGEST_S, description="least seconds from start to start; more synchronises less often"),
    ] = 0.0
    max_share: Annotated[
        float, Field(gt=0, le=1, description="share of one core the shadow thread may use; 1 is back to back")
    ] = 0.02

    def next_start(self, started: float, ended: float, cpu_s: float) -> float:
        """The earliest time for the next synchronisation after one from `started` to `ended` that used `cpu_s`."""
        return max(started + self.every_s, started + cpu_s / self.max_share, ended)

    def _drive(self, synchronisation: Synchronisation) -> Driver:
        return Shadow(self, synchronisation)


def counted_cost(last: Sequence[float]) -> float:
    """Of the last of these synchronisations, by the processor seconds of each: its own, but at most four times their
    median.

    A single one may have had to do what has nothing to do with it. A garbage collection that falls into it takes a
    fifth of a second, and to rest fifty times as long, with all who average waiting, would leave replicas to themselves
    for ten. The first by itself says nothing of what they cost, and counts for nothing.
    """
    return min(last[-1], _MOST_TIMES * statistics.median_low(last)) if len(last) > 1 else 0.0


class Shadow(Driver):
    """One trainer's shadow thread."""

    def __init__(self, schedule: Background, synchronisation: Synchronisation) -> None:
        self._schedule = schedule
        self._synchronisation = synchronisation
        self._stopping = False
        self._iterations = [0] * synchronisation.workers
        self._stepped, self._waits = threading.Event(), False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)

    def start(self) -> None:
        self._synchronisation.gate.join()
        self._thread.start()

    def after_step(self, worker_index: int, iteration: int) -> None:
        self._iterations[worker_index] = iteration
        if self._waits:
            self._stepped.set()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopping = True
        self._stepped.set()
        self._synchronisation.gate.wake()
        self._synchronisation.group.leave()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        gate = self._synchronisation.gate
        try:
            self._loop()
        except BaseException as error:
            self._error = error
        finally:
            self._synchronisation.group.leave()
            gate.leave()

    def _cpu_s(self) -> float:
        return time.thread_time() + self._synchronisation.group.cpu_s()

    def _loop(self) -> None:
        gate, seen = self._synchronisation.gate, 0
        costs: deque[float] = deque(maxlen=_LAST)
        while not self._stopping:
            gate.step()
            if sum(self._iterations) == seen and not self._synchronisation.method.collective:
                self._wait_for_a_step(seen)
                continue
            seen = sum(self._iterations)
            started, cpu_started = time.monotonic(), self._cpu_s()
            self._synchronisation.once()
            ended = time.monotonic()
            costs.append(self._cpu_s() - cpu_started)
            pause_s = self._schedule.next_start(started, ended, counted_cost(costs)) - ended
            if pause_s > 0:
                gate.rest(pause_s, lambda: self._stopping)

    def _wait_for_a_step(self, seen: int) -> None:
        """Until workers have made more iterations than these, or it is stopped."""
        self._waits = True  # first: whoever steps from here on sets the event
        self._stepped.clear()
        if sum(self._iterations) == seen and not self._stopping:
            with self._synchronisation.gate.resting():
                self._stepped.wait()
        self._waits = False
