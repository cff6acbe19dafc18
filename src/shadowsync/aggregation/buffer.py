"""A buffer of gradients: what all gradient methods have in common."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from shadowsync.aggregation.aggregator import Aggregator, Begun, Commit, Worker

Divisor = Callable[[Collection[float]], float]
"""What the weighted sum is divided by, given the weights."""


class Buffer(Aggregator):
    """Commits whenever `size` gradients have arrived, each with weight 1, and makes nobody wait.

    Methods change who may begin (`_admits`), when the buffer is full (`_is_full`), and what counts how much (`_weight`,
    `_divisor`).

    Attributes:
        size: gradients of a commit.
    """

    def __init__(self, mode: str, size: int, step: int) -> None:
        super().__init__(mode, step)
        if size < 1 or step < 0:
            raise ValueError(f"size={size}, step={step}: a step takes at least one batch, and steps count from 0")
        self.size = size
        self._in_flight: dict[int, Begun] = {}
        self._waiting: dict[int, Begun] = {}
        self._held: list[Begun] = []

    @property
    def in_flight(self) -> Mapping[int, Begun]:
        return self._in_flight

    @property
    def held(self) -> Sequence[Begun]:
        return tuple(self._held)

    def begin(self, batch: Begun, now: float) -> bool:
        if batch.number in self._in_flight:
            return True
        if not self._admits(batch):
            self._waiting[batch.number] = batch
            return False
        self._waiting.pop(batch.number, None)
        self._in_flight[batch.number] = batch
        return True

    def arrived(self, number: int, now: float) -> Sequence[Commit]:
        if (batch := self._finished(number)) is None:
            return []
        self._held.append(batch)
        return [self._commit(self._divisor)] if self._is_full() else []

    def retired(self, number: int, now: float) -> Sequence[Commit]:
        self._waiting.pop(number, None)
        self._finished(number)
        return []

    def left(self, worker: Worker, now: float) -> Sequence[Commit]:
        for number in [b.number for b in (*self._in_flight.values(), *self._waiting.values()) if b.worker == worker]:
            self.retired(number, now)
        return []

    def flush(self, now: float) -> Sequence[Commit]:
        return [self._commit(kept)] if self._held else []

    def carry(self, batches: Iterable[Begun], held: Iterable[Begun], now: float) -> None:
        self._in_flight.update((batch.number, batch) for batch in batches)
        self._held.extend(held)

    def _admits(self, batch: Begun) -> bool:
        return True

    def _finished(self, number: int) -> Begun | None:
        """A batch is no longer being computed; None if it was not."""
        return self._in_flight.pop(number, None)

    def _is_full(self) -> bool:
        return len(self._held) >= self.size

    def _weight(self, batch: Begun) -> float:
        return 1.0

    def _divisor(self, weights: Collection[float]) -> float:
        """Of a commit that was not forced by a flush."""
        return kept(weights)

    def _commit(self, divisor: Divisor) -> Commit:
        weights = {batch.number: self._weight(batch) for batch in self._held}
        commit = Commit(self.step, weights, divisor(weights.values()))
        self._held.clear()
        self.step += 1
        return commit


def kept(weights: Collection[float]) -> float:
    """How many weights are not 0; 1 if none is, for the sum of nothing is 0 whatever divides it."""
    return float(max(1, sum(weight > 0 for weight in weights)))
