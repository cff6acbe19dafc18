"""The seam of the recovery policies: how often to save, what that and failures cost, who loads after a failure.

Pure formulas after CPR (Maeng et al., arXiv 2011.02999, section 3). Shares of the time are of the whole wall-clock time
T_total, so they do not depend on how long the job is. PLS is the portion of lost samples: see `pls`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from shadowsync.recovery.costs import Costs, Scale


class RecoveryPolicy(ABC):
    """What is saved when, and who goes back to it after a failure.

    Attributes:
        name: in `recovery.mode`.
        title: in sentences.
        saves: checkpoints are taken while the job runs.
        by_priority: rows may be saved a share at a time. Otherwise each save is one image of everything.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    saves: ClassVar[bool] = True
    by_priority: ClassVar[bool] = False

    @abstractmethod
    def interval_s(self, costs: Costs, scale: Scale) -> float:
        """The best time from the start of one save to the start of the next; infinite for never.

        It is never shorter than a save takes, and never longer than the job: a job saves at its end anyway.
        """

    @abstractmethod
    def overhead(self, costs: Costs, interval_s: float) -> float:
        """The share of the time that saving and failures cost; above 1 the job would get nowhere."""

    @abstractmethod
    def expected_pls(self, costs: Costs, scale: Scale, interval_s: float) -> float:
        """The PLS to expect at the end of the job."""


@dataclass(frozen=True)
class Full(RecoveryPolicy):
    """Everybody goes back to the last checkpoint, and what was trained since then is trained again.

    `O_save/T_save + (O_load + T_save/2 + O_res)/T_fail`, smallest at `T_save = sqrt(2 O_save T_fail)` (Young, 1974).
    Where saving costs nothing, that is 0: save after save, as fast as they go.
    """

    name: ClassVar[str] = "full"
    title: ClassVar[str] = "full recovery"

    def interval_s(self, costs: Costs, scale: Scale) -> float:
        best_s = math.inf if math.isinf(costs.fail_s) else math.sqrt(2 * costs.save_s * costs.fail_s)
        return _within(best_s, costs, scale)

    def overhead(self, costs: Costs, interval_s: float) -> float:
        return costs.per_save(interval_s) + costs.per_failure(costs.load_s + interval_s / 2 + costs.restart_s)

    def expected_pls(self, costs: Costs, scale: Scale, interval_s: float) -> float:
        return 0.0


@dataclass(frozen=True)
class Partial(RecoveryPolicy):
    """Only replacements of the dead load the last checkpoint; nothing is trained again (CPR).

    `O_save/T_save + (O_load + O_res)/T_fail`, which only falls as saves get rarer. What grows is
    `E[PLS] = 0.5 T_save/(T_fail N)`, so the target sets the interval: `T_save = 2 PLS N T_fail`. Ours also counts how
    many servers a failure takes (`lost_servers`), each of which loses its own share. With N = 1 a failure takes every
    row back, yet nothing is trained again, and the formulas hold as they are.

    Attributes:
        target_pls: portion of lost samples that may be expected at the end; more saves less often.
    """

    name: ClassVar[str] = "partial"
    title: ClassVar[str] = "partial recovery"
    by_priority: ClassVar[bool] = True

    target_pls: float = 0.1

    def interval_s(self, costs: Costs, scale: Scale) -> float:
        lost = min(costs.lost_servers, scale.servers)
        return _within(2 * self.target_pls * scale.servers / lost * costs.fail_s, costs, scale)

    def overhead(self, costs: Costs, interval_s: float) -> float:
        return costs.per_save(interval_s) + costs.per_failure(costs.load_s + costs.restart_s)

    def expected_pls(self, costs: Costs, scale: Scale, interval_s: float) -> float:
        return _lost(costs, scale, interval_s)


@dataclass(frozen=True)
class NoRecovery(RecoveryPolicy):
    """Nothing is saved to recover from, and a replacement starts from initial rows: the yardstick of the others.

    Where the user has checkpoints written anyway (`train.save_every_s`), it starts from the last of them.

    A failure loses all that its server has learned so far, so the PLS is that of an interval as long as the job.
    """

    name: ClassVar[str] = "none"
    title: ClassVar[str] = "no recovery"
    saves: ClassVar[bool] = False

    def interval_s(self, costs: Costs, scale: Scale) -> float:
        return math.inf

    def overhead(self, costs: Costs, interval_s: float) -> float:
        return costs.per_failure(costs.restart_s)

    def expected_pls(self, costs: Costs, scale: Scale, interval_s: float) -> float:
        return _lost(costs, scale, scale.job_s)


def policies(target_pls: float) -> dict[str, RecoveryPolicy]:
    """The members by name."""
    return {policy.name: policy for policy in (NoRecovery(), Full(), Partial(target_pls))}


def _within(best_s: float, costs: Costs, scale: Scale) -> float:
    return min(max(best_s, costs.save_s), scale.job_s)


def _lost(costs: Costs, scale: Scale, interval_s: float) -> float:
    """`0.5 T_save/(T_fail N)` for each server that a failure takes."""
    lost = min(costs.lost_servers, scale.servers)
    return costs.per_failure(0.5 * interval_s * lost / scale.servers)
