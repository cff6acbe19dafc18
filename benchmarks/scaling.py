"""Speed and sync gap of the replica methods against the number of trainers, where the dense servers' network is short.

    python benchmarks/scaling.py --out FOLDER [--trainers 1 5 10 15 20] [--rate 6mbit] [--picture scaling.png]
    python benchmarks/scaling.py --out FOLDER --report      prints the table of what has been run so far

Every trainer is emulated: it computes a small batch, then waits until its step has lasted as long as on the machine it
stands for, so that twenty of them fit on two cores. Servers and network are real: each dense server has a host of its
own in the testbed behind a link of `--rate`, and so has the server of rows; links of trainers are not short. Averages
(MA, BMUF) need no server: there each trainer has `--rate` of its host's link, those of a host average in its memory,
and hosts with each other. A finished run is a line of FOLDER/runs.jsonl; started again, the script goes on where it
stopped. Root rights are needed.

Trainers whose steps all last alike and that began together would stay together: all at work, then all at the network.
Machines are not like that, nor is the law below. So a trainer's first step lasts up to as long as it has, by the law,
from one exchange to the next, and half of all steps up to half as long again as the others (`train.stragglers`): `T` is
the mean.

The law (the project's own arithmetic): `|w|` bytes of the dense part, `P` servers of usable bandwidth `b`, steps of `T`
seconds. An exchange carries `|w| / P` to each server and as much back, `S = |w| / (P b)` seconds each way. `n` trainers
that exchange every `k` iterations make `min(n / (k T + 2 S), 1 / S)` exchanges a second: linear up to
`n = (k T + 2 S) / S`, and no more than `1 / S` from there on. With queues: what mean value analysis (Reiser and
Lavenberg 1980) gives for a closed network of two links that trainers share evenly and `k T` of thinking, where some
wait before the links are full. It leaves out that an exchange waits for the slower of its servers, where links are not
shared evenly: one server with the links of two is run beside them. In the background there is no thinking, all train
on, and the gap is `(n + 1) S / T` iterations.
"""

import argparse
import functools
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from shadowsync.assembly import make_module, make_tables
from shadowsync.choices import choose_all
from shadowsync.config import load
from shadowsync.report.files import read_frames

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells, in_sentences, load_average, run_and_report, start_ray, train
from machine import table
from namespaces import bits_per_second
from testbed import RayNode, Testbed

