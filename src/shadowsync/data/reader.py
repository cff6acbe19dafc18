"""Feeds trainers with batches: slices are leased, parsed ahead by a pool of threads, permuted, cut and checked there.

`B` samples of a batch.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
import numpy as np
import torch

from shadowsync.data.batch import Batch
from shadowsync.data.checks import check_ids
from shadowsync.data.leases import EpochCount, Lease, LeaseBook, Plan, Span
from shadowsync.data.source import OpenSource
from shadowsync.errors import CheckpointError

_EVALUATION_ROWS = 32_768


@dataclass(frozen=True)
class ReaderOptions:
    """How a source is read.

    Attributes:
        batch_size: `B`; the last batch of a slice may be shorter.
        slice_rows: rows leased at once, best a multiple of `batch_size`.
        epochs: passes over the data.
        shuffle: permute slices (unless the source is sequential), and rows inside a slice, anew in every epoch.
        seed: of these permutations.
        readers: threads that parse.
        prefetch: slices parsed ahead for each trainer, besides the one it is at.
    """

    batch_size: int
    slice_rows: int = 8192
    epochs: int = 1
    shuffle: bool = True
    seed: int = 0
    readers: int = 1
    prefetch: int = 2


@dataclass(frozen=True)
class LeasedBatch:
    """A batch with what is needed to report it done: rows `start … stop − 1` of the lease's permuted slice.

    Attributes:
        number: its place in the order in which this reader hands batches out, to all trainers, from 0; −1 before.
    """

    batch: Batch
    lease: Lease
    start: int
    stop: int
    number: int = -1


@dataclass
class _Block:
    """A leased slice; `batches` is None while it is being parsed."""

    lease: Lease
    batches: deque[LeasedBatch] | None = None


@dataclass(eq=False)
class Feed:
    """One trainer's side of the reader; all its workers share it."""

    reader: "Reader"
    trainer: int
    closed: bool = False
    blocks: deque[_Block] = field(default_factory=deque)

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
        return self.reader._next(self, wait)

    def done(self, leased: LeasedBatch) -> bool:
        """Says that a batch was trained; False if the trainer had been given up, so that others train its rows."""
        return self.reader._done(leased)

    def close(self) -> None:
        """Puts back what the trainer holds and has not done; `next` gives None from now on."""
        self.reader._close_feed(self)


class _Saved(msgspec.Struct, frozen=True):
    """What `Reader.state` gives."""

    slice_rows: Annotated[int, msgspec.Meta(ge=1)]
    shuffle: bool
    seed: Annotated[int, msgspec.Meta(ge=0)]
    book: dict[str, Any]


def _saved(state: Mapping[str, Any]) -> _Saved:
    try:
        return msgspec.convert(state, _Saved)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the checkpoint's position in the data is not that of a job: {error}") from error


