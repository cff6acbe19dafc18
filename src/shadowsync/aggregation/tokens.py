"""Tokens: the global step at which synchronous training would have used a batch.

Pure: one authority keeps the book, beside the leases of the rows.
"""

from dataclasses import InitVar, dataclass, field


@dataclass
class TokenBook:
    """Hands out tokens in the order in which batches are dispatched: `τ = floor(q / M)` for the q-th (GBA, arXiv
    2205.11048), counted from the step at which the book begins.

    The formula knows no losses. Here batches of workers that died are retired, and q is what was dispatched and not
    retired: otherwise tokens would run ahead of k, and a gradient would look fresher than it is.

    Attributes:
        size: M, batches of a global step (`Aggregation.batches_per_step`).
        step: k when the book began.
        outstanding: batches that were dispatched before and had neither arrived nor been retired.
    """

    size: int
    step: int = 0
    outstanding: InitVar[int] = 0
    _places: int = field(init=False)

    def __post_init__(self, outstanding: int) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size}: a step takes at least one batch")
        self.realign(self.step, outstanding)

    def dispatch(self) -> int:
        """The token of the next batch."""
        token = self.step + self._places // self.size
        self._places += 1
        return token

    def retired(self, count: int = 1) -> None:
        """So many dispatched batches will never arrive: others get their places."""
        if not 0 <= count <= self._places:
            raise ValueError(f"{count} batches retired of {self._places} dispatched")
        self._places -= count

    def realign(self, step: int, outstanding: int) -> None:
        """Counts anew from a step that was not made of M batches, as after a flush, or after a switch of method.

        Otherwise every flush would leave the tokens further behind k, until each gradient looked too old.

        Args:
            step: k now.
            outstanding: dispatched batches that have neither arrived nor been retired: the next steps are theirs.
        """
        if step < 0 or outstanding < 0:
            raise ValueError(f"step={step}, outstanding={outstanding}: neither can be negative")
        self.step, self._places = step, outstanding
