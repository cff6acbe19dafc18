"""What saving and failing cost, and how large a job is: the numbers that every recovery policy reasons with.

O_save, O_load, O_res and T_fail of CPR (Maeng et al., arXiv 2011.02999, section 2) have these names here: `save_s`,
`load_s`, `restart_s`, `fail_s`; N is `servers`, T_total is `job_s`, T_save an `interval_s`.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Seconds that training loses to each event, and how far apart the failures are.

    Attributes:
        save_s: to save everything once. Where saving runs beside training, what training loses by it.
        load_s: to load what a failure makes somebody load.
        restart_s: to find out about a failure and start a replacement.
        fail_s: mean time between failures of embedding servers, of the whole job and not of one server; infinite where
            none are expected.
        lost_servers: embedding servers that one failure takes, on average.
    """

    save_s: float
    load_s: float
    restart_s: float
    fail_s: float
    lost_servers: float = 1.0

    def __post_init__(self) -> None:
        for name in ("save_s", "load_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: seconds from 0 on")
        for name in ("fail_s", "lost_servers"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: it must be above 0")

    def per_failure(self, seconds: float) -> float:
        """The share of the time that goes when every failure costs so many seconds."""
        return 0.0 if math.isinf(self.fail_s) else seconds / self.fail_s

    def per_save(self, interval_s: float) -> float:
        """The share of the time that goes into saving once in every interval."""
        return self.save_s / interval_s if self.save_s else 0.0


@dataclass(frozen=True)
class Scale:
    """A job's embedding servers, and its seconds from first to last; infinite where nobody knows."""

    servers: int
    job_s: float = math.inf

    def __post_init__(self) -> None:
        if self.servers < 1 or not self.job_s > 0:
            raise ValueError(f"servers={self.servers}, job_s={self.job_s}: at least one server, and more than 0 s")


def spoken(seconds: float) -> str:
    """`0.25 s`, `5.3 min`, `44.8 h`, `12.5 days`: for sentences."""
    for below, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (4 * 86_400, 3600, "h"), (math.inf, 86_400, "days")):
        if seconds < below:
            return f"{seconds / unit_s:.3g} {unit}"
    return "never"
