"""Feeds trainers with batches: leases are parsed by a pool of threads, here or elsewhere, and claimed one by one.

`B` samples of a batch.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch

from shadowsync.data.batch import Batch
from shadowsync.data.leases import Lease, LeaseBook, Leases, LeaseService, LeaseStatus, Position, permutation
from shadowsync.data.source import OpenSource, Slice, check_ids
from shadowsync.errors import ConfigError, DataError, RunError
from shadowsync.rpc.errors import CallTimeout
from shadowsync.rpc.pending import Pending, ended, from_future
from shadowsync.rpc.served import served

_MOST_SLICES = 10_000_000
EVALUATION_ROWS = 32_768
"""Read at once where rows are gone through in their order."""
PARSE_S = 900.0
"""Deadline of a lease: a reader waits for nobody but its file system."""


@dataclass(frozen=True)
class ReaderOptions:
    """How a source is read.

    Attributes:
        batch_size: `B`; the last batch of a slice may be shorter.
        slice_rows: rows leased at once, best a multiple of `batch_size`.
        shuffle: permute slices (unless the source is sequential), and rows inside a slice, anew in every epoch.
        readers: threads that parse.
        prefetch: slices parsed ahead for each trainer, besides the one it is at.
        window: slices, and rows inside a slice, stay within stretches of at most so many rows; None: of all.
    """

    batch_size: int
    slice_rows: int = 8192
    epochs: int = 1
    shuffle: bool = True
    seed: int = 0
    readers: int = 1
    prefetch: int = 2
    window: int | None = None


@dataclass(frozen=True)
class Parsed:
    """A lease that was parsed: good rows of the whole slice, and rows `start … stop − 1` of it, permuted, by batch."""

    rows: int
    batches: tuple[tuple[int, int, Batch], ...]


class Parser:
    """Parses leases of one source (the reader's role): reads, checks, permutes and cuts.

    It keeps nothing from one lease to the next, so whoever takes a dead reader's place can be asked the same again.

    Attributes:
        slices: of the source; `lease.slice` is a position among them.
    """

    def __init__(self, source: OpenSource, options: ReaderOptions) -> None:
        if source.rows > _MOST_SLICES * options.slice_rows:
            raise ConfigError(
                f"data.slice_rows={options.slice_rows} cuts {source.rows:,} rows into more slices than can be kept "
                f"track of: set data.slice_rows={-(-source.rows // _MOST_SLICES)} or more"
            )
        self.source, self.options = source, options
        self.slices = source.slices(options.slice_rows)

    @served(once=False, timeout_s=PARSE_S)
    def parse(self, lease: Lease) -> Parsed:
        """The lease's rows, whose order depends on seed, epoch and slice only; raises whatever reading them raises."""
        known = 0 <= lease.slice < len(self.slices) and lease.epoch >= 0
        rows = self.slices[lease.slice].rows if known else 0
        if not known or not all(0 <= start < stop <= rows for start, stop in lease.spans):
            raise DataError(f"a lease of slice {lease.slice} with rows {list(lease.spans)[:4]} does not fit this data")
        whole = _read(self.source, self.slices, lease.slice)
        order, size = None, self.options.batch_size
        if self.options.shuffle:
            generator = np.random.default_rng((self.options.seed, lease.epoch, lease.slice))
            order = torch.from_numpy(permutation(generator, len(whole), self.options.window))
        batches = []
        for first, last in lease.spans:
            end = min(last, len(whole))
            for start in range(first, end, size):
                stop = min(start + size, end)
                batch = whole.narrow(start, stop) if order is None else whole.take(order[start:stop])
                batches.append((start, stop, batch))
        return Parsed(len(whole), tuple(batches))

    def close(self) -> None:
        self.source.close()


@dataclass(frozen=True)
class LeasedBatch:
    """A batch with what is needed to report it done: rows `start … stop − 1` of the lease's permuted slice; the one
    begun as `number`, over all trainers, from 0."""

    batch: Batch
    lease: Lease
    start: int
    stop: int
    number: int


@dataclass
class _Block:
    """A leased slice; `batches` is None until it is parsed and opened."""

    lease: Lease
    parsing: Pending[Parsed]
    batches: deque[tuple[int, int, Batch]] | None = None


class Feed:
    """What a trainer trains; all its workers share it.

    It leases slices, has `prefetch` of them parsed ahead, besides the one the trainer is at, and claims each batch
    right before it goes out. It is closed before `parse`, which starts to parse a lease, cancels any.
    """

    def __init__(self, trainer: int, leases: Leases, parse: Callable[[Lease], Pending[Parsed]], prefetch: int) -> None:
        self.trainer, self.leases, self.closed = trainer, leases, False
        self._parse, self._prefetch = parse, prefetch
        self.opened: Callable[[Sequence[Batch]], None] = lambda _: None
        """Called with the batches of a slice that was parsed, and which will come next; returns at once."""
        self._blocks: deque[_Block] = deque()
        self._lock = threading.Lock()
        self._status = LeaseStatus(0, False, 0)
        self._nothing_at = -1

    def next(self, wait: bool = True) -> LeasedBatch | None:
        """The trainer's next batch; None if there is no more work for it, without `wait` if there is none now.

        With `wait`, when everything has been leased but others still hold rows, it waits until they are done with them
        or give them back. A worker that still holds batches itself must not, or it may wait for itself: it calls with
        False, finishes them when it gets None, and then calls with True. Raises whatever reading the source raised.
        """
        while not self.closed:
            with self._lock:
                leased, status = self._take(), self._status
                parsing = self._blocks[0].parsing if self._blocks else None
            if leased is not None or (parsing is None and (not wait or status.finished)):
                return leased
            if parsing is None:
                self.leases.wait(status.version)
            else:
                ended([parsing])
        return None

    def done(self, leased: LeasedBatch) -> bool:
        """Says that a batch was trained; False if the trainer had been given up, so that others train its rows."""
        return self.leases.done(leased.lease, leased.start, leased.stop)

    def close(self) -> None:
        """Puts back what the trainer holds and has not done; `next` gives None from now on."""
        if not self.closed:
            self.closed = True
            self.leases.abandon(self.trainer)

    @property
    def depth(self) -> int:
        """Batches parsed and not begun."""
        return sum(len(block.batches or ()) for block in tuple(self._blocks))

    def _take(self) -> LeasedBatch | None:
        """The next batch that is parsed, or what of it is still this trainer's."""
        self._fill()
        while self._blocks and not self.closed:
            block = self._blocks[0]
            if block.batches is None and not self._open_parsed():
                return None
            while block.batches:
                start, stop, batch = block.batches.popleft()
                self._status, claim = self.leases.claim(block.lease, start, stop)
                if claim is not None:
                    whole = batch if claim.stop == stop else batch.narrow(0, claim.stop - start)
                    return LeasedBatch(whole, block.lease, start, claim.stop, claim.number)
            self._blocks.popleft()
            self._fill()
        return None

    def _fill(self) -> None:
        """Leases ahead; what was not to be had at this version is not asked for again while there is a queue."""
        while len(self._blocks) <= self._prefetch and not self.closed:
            if self._blocks and self._nothing_at == self._status.version:
                return
            self._status, lease = self.leases.lease(self.trainer, idle=not self._blocks)
            if lease is None:
                self._nothing_at = self._status.version
                return
            self._blocks.append(_Block(lease, self._parse(lease)))

    def _open_parsed(self) -> bool:
        """Opens every block that has been parsed; whether the first one is among them."""
        for block in self._blocks:
            if block.batches is None and block.parsing.done():
                if self.closed:
                    return False  # what went wrong with it may be that nobody wants it any more
                try:
                    parsed = block.parsing.result()
                except CallTimeout as error:  # it is not the trainer that is to be replaced, as after a peer's loss
                    raise RunError(
                        f"no reader has read its rows within {PARSE_S:g} s: does the file system of data.path answer?"
                    ) from error
                self._status, held = self.leases.opened(block.lease, parsed.rows)
                block.batches = deque(parsed.batches if held else ())
                self.opened([batch for _, _, batch in block.batches])
        return self._blocks[0].batches is not None


class Reader:
    """Hands out the rows of a source, each exactly once per epoch, to any number of trainers.

    With one trainer and one worker the batches and their order depend on options and seed only. A trainer that finds
    nothing left to lease takes over half of what another has not begun, so that all end together.

    Args:
        source: the caller closes it after the reader.
        options: with a state, its slice_rows, shuffle, window and seed are those of the state.
        state: goes on from what `state()` gave, with any batch size, epochs and number of trainers; `CheckpointError`
            if it is of other data.
        first_number: of the leases (see `LeaseBook`).
    """

    def __init__(
        self,
        source: OpenSource,
        options: ReaderOptions,
        state: Mapping[str, Any] | None = None,
        first_number: int = 0,
    ) -> None:
        position = None if state is None else Position.of(state)
        if position is not None:
            kept = {name: getattr(position, name) for name in ("slice_rows", "shuffle", "window", "seed")}
            options = replace(options, **kept)
        self.source, self.options = source, options
        self._parser = Parser(source, options)
        self.slices = self._parser.slices
        shuffle_slices = options.shuffle and not source.sequential
        rows = [part.rows for part in self.slices]
        window = None if options.window is None else max(1, options.window // options.slice_rows)
        book = LeaseBook(rows, options.epochs, shuffle_slices, options.seed, first_number, window)
        if position is not None:
            book.restore(position.book)
        self.leases = LeaseService(book, options.batch_size)
        self._feeds: dict[int, Feed] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._pool = ThreadPoolExecutor(options.readers, thread_name_prefix="reader")

    def feed(self, trainer: int) -> Feed:
        """The trainer's feed, the same one until it is closed."""
        with self._lock:
            feed = self._feeds.get(trainer)
            if feed is None or feed.closed:
                feed = self._feeds[trainer] = Feed(trainer, self.leases, self._parse, self.options.prefetch)
                feed.closed = self._closed
            return feed

    def state(self) -> dict[str, Any]:
        """The position as plain JSON values; batches that were handed out and not done count as not trained."""
        options = self.options
        book = self.leases.state()
        position = Position(options.slice_rows, options.shuffle, options.seed, book, options.window)
        builtins: dict[str, Any] = msgspec.to_builtins(position)
        return builtins

    @property
    def finished(self) -> bool:
        return self.leases.finished

    @property
    def trained(self) -> int:
        return self.leases.trained

    @property
    def skipped(self) -> int:
        return self.leases.skipped

    def close(self) -> None:
        """Ends the threads; every `next` gives None from now on."""
        with self._lock:
            self._closed = True
            for feed in self._feeds.values():
                feed.closed = True
        self.leases.wake()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _parse(self, lease: Lease) -> Pending[Parsed]:
        try:
            future = self._pool.submit(self._parser.parse, lease)
        except RuntimeError:  # the pool was shut down meanwhile
            future = Future()
            future.cancel()
        return from_future(future)


def batches(source: OpenSource, batch_size: int) -> Iterator[Batch]:
    """All rows of a source in their order, in batches of at most `batch_size`, one slice read ahead in a thread."""
    slices = source.slices(max(batch_size, EVALUATION_ROWS // batch_size * batch_size))
    with ThreadPoolExecutor(1, thread_name_prefix="reader") as pool:
        coming = pool.submit(_read, source, slices, 0)
        for index in range(len(slices)):
            whole = coming.result()
            if index + 1 < len(slices):
                coming = pool.submit(_read, source, slices, index + 1)
            for start in range(0, len(whole), batch_size):
                yield whole.narrow(start, min(start + batch_size, len(whole)))


def _read(source: OpenSource, slices: Sequence[Slice], index: int) -> Batch:
    """A slice whose ids are known to lie in their tables."""
    batch = source.read(slices[index])
    check_ids(batch, source, slices[index])
    return batch
