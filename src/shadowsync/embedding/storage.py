"""The seam between an embedding server and the library that holds the rows.

`B` samples, `F` features, `D_f` width of feature f's table, `K` rows asked for by number, `D_w` their width.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.memory import parts_of
from shadowsync.embedding.optimizers import RowOptimizer
from shadowsync.embedding.table import Shard
from shadowsync.errors import ConfigError
from shadowsync.memory.room import Disk, Room
from shadowsync.registry import members, nearest

AUTO = "auto"


@dataclass(frozen=True)
class StorageCounts:
    """Of a storage on disk: its rows, how many of them fit into memory, and since its start, rows looked up, rows
    looked up that had to be read (each once for a look-up), and bytes of rows read and written back."""

    rows: int
    slots: int
    looked_up: int
    missed: int
    read_bytes: int
    written_bytes: int

    def plus(self, other: "StorageCounts") -> "StorageCounts":
        return StorageCounts(*(getattr(self, own.name) + getattr(other, own.name) for own in fields(self)))


class Storage(ABC):
    """Rows with their optimizer state. `pull` and `push` are called lock-free from many threads (Hogwild).

    A storage knows shards and local row numbers only: ids are relative to the shard's start, and pooling is a sum
    weighted by the ids' weights (the client turns a mean into weights).
    """

    name: ClassVar[str]
    on_disk: ClassVar[bool] = False
    """It need not have all rows in memory."""

    @abstractmethod
    def __init__(
        self,
        shards: Sequence[Shard],
        features: Sequence[int],
        optimizer: RowOptimizer,
        seed: int | None,
        room: Room | None = None,
    ) -> None:
        """
        Args:
            shards: what to hold.
            features: of each that will be looked up, the position of its shard.
            seed: of the initial rows (`initial`); None leaves them as they are in the memory, zero where it is new.
            room: where the tensors are; it gives memory in the order of `memory_parts`, a file in that of `file_parts`.
        """

    @classmethod
    def memory_parts(
        cls, shards: Sequence[Shard], optimizer: RowOptimizer, disk: Disk | None
    ) -> list[tuple[int, torch.dtype]]:
        """Elements and type of each tensor that it has in memory."""
        return parts_of(shards, optimizer)

    @classmethod
    def file_parts(cls, shards: Sequence[Shard], optimizer: RowOptimizer) -> list[tuple[int, torch.dtype]]:
        """As `memory_parts`, of what it has on disk."""
        return []

    @classmethod
    def loads(cls) -> bool:
        """What it is made with is installed."""
        return True

    @abstractmethod
    def pull(self, ids: Jagged, features: Sequence[int]) -> Tensor:
        """Weighted sums of rows, float32 `[B, Σ D_f]`, of the features at these positions in the constructor's, in the
        order wanted; `ids` are theirs, local to the shards."""

    @abstractmethod
    def push(self, ids: Jagged, features: Sequence[int], gradient: Tensor, lr: float) -> None:
        """Applies the optimizer once to every row that occurs in `ids`, with the sum of its gradients; ids and features
        are as given to `pull`, and `gradient` is that of its output, float32 `[B, Σ D_f]`."""

    @abstractmethod
    def read_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows as they are, for each width of the shards (ascending) float32 `[K_w, D_w]`, by distinct numbers
        (`RowNumbers` of the constructor's shards), those of a width together, in order of the widths, int64 `[K]`."""

    @abstractmethod
    def step_rows(self, rows: Tensor, gradients: Sequence[Tensor], shards: Sequence[int], lr: float) -> None:
        """Applies the optimizer once to every row, as a `push` whose gradients sum up to these, of the shape of
        `read_rows`' answer. It counts as a push for the shards at these positions; all rows are theirs."""

    @abstractmethod
    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """For each shard's key, live views of its tensors by name, first dimension = rows of the shard.

        `weight` `[rows, D]` is always there; the rest is the optimizer's: `momentum` `[rows]` (row-wise Adagrad's
        sum of squares), or Adam's `exp_avg` and `exp_avg_sq` `[rows, D]` and `step` `[1]`. Who writes to the views says
        so (`written`). What pushes change is seen there unless the storage is on disk: `copy` tells it.
        """

    @abstractmethod
    def copy(self, shard: int, rows: Tensor | range, out: Mapping[str, Tensor]) -> None:
        """Copies rows of the shard at that position as they are, by their positions in it, into tensors by name, `[K]`
        or `[K, D]`; nobody pushes."""

    @abstractmethod
    def reset(self, seed: int | None) -> None:
        """All rows are as at the start, with the initial rows of this seed; nobody pushes."""

    # A storage of which all is in memory has nothing to do for these.

    def approach(self, shard: int, rows: Tensor | range) -> None:  # noqa: B027
        """These rows of a shard are going to be copied or written."""

    def written(self, shard: int, rows: Tensor | range) -> None:  # noqa: B027
        """These rows of a shard were written to the views of `state`; whoever did so keeps rows from being moved
        meanwhile: it is inside the gate, or nobody else is."""

    def settle(self, shard: int) -> None:  # noqa: B027
        """The views of a shard's rows in `state` are to be as the rows are; nobody pushes."""

    def expect(self, ids: Jagged, features: Sequence[int]) -> None:  # noqa: B027
        """This is going to be pulled."""

    def expect_rows(self, rows: Tensor) -> None:  # noqa: B027
        """These rows are going to be read."""

    @property
    def counts(self) -> StorageCounts | None:
        """What it reads and writes, where it is on disk."""
        return None


def copy_rows(source: Tensor, rows: Tensor | range, out: Tensor) -> None:
    """Copies rows of a tensor, by their positions."""
    if isinstance(rows, range):
        out.copy_(source[rows.start : rows.stop])
    else:
        torch.index_select(source, 0, rows, out=out)


def storage_class(name: str) -> type[Storage]:
    """The storage called `name`; `auto` takes `fbgemm` where it can be loaded, else `torch`.

    Raises:
        ConfigError: there is none of that name. Whether a storage can be used is checked when one is made.
    """
    known = members("shadowsync.embedding", Storage)
    if name == AUTO:
        return known["fbgemm"] if known["fbgemm"].loads() else known["torch"]
    if name not in known:
        allowed = (AUTO, *known)
        raise ConfigError(
            f"embedding.storage={name} is not known{nearest(name, allowed)}; allowed: {', '.join(allowed)}"
        )
    return known[name]
