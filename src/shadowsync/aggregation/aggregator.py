"""The seam of the gradient methods: which of the gradients that arrive make a global step, and with what weight.

`M` batches of a step: global batch over local batch; `k` global steps so far; `τ` a batch's token. A batch is
dispatched to a worker, begun by it, and then its gradient arrives or it is retired. A gradient is held by the servers
from its arrival to the commit that names it.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

Worker = Hashable
"""Whoever computes one batch after the other: (trainer rank, worker index), say."""


class Begun(NamedTuple):
    """A dispatched batch and who computes it.

    Its number is unique in a run, and grows in the order in which batches are dispatched; its token τ is the global
    step at which synchronous training would have used it (`TokenBook`).
    """

    number: int
    token: int
    worker: Worker


@dataclass(frozen=True)
class Commit:
    """One global step: `g = Σ weight · gradient / divisor`; for rows, too, or by `aggregation.rows`.

    A step whose weights are all 0 changes nothing: nobody runs the optimizer for it, whose momentum would move the
    parameters without a gradient. It counts all the same, so that k keeps up with the tokens.

    Attributes:
        step: the k that it makes; the parameters have version `step + 1` after it.
        weights: by number of the batch, in the order of arrival; 0 is dropped: forgotten, but its samples count as
            trained.
        divisor: never 0.
    """

    step: int
    weights: Mapping[int, float]
    divisor: float


@dataclass(frozen=True)
class Switch:
    """A method that delegates has changed the one at work, after `step` global steps, to `mode`; `why` is a
    sentence."""

    step: int
    mode: str
    why: str

    @property
    def sentence(self) -> str:
        return f"gradients are aggregated by {self.mode} from global step {self.step:,} on: {self.why}"


class Aggregator:
    """The state machine of a gradient method. This one commits whenever `size` gradients have arrived, each with weight
    1; others change who may begin (`_admits`), when a step is complete (`_is_full`), and what counts how much
    (`_weight`, `_divisor`). One thread at a time; time is handed in, in seconds, and never falls.

    Every gradient that arrives is named by exactly one commit, so what was received is what was applied, what was
    dropped and what is held. Reports of a batch that is not being computed (retired before, or reported twice) are
    ignored: servers forget a gradient when its batch is retired.

    Attributes:
        mode: name of the method at work.
        size: dispatched batches to a step: M, or 1 where each gradient is one.
        step: k, the global steps so far; those of a checkpoint included.
        waits: there are rounds: a batch that begins is computed with the parameters of `step`, so that it has to wait
            until that is made, and no more begin than a step takes; the rest wait, first those dispatched first.
        switches: from one method to another while the job runs, in order.
        in_flight: batches that are being computed.
        held: batches whose gradients have arrived and that no commit has named, in the order of arrival.
    """

    def __init__(self, mode: str, size: int, step: int, waits: bool = False) -> None:
        if size < 1 or step < 0:
            raise ValueError(f"size={size}, step={step}: a step takes at least one batch, and steps count from 0")
        self.mode, self.size, self.step, self.waits = mode, size, step, waits
        self.switches: list[Switch] = []
        self.in_flight: dict[int, Begun] = {}
        self.held: list[Begun] = []
        self._waiting: dict[int, Begun] = {}

    def begin(self, batch: Begun, now: float) -> bool:
        """Whether the worker may compute the batch now; if so, it counts as being computed.

        Otherwise ask again with the same batch after the next commit, departure, retirement or flush: a place may be
        kept for it.
        """
        if batch.number in self.in_flight:
            return True
        if not self._admits(batch):
            self._waiting[batch.number] = batch
            return False
        self._waiting.pop(batch.number, None)
        self.in_flight[batch.number] = batch
        return True

    def arrived(self, number: int, now: float) -> Sequence[Commit]:
        """The gradient of a begun batch is held by all servers."""
        if (batch := self._finished(number)) is None:
            return []
        self.held.append(batch)
        return [self._commit()] if self._is_full() else []

    def retired(self, number: int) -> None:
        """A batch that was begun, or only dispatched, will never arrive."""
        self._waiting.pop(number, None)
        self._finished(number)

    def left(self, worker: Worker) -> None:
        """A worker has ended, has died or is out of data: its batches are retired and nobody waits for it.

        What has arrived of it stays. With its next `begin` it takes part again.
        """
        for number in [b.number for b in (*self.in_flight.values(), *self._waiting.values()) if b.worker == worker]:
            self.retired(number)

    def flush(self) -> Sequence[Commit]:
        """No more gradients come for now: commits what is held, divided by the number kept. Never waits.

        At the end of the data, and when nobody has a batch to compute. A step that fewer than M batches made leaves
        the tokens behind; `TokenBook.realign` brings them up.
        """
        return [self._commit(flushed=True)] if self.held else []

    def look(self, now: float) -> bool:
        """Time has passed, whether anything happened or not; called several times a second. Whether batches may begin
        now that could not before.
        """
        return False

    def _admits(self, batch: Begun) -> bool:
        before = sum(number < batch.number for number in self._waiting)
        return not self.waits or self._taken() + before < self.size

    def _taken(self) -> int:
        """Places of a round that are not free."""
        return len(self.in_flight) + len(self.held)

    def _finished(self, number: int) -> Begun | None:
        return self.in_flight.pop(number, None)

    def _is_full(self) -> bool:
        return len(self.held) >= self.size

    def _weight(self, batch: Begun) -> float:
        return 1.0

    def _divisor(self, weights: Collection[float]) -> float:
        """Of a commit that was not forced by a flush."""
        return kept(weights)

    def _commit(self, flushed: bool = False) -> Commit:
        weights = {batch.number: self._weight(batch) for batch in self.held}
        divide_by = kept if flushed else self._divisor
        commit = Commit(self.step, weights, divide_by(weights.values()))
        self.held.clear()
        self.step += 1
        return commit


def kept(weights: Collection[float]) -> float:
    """How many weights are not 0; 1 if none is, for the sum of nothing is 0 whatever divides it."""
    return float(max(1, sum(weight > 0 for weight in weights)))


class Aggregation(ABC):
    """A gradient method: options only; what moves is in the aggregator that it starts.

    A job that goes on from a checkpoint under another method starts that at the first one's step.
    """

    name: ClassVar[str]

    @abstractmethod
    def start(self, size: int, step: int = 0) -> Aggregator:
        """The aggregator of a job with M = `size` that has made so many global steps.

        Raises:
            ConfigError: the options do not fit that size.
        """


class TokenBook:
    """Hands out tokens in the order in which batches are dispatched: `τ = floor(q / M)` for the q-th (GBA, arXiv
    2205.11048), counted from the step at which the book begins.

    The formula knows no losses. Here batches of workers that died are retired, and q is what was dispatched and not
    retired: otherwise tokens would run ahead of k, and a gradient would look fresher than it is.

    Args:
        size: batches of a global step (`Aggregator.size`).
        step: k when the book begins.
        outstanding: batches that were dispatched before and have neither arrived nor been retired.
    """

    def __init__(self, size: int, step: int = 0, outstanding: int = 0) -> None:
        self._size = size
        self.realign(step, outstanding)

    def dispatch(self) -> int:
        token = self._step + self._places // self._size
        self._places += 1
        return token

    def retired(self, count: int = 1) -> None:
        """So many dispatched batches will never arrive: others get their places."""
        self._places -= count

    def realign(self, step: int, outstanding: int) -> None:
        """Counts anew from step k that was not made of M batches, as after a flush, or after a switch of method.

        Otherwise every flush would leave the tokens further behind k, until each gradient looked too old. The next
        steps are those of the outstanding batches.
        """
        self._step, self._places = step, outstanding


@dataclass(frozen=True)
class Async(Aggregation):
    """Applies each gradient as it arrives, however old: asynchronous SGD with a parameter server (Dean et al. 2012;
    a baseline of GBA, arXiv 2205.11048).

    A step is made of one local batch instead of M, which is why the hyper-parameters of synchronous training do not
    fit it.
    """

    name: ClassVar[str] = "async"

    def start(self, size: int, step: int = 0) -> Aggregator:
        return Aggregator(self.name, 1, step)


@dataclass(frozen=True)
class Bsp(Aggregation):
    """A step is the mean of the next M gradients that arrive, whoever computed them and however old they are (BSP in
    GBA, arXiv 2205.11048).

    Not to be confused with bulk synchronous parallel, which is `sync` here: nobody waits at a barrier.
    """

    name: ClassVar[str] = "bsp"

    def start(self, size: int, step: int = 0) -> Aggregator:
        return Aggregator(self.name, size, step)


@dataclass(frozen=True)
class Sync(Aggregation):
    """A step is the mean of M gradients of the same version of the parameters: large-batch training.

    A round admits M batches, counted, whoever computes them: of fewer workers than M each computes several, of more
    some wait for the next round. The place of a batch that is lost goes to another one, so the global batch is what it
    was and no round needs a worker that died.
    """

    name: ClassVar[str] = "sync"

    def start(self, size: int, step: int = 0) -> Aggregator:
        return Aggregator(self.name, size, step, waits=True)
