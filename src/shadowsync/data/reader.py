"""Feeds the trainers of one process: one desk, a pool of threads that parse, and a feed for each trainer."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from shadowsync.data.batch import Batch
from shadowsync.data.checks import check_ids
from shadowsync.data.desk import Desk
from shadowsync.data.feed import Feed, LeasedBatch
from shadowsync.data.leases import EpochCount, Lease, LeaseBook, Plan
from shadowsync.data.parsing import Parsed, Parser, ReaderOptions
from shadowsync.data.source import OpenSource
from shadowsync.errors import CheckpointError

__all__ = ["Feed", "LeasedBatch", "Position", "Reader", "ReaderOptions", "batches"]

_EVALUATION_ROWS = 32_768


class Position(msgspec.Struct, frozen=True):
    """How far the data is trained: what `Reader.state` gives."""

    slice_rows: Annotated[int, msgspec.Meta(ge=1)]
    shuffle: bool
    seed: Annotated[int, msgspec.Meta(ge=0)]
    book: dict[str, Any]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Position":
        """The position in a checkpoint.

        Raises:
            CheckpointError: it is not one that `Reader.state` gives.
        """
        try:
            return msgspec.convert(state, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"the checkpoint's position in the data is not that of a job: {error}") from error

    def options(self, options: ReaderOptions) -> ReaderOptions:
        """The options with what decides the order of the data."""
        return replace(options, slice_rows=self.slice_rows, shuffle=self.shuffle, seed=self.seed)


class Reader:
    """Hands out the rows of a source, each exactly once per epoch, to any number of trainers.

    With one trainer and one worker the batches and their order depend on options and seed only. A trainer that finds
    nothing left to lease takes over half of what another has not begun, so that all end together.

    Attributes:
        slices: of the source; `lease.slice` is a position among them.
        desk: says who trains what.
    """

    def __init__(
        self,
        source: OpenSource,
        options: ReaderOptions,
        state: Mapping[str, Any] | None = None,
        first_number: int = 0,
    ) -> None:
        """
        Args:
            source: opened; the caller closes it after the reader.
            options: with a state, its slice_rows, shuffle and seed are those of the state.
            state: goes on from what `state()` gave, with any batch size, epochs and number of trainers.
            first_number: of the leases (see `LeaseBook`).

        Raises:
            DataError: the source is empty.
            CheckpointError: the state is of other data, or not one that `state()` gives.
        """
        position = None if state is None else Position.of(state)
        options = options if position is None else position.options(options)
        self.source, self.options = source, options
        self._parser = Parser(source, options)
        self.slices = self._parser.slices
        shuffle_slices = options.shuffle and not source.sequential
        plan = Plan([part.rows for part in self.slices], options.epochs, shuffle_slices, options.seed)
        book = LeaseBook(plan, first_number)
        if position is not None:
            book.restore(position.book)
        self.desk = Desk(book, options.batch_size)
        self._feeds: dict[int, Feed] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._pool = ThreadPoolExecutor(options.readers, thread_name_prefix="reader")

    def feed(self, trainer: int) -> Feed:
        """The trainer's feed, the same one until it is closed."""
        with self._lock:
            feed = self._feeds.get(trainer)
            if feed is None or feed.closed:
                feed = Feed(trainer, self.desk, self._parse, self.options.prefetch, closed=self._closed)
                self._feeds[trainer] = feed
            return feed

    def abandon(self, trainer: int) -> None:
        """Puts back what a dead trainer holds and has not done; its feed is closed."""
        feed = self._feeds.get(trainer)
        if feed is not None:
            feed.close()

    def waiting(self, trainer: int) -> int:
        """Batches that are parsed for the trainer and not begun."""
        feed = self._feeds.get(trainer)
        return 0 if feed is None else feed.depth

    def state(self) -> dict[str, Any]:
        """The position as plain JSON values; batches that were handed out and not done count as not trained."""
        options = self.options
        position = Position(options.slice_rows, options.shuffle, options.seed, dict(self.desk.state()))
        builtins: dict[str, Any] = msgspec.to_builtins(position)
        return builtins

    @property
    def finished(self) -> bool:
        """Every row of every epoch was trained or skipped."""
        return self.desk.finished

    @property
    def trained(self) -> int:
        """Rows trained so far, all epochs."""
        return self.desk.trained

    def epochs(self) -> Sequence[EpochCount]:
        """Rows trained and skipped in each epoch so far."""
        return self.desk.epochs()

    def close(self) -> None:
        """Ends the threads; every `next` gives None from now on."""
        with self._lock:
            self._closed = True
            for feed in self._feeds.values():
                feed.closed = True
        self.desk.wake()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _parse(self, lease: Lease) -> Future[Parsed]:
        try:
            return self._pool.submit(self._parser.parse, lease)
        except RuntimeError:  # the pool was shut down meanwhile
            ended: Future[Parsed] = Future()
            ended.cancel()
            return ended


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
