"""What each table costs: the time of real look-ups, measured."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from shadowsync.data.batch import Jagged
from shadowsync.embedding.storage import RowOptimizer, Storage
from shadowsync.embedding.table import Shard, Table

SURROGATE_ROWS = 1 << 15


@dataclass(frozen=True)
class Probe:
    """How costs are measured.

    Attributes:
        storage: what holds the rows.
        optimizer: what the push applies.
        repeats: measurements of each batch; more costs time and evens out disturbances.
        clock: seconds now.
    """

    storage: type[Storage]
    optimizer: RowOptimizer
    repeats: int = 3
    clock: Callable[[], float] = time.perf_counter


def measure_costs(
    tables: Sequence[Table], features: Sequence[str], batches: Sequence[Jagged], probe: Probe
) -> dict[str, float]:
    """Seconds that one pull and one push of each table take, by the table's name: the median over batches and repeats.

    A surrogate of at most 32,768 rows stands for the table, with ids folded into it: this keeps how many ids there are
    and how often the frequent ones repeat, costs a few MB, and leaves out only misses of the processor's caches on
    tables larger than that.

    Args:
        tables: what is to be placed.
        features: names of the features of `batches`, in their order.
        batches: a few real batches, not empty.
        probe: how to measure.
    """
    positions = {feature: index for index, feature in enumerate(features)}
    return {table.name: _cost(table, [positions[f] for f in table.features], batches, probe) for table in tables}


def _cost(table: Table, positions: Sequence[int], batches: Sequence[Jagged], probe: Probe) -> float:
    rows = min(table.rows, SURROGATE_ROWS)
    surrogate = Shard(replace(table, rows=rows), 0, rows)
    storage = probe.storage([surrogate], [0] * len(positions), probe.optimizer, 0)
    seconds = []
    for batch in batches:
        ids = batch.select(positions)
        folded = replace(ids, values=ids.values % rows)
        _look_up(storage, folded)  # the first look-up plans and warms up
        for _ in range(probe.repeats):
            start = probe.clock()
            _look_up(storage, folded)
            seconds.append(probe.clock() - start)
    return statistics.median(seconds)


def _look_up(storage: Storage, ids: Jagged) -> None:
    features = range(ids.feature_count)
    pooled = storage.pull(ids, features)
    storage.push(ids, features, torch.ones_like(pooled), 0.0)
