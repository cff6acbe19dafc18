"""What failures, and being ready for them, have cost a job so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Toll:
    """Nothing, where nobody keeps an account.

    Attributes:
        pls: portion of lost samples; None where it is not counted.
        target_pls: what `pls` may come to; None where nothing is meant to be lost.
        seconds: by kind (`save`, `load`, `lost`, `wait`).
        emulated_job_s: the seconds are those of a job of this length; None where they have passed.
    """

    pls: float | None = None
    target_pls: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    emulated_job_s: float | None = None
