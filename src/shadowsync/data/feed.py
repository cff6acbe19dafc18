"""One trainer's queue of batches: leases slices, has them parsed ahead, and claims each batch right before it goes out.

`B` samples of a batch.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace

from shadowsync.data.batch import Batch
from shadowsync.data.desk import Leasing
from shadowsync.data.leases import Lease
from shadowsync.data.parsing import Parsed


@dataclass(frozen=True)
class LeasedBatch:
    """A batch with what is needed to report it done: rows `start … stop − 1` of the lease's permuted slice.

    Attributes:
        number: its place in the order in which batches are begun, over all trainers, from 0; −1 before.
    """

    batch: Batch
    lease: Lease
    start: int
    stop: int
    number: int = -1


@dataclass
class _Block:
    """A leased slice; `batches` is None until it is parsed and opened."""

    lease: Lease
    parsing: Future[Parsed]
    batches: deque[LeasedBatch] | None = None


@dataclass(eq=False)
class Feed:
    """What a trainer trains; all its workers share it. The desk may be near or behind a wire.

    Args:
        trainer: its rank.
        desk: says who trains what.
        parse: starts to parse a lease.
        prefetch: slices parsed ahead, besides the one the trainer is at.
    """

    trainer: int
    desk: Leasing
    parse: Callable[[Lease], Future[Parsed]]
    prefetch: int
    closed: bool = False
    blocks: deque[_Block] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _nothing_at: int = -1

    def next(self, wait: bool = True) -> LeasedBatch | None:
        """The trainer's next batch.

        Args:
            wait: when everything has been leased but others still hold rows, wait until they are done with them or
                give them back. A worker that still holds batches itself must not wait, or it may wait for itself:
                it calls with False, finishes them when it gets None, and then calls with True.

        Returns:
            None: there is no more work for this trainer; with `wait=False`, there is none now.

        Raises:
            Exception: whatever reading the source raised, unchanged.
        """
        while not self.closed:
            version = self.desk.version()
            with self._lock:
                leased = self._take(version)
                head = self.blocks[0].parsing if self.blocks else None
            if leased is not None or (head is None and (not wait or self.desk.finished)):
                return leased
            if head is None:
                self.desk.wait(version)
            else:
                _wait_for(head)
        return None

    def done(self, leased: LeasedBatch) -> bool:
        """Says that a batch was trained; False if the trainer had been given up, so that others train its rows."""
        return self.desk.done(leased.lease, leased.start, leased.stop)

    def close(self) -> None:
        """Puts back what the trainer holds and has not done; `next` gives None from now on."""
        if not self.closed:
            self.closed = True
            self.desk.abandon(self.trainer)

    @property
    def depth(self) -> int:
        """Batches parsed and not begun."""
        return sum(len(block.batches or ()) for block in tuple(self.blocks))

    def _take(self, version: int) -> LeasedBatch | None:
        self._fill(version)
        while self.blocks and not self.closed:
            block = self.blocks[0]
            if block.batches is None and not self._open_parsed():
                return None
            while block.batches:
                if (leased := self._claimed(block.batches.popleft())) is not None:
                    return leased
            self.blocks.popleft()
            self._fill(version)
        return None

    def _claimed(self, leased: LeasedBatch) -> LeasedBatch | None:
        """The batch, or what of it is still this trainer's."""
        claim = self.desk.claim(leased.lease, leased.start, leased.stop)
        if claim is None:
            return None
        batch = leased.batch
        if claim.stop < leased.stop:
            batch = batch.narrow(0, claim.stop - leased.start)
        return replace(leased, batch=batch, stop=claim.stop, number=claim.number)

    def _fill(self, version: int) -> None:
        """Leases ahead; what the desk did not have at this version is not asked for again while there is a queue."""
        while len(self.blocks) <= self.prefetch and not self.closed:
            idle = not self.blocks
            if self._nothing_at == version and not idle:
                return
            lease = self.desk.lease(self.trainer, idle)
            if lease is None:
                self._nothing_at = version
                return
            self.blocks.append(_Block(lease, self.parse(lease)))

    def _open_parsed(self) -> bool:
        """Opens every block that has been parsed; whether the first one is among them."""
        for block in self.blocks:
            if block.parsing.cancelled():
                self.closed = True  # nobody parses any more
                return False
            if block.batches is None and block.parsing.done():
                if self.closed:
                    return False  # what went wrong with it may be that nobody wants it any more
                block.batches = deque(self._opened(block.lease, block.parsing.result()))
        return self.blocks[0].batches is not None

    def _opened(self, lease: Lease, parsed: Parsed) -> list[LeasedBatch]:
        if not self.desk.opened(lease, parsed.rows):
            return []
        pairs = zip(parsed.spans, parsed.batches, strict=True)
        return [LeasedBatch(batch, lease, *span) for span, batch in pairs]


def _wait_for(parsing: Future[Parsed]) -> None:
    """Waits until a lease is parsed, cannot be, or nobody will.

    `concurrent.futures.wait` would wait for ever for one that the end of its pool cancelled.
    """
    with contextlib.suppress(CancelledError):
        parsing.exception()
