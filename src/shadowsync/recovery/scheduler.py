"""When a running job saves: the costs are measured, and the choice of a policy is made anew when they have moved.

Pure: the time is handed in, and what was measured. Nobody else needs to know the formulas.
"""

import enum
import math
from dataclasses import dataclass, field

from shadowsync.recovery.policy import Costs, Decision, Goal, decide, spoken

RECENT = 0.3
_INSTANT_S = 1e-6
_NAMES = {
    "save_s": "a save",
    "load_s": "a load",
    "restart_s": "a restart",
    "fail_s": "time between failures",
}


@dataclass(frozen=True)
class Priors:
    """What is believed before anything was measured, as in `Costs`; the first measurement of one replaces it.

    Attributes:
        load_s: None: as long as a save.
        fail_s: infinite to believe the measurements alone.
        fail_spread: how sure that is: the truth is believed to be within a factor of e^spread, two times out of three.
            More follows the measurements sooner.
        lost_servers: the first failure replaces it by the servers that it took.
    """

    save_s: float = 60.0
    load_s: float | None = None
    restart_s: float = 15.0
    fail_s: float = 28 * 3600.0
    fail_spread: float = 1.0
    lost_servers: float = 1.0


def time_between_failures(priors: Priors, failures: int, exposure_s: float) -> float:
    """T_fail after so many failures in so many seconds.

    The most probable value for failures of a constant rate (Poisson) under a log-normal prior around `fail_s`:
    `u = log(prior/T)` solves `n − t/prior · e^u − u/σ² = 0`. Without observations that is the prior, after many the
    plain `t/n`, and without failures it grows with the time.

    Weighed: a Gamma prior, with which `T = (a·prior + t)/(a + n)`. With a = 1, after ten failures in a minute it
    still says 2.5 h where the prior was 28 h, and with a small one it takes a quiet hour for a sign of eternity. In
    this one the logarithm of the error counts: a prior that is wrong by orders of magnitude costs a few failures.
    """
    if math.isinf(priors.fail_s):
        return exposure_s / failures if failures and exposure_s else math.inf
    variance, exposure_s = priors.fail_spread**2, max(exposure_s, _INSTANT_S)
    # With w = σ² t/T the equation is w + ln w = c: Newton's steps, from below, where they cannot overshoot.
    c = math.log(variance * exposure_s / priors.fail_s) + variance * failures
    w = c - math.log(c) if c > 1 else math.exp(c - 1)
    for _ in range(20):
        w = w * (1 + c - math.log(w)) / (1 + w)
    return variance * exposure_s / w


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
class CheckpointScheduler:
    """The choice of a policy, kept up to date, and the saves that follow from it.

    Saves follow the clock from start to start, also across failures: after a roll-back the next save comes no later
    than it would have, so a job that fails more often than it saves still gets on.

    Attributes:
        servers, job_s: as in `Costs`.
        started_s: time at which the job could first fail.
        share: of the rows in a save by priority (r of CPR), in (0, 1].
        moved: share by which a cost must differ from what the choice was made with before it is made anew. More
            keeps the rhythm steadier and follows changes later.
        probe_s: the first save comes after this time if not sooner, for until then the cost of a save is only believed.
        saved_at: when the last save began, or the job.
        failures: of embedding servers so far; several at once are one.
        measured: seconds by the names of `Costs`: means in which the newest measurement weighs `RECENT`.
    """

    goal: Goal
    priors: Priors = Priors()
    servers: int = 1
    job_s: float = math.inf
    started_s: float = 0.0
    share: float = 1.0
    moved: float = 0.5
    probe_s: float = 600.0
    decision: Decision = field(init=False)
    saved_at: float = field(init=False)
    failures: int = field(default=0, init=False)
    measured: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._round_s = self.saved_at = self.started_s
        self._before = (self._round_s, self.saved_at)
        self._round_cost_s = 0.0
        self._lost_servers = 0
        self._basis = self.costs(self.started_s)
        self.decision = decide(self.goal, self._basis)

    def failed(self, servers: int = 1) -> None:
        """So many embedding servers died at once."""
        self.failures += 1
        self._lost_servers += servers

    @property
    def lost_servers(self) -> float | None:
        """That a failure has taken on average; None as long as there was none."""
        return self._lost_servers / self.failures if self.failures else None

    def measure(self, name: str, seconds: float) -> None:
        before = self.measured.get(name, seconds)
        self.measured[name] = before + RECENT * (seconds - before)

    def costs(self, now: float) -> Costs:
        """The costs, given all that was measured and that there was no other failure until now."""
        save_s = self.measured.get("save_s", self.priors.save_s)
        return Costs(
            save_s=save_s,
            load_s=self.measured.get("load_s", save_s if self.priors.load_s is None else self.priors.load_s),
            restart_s=self.measured.get("restart_s", self.priors.restart_s),
            fail_s=time_between_failures(self.priors, self.failures, max(now - self.started_s, 0.0)),
            lost_servers=self.lost_servers or self.priors.lost_servers,
            servers=self.servers,
            job_s=self.job_s,
        )

    @property
    def due_at(self) -> float:
        step = self.share if self.decision.chosen.policy.by_priority else 1.0
        return min(self._round_at, self.saved_at + step * self.decision.interval_s)

    @property
    def _round_at(self) -> float:
        interval_s = self.decision.interval_s
        if "save_s" not in self.measured and self.decision.chosen.policy.saves:
            interval_s = min(interval_s, self.probe_s)
        return self._round_s + interval_s

    def due(self, now: float) -> Due:
        """Whoever saves it says so with `saving`."""
        if now >= self._round_at:
            return Due.ROUND
        return Due.SHARE if now >= self.due_at else Due.NOTHING

    def saving(self, due: Due, now: float) -> None:
        """A save of what was due begins now: what it holds is the state of now. The next follows from here."""
        self._before = (self._round_s, self.saved_at)
        self.saved_at = now
        if due is Due.ROUND:
            self._round_s = now

    def not_saved(self) -> None:
        """What `saving` announced did not come about: it is due as before."""
        self._round_s, self.saved_at = self._before

    def saved(self, due: Due, cost_s: float) -> None:
        """A save has ended and has cost training so many seconds. What a whole round has cost is the cost of a save."""
        self._round_cost_s += cost_s
        if due is Due.ROUND:
            self.measure("save_s", self._round_cost_s)
            self._round_cost_s = 0.0

    def revise(self, now: float) -> str | None:
        """Chooses anew if a cost has moved; a sentence to log if the policy or the interval changed.

        To be asked now and then, and after each failure.
        """
        costs, basis = self.costs(now), self._basis
        moved = [name for name in _NAMES if self._has_moved(getattr(basis, name), getattr(costs, name))]
        if not moved and not self._has_moved(basis.lost_servers, costs.lost_servers):
            return None
        before, self._basis = self.decision, costs
        self.decision = decide(self.goal, costs)
        if (before.mode, before.interval_s) == (self.decision.mode, self.decision.interval_s):
            return None
        reasons = [f"{_NAMES[n]} is {spoken(getattr(costs, n))}, was {spoken(getattr(basis, n))}" for n in moved]
        if self._has_moved(basis.lost_servers, costs.lost_servers):
            reasons.append(f"a failure takes {costs.lost_servers:.3g} servers, was {basis.lost_servers:.3g}")
        was = f"before, {before.mode} with one every {spoken(before.interval_s)}"
        return f"recovery is chosen anew ({'; '.join(reasons)}): {self.decision.why} ({was})"

    def _has_moved(self, before: float, now: float) -> bool:
        low, high = sorted((before, now))
        return low != high and (low <= 0 or high / low > 1 + self.moved)
