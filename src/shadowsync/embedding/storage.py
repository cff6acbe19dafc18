"""The seam between an embedding server and the library that holds the rows.

`B` samples, `F` features, `D_f` width of feature f's table, `K` rows asked for by number, `D_w` their width.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.optimizers import RowOptimizer
from shadowsync.embedding.table import Shard
from shadowsync.errors import ConfigError
from shadowsync.memory.pages import zeros
from shadowsync.memory.shared import Allocate
from shadowsync.registry import members, nearest

AUTO = "auto"


class Storage(ABC):
    """Rows with their optimizer state. `pull` and `push` are called lock-free from many threads (Hogwild).

    A storage knows shards and local row numbers only: ids are relative to the shard's start, and pooling is a sum
    weighted by the ids' weights (the client turns a mean into weights).
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(
        self,
        shards: Sequence[Shard],
        features: Sequence[int],
        optimizer: RowOptimizer,
        seed: int | None,
        allocate: Allocate = zeros,
    ) -> None:
        """
        Args:
            shards: what to hold.
            features: of each that will be looked up, the position of its shard.
            seed: of the initial rows (`memory.fill`); None leaves them as they are in the memory, zero where it is new.
            allocate: gives the memory of all tensors, in the order of `embedding.memory.parts_of`.
        """

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
        (`RowNumbers` of the constructor's shards), ascending, int64 `[K]`."""

    @abstractmethod
    def step_rows(self, rows: Tensor, gradients: Sequence[Tensor], shards: Sequence[int], lr: float) -> None:
        """Applies the optimizer once to every row, as a `push` whose gradients sum up to these, of the shape of
        `read_rows`' answer. It counts as a push for the shards at these positions; all rows are theirs."""

    @abstractmethod
    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """For each shard's key, live views of its tensors by name, first dimension = rows of the shard.

        `weight` `[rows, D]` is always there; the rest is the optimizer's: `momentum` `[rows]` (row-wise Adagrad's
        sum of squares), or Adam's `exp_avg` and `exp_avg_sq` `[rows, D]` and `step` `[1]`. Writing to the views
        changes the storage.
        """


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