BACK_TO_BACK = "sync.max_share=1"
"""As in the paper: the network alone sets the pace."""
METHODS: Mapping[str, tuple[str, int]] = {
    "background EASGD": ("easgd", 0),
    "EASGD every 5": ("easgd", 5),
    "EASGD every 30": ("easgd", 30),
    "background MA": ("ma", 0),
    "background BMUF": ("bmuf", 0),
}
"""The method, and in the foreground after how many iterations."""
K: Mapping[str, int] = {name: k for name, (method, k) in METHODS.items() if method == "easgd"}
"""Iterations between two exchanges that nobody waits for, of methods that the law covers."""
COUNTS: Mapping[str, Sequence[int]] = {
    "EASGD every 30": (1, 20),
    "background MA": (1, 5, 20),
    "background BMUF": (1, 20),
}
"""Of trainers, for methods that are not run with every number."""
MEAN_FACTOR = 1 + 0.5 * 0.25
"""By which steps last longer than `--step-ms` in the mean: half of them, drawn each by itself, 1 to 1.5 times."""
TASK = (
    *(
        "data.name=synthetic",
        "data.features=2",
        "data.table_rows=1000",
        "data.dense_share=0.9",
        "data.repeat_blocks=16",
    ),
    *(
        "data.test_rows=50000",
        "data.slice_rows=256",
        "train.workers=1",
        "embedding.servers=1",
        "model.embedding_dim=2",
    ),
    *("report.html=false", "report.tensorboard=false", "report.every_s=0.5"),
)
PLACES = "cluster.trainer_resource=trainer", "cluster.server_resource=server", "cluster.server_cpus=1"
"""A server's host has one CPU, so that each server gets a link of its own."""
BATCH = 64
TRAINER_HOSTS = 4
USABLE = 0.95  # of a link's rate, for what TCP carries
MORE_SERVERS_FOR = ("EASGD every 5", "background EASGD")
ALONE = "EASGD every 5"
"""Is run on one server too, with the links of as many as the first number in one."""
SHORTER = {"EASGD every 5": 3.0, "EASGD every 30": 1.0}
"""By what the steps of a run are divided, where each takes longer; 1.5 for the others."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    trainers: int
    dense_servers: int
    method: str


@dataclass(frozen=True)
class Emulated:
    """What is emulated.

    Attributes:
        rate: of a dense server's link, and of each trainer's.
        step_ms: how long a trainer's step lasts.
        steps: of each trainer at most.
    """

    rate: str
    step_ms: float
    steps: int

    def together(self, servers: int) -> "Emulated":
        """With the links of so many servers in one."""
        return replace(self, rate=f"{servers * bits_per_second(self.rate) / 1e6:g}mbit")

    def name(self, cell: Cell) -> str:
        """Of a run."""
        what = f"{cell.method} on {cell.dense_servers} with {cell.trainers:02}"
        return f"{what}, {self.rate}, {self.step_ms:g} ms x {self.steps}".replace(" ", "-")


def synchronised(method: str, k: int) -> tuple[str, ...]:
    """Overrides of one of `METHODS`."""
    schedule = ("sync.schedule=every_k", f"sync.k={k}") if k else ("sync.schedule=background", BACK_TO_BACK)
    return f"sync.method={method}", *schedule


def apart(step_ms: float, longest: float) -> str:
    """How steps differ, so that trainers do not stay together: the first is up to so many times longer."""
    first = f"share=1,slow=1-{longest:.1f},for_s=1000,until_s={1.5e-3 * step_ms:g}"
    return f"train.stragglers={first};share=0.5,slow=1-1.5,for_s=0.1,seed=1"


def grid(trainers: Sequence[int], servers: Sequence[int], emulated: Emulated) -> Iterator[tuple[list[Cell], Emulated]]:
    """All runs, those that share a testbed together, with what is emulated; not every method is run on more servers
    than the first."""
    for place, count in itertools.product(range(len(servers)), trainers):
        methods = METHODS if place == 0 else MORE_SERVERS_FOR
        chosen = [method for method in methods if count in COUNTS.get(method, trainers)]
        yield [Cell(count, servers[place], method) for method in chosen], emulated
    yield from (([Cell(count, 1, ALONE)], emulated.together(servers[0])) for count in trainers if servers[0] > 1)


def layout(trainers: int, dense_servers: int) -> tuple[list[RayNode], list[int]]:
    """The Ray nodes, host 0 for the driver alone, and on how many links' worth each host's link is.

    Returns:
        A node for each host, and for each host the multiple of the rate that its link has; 0 for unshaped.
    """
    hosts = min(trainers, TRAINER_HOSTS)
    each = [trainers // hosts + (index < trainers % hosts) for index in range(hosts)]
    servers = [RayNode(cpus=1, resources={"server": 1000}) for _ in range(dense_servers + 1)]
    trainer_hosts = [RayNode(cpus=count, resources={"trainer": 1000}) for count in each]
    return [RayNode(cpus=0), *servers, *trainer_hosts], [0, *([1] * len(servers)), *each]


def steps_of(cell: Cell, emulated: Emulated) -> int:
    """Of each trainer."""
    return int(emulated.steps / SHORTER.get(cell.method, 1.5))


def cycle_s(cell: Cell, emulated: Emulated) -> float:
    """Of a trainer, from one exchange that it waits for to the next, by the law; 0 where it waits for none."""
    if not K.get(cell.method):
        return 0.0
    row = {**asdict(cell), **asdict(emulated), "dense_bytes": dense_bytes()}
    return cell.trainers / exchanges(row, cell.trainers, queues=True)


def overrides(cell: Cell, emulated: Emulated) -> list[str]:
    """Of a run."""
    return [
        *TASK,
        *synchronised(*METHODS[cell.method]),
        f"data.rows={cell.trainers * steps_of(cell, emulated) * BATCH}",
        f"train.trainers={cell.trainers}",
        f"train.batch_size={BATCH}",
        f"train.emulate_step_ms={emulated.step_ms:g}",
        apart(emulated.step_ms, max(1.0, 1e3 * cycle_s(cell, emulated) / emulated.step_ms)),
        f"cluster.dense_servers={cell.dense_servers if 'EASGD' in cell.method else 1}",  # averages need none
        *PLACES,
    ]


def run_group(cells: Sequence[Cell], emulated: Emulated, kept: Cells, extra: Sequence[str]) -> None:
    """Runs what has not been run of cells that share a testbed."""
    missing = [cell for cell in cells if kept.read(emulated.name(cell)) is None]
    if not missing:
        return
    nodes, links = layout(cells[0].trainers, cells[0].dense_servers)
    with Testbed(hosts=len(nodes), rate=None) as testbed:
        start_ray(testbed, nodes)
        for cell in missing:
            first = 2 + cell.dense_servers  # of the trainers' hosts
            short = range(1, first) if cell.method in K else range(first, len(nodes))
            for host, multiple in enumerate(links):
                bits = bits_per_second(emulated.rate) * multiple
                testbed.rate(host, f"{bits / 1e3:.0f}kbit" if host in short else None)
            kept.write(emulated.name(cell), run(testbed, cell, emulated, extra))
            print(cell, "done", file=sys.stderr, flush=True)


def run(testbed: Testbed, cell: Cell, emulated: Emulated, extra: Sequence[str]) -> dict[str, Any]:
    """One run's figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        result = train(testbed, out, [*overrides(cell, emulated), *extra], timeout_s=900.0)
        points = [(frame.seconds, frame.samples) for frame in read_frames(out)]
    return {
        **asdict(cell),
        **asdict(emulated),
        "eps": steady_rate(points, result["data"]["train_samples"]) or result["throughput"]["eps"],
        "eps_whole": result["throughput"]["eps"],
        "gap": result["sync"]["average_gap"],
        "auc": result["test"]["auc"],
        "samples": result["data"]["trained_samples"],
        "dense_bytes": dense_bytes(),
        "load": load_average(),
    }


