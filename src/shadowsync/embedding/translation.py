"""The trainer's side of dynamic tables: ids of a batch become row numbers before anything else is done with them.

`L` ids, `F` features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.initial import hashes_of, salt_of
from shadowsync.embedding.keys import LOWEST, Wanted, drops_keys, sets_of
from shadowsync.embedding.proxy import ServerProxy
from shadowsync.embedding.table import WAYS, Shard, Table
from shadowsync.rpc.pending import Pending
from shadowsync.serving import Ids, Mask


@dataclass(frozen=True)
class _Run:
    """Keys that are asked for at a shard: which of the batch's ids they are, and the first row of the shard."""

    shard: int
    keys: Ids
    at: Ids | slice
    start: int


@dataclass(frozen=True)
class _Keyed:
    """A feature of a dynamic table: its position, and where its rows are.

    Attributes:
        edges: the first row of each shard but the first, ascending.
        holders: server and position there of each shard.
        starts: the first row of each shard.
    """

    position: int
    table: Table
    edges: Ids
    holders: tuple[tuple[int, int], ...]
    starts: Ids


class Translation:
    """For all features of the source, in that of its schema, and what each server holds.

    Args:
        admits: keys that have no row may get one: what is looked up is trained.
    """

    def __init__(
        self, tables: Sequence[Table], features: Sequence[str], held: Sequence[Sequence[Shard]], admits: bool
    ) -> None:
        self._admits = admits
        found: dict[str, list[tuple[int, int, int]]] = {}
        for server, shards in enumerate(held):
            for position, shard in enumerate(shards):
                found.setdefault(shard.table.name, []).append((shard.start, server, position))
        self._keyed = []
        for table in tables:
            if table.ids is not None:
                parts = sorted(found[table.name])
                starts = np.array([start for start, _, _ in parts], dtype=np.int64)
                holders = tuple((server, position) for _, server, position in parts)
                places = (features.index(feature) for feature in table.features)
                self._keyed += [_Keyed(place, table, starts[1:], holders, starts) for place in places]
        self._keyed.sort(key=lambda each: each.position)
        self._dropping = any(drops_keys(each.table) for each in self._keyed)

    def __bool__(self) -> bool:
        return bool(self._keyed)

    def rows(self, ids: Jagged, servers: Sequence[ServerProxy], minute: int = 0) -> Jagged:
        """The ids with those of dynamic tables as numbers of rows; those that look up nothing are left out. By the
        data it is so many minutes after 1970; 0 where that is not known."""
        values: Ids = ids.values.numpy().copy()
        edges = np.arange(ids.feature_count + 1) * ids.samples
        edges = edges if ids.offsets is None else ids.offsets.numpy()[edges]
        asked: dict[int, list[_Run]] = {}  # by server
        for each in self._keyed:
            start, stop = edges[each.position], edges[each.position + 1]
            keys = values[start:stop]
            if len(each.holders) == 1:
                server, shard = each.holders[0]
                asked.setdefault(server, []).append(_Run(shard, keys, slice(start, stop), int(each.starts[0])))
                continue
            sets = sets_of(hashes_of(np.maximum(keys, LOWEST), salt_of(each.table.name)), each.table.rows // WAYS)
            parts = np.searchsorted(each.edges, sets * WAYS, side="right")
            for part, (server, shard) in enumerate(each.holders):
                mine = np.flatnonzero(parts == part)
                if len(mine) or self._admits:  # so that time goes on
                    run = _Run(shard, keys[mine], start + mine, int(each.starts[part]))
                    asked.setdefault(server, []).append(run)
        answers: list[tuple[list[_Run], Pending[Tensor]]] = []
        for server, runs in asked.items():
            shards, counts = tuple(run.shard for run in runs), tuple(len(run.keys) for run in runs)
            joined = torch.from_numpy(np.concatenate([run.keys for run in runs]))
            wanted = Wanted(shards, counts, joined, ids.samples if self._admits else 0, minute)
            answers.append((runs, servers[server].rows_of(wanted)))
        for runs, answer in answers:
            rows: Ids = answer.result().numpy()
            ends = [0, *accumulate(len(run.keys) for run in runs)]
            starts = np.array([run.start for run in runs], dtype=np.int64).repeat(np.diff(ends))
            rows = np.where(rows < 0, -1, rows + starts)
            for run, (begin, end) in zip(runs, pairwise(ends), strict=True):
                values[run.at] = rows[begin:end]
        without = values < 0
        if self._dropping and without.any():
            return self._without(replace(ids, values=torch.from_numpy(values)), edges, without)
        values[without] = 0
        return replace(ids, values=torch.from_numpy(values))

    def _without(self, ids: Jagged, edges: Ids, without: Mask) -> Jagged:
        """Keys without a row are left out, or look up the row that they share, as their tables say."""
        keep = torch.from_numpy(~without)
        for each in self._keyed:
            if not drops_keys(each.table):
                span = slice(int(edges[each.position]), int(edges[each.position + 1]))
                ids.values[span].clamp_(min=0)
                keep[span] = True
        before = torch.zeros(len(keep) + 1, dtype=torch.int64)
        torch.cumsum(keep, 0, out=before[1:])
        weights = None if ids.weights is None else ids.weights[keep]
        return Jagged(ids.values[keep], before[ids.bag_offsets()], weights, ids.feature_count, ids.samples)
