"""Models, tables and inputs that the tests of the export share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shadowsync.data.batch import Jagged
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.optimizers import SGD
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Shard, Table, widths
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.export import ExportSpec, export_model
from shadowsync.models.dcn import Dcn
from shadowsync.models.deepfm import DeepFm
from shadowsync.models.dlrm import Dlrm
from shadowsync.models.fm import Fm
from shadowsync.models.interest import Dien, Din
from shadowsync.models.model import ModelSpec, SequenceInput
from shadowsync.models.wide_deep import WideDeep
from shadowsync.models.youtube_dnn import YoutubeDnn

ROW_BYTES = 4 * 8
SHARED = (Table("user", 50, 8, ("user",)), Table("category", 30, 8, ("seen", "bought"), "mean"))
SUMS = (Table("user", 50, 8, ("user",)), Table("category", 30, 8, ("seen", "bought")))
MIXED = (Table("user", 50, 8, ("user",)), Table("category", 30, 4, ("seen", "bought"), "mean"))
HISTORY = (Table("user", 50, 8, ("user",)), Table("category", 30, 8, ("seen", "bought"), ("none", "mean")))
FEATURES = ("seen", "user", "bought")
"""In another order than the tables have them."""


class Plain(nn.Module):
    """A user's own module."""

    def __init__(self, dense: int, dims: Mapping[str, int]) -> None:
        super().__init__()
        self.layer = nn.Linear(dense + sum(dims.values()), 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        together = torch.cat([dense, *(embeddings[name] for name in FEATURES)], 1)
        return self.layer(self.dropout(together)).squeeze(1)


class Own(ModelSpec):
    """Makes the user's own module."""

    name = "own"

    def build(self, dense_columns: int, dims: Mapping[str, int]) -> nn.Module:
        return Plain(dense_columns, dims)


@dataclass(frozen=True)
class Case:
    """A model to export, and how."""

    model: ModelSpec
    tables: tuple[Table, ...] = SHARED
    dense: int = 3
    weighted: bool = False
    chunk_bytes: int = 1 << 20

    @property
    def spec(self) -> ExportSpec:
        names = [f"number {index}" for index in range(self.dense)]
        return ExportSpec(self.tables, FEATURES, names, self.weighted, self.chunk_bytes)

    def build(self) -> nn.Module:
        torch.manual_seed(1)
        dims = widths(self.tables)
        sequences = {f: SequenceInput(table.dim, ("bought",)) for table in self.tables for f in table.sequences}
        pooled = {feature: dims[feature] for feature in FEATURES if feature in dims}
        return self.model.build(self.dense, pooled, sequences) if sequences else self.model.build(self.dense, pooled)


CASES = {
    "dlrm": Case(Dlrm((16,), (16,))),
    "deepfm, sums": Case(DeepFm(), SUMS),
    "dcn, mixed widths, weights": Case(Dcn(), MIXED, weighted=True),
    "no dense columns": Case(Dlrm((16,), (16,)), SUMS, dense=0),
    "fm": Case(Fm(), SUMS),
    "wide and deep, batch norm, dropout, mixed": Case(WideDeep(deep=(8,), norm="batch", dropout=0.5), MIXED),
    "youtube, layer norm, weights": Case(YoutubeDnn(deep=(8,), norm="layer"), MIXED, weighted=True),
    "own module": Case(Own()),
    "chunks, weights, mixed": Case(Own(), MIXED, weighted=True, chunk_bytes=20 * ROW_BYTES),
    "din, chunks, weights": Case(Din(attention=(8,), deep=(8,)), HISTORY, weighted=True, chunk_bytes=30 * ROW_BYTES),
    "dien, shorter than histories": Case(Dien(steps=2, deep=(8,)), HISTORY),
}


def make_rows(tables: Sequence[Table]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {table.name: torch.randn(table.rows, table.dim, generator=generator) for table in tables}


def make_client(tables: Sequence[Table], rows: Mapping[str, Tensor]) -> EmbeddingClient:
    """The job's own embeddings, one table cut in two."""
    first, *others = tables
    cut = first.rows // 3
    shards = [Shard(first, 0, cut), Shard(first, cut, first.rows), *(Shard(table, 0, table.rows) for table in others)]
    servers = [EmbeddingServer([shard], TorchStorage, SGD(), seed=0) for shard in shards]
    for server in servers:
        for held in server.state():
            weight = held.tensors["weight"]
            weight.copy_(rows[held.table.name][held.start : held.start + len(weight)])
    return EmbeddingClient(tables, FEATURES, servers)


def make_inputs(case: Case, samples: int, longest: int = 3) -> tuple[Tensor, ...]:
    """Dense columns, ids, offsets and, where asked for, weights; bags have 0 to `longest` ids."""
    generator = torch.Generator().manual_seed(samples * 10 + longest)
    rows = {feature: table.rows for table in case.tables for feature in table.features}
    lengths = torch.randint(longest + 1, (len(FEATURES), samples), generator=generator)
    values = torch.cat(
        [torch.randint(rows[f], (int(n.sum()),), generator=generator) for f, n in zip(FEATURES, lengths, strict=True)]
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    dense = torch.randn(samples, case.dense, generator=generator)
    weights = torch.rand(len(values), generator=generator)
    return (dense, values, offsets, weights) if case.weighted else (dense, values, offsets)


def export(case: Case, path: Path) -> nn.Module:
    """Exports a case's model and gives the model back."""
    module, rows = case.build(), make_rows(case.tables)
    export_model(module, case.spec, lambda name, start, stop: rows[name][start:stop], path)
    return module


def job_logits(case: Case, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """What the job itself would predict."""
    dense, values, offsets, *weights = inputs
    client = make_client(case.tables, make_rows(case.tables))
    ids = Jagged(values, offsets, weights[0] if weights else None, len(FEATURES), len(dense))
    pulled = client.pull(ids)
    pooled = {name: pulled.pooled[:, columns] for name, columns in client.columns.items()}
    with torch.no_grad():
        logits: Tensor = module.eval()(dense, pooled | dict(pulled.sequences))
    return logits