class Reader:
    """Hands out the rows of a source, each exactly once per epoch, to any number of trainers.

    With one trainer and one worker the batches and their order depend on options and seed only. A trainer that finds
    nothing left to lease takes over half of what another has parsed and not begun, so that all end together.

    Attributes:
        slices: of the source; `lease.slice` is a position among them.
    """

    def __init__(self, source: OpenSource, options: ReaderOptions, state: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            source: opened; the caller closes it after the reader.
            options: with a state, its slice_rows, shuffle and seed are those of the state.
            state: goes on from what `state()` gave, with any batch size, epochs and number of trainers.

        Raises:
            DataError: the source is empty.
            CheckpointError: the state is of other data, or not one that `state()` gives.
        """
        saved = None if state is None else _saved(state)
        if saved is not None:
            options = replace(options, slice_rows=saved.slice_rows, shuffle=saved.shuffle, seed=saved.seed)
        self.source, self.options = source, options
        self.slices = source.slices(options.slice_rows)
        shuffle_slices = options.shuffle and not source.sequential
        plan = Plan([part.rows for part in self.slices], options.epochs, shuffle_slices, options.seed)
        self._book = LeaseBook(plan)
        if saved is not None:
            self._book.restore(saved.book)
        self._feeds: dict[int, Feed] = {}
        self._dispatched = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._pool = ThreadPoolExecutor(options.readers, thread_name_prefix="reader")

    def feed(self, trainer: int) -> Feed:
        """The trainer's feed, the same one until it is closed."""
        with self._changed:
            return self._feeds.setdefault(trainer, Feed(self, trainer))

    def abandon(self, trainer: int) -> None:
        """Puts back what a dead trainer holds and has not done; its feed is closed."""
        feed = self._feeds.get(trainer)
        if feed is not None:
            self._close_feed(feed)

    def state(self) -> dict[str, Any]:
        """The position as plain JSON values; batches that were handed out and not done count as not trained."""
        options = self.options
        with self._changed:
            book = self._book.state()
        return {"slice_rows": options.slice_rows, "shuffle": options.shuffle, "seed": options.seed, "book": book}

    @property
    def finished(self) -> bool:
        """Every row of every epoch was trained or skipped."""
        with self._changed:
            return self._book.finished

    @property
    def trained(self) -> int:
        """Rows trained so far, all epochs."""
        with self._changed:
            return self._book.trained

    def epochs(self) -> Sequence[EpochCount]:
        """Rows trained and skipped in each epoch so far."""
        with self._changed:
            return [replace(count) for count in self._book.epochs]

    def close(self) -> None:
        """Ends the threads; every `next` gives None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _next(self, feed: Feed, wait: bool) -> LeasedBatch | None:
        with self._changed:
            while not (self._closed or feed.closed):
                if self._error is not None:
                    raise self._error
                leased = self._take(feed)
                if leased is not None or self._book.finished or not (wait or feed.blocks):
                    return leased
                self._changed.wait()
        return None

    def _take(self, feed: Feed) -> LeasedBatch | None:
        self._fill(feed)
        while feed.blocks and feed.blocks[0].batches is not None:
            if feed.blocks[0].batches:
                return self._dispatch(feed.blocks[0].batches.popleft())
            feed.blocks.popleft()
            self._fill(feed)
        return None if feed.blocks else self._take_over(feed)

    def _dispatch(self, leased: LeasedBatch) -> LeasedBatch:
        number = self._dispatched
        self._dispatched += 1
        return replace(leased, number=number)

    def _fill(self, feed: Feed) -> None:
        while len(feed.blocks) <= self.options.prefetch:
            lease = self._book.lease(feed.trainer)
            if lease is None:
                return
            block = _Block(lease)
            feed.blocks.append(block)
            self._pool.submit(self._parse, feed, block)

    def _take_over(self, feed: Feed) -> LeasedBatch | None:
        """At least half of the batches that wait in the fullest block of the others."""
        blocks = [block for other in self._feeds.values() for block in other.blocks if block.batches]
        fullest = max(blocks, key=lambda block: len(block.batches or ()), default=None)
        if fullest is None or fullest.batches is None:
            return None
        keep = len(fullest.batches) // 2
        moved = [fullest.batches.pop() for _ in range(len(fullest.batches) - keep)][::-1]
        lease = self._book.split(fullest.lease, moved[0].start, feed.trainer)
        assert lease is not None, "batches that wait in a block are not done"
        feed.blocks.append(_Block(lease, deque(replace(batch, lease=lease) for batch in moved)))
        return self._take(feed)

    def _done(self, leased: LeasedBatch) -> bool:
        with self._changed:
            held = self._book.done(leased.lease, leased.start, leased.stop)
            if self._book.finished:
                self._changed.notify_all()
            return held

    def _close_feed(self, feed: Feed) -> None:
        with self._changed:
            if not feed.closed:
                feed.closed = True
                feed.blocks.clear()
                del self._feeds[feed.trainer]
                self._book.abandon(feed.trainer)
                self._changed.notify_all()

    def _parse(self, feed: Feed, block: _Block) -> None:
        if self._closed or feed.closed:
            return
        try:
            rows, batches = self._read(block.lease)
        except BaseException as error:  # of any kind: it is raised again where the batch was wanted
            with self._changed:
                self._error = error
                self._changed.notify_all()
            return
        with self._changed:
            block.batches = deque(batches if self._book.opened(block.lease, rows) else ())
            self._changed.notify_all()

    def _read(self, lease: Lease) -> tuple[int, list[LeasedBatch]]:
        """How many good rows the slice has, and the lease's rows as batches."""
        part = self.slices[lease.slice]
        whole = self.source.read(part)
        check_ids(whole, self.source, part)
        order = self._permutation(lease, len(whole)) if self.options.shuffle else None
        spans = _cut(lease.spans, len(whole), self.options.batch_size)
        batches = [whole.narrow(*span) if order is None else whole.take(order[slice(*span)]) for span in spans]
        return len(whole), [LeasedBatch(batch, lease, *span) for batch, span in zip(batches, spans, strict=True)]

    def _permutation(self, lease: Lease, rows: int) -> torch.Tensor:
        generator = np.random.default_rng((self.options.seed, lease.epoch, lease.slice))
        return torch.from_numpy(generator.permutation(rows))


def batches(source: OpenSource, batch_size: int) -> Iterator[Batch]:
    """All rows of a source in their order, in batches of at most `batch_size`, one slice read ahead in a thread.

    Raises:
        DataError: a row cannot be used.
    """

    def read(index: int) -> Batch:
        batch = source.read(parts[index])
        check_ids(batch, source, parts[index])
        return batch

    parts = source.slices(max(batch_size, _EVALUATION_ROWS // batch_size * batch_size))
    with ThreadPoolExecutor(1, thread_name_prefix="reader") as pool:
        coming = pool.submit(read, 0)
        for index in range(len(parts)):
            whole = coming.result()
            if index + 1 < len(parts):
                coming = pool.submit(read, index + 1)
            for start in range(0, len(whole), batch_size):
                yield whole.narrow(start, min(start + batch_size, len(whole)))


def _cut(spans: Sequence[Span], rows: int, batch_size: int) -> list[Span]:
    """The spans less what lies beyond `rows`, in pieces of at most `batch_size`."""
    clipped = [(start, min(stop, rows)) for start, stop in spans]
    return [(at, min(at + batch_size, stop)) for start, stop in clipped for at in range(start, stop, batch_size)]
