"""What saving and failing cost, measured while the job runs. Pure: observations and the time are handed in."""

import math
from dataclasses import dataclass, field

from shadowsync.recovery.costs import Costs

RECENT = 0.3
_INSTANT_S = 1e-6


@dataclass(frozen=True)
class Priors:
    """What is believed before anything was measured.

    Attributes:
        save_s: seconds that a save costs.
        load_s: seconds that a load costs; None: as long as a save.
        restart_s: seconds until a replacement can load.
        fail_s: mean time between failures; infinite to believe the measurements alone.
        fail_spread: how sure that is: the truth is believed to be within a factor of e^spread, two times out of three.
            More follows the measurements sooner.
    """

    save_s: float = 60.0
    load_s: float | None = None
    restart_s: float = 15.0
    fail_s: float = 28 * 3600.0
    fail_spread: float = 1.0

    def __post_init__(self) -> None:
        if not (self.fail_s > 0 and 0 < self.fail_spread < math.inf):
            raise ValueError(f"fail_s={self.fail_s}, fail_spread={self.fail_spread}: both must be above 0")


@dataclass
class Recent:
    """A mean in which the newest measurement weighs `RECENT`; None before the first one."""

    value: float | None = None

    def add(self, seconds: float) -> None:
        """Takes a measurement in."""
        self.value = seconds if self.value is None else self.value + RECENT * (seconds - self.value)

    def otherwise(self, prior: float) -> float:
        """The mean, or what was believed before."""
        return prior if self.value is None else self.value


@dataclass
class Estimates:
    """The costs as they look now.

    Attributes:
        priors: what is believed at first. The first measurement of a duration replaces its prior.
        started_s: time at which the job could first fail.
        failures: failures of embedding servers so far; several at once are one.
    """

    priors: Priors = Priors()
    started_s: float = 0.0
    failures: int = 0
    save: Recent = field(default_factory=Recent)
    load: Recent = field(default_factory=Recent)
    restart: Recent = field(default_factory=Recent)
    _lost_servers: int = 0

    def failed(self, servers: int = 1) -> None:
        """So many embedding servers died at once."""
        self.failures += 1
        self._lost_servers += servers

    def costs(self, now: float) -> Costs:
        """The costs, given all that was measured and that there was no other failure until now."""
        save_s = self.save.otherwise(self.priors.save_s)
        return Costs(
            save_s=save_s,
            load_s=self.load.otherwise(save_s if self.priors.load_s is None else self.priors.load_s),
            restart_s=self.restart.otherwise(self.priors.restart_s),
            fail_s=time_between_failures(self.priors, self.failures, max(now - self.started_s, 0.0)),
            lost_servers=self._lost_servers / self.failures if self.failures else 1.0,
        )


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
