"""What recovery costs, how often each policy saves, and the choice between full and partial recovery.

Pure formulas after CPR (Maeng et al., arXiv 2011.02999). O_save, O_load, O_res and T_fail have these
names here: `save_s`, `load_s`, `restart_s`, `fail_s`; N is `servers`, T_total is `job_s`, T_save an `interval_s`.
Shares of the time are of the whole wall-clock time, so they do not depend on how long the job is. PLS is the portion
of lost samples: see `pls`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

AUTO = "auto"


@dataclass(frozen=True)
class Costs:
    """Seconds that training loses to each event, and how far apart the failures are.

    Attributes:
        save_s: to save everything once. Where saving runs beside training, what training loses by it.
        load_s: to load what a failure makes somebody load.
        restart_s: to find out about a failure and start a replacement.
        fail_s: mean time between failures of embedding servers, of the whole job; infinite where none are expected.
        lost_servers: embedding servers that one failure takes, on average.
        servers: embedding servers of the job.
        job_s: from its first second to its last; infinite where nobody knows.
    """

    save_s: float
    load_s: float
    restart_s: float
    fail_s: float
    lost_servers: float = 1.0
    servers: int = 1
    job_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("save_s", "load_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: seconds from 0 on")
        for name in ("fail_s", "lost_servers"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: it must be above 0")

    def per_failure(self, seconds: float) -> float:
        return 0.0 if math.isinf(self.fail_s) else seconds / self.fail_s

    def per_save(self, interval_s: float) -> float:
        return self.save_s / interval_s if self.save_s else 0.0

    def lost(self, interval_s: float) -> float:
        """The PLS of saving once in every interval: `0.5 T_save/(T_fail N)` for each server that a failure takes."""
        return self.per_failure(0.5 * interval_s * min(self.lost_servers, self.servers) / self.servers)


class RecoveryPolicy(ABC):
    """What is saved when, and who goes back to it after a failure; `title` is for sentences.

    If it `saves`, checkpoints are taken while the job runs; rows may be saved a share at a time if `by_priority`, and
    otherwise each save is one image of everything.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    saves: ClassVar[bool] = True
    by_priority: ClassVar[bool] = False

    @abstractmethod
    def interval_s(self, costs: Costs) -> float:
        """The best time from the start of one save to the start of the next; infinite for never.

        It is never shorter than a save takes, and never longer than the job: a job saves at its end anyway.
        """

    @abstractmethod
    def overhead(self, costs: Costs, interval_s: float) -> float:
        """The share of the time that saving and failures cost; above 1 the job would get nowhere."""

    @abstractmethod
    def expected_pls(self, costs: Costs, interval_s: float) -> float:
        """The PLS to expect at the end of the job."""


@dataclass(frozen=True)
class Full(RecoveryPolicy):
    """Everybody goes back to the last checkpoint, and what was trained since then is trained again.

    `O_save/T_save + (O_load + T_save/2 + O_res)/T_fail`, smallest at `T_save = sqrt(2 O_save T_fail)` (Young, 1974).
    Where saving costs nothing, that is 0: save after save, as fast as they go.
    """

    name: ClassVar[str] = "full"
    title: ClassVar[str] = "full recovery"

    def interval_s(self, costs: Costs) -> float:
        best_s = math.inf if math.isinf(costs.fail_s) else math.sqrt(2 * costs.save_s * costs.fail_s)
        return min(max(best_s, costs.save_s), costs.job_s)

    def overhead(self, costs: Costs, interval_s: float) -> float:
        return costs.per_save(interval_s) + costs.per_failure(costs.load_s + interval_s / 2 + costs.restart_s)

    def expected_pls(self, costs: Costs, interval_s: float) -> float:
        return 0.0


@dataclass(frozen=True)
class Partial(RecoveryPolicy):
    """Only replacements of the dead load the last checkpoint; nothing is trained again (CPR).

    `O_save/T_save + (O_load + O_res)/T_fail`, which only falls as saves get rarer. What grows is
    `E[PLS] = 0.5 T_save/(T_fail N)`, so the target sets the interval: `T_save = 2 PLS N T_fail`. Ours also counts how
    many servers a failure takes (`lost_servers`), each of which loses its own share. With N = 1 a failure takes every
    row back, yet nothing is trained again, and the formulas hold as they are. A larger `target_pls` saves less
    often.
    """

    name: ClassVar[str] = "partial"
    title: ClassVar[str] = "partial recovery"
    by_priority: ClassVar[bool] = True

    target_pls: float = 0.1

    def interval_s(self, costs: Costs) -> float:
        best_s = 2 * self.target_pls * costs.servers / min(costs.lost_servers, costs.servers) * costs.fail_s
        return min(max(best_s, costs.save_s), costs.job_s)

    def overhead(self, costs: Costs, interval_s: float) -> float:
        return costs.per_save(interval_s) + costs.per_failure(costs.load_s + costs.restart_s)

    def expected_pls(self, costs: Costs, interval_s: float) -> float:
        return costs.lost(interval_s)


@dataclass(frozen=True)
class NoRecovery(RecoveryPolicy):
    """Nothing is saved to recover from, and a replacement starts from initial rows: the yardstick of the others.

    Where the user has checkpoints written anyway (`train.save_every_s`), it starts from the last of them.

    A failure loses all that its server has learned so far, so the PLS is that of an interval as long as the job.
    """

    name: ClassVar[str] = "none"
    title: ClassVar[str] = "no recovery"
    saves: ClassVar[bool] = False

    def interval_s(self, costs: Costs) -> float:
        return math.inf

    def overhead(self, costs: Costs, interval_s: float) -> float:
        return costs.per_failure(costs.restart_s)

    def expected_pls(self, costs: Costs, interval_s: float) -> float:
        return costs.lost(costs.job_s)