def steady_rate(points: Sequence[tuple[float, int]], total: int) -> float | None:
    """Samples per second between a quarter and nine tenths of the run, when all trainers are at work.

    Args:
        points: seconds and samples so far.
        total: samples of the run.

    Returns:
        None where the points are too few to tell.
    """
    inside = [point for point in points if 0.25 * total <= point[1] <= 0.9 * total]
    if len(inside) < 2 or inside[-1][0] <= inside[0][0]:
        return None
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


@functools.cache
def dense_bytes() -> int:
    """`|w|` of the model, float32."""
    config = load(None, TASK)
    choices = choose_all(config, own_model=False)
    source = choices.source.open("train", "error")
    assert source is not None
    tables = make_tables(config, source.schema)
    module = make_module(config, choices, source.schema, tables, None)
    return 4 * sum(parameter.numel() for parameter in module.parameters())


def exchange_s(row: Mapping[str, Any]) -> float:
    """`S`, of one exchange one way where nobody else is on the links."""
    usable = USABLE * bits_per_second(row["rate"]) / 8
    return float(row["dense_bytes"] / (row["dense_servers"] * usable))


def step_s(row: Mapping[str, Any]) -> float:
    """`T`, of a trainer's step in the mean."""
    return float(MEAN_FACTOR * row["step_ms"] / 1e3)


def thinking_s(row: Mapping[str, Any]) -> float:
    """Of a trainer from one exchange to the next."""
    return K[row["method"]] * step_s(row)


def exchanges(row: Mapping[str, Any], trainers: int, queues: bool) -> float:
    """A second, of so many trainers, by the law."""
    once, thinking = exchange_s(row), thinking_s(row)
    if not queues:
        return min(trainers / (thinking + 2 * once), 1 / once)
    waiting, rate = 0.0, 0.0
    for count in range(1, trainers + 1):
        each = once * (1 + waiting)  # who comes finds at each of the two links what one trainer less would leave there
        rate = count / (thinking + 2 * each)
        waiting = rate * each
    return rate


def predicted_gap(row: Mapping[str, Any]) -> float | None:
    """Iterations between two syncs, by the law; None for methods that it does not cover."""
    if row["method"] not in K:
        return None
    between = row["trainers"] / exchanges(row, row["trainers"], queues=True) / step_s(row)
    return float(K[row["method"]]) or max(1.0, between)


