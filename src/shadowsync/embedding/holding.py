"""Gradients of rows that wait until a global step names their batches (GBA, arXiv 2205.11048, section 4.2).

`K` distinct rows of a batch, `D_w` width of a row.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.embedding.distinct import find_distinct
from shadowsync.embedding.numbering import RowNumbers


@dataclass(frozen=True)
class RowSums:
    """What one batch, or several together, brings to the rows of a server.

    Attributes:
        rows: distinct numbers (`RowNumbers`), ascending, int64 `[K]`.
        gradients: each row's, for each width of the server (ascending) float32 `[K_w, D_w]`.
        shards: positions of the shards that were looked up.
    """

    rows: Tensor
    gradients: tuple[Tensor, ...]
    shards: tuple[int, ...]

    @property
    def byte_count(self) -> int:
        """Memory that they take."""
        return self.rows.nbytes + sum(gradient.nbytes for gradient in self.gradients)


@dataclass(frozen=True)
class RowStep:
    """A global step as embedding servers carry it out.

    Attributes:
        step: its number; each is carried out once.
        weights: factor of each batch's gradients, by the batch's number; 0 drops them.
        divisor: of the weighted sum of a row's gradients; None takes, for each row, how many of the batches that are
            not dropped contain it.
        lr: learning rate.
        below: batches with lower numbers will not be named any more, so what is held of them is forgotten.
    """

    step: int
    weights: Mapping[int, float]
    divisor: float | None
    lr: float
    below: int


class HeldGradients:
    """Gradients by batch, of one server; any thread may add, one at a time takes.

    Args:
        numbers: of the server's rows.
    """

    def __init__(self, numbers: RowNumbers) -> None:
        self._numbers = numbers
        self._held: dict[int, list[RowSums]] = {}
        self._below = 0
        self._lock = threading.Lock()

    @property
    def byte_count(self) -> int:
        """Memory that is held."""
        with self._lock:
            return sum(sums.byte_count for parts in self._held.values() for sums in parts)

    def add(self, number: int, sums: RowSums) -> None:
        """Keeps what a batch brings; one that will not be named any more is passed over."""
        with self._lock:
            if number >= self._below:
                self._held.setdefault(number, []).append(sums)

    def take(self, step: RowStep) -> RowSums | None:
        """What a step brings to each row; its batches, and all below, are held no longer.

        Returns:
            None if it brings nothing.
        """
        with self._lock:
            named = {number: self._held.pop(number, []) for number in step.weights}
            self._below = max(self._below, step.below)
            for number in [number for number in self._held if number < self._below]:
                del self._held[number]
        kept = [(self._joined(parts), step.weights[number]) for number, parts in named.items() if parts]
        kept = [(sums, weight) for sums, weight in kept if weight]
        return self._merged(kept, step.divisor) if kept else None

    def clear(self) -> None:
        """Forgets everything; the batches will be trained anew."""
        with self._lock:
            self._held.clear()

    def _joined(self, parts: Sequence[RowSums]) -> RowSums:
        """One batch's, each row once."""
        return parts[0] if len(parts) == 1 else self._merged([(part, 1.0) for part in parts], 1.0)

    def _merged(self, parts: Sequence[tuple[RowSums, float]], divisor: float | None) -> RowSums:
        split = [self._numbers.split(sums.rows) for sums, _ in parts]
        rows, gradients = [], []
        for position, width in enumerate(self._numbers.widths):
            keys = torch.cat([by_width[position] for by_width in split])
            vectors = torch.cat([_scaled(sums.gradients[position], weight) for sums, weight in parts])
            found = find_distinct(keys.numpy(), self._numbers.total)
            total = found.sum(vectors)
            total /= found.starts.diff()[:, None] if divisor is None else divisor
            rows.append(torch.from_numpy(found.keys) + width.start)
            gradients.append(total)
        shards = tuple(sorted({shard for sums, _ in parts for shard in sums.shards}))
        return RowSums(torch.cat(rows), tuple(gradients), shards)


def _scaled(gradient: Tensor, weight: float) -> Tensor:
    return gradient if weight == 1.0 else gradient * weight
