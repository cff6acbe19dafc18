"""What training loses when fewer bytes cross: `python benchmarks/compression.py quality` (DCT, arXiv 2010.08899)."""

import argparse
import itertools
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from torch import Tensor, nn

from shadowsync import CompressedCut
from shadowsync.assembly import make_tables
from shadowsync.choices import choose_all
from shadowsync.config import Config
from shadowsync.embedding.table import widths

sys.path.insert(0, str(Path(__file__).parent))
from clustered import PUBLISHED, Cells, codec, load_average
from emulated import SYNTHETIC, train
from machine import describe, table, with_interval

TASKS: Mapping[str, tuple[str, ...]] = {
    "demo": ("data.rows=655360",),
    "synthetic": (*SYNTHETIC, "data.rows=655360"),
}
JOB = (
    *("aggregation.method=gba", "aggregation.global_batch=1024", "aggregation.rows=buffer"),
    *("train.workers=2", "train.batch_size=512"),
)
WIDE = 512
"""Units of the layer behind which the wide cut is."""
KINDS: Mapping[str, tuple[str, ...]] = {
    "dense": ("dense",),
    "cut": ("pull", "push"),
    "wide": ("wide",),
    "hybrid": ("dense", "pull", "push"),
    "both": ("dense", "pull", "push"),
}
"""What crosses by the part that a setting changes."""
KEPT = (0.04, 0.009, 0.003, 0.001)
"""Shares whose messages, with int8 values, are about 50, 200, 600 and 2,000 times shorter."""
TICKS = (2, 5, 10, 20, 50, 100, 200)
"""Of the picture."""
UNIQUE = "embedding.unique_rows=always"


def both(name: str, **options: object) -> tuple[str, ...]:
    """The same codec for pulls and pushes."""
    return (*codec("pull", name, **options), *codec("push", name, **options))


class Tally:
    """What crosses the cuts of a job, whose workers train copies of the module; of two at once one may be missed."""

    def __init__(self) -> None:
        self.sent = 0

    def __deepcopy__(self, _: object) -> "Tally":
        return self


