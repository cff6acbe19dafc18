"""Tables, ids and jobs that the tests of the embeddings share."""

import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from shadowsync.compression.channel import Channel
from shadowsync.compression.codec import Codec
from shadowsync.compression.plain import Plain
from shadowsync.compression.wire import WireCounter
from shadowsync.data.batch import Jagged
from shadowsync.embedding import optimizers
from shadowsync.embedding.client import EmbeddingClient, Pulled
from shadowsync.embedding.fbgemm_storage import FbgemmStorage, twins_lead
from shadowsync.embedding.mapped_storage import INDEX_BYTES, SLOT_BYTES, MappedStorage
from shadowsync.embedding.optimizers import Adam, RowOptimizer, RowwiseAdagrad
from shadowsync.embedding.proxy import ServerProxy
from shadowsync.embedding.routing import NEVER, UniqueRows
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.storage import Storage
from shadowsync.embedding.table import Rows, Shard, Table
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.memory.room import Disk, Room
from shadowsync.models.vectors import VectorGradients
from shadowsync.rpc.kept import USUAL, KeptLimits

needs_fbgemm = pytest.mark.skipif(
    importlib.util.find_spec("fbgemm_gpu") is None, reason="needs FBGEMM: pip install 'shadowsync[fbgemm]'"
)


