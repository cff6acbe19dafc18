"""Synchronous while the workers are even, GBA while stragglers would hold up the rounds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated, ClassVar

from pydantic import Field

from shadowsync.aggregation.aggregator import Aggregation, Aggregator, Begun, Commit, Switch, Worker
from shadowsync.aggregation.gba import DivideBy, Gba, Tolerance
from shadowsync.aggregation.step_times import StepTimes, lost_share
from shadowsync.aggregation.synchronous import Sync
from shadowsync.config import LONGEST_S
from shadowsync.errors import ConfigError

BACK = 10
"""How many times longer the workers have to be even than they have to be uneven."""
HANGING = 3
"""Usual batches in the time of one that does not end, from which on its round is not waited for."""


@dataclass(frozen=True)
class Auto(Aggregation):
    """Switches between `sync` and `gba` while the job runs, which GBA makes possible without re-tuning (arXiv
    2205.11048). The rule of when to switch is ours.

    What synchronous rounds lose to stragglers is estimated after every commit, in either mode, from the last step times
    of the living workers (`step_times.lost_share`). Above `share` it goes to GBA, once the estimate has been there for
    `steady_commits` commits and `steady_s` seconds in a row; below `even` back, for which it takes `BACK` times as
    much of both: rounds are no faster among even workers, so nothing is lost by staying. It starts synchronously.

    A round need not end for that: a batch that takes as long as `HANGING` usual ones, and `steady_s`, says as much, so
    that a worker that hangs holds nobody up for longer. What has arrived of that round is the beginning of the
    first global batch of GBA. The way back is taken right after a commit, and gradients in flight are kept: the first
    round waits for them instead of admitting as many new ones.
    """

    name: ClassVar[str] = "auto"

    share: Annotated[
        float, Field(gt=0, lt=1, description="loss of synchronous throughput to leave it at; more stays longer")
    ] = 0.2
    even: Annotated[
        float, Field(gt=0, lt=1, description="loss of synchronous throughput to return at; more returns sooner")
    ] = 0.1
    steady_commits: Annotated[
        int, Field(ge=1, description="commits in a row to go to GBA, ten times as many to return; more flaps less")
    ] = 2
    steady_s: Annotated[
        float,
        Field(
            ge=0,
            le=LONGEST_S,
            allow_inf_nan=False,
            description="seconds in a row to go to GBA, ten times that to return",
        ),
    ] = 1.0
    tolerance: Tolerance = Gba.tolerance
    divide_by: DivideBy = Gba.divide_by

    def __post_init__(self) -> None:
        if self.even >= self.share:
            raise ConfigError(
                f"aggregation.even={self.even} has to be below aggregation.share={self.share}, or the modes would "
                "alternate: lower even, or raise share"
            )

    def start(self, size: int, step: int = 0) -> Aggregator:
        return _Switching(self, size, step)


class _Switching(Aggregator):
    """Hands everything on to the method at work, and changes it."""

    def __init__(self, options: Auto, size: int, step: int) -> None:
        self._options = options
        self._size = size
        self._modes: tuple[Aggregation, Aggregation] = (Sync(), Gba(options.tolerance, options.divide_by))
        self._at_work = self._modes[0].start(size, step)
        self._times = StepTimes()
        self._streak, self._since = 0, math.inf  # commits in a row that called for a switch, and when the first did
        super().__init__(self._at_work.mode, step)

    @property
    def waits(self) -> bool:
        return self._at_work.waits

    @property
    def in_flight(self) -> Mapping[int, Begun]:
        return self._at_work.in_flight

    @property
    def held(self) -> Sequence[Begun]:
        return self._at_work.held

    def begin(self, batch: Begun, now: float) -> bool:
        if not self._at_work.begin(batch, now):
            return False
        self._times.began(batch, now)
        return True

    def arrived(self, number: int, now: float) -> Sequence[Commit]:
        self._times.arrived(number, now)
        if commits := self._stepped(self._at_work.arrived(number, now)):
            self._judge(now)
        return commits

    def retired(self, number: int, now: float) -> Sequence[Commit]:
        self._times.retired(number)
        return self._stepped(self._at_work.retired(number, now))

    def left(self, worker: Worker, now: float) -> Sequence[Commit]:
        self._times.left(worker)
        return self._stepped(self._at_work.left(worker, now))

    def flush(self, now: float) -> Sequence[Commit]:
        return self._stepped(self._at_work.flush(now))

    def look(self, now: float) -> bool:
        if not self.waits:
            return False
        options, longest = self._options, self._times.longest_s(now)
        if longest < options.steady_s or not (usual := self._times.usual_s):
            return False
        times = longest / usual
        if times < HANGING:
            return False
        lost = lost_share(self._times.rounds(now), self._size)  # last: this is called often and seldom gets here
        if lost <= options.share:
            return False
        why = f"stragglers cost synchronous rounds {lost:.0%}, above share={options.share:.0%}"
        self._switch(f"{why}, and a batch has taken {longest:.3g} s so far, {times:.0f} times the usual", now)
        return True

    def carry(self, batches: Iterable[Begun], held: Iterable[Begun], now: float) -> None:
        taken = list(batches)
        self._at_work.carry(taken, held, now)
        for batch in taken:
            self._times.began(batch, now)

    def _stepped(self, commits: Sequence[Commit]) -> Sequence[Commit]:
        self.step = self._at_work.step
        return commits

    def _judge(self, now: float) -> None:
        """Looks at the step times, and switches if they have called for it long enough.

        Only when gradients complete a step: workers that end say nothing about those that stay.
        """
        if not (rounds := self._times.rounds(now)):
            return
        lost = lost_share(rounds, self._size)
        options, waits = self._options, self.mode == Sync.name
        if not (lost > options.share if waits else lost < options.even):
            self._streak, self._since = 0, math.inf
            return
        self._streak, self._since = self._streak + 1, min(self._since, now)
        times = 1 if waits else BACK
        if self._streak >= times * options.steady_commits and now - self._since >= times * options.steady_s:
            bound = f"above share={options.share:.0%}" if waits else f"below even={options.even:.0%}"
            means = [fmean(step_s) for step_s in zip(*rounds, strict=True)]
            self._switch(
                f"stragglers cost synchronous rounds {lost:.0%}, {bound} for {self._streak} commits; of {len(means)} "
                f"workers the slowest takes {max(means):.3g} s a batch on average, the median {median(means):.3g} s",
                now,
            )

    def _switch(self, why: str, now: float) -> None:
        carried, held = tuple(self._at_work.in_flight.values()), self._at_work.held
        self._modes = (self._modes[1], self._modes[0])
        self._at_work = self._modes[0].start(self._size, self.step)
        self._at_work.carry(carried, held, now)
        self._streak, self._since = 0, math.inf
        self.mode = self._at_work.mode
        self.switches.append(Switch(self.step, self.mode, why))
