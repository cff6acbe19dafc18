"""How the learning rate moves with the samples trained so far: a warm-up, then a decay."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shadowsync.errors import ConfigError
from shadowsync.registry import nearest


def _constant(progress: float) -> float:  # noqa: ARG001 - the signature of a decay
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    """Half a period of a cosine (arXiv 1608.03983, equation 5, without restarts)."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


DECAYS: Mapping[str, Callable[[float], float]] = {"none": _constant, "linear": _linear, "cosine": _cosine}
"""Share of the way from the final to the full learning rate, from progress 0 (end of the warm-up) to 1 (end)."""


@dataclass(frozen=True)
class Rates:
    """The factor on both learning rates, the dense part's and the rows', as a pure function of progress.

    Attributes:
        warmup_samples: samples of the job over which the factor rises linearly from 0 to 1; 0 for no warm-up.
        decay: a key of `DECAYS`, how the factor falls after the warm-up.
        final_lr: the factor at `total_samples`, in [0, 1]; without meaning where `decay` is `none`.
        total_samples: of the whole job, all epochs; the factor stays at `final_lr` beyond.
    """

    warmup_samples: int = 0
    decay: str = "none"
    final_lr: float = 0.0
    total_samples: int = 0

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            close = nearest(self.decay, DECAYS)
            raise ConfigError(f"train.decay={self.decay} is not known{close}; allowed: {', '.join(DECAYS)}")
        if self.decay != "none" and self.warmup_samples >= self.total_samples:
            raise ConfigError(
                f"train.warmup_samples={self.warmup_samples} leaves nothing of the {self.total_samples} samples of the "
                f"run for train.decay={self.decay}: shorten the warm-up, or set train.decay=none"
            )

    def factor(self, samples: int) -> float:
        """The factor for a step that brings the job to `samples` trained samples, its own included, in [0, 1]."""
        if samples < self.warmup_samples:
            return samples / self.warmup_samples
        span = max(self.total_samples - self.warmup_samples, 1)
        progress = min((samples - self.warmup_samples) / span, 1.0)
        return self.final_lr + (1.0 - self.final_lr) * DECAYS[self.decay](progress)

    def settled(self, samples: int) -> bool:
        """The factor is the same for all numbers of samples from here on."""
        falls = DECAYS[self.decay] is not _constant
        return samples >= (self.total_samples if falls else self.warmup_samples)