class FewSlots(MappedStorage):
    """With memory for a third of the rows, and all state as it is: what is in a slot was written back."""

    def __init__(self, shards, features, optimizer, seed, room=None) -> None:
        size = sum(
            shard.rows * (optimizer.row_bytes(shard.table.dim) + SLOT_BYTES + 3 * INDEX_BYTES) for shard in shards
        )
        self._alone = room is None  # else its server has pushes go through the gate
        super().__init__(shards, features, optimizer, seed, room or Room(disk=Disk(Path(gettempdir()), size // 3)))

    def push(self, *given) -> None:
        with self._gate if self._alone else nullcontext():
            super().push(*given)

    def state(self):
        for index in range(len(self._shards)):
            self.settle(index)
        return super().state()


class OtherProcessor(FbgemmStorage):
    """Steps rows by the code that is the slower one here."""

    _twins_lead = staticmethod(lambda: not twins_lead())


STORAGES = [
    pytest.param(TorchStorage, id="torch"),
    pytest.param(FbgemmStorage, id="fbgemm", marks=needs_fbgemm),
    pytest.param(FewSlots, id="mapped"),
    pytest.param(OtherProcessor, id="fbgemm as on another processor", marks=needs_fbgemm),
]
# an eps large enough to be seen
OPTIMIZERS = [RowwiseAdagrad(0.01), Adam(0.01, 0.9, 0.999), optimizers.SGD()]
ADAGRAD, ADAM, SGD = OPTIMIZERS
EACH = pytest.mark.parametrize("storage", STORAGES)
BY_NAME = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


TABLES = [
    Table("user", 40, 8, ("user",)),
    Table("item", 30, 4, ("viewed", "bought"), "mean"),
    Table("day", 3, 6, ("day",)),
    Table("shop", 25, 8, ("here", "there")),
    Table("tag", 12, 4, ("tag",), "mean"),
]
HISTORIES = [
    Table("item", 30, 4, ("item", "seen", "liked"), ("sum", "none", "mean")),
    Table("user", 40, 8, ("user",)),
    Table("shop", 25, 8, ("visited",), "none"),
    Table("tag", 12, 4, ("tag",), "mean"),
    Table("word", 9, 4, ("words", "letters"), "none"),
]
"""Features of which some are sequences."""
HISTORY_SOURCE = ["liked", "words", "user", "visited", "item", "tag", "letters", "seen"]
HISTORY_ROWS = [30, 9, 40, 25, 30, 12, 9, 30]
"""Of the features in `HISTORY_SOURCE`."""
SOURCE = ["bought", "user", "tag", "there", "viewed", "here", "day"]
ROWS = [30, 40, 12, 25, 30, 25, 3]
"""Of the features in `SOURCE`."""
KINDS = ("single", "multi", "weighted")


def whole(tables: Sequence[Table]) -> list[Shard]:
    """Each table in one piece."""
    return [Shard(table, 0, table.rows) for table in tables]


def table(name: str, rows: int = 7, dim: int = 4, features: tuple[str, ...] = (), pooling: str = "sum") -> Table:
    """A table with one feature of its own name unless told otherwise."""
    return Table(name, rows, dim, features or (name,), pooling)


def jagged(bags: Sequence[Sequence[Sequence[int]]], samples: int, weights: Tensor | None = None) -> Jagged:
    """`bags[f][b]` are the ids of feature f in sample b."""
    flat = [bag for feature in bags for bag in feature]
    offsets = torch.tensor(np.cumsum([0, *map(len, flat)]), dtype=torch.int64)
    values = torch.tensor([i for bag in flat for i in bag], dtype=torch.int64)
    return Jagged(values, offsets, weights, len(bags), samples)


def random_ids(rows: Sequence[int], samples: int, seed: int, kind: str = "multi") -> Jagged:
    """Ids of features with these rows; `kind` is single, multi or weighted; bags have up to 4 ids, many equal."""
    random = np.random.default_rng(seed)
    if kind == "single":
        values = np.concatenate([random.integers(0, r, samples) for r in rows] or [np.zeros(0)]).astype(np.int64)
        return Jagged(torch.from_numpy(values), None, None, len(rows), samples)
    bags = [[random.integers(0, r, random.integers(0, 5)).tolist() for _ in range(samples)] for r in rows]
    ids = jagged(bags, samples)
    if kind == "multi":
        return ids
    weights = torch.from_numpy(random.uniform(-2, 2, len(ids.values)).astype(np.float32))
    return Jagged(ids.values, ids.offsets, weights, len(rows), samples)


def dense_gradient(samples: int, width: int, seed: int) -> Tensor:
    """A gradient with entries of ordinary size."""
    return torch.randn(samples, width, generator=torch.Generator().manual_seed(seed))


def reference_pull(weights: Sequence[Tensor], ids: Jagged) -> Tensor:
    """Sums of rows bag by bag, `weights[f]` being the rows that feature f looks up; differentiable."""
    offsets, columns = ids.bag_offsets().tolist(), []
    for feature, weight in enumerate(weights):
        rows = []
        for bag in range(feature * ids.samples, (feature + 1) * ids.samples):
            span = slice(offsets[bag], offsets[bag + 1])
            found = weight[ids.values[span]]
            rows.append((found if ids.weights is None else found * ids.weights[span, None]).sum(0))
        columns.append(torch.stack(rows) if rows else weight.new_zeros(0, weight.shape[1]))
    return torch.cat(columns, 1)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[Table], list[int], list[int], int, str]:
    """Tables of mixed widths, the table of each feature, the features asked for, samples, and a kind of ids."""
    count = draw(st.integers(1, 4))
    sizes = st.tuples(st.integers(1, 12), st.sampled_from([1, 3, 4, 8, 16, 17]))
    tables = [table(f"t{index}", *draw(sizes)) for index in range(count)]
    features = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6))
    asked = draw(st.permutations(range(len(features))))[: draw(st.integers(1, len(features)))]
    return (
        tables,
        features,
        list(asked),
        draw(st.integers(0, 5)),
        draw(st.sampled_from(["single", "multi", "weighted"])),
    )


def client(
    tables: Sequence[Table],
    features: Sequence[str],
    servers: Sequence[Sequence[Shard]],
    storage: type[Storage] = TorchStorage,
    optimizer: RowOptimizer = ADAGRAD,
    *,
    codec: Codec | None = None,
    push: Codec | None = None,
    unique: UniqueRows = NEVER,
    limits: KeptLimits = USUAL,
) -> tuple[EmbeddingClient, list[EmbeddingServer], WireCounter]:
    """A client with its servers in this process and the counter of its bytes; `codec` is that of pulls, and of pushes
    unless these have one of their own."""
    held = [EmbeddingServer(shards, storage, optimizer, seed=3) for shards in servers]
    counter, codec = WireCounter(), codec or Plain()
    ways = Channel("pull", codec, counter), Channel("push", push or codec, counter)
    proxies = [ServerProxy.near(server, position, *ways, limits=limits) for position, server in enumerate(held)]
    return EmbeddingClient(tables, features, proxies, unique), held, counter