def policies(target_pls: float) -> dict[str, RecoveryPolicy]:
    """The members by name."""
    return {policy.name: policy for policy in (NoRecovery(), Full(), Partial(target_pls))}


@dataclass(frozen=True)
class Goal:
    """What the user asked for: a policy's name or `auto` for the cheaper of full and partial, and the PLS that partial
    recovery may expect. No interval between saves leaves it to the policy.
    """

    mode: str = AUTO
    target_pls: float = 0.1
    interval_s: float | None = None


@dataclass(frozen=True)
class Option:
    """A policy at its interval, or at the one that was asked for, and what its methods say of it."""

    policy: RecoveryPolicy
    interval_s: float
    overhead: float
    expected_pls: float

    @property
    def rhythm(self) -> str:
        return f"a save every {spoken(self.interval_s)}" if math.isfinite(self.interval_s) else "no save"

    @property
    def terms(self) -> str:
        share = f"{100 * self.overhead:.2f} % of the time" if self.overhead < 1 else "more time than there is"
        return f"{share} with {self.rhythm}"


@dataclass(frozen=True)
class Decision:
    """The chosen option, those it was weighed against, and why as a sentence."""

    chosen: Option
    full: Option
    partial: Option
    why: str

    @property
    def mode(self) -> str:
        return self.chosen.policy.name

    @property
    def interval_s(self) -> float:
        return self.chosen.interval_s


def decide(goal: Goal, costs: Costs) -> Decision:
    """The policy that was asked for; for `auto` partial if and only if it costs less than full, else full.

    Each is weighed at its own interval (CPR, arXiv 2011.02999), or both at the one asked for. Ours differs
    in one point: where an interval cannot keep the target PLS (asked for, or no shorter than a save takes), full.
    """
    options = {}
    for name, policy in policies(goal.target_pls).items():
        interval_s = policy.interval_s(costs)
        if goal.interval_s is not None and policy.saves:
            interval_s = min(goal.interval_s, costs.job_s)
        expected_pls = policy.expected_pls(costs, interval_s)
        options[name] = Option(policy, interval_s, policy.overhead(costs, interval_s), expected_pls)
    full, partial = options["full"], options["partial"]

    if goal.mode != AUTO:
        chosen = options[goal.mode]
        why = f"{chosen.policy.title}, as set: {chosen.terms}"
    elif math.isinf(costs.fail_s):
        chosen = full
        why = f"{full.policy.title}: no failures are expected, so there is no time to gain by losing samples"
    elif partial.expected_pls > goal.target_pls * (1 + 1e-9):
        chosen = full
        why = (
            f"{full.policy.title}: {full.terms}; partial recovery with {partial.rhythm} would lose a PLS of "
            f"{partial.expected_pls:.3g} (portion of lost samples), above the target of {goal.target_pls:g}"
        )
    else:
        chosen, other = (partial, full) if partial.overhead < full.overhead else (full, partial)
        why = f"{chosen.policy.title}: {chosen.terms}, and {other.policy.title} {other.terms}"
    if chosen.expected_pls:
        why += (
            f"; a PLS of {chosen.expected_pls:.3g} (portion of lost samples) is expected, the target is "
            f"{goal.target_pls:g}"
        )
    return Decision(chosen, full, partial, why)


class PlsAccount:
    """Adds up what failures have cost in samples (CPR, arXiv 2011.02999).

    A failure at sample S of server j, last saved whole at sample S_j, adds `(S − S_j)/S_total · share_j`, where the
    share is 1/N unless the servers' shares of the rows are given. As in the paper

    - rows saved by priority in between do not count: S_j is the end of the last whole round, so with priority saving
      this is an upper bound, the same for every priority, and the target sets the same interval for all of them;
    - a second failure since the same save counts from that save again, although part of it was lost already.

    Where everybody goes back (full recovery), nothing is lost: say `went_back` then, and not `failed`.

    The job has so many samples in all epochs, and each server its share of the rows, which add up to 1. Up to `begun`,
    the samples trained when the job began, nothing can be lost: initial values can be made again. `saved_at` are the
    samples trained at each server's last whole save.
    """

    def __init__(self, total_samples: int, shares: Sequence[float], begun: int = 0) -> None:
        self.total_samples = total_samples
        self.shares = shares
        self.saved_at = [begun] * len(shares)
        self.pls = 0.0

    def saved(self, server: int, samples: int) -> None:
        """A server's rows are all saved as of so many samples; one that ends after a newer one changes nothing."""
        self.saved_at[server] = max(self.saved_at[server], samples)

    def failed(self, servers: Collection[int], samples: int, loaded: int | None = None) -> None:
        """These servers died at once after so many samples, and their replacements load their last saves.

        Where that may be an older checkpoint, `loaded` are its samples.
        """
        for server in set(servers):
            if loaded is not None:
                self.saved_at[server] = min(self.saved_at[server], loaded)
            self.pls += max(samples - self.saved_at[server], 0) * self.shares[server] / self.total_samples

    def went_back(self, samples: int) -> None:
        """After a failure everybody went back to a checkpoint taken at so many samples, and trains on from there."""
        self.saved_at = [samples] * len(self.shares)


def spoken(seconds: float) -> str:
    """`0.25 s`, `5.3 min`, `44.8 h`, `12.5 days`: for sentences."""
    for below, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (4 * 86_400, 3600, "h"), (math.inf, 86_400, "days")):
        if seconds < below:
            return f"{seconds / unit_s:.3g} {unit}"
    return "never"
