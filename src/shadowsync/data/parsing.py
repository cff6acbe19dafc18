"""Turns the rows of a lease into batches, here or elsewhere: read, checked, permuted, cut.

`B` samples of a batch.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from shadowsync.data.batch import Batch
from shadowsync.data.checks import check_ids
from shadowsync.data.leases import Lease, Span
from shadowsync.data.source import OpenSource, Slice
from shadowsync.errors import ConfigError, DataError, RunError
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.errors import CallTimeout
from shadowsync.rpc.pending import Pending
from shadowsync.rpc.served import later, served

_MOST_SLICES = 10_000_000
PARSE_S = 900.0
"""Deadline of a lease: a reader waits for nobody but its file system."""


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
class Parsed:
    """The rows of a lease.

    Attributes:
        rows: good rows of the whole slice.
        spans: of each batch, as rows of the permuted slice.
        batches: the samples of each span.

    Raises:
        ValueError: there are other batches than spans.
    """

    rows: int
    spans: tuple[Span, ...]
    batches: tuple[Batch, ...]

    def __post_init__(self) -> None:
        if len(self.batches) != len(self.spans):
            raise ValueError(f"there are {len(self.batches)} batches for {len(self.spans)} spans")


@dataclass(frozen=True)
class Parser:
    """Parses leases of one source (the reader's role).

    It keeps nothing from one lease to the next, so whoever takes a dead reader's place can be asked the same again.

    Attributes:
        source: opened.
        options: how.
        slices: of the source; `lease.slice` is a position among them.

    Raises:
        ConfigError: the slices are far too many.
    """

    source: OpenSource
    options: ReaderOptions
    slices: Sequence[Slice] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows, size = self.source.rows, self.options.slice_rows
        if rows > _MOST_SLICES * size:
            raise ConfigError(
                f"data.slice_rows={size} cuts {rows:,} rows into more slices than can be kept track of: set "
                f"data.slice_rows={-(-rows // _MOST_SLICES)} or more"
            )
        object.__setattr__(self, "slices", self.source.slices(self.options.slice_rows))

    @served(once=False, timeout_s=PARSE_S)
    def parse(self, lease: Lease) -> Parsed:
        """The lease's rows, whose order depends on seed, epoch and slice only.

        Raises:
            DataError: a row cannot be used, or no desk of this data gives such a lease; and whatever else reading the
                source raises.
        """
        self._check(lease)
        part = self.slices[lease.slice]
        whole = self.source.read(part)
        check_ids(whole, self.source, part)
        order = self._permutation(lease, len(whole)) if self.options.shuffle else None
        spans = _cut(lease.spans, len(whole), self.options.batch_size)
        batches = [whole.narrow(*span) if order is None else whole.take(order[slice(*span)]) for span in spans]
        return Parsed(len(whole), tuple(spans), tuple(batches))

    def close(self) -> None:
        """Lets go of open files."""
        self.source.close()

    def _check(self, lease: Lease) -> None:
        known = 0 <= lease.slice < len(self.slices) and lease.epoch >= 0
        rows = self.slices[lease.slice].rows if known else 0
        if not known or not all(0 <= start < stop <= rows for start, stop in lease.spans):
            raise DataError(f"a lease of slice {lease.slice} with rows {list(lease.spans)[:4]} does not fit this data")

    def _permutation(self, lease: Lease, rows: int) -> torch.Tensor:
        generator = np.random.default_rng((self.options.seed, lease.epoch, lease.slice))
        return torch.from_numpy(generator.permutation(rows))


def _cut(spans: Sequence[Span], rows: int, batch_size: int) -> list[Span]:
    """The spans less what lies beyond `rows`, in pieces of at most `batch_size`."""
    clipped = [(start, min(stop, rows)) for start, stop in spans]
    return [(at, min(at + batch_size, stop)) for start, stop in clipped for at in range(start, stop, batch_size)]


class ReaderRemote:
    """Has leases parsed elsewhere."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def parse(self, lease: Lease) -> Future[Parsed]:
        """As `Parser.parse`; its errors are in the future."""
        parsed: Future[Parsed] = Future()
        asked = later(self._connection, Parser.parse, lease)
        asked.then(lambda _: _pass_on(asked, parsed))
        return parsed


def _pass_on(asked: Pending[Parsed], parsed: Future[Parsed]) -> None:
    try:
        parsed.set_result(asked.result())
    except CallTimeout:  # it is not the trainer that is to be replaced, as after the loss of a peer
        parsed.set_exception(
            RunError(f"no reader has read its rows within {PARSE_S:g} s: does the file system of data.path answer?")
        )
    except BaseException as error:  # whoever waits is to hear of it, not the thread that serves the connection
        parsed.set_exception(error)