class WideModel(nn.Module):
    """A wide ReLU layer over everything, the cut, and a tower."""

    def __init__(self, dense: int, features: Mapping[str, int], tally: Tally, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.features, self.tally, self.counted = tuple(features), tally, 0
        self.bottom = nn.Sequential(nn.Linear(dense + sum(features.values()), WIDE), nn.ReLU())
        self.cut = CompressedCut(**{"codec": "plain", **options})
        self.top = nn.Sequential(nn.Linear(WIDE, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Logits `[B]`."""
        vectors = torch.cat([dense, *(embeddings[name] for name in self.features)], dim=1)
        sent = self.cut.forward_bytes + self.cut.backward_bytes  # both ways of all batches before this one
        self.tally.sent, self.counted = self.tally.sent + sent - self.counted, sent
        logits: Tensor = self.top(self.cut(self.bottom(vectors))).squeeze(1)
        return logits


def wide_model(config: Config, tally: Tally, options: Sequence[str]) -> WideModel:
    """The model for the job's data."""
    source = choose_all(config, own_model=True).source.open("train", "error")
    assert source is not None
    schema = source.schema
    dims = widths(make_tables(config, schema))
    given: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(options)))
    return WideModel(len(schema.dense), dims, tally, given)


Setting = tuple[str, str, tuple[str, ...]]
"""Whose traffic is changed, the name of the setting, and its overrides; for the wide cut options of `CompressedCut`."""


def settings() -> Iterator[Setting]:
    """All of them, without a codec first; once more without one, which says what is chance."""
    yield "both", "plain", ()
    yield "both", "plain again", ()
    yield "wide", "plain", ()
    yield from _of_dense()
    yield from _of_cut()
    for name in ("int8", "int4"):
        yield "wide", name, (f"codec={name}",)
    for keep in (0.1, 0.05):
        yield "wide", f"DCT {keep:g}", _options(keep, PUBLISHED)
        yield "wide", f"threshold {keep:g}, int8", _options(keep, {"values": "int8"})
    yield "wide", "top-k 0.05, int8", _options(0.05, {"values": "int8", "refresh": 1})
    published = codec("dense", "threshold", keep=0.009, **PUBLISHED), codec("pull", "threshold", keep=0.2, **PUBLISHED)
    yield "hybrid", "DCT 0.009 and 0.2", (*published[0], *published[1])
    ours = codec("dense", "threshold", keep=0.009, values="int8"), _half_back(64, 0.5)
    yield "hybrid", "threshold 0.009, int8, and unique, int4 by 64, threshold 0.5 back", (*ours[0], *ours[1])


def _options(keep: float, given: Mapping[str, object]) -> tuple[str, ...]:
    return ("codec=threshold", f"keep={keep}", *(f"{option}={value}" for option, value in given.items()))


def _of_dense() -> Iterator[Setting]:
    for name in ("int8", "int4"):
        yield "dense", name, codec("dense", name)
    for keep in KEPT:
        yield "dense", f"DCT {keep:g}", codec("dense", "threshold", keep=keep, **PUBLISHED)
    for keep in KEPT[:2]:
        for values in ("fp32", "int8", "int4"):
            yield "dense", f"threshold {keep:g}, {values}", codec("dense", "threshold", keep=keep, values=values)
    yield "dense", "threshold 0.02, int8", codec("dense", "threshold", keep=0.02, values="int8")  # the documentation's
    yield "dense", "top-k 0.009, int8", codec("dense", "threshold", keep=0.009, values="int8", refresh=1)
    yield "dense", "DCT 0.009, no feedback", codec("dense", "threshold", keep=0.009, feedback=False, **PUBLISHED)
    once = {**PUBLISHED, "refresh": 1000}
    yield "dense", "DCT 0.009, chosen once", codec("dense", "threshold", keep=0.009, **once)


def _of_cut() -> Iterator[Setting]:
    for name in ("int8", "int4"):
        yield "cut", name, both(name)
    for keep in (0.2, 0.1, 0.05):
        yield "cut", f"DCT {keep:g}", codec("pull", "threshold", keep=keep, **PUBLISHED)
        yield "cut", f"threshold {keep:g}, int8", codec("pull", "threshold", keep=keep, values="int8")
    yield "cut", "top-k 0.1, int8", codec("pull", "threshold", keep=0.1, values="int8", refresh=1)
    yield "cut", "unique", (UNIQUE,)
    yield "cut", "unique, int8", (UNIQUE, *both("int8"))
    for block in (None, 64):
        coarse = {} if block is None else {"block": block}
        low = (*codec("pull", "int4", **coarse), *codec("push", "int4", rounding="stochastic", **coarse))
        yield "cut", f"unique, int4{'' if block is None else f' by {block}'}", (UNIQUE, *low)
    sparse = (*codec("pull", "threshold", keep=0.15, values="int8"), *codec("push", "int8"))
    yield "cut", "unique, threshold 0.15, int8", (UNIQUE, *sparse)
    for keep in (0.5, 0.1):
        yield "cut", f"unique, int4 by 64, threshold {keep:g} back", _half_back(64, keep)


def _half_back(block: int, keep: float) -> tuple[str, ...]:
    """Distinct rows in int4, their gradients thresholded."""
    back = codec("push", "threshold", keep=keep, values="int4", rounding="stochastic")
    return (UNIQUE, *codec("pull", "int4", block=block), *back)


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        task: what is trained.
        part: whose traffic is compressed: `dense`, `cut`, both of them (`hybrid`), `wide`, or none (`both`).
        setting: name of the codecs.
        overrides: that choose them; for `wide`, options of `CompressedCut`.
        seed: of the run.
    """

    task: str
    part: str
    setting: str
    overrides: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        """Of its file."""
        setting = self.setting.replace(",", "").replace(" ", "-")
        return f"{self.task}-{self.part}-{setting}-seed{self.seed}"


def run(cell: Cell) -> dict[str, Any]:
    """Trains one."""
    tally, base = Tally(), [*TASKS[cell.task], *JOB, f"train.seed={cell.seed}"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        if cell.part == "wide":
            result = train(base, out, model=lambda config: wide_model(config, tally, cell.overrides))
        else:
            result = train([*base, *cell.overrides], out)
    assert result.test is not None
    assert result.wire is not None
    return {
        **asdict(cell),
        "auc": result.test.auc,
        "ne": result.test.ne,
        "bytes": {**result.wire.bytes, "wide": tally.sent},
        "kept": result.wire.kept_share,
        "eps": result.throughput.eps,
        "load": load_average(),
    }


def against_plain(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with how many times fewer bytes they sent than the plain run, and what they gained over it."""
    plain = {(row["task"], row["seed"], row["part"]): row for row in rows if row["setting"] == "plain"}
    found = []
    for row in rows:
        part = "wide" if row["part"] == "wide" else "both"
        if (base := plain.get((row["task"], row["seed"], part))) is None or row["setting"] == "plain":
            continue
        sent = [sum(one["bytes"][kind] for kind in KINDS[row["part"]]) for one in (base, row)]
        found.append({**row, "fewer": sent[0] / sent[1], "gain": row["auc"] - base["auc"]})
    return found


def result_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each task and setting, over its seeds; the distance to plain is paired by seed."""
    compared = against_plain(rows)
    lines = []
    for task, part, setting in dict.fromkeys((row["task"], row["part"], row["setting"]) for row in compared):
        mine = [row for row in compared if (row["task"], row["part"], row["setting"]) == (task, part, setting)]
        gains = [row["gain"] for row in mine]
        shares = [[row["kept"][kind] for kind in KINDS[part] if kind in row.get("kept", {})] for row in mine]
        kept = [share[0] for share in shares if share]
        lines.append(
            (
                *(task, part, setting, len(mine), f"{statistics.fmean(row['fewer'] for row in mine):.1f}"),
                f"{100 * statistics.fmean(kept):.2f} %" if kept else "-",
                f"{statistics.fmean(row['auc'] for row in mine):.4f}",
                *(with_interval(gains, signed=True), f"{min(gains):+.4f}"),
                f"{statistics.fmean(row['ne'] for row in mine):.4f}",
                f"{statistics.fmean(row['eps'] for row in mine):,.0f}",
            )
        )
    head = ["task", "compressed", "codec", "seeds", "times fewer bytes", "kept"]
    return table([*head, "AUC", "to plain", "worst", "NE", "examples/s"], lines)


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """What AUC is lost over how many times fewer bytes: a row of panels for each task, a column for each part."""
    compared = against_plain(rows)
    tasks = list(dict.fromkeys(row["task"] for row in compared))
    compared = [row for row in compared if row["part"] != "both"]
    parts = [part for part in KINDS if any(row["part"] == part for row in compared)]
    families = dict.fromkeys(family(row["setting"]) for row in compared)
    colours = dict(zip(families, matplotlib.colormaps["tab20"].colors, strict=False))
    figure = Figure(figsize=(4.5 * len(parts) + 3, 4 * len(tasks)), layout="constrained")
    every = figure.subplots(len(tasks), len(parts), squeeze=False, sharey=True)
    shown = {}
    for (task, part), axes in zip(itertools.product(tasks, parts), every.flat, strict=True):
        mine = [row for row in compared if (row["task"], row["part"]) == (task, part)]
        for name in dict.fromkeys(family(row["setting"]) for row in mine):
            own = [row for row in mine if family(row["setting"]) == name]
            points = [row["fewer"] for row in own], [row["gain"] for row in own]
            (shown[name],) = axes.plot(*points, "o", color=colours[name], alpha=0.8)
        axes.set(title=f"{task}: {part}", xlabel="times fewer bytes", ylabel="AUC over plain", xscale="log")
        axes.set_xticks(TICKS, [str(tick) for tick in TICKS], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_yscale("symlog", linthresh=0.001)
        axes.axhline(-0.0005, color="grey", linewidth=0.8)
    figure.legend(list(shown.values()), list(shown), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=90)


def family(setting: str) -> str:
    """The settings that differ in how much is kept only."""
    return re.sub(r"(threshold|top-k|DCT) [0-9.]+", r"\1", setting)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `quality`."""
    parser.add_argument("--out", type=Path, required=True, help="a file for each run; started again, it goes on there")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--parts", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--settings", nargs="+", help="names of those to run, as in the table; all if left out")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--report", action="store_true", help="only print what has been run")
    parser.set_defaults(run=quality)


def quality(given: argparse.Namespace) -> None:
    """Runs what is missing, and prints the table."""
    print("\n".join(describe()))
    kept = Cells(given.out)
    wanted = itertools.product(range(given.seeds), given.tasks, settings())
    cells = [Cell(task, *setting, seed) for seed, task, setting in wanted if setting[0] in (*given.parts, "both")]
    chosen = [cell for cell in cells if given.settings is None or cell.setting in (*given.settings, "plain")]
    if not given.report:
        kept.run_missing(chosen, lambda cell: cell.name, run)
    rows = kept.those(cell.name for cell in cells)
    print("\n" + result_table(rows))
    if given.picture is not None and against_plain(rows):
        picture(rows, given.picture)
