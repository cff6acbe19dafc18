"""Holds the choice of a recovery policy while a job runs: when a save is due, and when the choice is made anew.

Pure: the time is handed in, and what was measured. Nobody else needs to know the formulas.
"""

import enum
from dataclasses import dataclass, field

from shadowsync.recovery.costs import Costs, Scale, spoken
from shadowsync.recovery.decision import Decision, Goal, decide
from shadowsync.recovery.estimates import Estimates

_NAMES = {
    "save_s": "a save",
    "load_s": "a load",
    "restart_s": "a restart",
    "fail_s": "time between failures",
}


class Due(enum.Enum):
    """What is to be saved now: nothing, the next share of the rows by priority, or the end of a whole round.

    A round ends after one interval. With it the small tables and the dense part are saved whole; of the tables that
    are saved by priority it is the round's last share. Without priority there are no shares, and a round is one save
    of everything.
    """

    NOTHING = "nothing"
    SHARE = "share"
    ROUND = "round"


@dataclass
class Governor:
    """The choice, kept up to date.

    Saves follow the clock from start to start, also across failures: after a roll-back the next save comes no later
    than it would have, so a job that fails more often than it saves still gets on.

    Attributes:
        goal: what the user asked for.
        scale: servers and length of the job.
        estimates: for the job to hand measurements to; the governor adds those of saves.
        share: of the rows in a save by priority (r of CPR); 1 saves everything every time.
        moved: share by which a cost must differ from what the choice was made with before it is made anew. More
            keeps the rhythm steadier and follows changes later.
        probe_s: the first save comes after this time if not sooner, for until then the cost of a save is only believed.
        decision: what holds now.
    """

    goal: Goal
    scale: Scale
    estimates: Estimates
    share: float = 1.0
    moved: float = 0.5
    probe_s: float = 600.0
    decision: Decision = field(init=False)
    _basis: Costs = field(init=False)
    _round_s: float = field(init=False)
    _save_s: float = field(init=False)
    _before: tuple[float, float] = field(init=False)
    _round_cost_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}: above 0 and at most 1")
        self._round_s = self._save_s = self.estimates.started_s
        self._before = (self._round_s, self._save_s)
        self._basis = self.estimates.costs(self.estimates.started_s)
        self.decision = decide(self.goal, self._basis, self.scale)

    @property
    def saved_at(self) -> float:
        """When the last save began, or the job."""
        return self._save_s

    @property
    def due_at(self) -> float:
        """When the next save is due; infinite for never."""
        return min(self._round_at, self._save_s + self._step * self.decision.interval_s)

    def due(self, now: float) -> Due:
        """What is to be saved now. Whoever saves it says so with `saving`."""
        if now >= self._round_at:
            return Due.ROUND
        return Due.SHARE if now >= self.due_at else Due.NOTHING

    def saving(self, due: Due, now: float) -> None:
        """A save of what was due begins now: what it holds is the state of now. The next follows from here."""
        self._before = (self._round_s, self._save_s)
        self._save_s = now
        if due is Due.ROUND:
            self._round_s = now

    def not_saved(self) -> None:
        """What `saving` announced did not come about: it is due as before."""
        self._round_s, self._save_s = self._before

    def saved(self, due: Due, cost_s: float) -> None:
        """A save has ended and has cost training so many seconds. What a whole round has cost is the cost of a save."""
        self._round_cost_s += cost_s
        if due is Due.ROUND:
            self.estimates.save.add(self._round_cost_s)
            self._round_cost_s = 0.0

    def revise(self, now: float) -> str | None:
        """Chooses anew if a cost has moved; to be asked now and then, and after each failure.

        Returns:
            A sentence to log if the policy or the interval changed.
        """
        costs = self.estimates.costs(now)
        moved = [name for name in _NAMES if self._has_moved(getattr(self._basis, name), getattr(costs, name))]
        if not moved and not self._has_moved(self._basis.lost_servers, costs.lost_servers):
            return None
        reasons = [f"{_NAMES[n]} is {spoken(getattr(costs, n))}, was {spoken(getattr(self._basis, n))}" for n in moved]
        before, self._basis = self.decision, costs
        self.decision = decide(self.goal, costs, self.scale)
        if (before.mode, before.interval_s) == (self.decision.mode, self.decision.interval_s):
            return None
        reasons = reasons or [f"a failure takes {costs.lost_servers:.3g} servers"]
        was = f"before, {before.mode} with one every {spoken(before.interval_s)}"
        return f"recovery is chosen anew ({'; '.join(reasons)}): {self.decision.why} ({was})"

    @property
    def _step(self) -> float:
        """Part of an interval from save to save."""
        return self.share if self.decision.chosen.policy.by_priority else 1.0

    @property
    def _round_at(self) -> float:
        interval_s = self.decision.interval_s
        if self.estimates.save.value is None and self.decision.chosen.policy.saves:
            interval_s = min(interval_s, self.probe_s)
        return self._round_s + interval_s

    def _has_moved(self, before: float, now: float) -> bool:
        low, high = sorted((before, now))
        return low != high and (low <= 0 or high / low > 1 + self.moved)
