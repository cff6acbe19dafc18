"""Turns the rows of a lease into batches: read, checked, permuted, cut. Keeps nothing from one lease to the next.

`B` samples of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shadowsync.data.batch import Batch
from shadowsync.data.checks import check_ids
from shadowsync.data.leases import Lease, Span
from shadowsync.data.source import OpenSource, Slice
from shadowsync.errors import ConfigError

_MOST_SLICES = 10_000_000


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
    """

    rows: int
    spans: tuple[Span, ...]
    batches: tuple[Batch, ...]


@dataclass(frozen=True)
class Parser:
    """Parses leases of one source (the reader's role).

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

    def parse(self, lease: Lease) -> Parsed:
        """The lease's rows, whose order depends on seed, epoch and slice only.

        Raises:
            DataError: a row cannot be used; and whatever else reading the source raises.
        """
        part = self.slices[lease.slice]
        whole = self.source.read(part)
        check_ids(whole, self.source, part)
        order = self._permutation(lease, len(whole)) if self.options.shuffle else None
        spans = _cut(lease.spans, len(whole), self.options.batch_size)
        batches = [whole.narrow(*span) if order is None else whole.take(order[slice(*span)]) for span in spans]
        return Parsed(len(whole), tuple(spans), tuple(batches))

    def _permutation(self, lease: Lease, rows: int) -> torch.Tensor:
        generator = np.random.default_rng((self.options.seed, lease.epoch, lease.slice))
        return torch.from_numpy(generator.permutation(rows))


def _cut(spans: Sequence[Span], rows: int, batch_size: int) -> list[Span]:
    """The spans less what lies beyond `rows`, in pieces of at most `batch_size`."""
    clipped = [(start, min(stop, rows)) for start, stop in spans]
    return [(at, min(at + batch_size, stop)) for start, stop in clipped for at in range(start, stop, batch_size)]