def predicted_share(row: Mapping[str, Any], queues: bool) -> float | None:
    """Of linear speed, by the law; None for methods that it does not cover."""
    if row["method"] not in K:
        return None
    single = exchanges(row, 1, queues)
    return exchanges(row, row["trainers"], queues) / (row["trainers"] * single) if K[row["method"]] else 1.0


def linear(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> float | None:
    """This row's speed over that of so many times one trainer with the same method and servers; None without one."""
    single = [
        other["eps"]
        for other in rows
        if (other["method"], other["dense_servers"], other["trainers"]) == (row["method"], row["dense_servers"], 1)
    ]
    return float(row["eps"] / (row["trainers"] * single[0])) if single else None


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of all runs."""
    order = list(METHODS)
    ordered = sorted(rows, key=lambda row: (row["dense_servers"], order.index(row["method"]), row["trainers"]))
    lines = [
        (
            row["method"],
            *(_servers(row), row["trainers"], f"{row['eps']:,.0f}"),
            *(_share(linear(rows, row)), *(_share(predicted_share(row, queues)) for queues in (False, True))),
            *(_number(row["gap"]), _number(predicted_gap(row)), _number(row["auc"], 4), f"{row['load']:.1f}"),
        )
        for row in ordered
    ]
    head = ["emulated", "servers", "trainers", "examples/s", "of linear", "law", "with queues"]
    head += ["gap", "law", "AUC", "load"]
    return table(head, lines)


def _servers(row: Mapping[str, Any]) -> str:
    return f"{row['dense_servers']} at {row['rate']}" if row["method"] in K else "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws speed and gap over the trainers, and where the law has every-5 EASGD saturate."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    speed, gap = figure.subplots(1, 2)
    counts = sorted({row["trainers"] for row in rows})
    for place, (method, servers) in enumerate(sorted({(row["method"], row["dense_servers"]) for row in rows})):
        line = sorted((r for r in rows if (r["method"], r["dense_servers"]) == (method, servers)), key=_trainers)
        style: dict[str, Any] = {"marker": "o", "ms": 4, "color": f"C{place}", "label": f"{method}, {servers} servers"}
        speed.plot([r["trainers"] for r in line], [r["eps"] for r in line], **style)
        gaps = [r for r in line if r["gap"] is not None]
        gap.plot([r["trainers"] for r in gaps], [r["gap"] for r in gaps], **style)
        if K.get(method) == K["EASGD every 5"]:
            fills = thinking_s(line[0]) / exchange_s(line[0]) + 2
            speed.axvline(fills, color=f"C{place}", linestyle=":", lw=1)
    single = [row["eps"] for row in rows if row["trainers"] == 1]
    if single:
        speed.plot(counts, [max(single) * count for count in counts], color="0.6", linestyle="--", label="linear")
    for axes, title in (
        (speed, "examples/s (dotted: where the law has it saturate)"),
        (gap, "average sync gap, iterations"),
    ):
        axes.set(title=title, xlabel="emulated trainers", xscale="log", yscale="log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    speed.legend(fontsize=7)
    figure.savefig(path, dpi=130)


def _trainers(row: Mapping[str, Any]) -> int:
    return int(row["trainers"])


def run_all(given: argparse.Namespace, kept: Cells) -> None:
    """What is missing, group by group."""
    for cells, used in grid(given.trainers, given.servers, Emulated(given.rate, given.step_ms, given.steps)):
        run_group(cells, used, kept, given.overrides)


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, nargs="+", default=[1, 5, 10, 15, 20])
    parser.add_argument(
        "--servers", type=int, nargs="+", default=[2, 4], help="dense servers; all methods on the first"
    )
    parser.add_argument("--rate", default="6mbit", help="of each dense server's link; of averages, each trainer's")
    parser.add_argument("--step-ms", type=float, default=1000.0, help="of an emulated step, the shortest")
    steps = "of each trainer; a third where it exchanges every 5, two thirds in the background"
    parser.add_argument("--steps", type=int, default=180, help=steps)
    parser.add_argument("overrides", nargs="*", help="of every run")
    run_and_report(parser, run_all, report, picture)


if __name__ == "__main__":
    in_sentences(main)
