"""The choice between full and partial recovery, with the sentence that says why."""

import math
from dataclasses import dataclass

from shadowsync.recovery.costs import Costs, Scale, spoken
from shadowsync.recovery.policy import RecoveryPolicy, policies

AUTO = "auto"


@dataclass(frozen=True)
class Goal:
    """What the user asked for.

    Attributes:
        mode: a policy's name, or `auto` for the cheaper of full and partial.
        target_pls: portion of lost samples that partial recovery may expect.
        interval_s: time between saves; None leaves it to the policy.
    """

    mode: str = AUTO
    target_pls: float = 0.1
    interval_s: float | None = None


@dataclass(frozen=True)
class Option:
    """A policy at its interval, or at the one that was asked for.

    Attributes:
        overhead: the share of the time that saving and failures cost.
        expected_pls: the portion of lost samples to expect.
    """

    policy: RecoveryPolicy
    interval_s: float
    overhead: float
    expected_pls: float


@dataclass(frozen=True)
class Decision:
    """The chosen option, those it was weighed against, and why as a sentence."""

    chosen: Option
    full: Option
    partial: Option
    why: str

    @property
    def mode(self) -> str:
        """`full`, `partial` or `none`."""
        return self.chosen.policy.name

    @property
    def interval_s(self) -> float:
        """Time from the start of one save to the start of the next; infinite for never."""
        return self.chosen.interval_s

    @property
    def expected_pls(self) -> float:
        """The portion of lost samples to expect."""
        return self.chosen.expected_pls


def decide(goal: Goal, costs: Costs, scale: Scale) -> Decision:
    """The policy that was asked for; for `auto` partial if and only if it costs less than full, else full.

    Each is weighed at its own interval (CPR, arXiv 2011.02999, section 3), or both at the one asked for. Ours differs
    in one point: where an interval cannot keep the target PLS (asked for, or no shorter than a save takes), full.
    """
    options = {name: _option(policy, goal, costs, scale) for name, policy in policies(goal.target_pls).items()}
    full, partial = options["full"], options["partial"]
    if goal.mode != AUTO:
        chosen = options[goal.mode]
        return Decision(
            chosen, full, partial, f"{chosen.policy.title}, as set: {_terms(chosen)}{_against(chosen, goal)}"
        )
    if math.isinf(costs.fail_s):
        why = f"{full.policy.title}: no failures are expected, so there is no time to gain by losing samples"
        return Decision(full, full, partial, why)
    if _misses(partial, goal):
        why = (
            f"{full.policy.title}: {_terms(full)}; partial recovery with {_rhythm(partial)} would lose a PLS of "
            f"{partial.expected_pls:.3g} (portion of lost samples), above the target of {goal.target_pls:g}"
        )
        return Decision(full, full, partial, why)
    chosen, other = (partial, full) if partial.overhead < full.overhead else (full, partial)
    why = f"{chosen.policy.title}: {_terms(chosen)}, and {other.policy.title} {_terms(other)}{_against(chosen, goal)}"
    return Decision(chosen, full, partial, why)


def _option(policy: RecoveryPolicy, goal: Goal, costs: Costs, scale: Scale) -> Option:
    interval_s = policy.interval_s(costs, scale)
    if goal.interval_s is not None and policy.saves:
        interval_s = min(goal.interval_s, scale.job_s)
    return Option(policy, interval_s, policy.overhead(costs, interval_s), policy.expected_pls(costs, scale, interval_s))


def _misses(partial: Option, goal: Goal) -> bool:
    return partial.expected_pls > goal.target_pls * (1 + 1e-9)


def _terms(option: Option) -> str:
    share = f"{100 * option.overhead:.2f} % of the time" if option.overhead < 1 else "more time than there is"
    return f"{share} with {_rhythm(option)}"


def _rhythm(option: Option) -> str:
    return f"a save every {spoken(option.interval_s)}" if math.isfinite(option.interval_s) else "no save"


def _against(chosen: Option, goal: Goal) -> str:
    """The expected loss beside what was aimed at, where there is any."""
    if not chosen.expected_pls:
        return ""
    return (
        f"; a PLS of {chosen.expected_pls:.3g} (portion of lost samples) is expected, the target is {goal.target_pls:g}"
    )
