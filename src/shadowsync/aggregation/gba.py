"""Global batch gradients aggregation: the global batch of synchronous training without its barrier."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from shadowsync.aggregation.aggregator import Aggregation, Aggregator, Begun

Tolerance = Annotated[
    int, Field(ge=0, description="steps (ι) that a gradient may be behind; more drops less and applies older ones")
]
DivideBy = Annotated[
    Literal["buffer", "kept"],
    Field(description="the sum of a step's gradients is divided by M, or by how many were not dropped"),
]


@dataclass(frozen=True)
class Gba(Aggregation):
    """A step is made of the next M gradients that arrive, less those that are too old (GBA, arXiv 2205.11048):
    `g = Σ f(τ_m, k) g_m / M` with `f = 0 if k − τ > ι else 1`.

    The buffer counts gradients, so a slow or lost worker holds nobody up. `divide_by=buffer` is the paper's M: a step
    with dropped gradients is shorter. `kept` divides by `Σ f`, which keeps its length. Also ours: a step all of whose
    gradients are too old leaves the optimizer alone (`Commit`), and at the end of the data a buffer that is partly
    filled is a step too, divided by the number kept. For an id the paper takes the mean over the batches that contain
    it, ours by default the sum divided as above (`aggregation.rows`). The paper's ι is not known to us; the default is
    ours.
    """

    name: ClassVar[str] = "gba"

    tolerance: Tolerance = 4
    divide_by: DivideBy = "buffer"

    def start(self, size: int, step: int = 0) -> Aggregator:
        return TokenAggregator(self.name, size, step, self.tolerance, self.divide_by)


class TokenAggregator(Aggregator):
    """Looks at tokens."""

    def __init__(self, mode: str, size: int, step: int, tolerance: int, divide_by: str, waits: bool = False) -> None:
        super().__init__(mode, size, step, waits)
        self._tolerance, self._by_size = tolerance, divide_by == "buffer"

    def _weight(self, batch: Begun) -> float:
        return 0.0 if self.step - batch.token > self._tolerance else 1.0

    def _divisor(self, weights: Collection[float]) -> float:
        return float(self.size) if self._by_size else super()._divisor(weights)
