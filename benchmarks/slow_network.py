"""How much sooner a job is as good over a slow network when its messages are compressed.

    python benchmarks/slow_network.py --out FOLDER [--rounds 3] [--variants DCT auto] [--rate 150mbit]
    … --report      prints the table of what has been run so far

Two hosts of one core each (see `testbed.py`) train the demo once through. First the rate of the links is found at which
the plain job takes twice the time that it takes at 10 Gbit/s, so that it spends half of it on the network; then plain
and compressed jobs take turns there. A job's time is that from its first batch to when the normalized entropy of its
progressive predictions has come down to the worse of its own and the plain job's last. Rates are medians over the
rounds; time and AUC against the plain run of the round have an interval of 95 % (Student's t). Root rights are needed.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent))
from clustered import WIRES, Cells, in_sentences, load_average, run_and_report, start_ray, train
from machine import table, with_interval
from namespaces import bits_per_second
from testbed import RayNode, Testbed

from shadowsync.report.files import read_frames

JOB = ("train.trainers=2", "train.batch_size=1024", "data.name=completejourney")
VARIANTS = ("DCT", "both thresholds", "int4", "int4, threshold", "auto")
FREE = "10gbit"
PROBES = 4
PROBE_ROWS = 250_000
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Cell:
    """One run."""

    rate: str
    variant: str
    round: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.rate}-{self.variant}-{self.round:02}".replace(", ", "-")


def run(rate: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Trains, and says how the progressive NE came down (`[seconds, NE]`)."""
    with tempfile.TemporaryDirectory() as folder, Testbed(hosts=2, rate=rate, cores=1) as testbed:
        start_ray(testbed, [RayNode(), RayNode()])
        out = Path(folder) / "run"
        result = train(testbed, out, [*JOB, *overrides], TIMEOUT_S)
        course = [[frame.seconds, frame.ne_lifetime] for frame in read_frames(out) if frame.ne_lifetime is not None]
    test = result["test"] or {}
    return {
        "eps": result["throughput"]["eps"],
        "seconds": result["throughput"]["seconds"],
        "auc": test.get("auc"),
        "ne": test.get("ne"),
        "wire": result["wire"],
        "course": course,
        "load": load_average(),
    }


def half_rate(kept: Cells) -> str:
    """The rate at which the plain job has half of its speed, between two that were tried."""

    def eps(rate: str) -> float:
        name = f"probe-{rate}"
        if (found := kept.read(name)) is None:
            found = {"rate": rate, "probe": True, **run(rate, [f"data.rows={PROBE_ROWS}"])}
            kept.write(name, found)
            print(f"plain at {rate}: {found['eps']:,.0f} examples/s", file=sys.stderr, flush=True)
        speed: float = found["eps"]
        return speed

    free, slow, fast = eps(FREE), 20e6, 1e9
    for _ in range(PROBES):
        middle = f"{(slow * fast) ** 0.5 / 1e6:.0f}mbit"
        slow, fast = (slow, bits_per_second(middle)) if eps(middle) > free / 2 else (bits_per_second(middle), fast)
    return f"{(slow * fast) ** 0.5 / 1e6:.0f}mbit"


def seconds_to(course: Sequence[Sequence[float]], ne: float) -> float:
    """When the progressive NE came down to that."""
    return next(seconds for seconds, found in course if found <= ne)


Compared = tuple[Mapping[str, Any], float, float]
"""A run, by how many percent less time it took than the plain one of its round, and what AUC it gained over that."""


def compared(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Compared]]:
    """By rate and variant, the runs of all rounds."""
    runs = {(row["rate"], row["round"], row["variant"]): row for row in rows if "probe" not in row}
    found: dict[tuple[str, str], list[Compared]] = {}
    for (rate, number, variant), row in runs.items():
        if (plain := runs.get((rate, number, "plain"))) is not None:
            target = max(row["course"][-1][1], plain["course"][-1][1])
            less = 100 * (1 - seconds_to(row["course"], target) / seconds_to(plain["course"], target))
            found.setdefault((rate, variant), []).append((row, less, row["auc"] - plain["auc"]))
    return found


def megabytes(row: Mapping[str, Any]) -> float:
    """What crossed in a run."""
    return float(sum(row["wire"]["bytes"].values())) / 1e6


def result_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of each variant over the rounds, each run against the plain one of its round."""
    lines = []
    for (rate, variant), each in compared(rows).items():
        mine, shares, gains = zip(*each, strict=True)
        whole = [sum(row["wire"]["raw_bytes"].values()) / 1e6 / megabytes(row) for row in mine]
        lines.append(
            (
                *(rate, variant, len(mine), f"{statistics.median(row['eps'] for row in mine):,.0f}"),
                f"{statistics.median(row['seconds'] for row in mine):.1f}",
                with_interval(shares, digits=0) + " %",
                *(f"{statistics.fmean(map(megabytes, mine)):,.0f}", f"{statistics.fmean(whole):.1f}"),
                *(f"{statistics.fmean(row[name] for row in mine):.4f}" for name in ("auc", "ne")),
                with_interval(gains, signed=True),
            )
        )
    head = ["rate", "codecs", "rounds", "examples/s", "s", "less time to the same NE", "MB", "fewer than in fp32"]
    return table([*head, "AUC", "NE", "AUC to plain"], lines)


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Time to the same NE over what crossed, and AUC over that, a point for each run."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    time, quality = figure.subplots(1, 2, sharex=True)
    for (rate, variant), each in compared(rows).items():
        crossed = [megabytes(row) for row, *_ in each]
        time.plot(crossed, [less for _, less, _ in each], "o", label=f"{variant}, {rate}")
        quality.plot(crossed, [gain for *_, gain in each], "o")
    time.set(xlabel="MB that crossed", ylabel="% less time to the same NE than plain")
    quality.set(xlabel="MB that crossed", ylabel="AUC to plain")
    quality.axhline(0, color="0.6", lw=0.8)
    time.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def run_all(given: argparse.Namespace, kept: Cells) -> None:
    """What is missing, round by round."""
    rate = given.rate or half_rate(kept)
    for number, variant in itertools.product(range(given.rounds), dict.fromkeys(["plain", *given.variants])):
        cell = Cell(rate, variant, number)
        if kept.read(cell.name) is None:
            found = asdict(cell) | run(rate, [*WIRES[variant], f"train.seed={number}"])
            kept.write(cell.name, found)
            print(cell.name, f"{found['eps']:,.0f} examples/s", file=sys.stderr, flush=True)


def main() -> None:
    """Runs what has not been run, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=WIRES)
    parser.add_argument("--rate", help="of the links, instead of the one at which plain messages take half the time")
    run_and_report(parser, run_all, result_table, picture)


if __name__ == "__main__":
    in_sentences(main)
