"""How evenly the tables are spread over embedding servers: what the busiest of them takes, and that over the mean.

    python benchmarks/placement.py --out FOLDER [--servers 2 4 8] [--rounds 5] [--batches 40]
    … --report      prints the tables of what has been run so far

Tables of Criteo Kaggle's sizes with an id each, and those of MLPerf's DLRM-DCNv2 with as many ids in a sample as its
synthetic multi-hot data has (`multi_hot_sizes` of the MLCommons reference, from 1 to 100), at most a million rows each.
The servers of a placement stand in this process and are asked one after the other, by one thread, so what one of them
takes for its pulls and pushes is what it would be busy with on a core of its own, without messages and network.

`job` is what a job on a cluster does: costs are measured, tables of many ids in a sample are cut, and the costliest
part goes to the server with the least so far; `profiled` is the same with whole tables. So are the others: `look-ups`
by ids in a sample, `bytes` by size, `round-robin` one after the other; `row_wise` cuts every table over all servers.

Placements take turns in every round, and figures are medians over the rounds. Any placement gives the same vectors (the
project's tests), so there is no quality to tell. A finished round is a line of FOLDER/runs.jsonl.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells, load_average, run_and_report
from machine import table
from throughput import KAGGLE_ROWS

from shadowsync.data.batch import Jagged
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.optimizers import RowOptimizer, RowwiseAdagrad
from shadowsync.embedding.placement import Cost, cut, measure_costs, place, row_bytes, row_wise
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.storage import AUTO, storage_class
from shadowsync.embedding.table import Shard, Table

DIM, SAMPLES, MOST_ROWS = 16, 1024, 1_000_000
MLPERF_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209),
    *(11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
MLPERF_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
TASKS = {"Kaggle": (KAGGLE_ROWS, (1,) * len(KAGGLE_ROWS)), "MLPerf": (MLPERF_ROWS, MLPERF_IDS)}
Placed = Sequence[Sequence[Shard]]


def batches(rows: Sequence[int], ids: Sequence[int], count: int) -> list[Jagged]:
    """Of ids that are all alike frequent, `ids` of each feature."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(ids).repeat_interleave(SAMPLES)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    most = torch.tensor(rows).repeat_interleave(torch.tensor(ids) * SAMPLES)
    drawn = (torch.randint(1 << 40, most.shape, generator=generator) % most for _ in range(count))
    return [Jagged(values, offsets, None, len(rows), SAMPLES) for values in drawn]


def round_robin(tables: Sequence[Table], optimizer: RowOptimizer, servers: int) -> Placed:
    """One after the other."""
    items = cut(tables, {table.name: Cost(1.0) for table in tables}, optimizer, servers)
    return [[item.shard for item in items[number::servers]] for number in range(servers)]


def placements(
    tables: Sequence[Table], ids: Sequence[int], batch: Jagged, optimizer: RowOptimizer, servers: int
) -> Iterator[tuple[str, Placed]]:
    """Each by its name."""
    names = [table.name for table in tables]
    costs = measure_costs(tables, names, [batch], storage_class(AUTO), optimizer)
    yield "job", place(tables, costs, optimizer, servers, cut_costly=True)
    yield "profiled", place(tables, costs, optimizer, servers)
    yield "look-ups", place(tables, {n: Cost(float(i)) for n, i in zip(names, ids, strict=True)}, optimizer, servers)
    sizes = {table.name: Cost(float(table.rows * row_bytes(table, optimizer))) for table in tables}
    yield "bytes", place(tables, sizes, optimizer, servers)
    yield "round-robin", round_robin(tables, optimizer, servers)
    yield "row_wise", row_wise(tables, optimizer, servers)


class Timed:
    """Calls, and the seconds that they took."""

    def __init__(self, call: Callable[..., Any], seconds: list[float], server: int) -> None:
        self._call, self._seconds, self._server = call, seconds, server

    def __call__(self, *given: Any) -> Any:
        start = time.perf_counter()
        found = self._call(*given)
        self._seconds[self._server] += time.perf_counter() - start
        return found