def placements(tables: Sequence[Table] = TABLES) -> st.SearchStrategy[list[list[Shard]]]:
    """Every row of the tables on one of up to four servers, tables in up to four parts."""
    return st.integers(1, 4).flatmap(
        lambda count: st.tuples(*(_cuts(t, count) for t in tables)).map(lambda cuts: _gather(cuts, count))
    )


def _cuts(found: Table, count: int) -> st.SearchStrategy[tuple[list[Shard], list[int]]]:
    edges = st.sets(st.integers(1, found.rows - 1), max_size=3).map(lambda inner: [0, *sorted(inner), found.rows])
    return edges.flatmap(
        lambda edges: st.tuples(
            st.just([Shard(found, *edge) for edge in pairwise(edges)]),
            st.lists(st.integers(0, count - 1), min_size=len(edges) - 1, max_size=len(edges) - 1),
        )
    )


def _gather(cuts: Sequence[tuple[list[Shard], list[int]]], count: int) -> list[list[Shard]]:
    servers: list[list[Shard]] = [[] for _ in range(count)]
    for shards, homes in cuts:
        for shard, home in zip(shards, homes, strict=True):
            servers[home].append(shard)
    return servers


def train(job: EmbeddingClient, steps: int, kind: str) -> list[Tensor]:
    """Trains on random batches; the pooled vectors of each step."""
    seen = []
    for step in range(steps):
        pulled = job.pull(random_ids(ROWS, 6, step, kind))
        seen.append(pulled.pooled.clone())
        job.push(pulled, dense_gradient(6, job.width, step), 0.1).result()
    return seen


def random_gradient(pulled: Pulled, seed: int) -> VectorGradients:
    """Of everything that was pulled, with entries of ordinary size."""
    generator = torch.Generator().manual_seed(seed)
    by_sequence = {
        name: torch.randn(found.values.shape, generator=generator) for name, found in pulled.sequences.items()
    }
    return VectorGradients(torch.randn(pulled.pooled.shape, generator=generator), by_sequence)


def train_histories(job: EmbeddingClient, steps: int, kind: str = "multi") -> list[Tensor]:
    """Trains on random batches of `HISTORY_SOURCE`; all vectors of each step."""
    seen = []
    for step in range(steps):
        pulled = job.pull(random_ids(HISTORY_ROWS, 6, step, kind))
        seen += [pulled.pooled, *(found.values for _, found in sorted(pulled.sequences.items()))]
        job.push(pulled, random_gradient(pulled, step), 0.1).result()
    return seen


def copied(server: EmbeddingServer) -> list[Rows]:
    """All of a server's rows as they are."""
    shards = enumerate(server.shards)
    return [Rows(s.table, s.start, server.copy_rows(index, range(s.start, s.stop))) for index, s in shards]


def rows_of(servers: Sequence[EmbeddingServer], name: str, tensor: str = "weight") -> Tensor:
    """A table's rows from wherever they are held."""
    found = [rows for server in servers for rows in copied(server) if rows.table.name == name]
    return torch.cat([rows.tensors[tensor] for rows in sorted(found, key=lambda rows: rows.start)])


def assert_close_rows(
    found: Sequence[EmbeddingServer], expected: Sequence[EmbeddingServer], tables: Sequence[Table] = TABLES
) -> None:
    """Two groups of servers hold the same weights within rounding, however they are placed."""
    for each in tables:
        torch.testing.assert_close(rows_of(found, each.name), rows_of(expected, each.name), **CLOSE)