def busy(tables: Sequence[Table], placed: Placed, asked: Sequence[Jagged], optimizer: RowOptimizer) -> list[float]:
    """Seconds of each server for all batches but the first."""
    servers = [EmbeddingServer(shards, storage_class(AUTO), optimizer, seed=0) for shards in placed if shards]
    seconds = [0.0] * len(servers)
    for number, server in enumerate(servers):
        calls: Any = server
        calls.pull, calls.push = Timed(server.pull, seconds, number), Timed(server.push, seconds, number)
    client = EmbeddingClient(tables, [table.name for table in tables], servers)
    for number, batch in enumerate(asked):
        if number == 1:
            seconds[:] = [0.0] * len(servers)
        pulled = client.pull(batch)
        client.push(pulled, torch.full_like(pulled.pooled, 0.01), 0.05)
    return seconds


def run_all(given: argparse.Namespace, kept: Cells) -> None:
    """What is missing, round by round."""
    torch.set_num_threads(1)
    optimizer = RowwiseAdagrad(eps=1e-8)
    for number in range(given.rounds):
        for task, (all_rows, ids) in TASKS.items():
            rows = [min(count, MOST_ROWS) for count in all_rows]
            tables = [Table(f"t{position}", count, DIM, (f"t{position}",)) for position, count in enumerate(rows)]
            asked = batches(rows, ids, given.batches)
            for servers in given.servers:
                name = f"{task}, {servers} servers, round {number}"
                if kept.read(name) is None:
                    ways = placements(tables, ids, asked[0], optimizer, servers)
                    seconds = {way: busy(tables, placed, asked, optimizer) for way, placed in ways}
                    told = {"task": task, "servers": servers, "batches": given.batches, "load": load_average()}
                    kept.write(name, {**told, "seconds": seconds})
                    print(name, file=sys.stderr, flush=True)


Figures = Mapping[tuple[str, int, str], Sequence[tuple[float, float, float]]]
"""By tables, servers and placement, of each round: milliseconds of the busiest, over the mean, to a job's placement."""


def figures_of(rows: Sequence[Mapping[str, Any]]) -> Figures:
    """Of all rounds."""
    found: dict[tuple[str, int, str], list[tuple[float, float, float]]] = {}
    for row in rows:
        most = {way: max(seconds) / (row["batches"] - 1) for way, seconds in row["seconds"].items()}
        for way, seconds in row["seconds"].items():
            spread = max(seconds) / (sum(seconds) / row["servers"])
            told = 1e3 * most[way], spread, most[way] / most["job"]
            found.setdefault((row["task"], row["servers"], way), []).append(told)
    return found


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the rounds."""
    lines = []
    for (task, servers, way), rounds in figures_of(rows).items():
        busiest, spread, slower = (statistics.median(values) for values in zip(*rounds, strict=True))
        figures = busiest, spread, max(values[1] for values in rounds), slower
        lines.append((task, servers, way, len(rounds), *(f"{figure:.2f}" for figure in figures)))
    header = ["tables", "servers", "placement", "rounds", "busiest, ms", "over the mean", "at worst", "to a job's"]
    return table(header, lines)


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The busiest server over the mean, median over the rounds, a panel for each task, a group of bars per number of
    servers."""
    found = figures_of(rows)
    tasks, counts, ways = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    figure = Figure(figsize=(6 * len(tasks), 4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for number, way in enumerate(ways):
            spreads = [statistics.median(spread for _, spread, _ in found[task, count, way]) for count in counts]
            places = [place + 0.8 * number / len(ways) for place in range(len(counts))]
            axes.bar(places, [spread - 1 for spread in spreads], 0.8 / len(ways), bottom=1, label=way)
        axes.set_xticks([place + 0.4 for place in range(len(counts))], [f"{count} servers" for count in counts])
        axes.set(title=task, ylabel="busiest server over the mean")
    figure.axes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=40, help="of 1,024 samples; the first one is not timed")
    run_and_report(parser, run_all, report, picture)


if __name__ == "__main__":
    main()
