"""How surely a default job ends well: many runs of each method and length, their spread, and their dead units.

    python benchmarks/collapse.py --out FILE.jsonl [--rows 50000 150000 all] [--runs 8] [--seeds 0]
        [--methods sync gba easgd ma bmuf none plain plain-sync] [--precisions auto] [--set key=value …]

Every run is a process of its own, one at a time, and all cells take turns. Each finished run is a line of the file;
started again, the script repeats none that is there. `--set` may be given several times, each time for a candidate that
is compared with the others; `--set` without anything is the candidate that changes nothing.

`plain` is a plain PyTorch loop (one replica, two threads inside torch) with the job's model, optimizers, learning rates
and warm-up; a step takes the samples of one batch, and under `plain-sync` those of all trainers. A run has collapsed
where its AUC is more than 0.003 below the median of its cell, or where it failed.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shadowsync import Job
from shadowsync.assembly import computing_here, make_module, make_tables
from shadowsync.choices import choose_all
from shadowsync.config import Config, load
from shadowsync.data.batch import Batch
from shadowsync.data.source import Schema
from shadowsync.embedding.table import Table
from shadowsync.errors import ShadowSyncError
from shadowsync.inference import score
from shadowsync.metrics.quality import Quality, evaluate_scores
from shadowsync.metrics.units import UnitActivity
from shadowsync.training.optimizers import Rates
from shadowsync.training.replica import PRECISIONS

sys.path.insert(0, str(Path(__file__).parent))
from machine import commit, describe, table
from shares import read_all

GRADIENT_METHODS = ("sync", "gba")
REPLICA_METHODS = ("easgd", "ma", "bmuf", "none")
PLAIN = ("plain", "plain-sync")
COLLAPSED = 0.003
TRAINERS = 2


@dataclass(frozen=True)
class Run:
    """One run; `candidate` are its overrides, `repeat` tells equal ones apart."""

    candidate: tuple[str, ...]
    method: str
    rows: str
    precision: str
    seed: int
    repeat: int

    @property
    def cell(self) -> tuple[str, str, str, str]:
        """What its spread is taken over."""
        return " ".join(self.candidate) or "defaults", self.rows, self.precision, self.method

    def overrides(self) -> list[str]:
        """On the command line of `shadowsync train`."""
        length = [] if self.rows == "all" else [f"data.rows={self.rows}"]
        family = "aggregation" if self.method in GRADIENT_METHODS else "sync"
        method = [] if self.method in PLAIN else [f"{family}.method={self.method}"]
        fixed = [f"train.trainers={TRAINERS}", f"train.precision={self.precision}", f"train.seed={self.seed}"]
        return [*fixed, *length, *method, "report.html=false", "report.tensorboard=false", *self.candidate]


def train_job(run: Run) -> dict[str, Any]:
    """By shadowsync."""
    with tempfile.TemporaryDirectory() as folder:
        result = Job(load(None, run.overrides()), out=Path(folder) / "run").run()
    assert result.test is not None
    assert result.train is not None
    return {
        "auc": result.test.auc,
        "ne": result.test.ne,
        "peak": msgspec.to_builtins(result.train.peak),
        "units": msgspec.to_builtins(result.units),
        "eps": result.throughput.eps,
        "warmup_samples": result.config["train"]["warmup_samples"],
    }


class PlainModel(nn.Module):
    """A bag for each table, and the dense part, as a careful user would write it."""

    def __init__(self, tables: tuple[Table, ...], schema: Schema, dense_part: nn.Module) -> None:
        super().__init__()
        self.places = {feature.name: place for place, feature in enumerate(schema.features)}
        self.tables, self.dense_part = tables, dense_part
        self.bags = nn.ModuleList(nn.EmbeddingBag(t.rows, t.dim, mode="sum", sparse=True) for t in tables)
        for bag, made in zip(self.bags, tables, strict=True):
            nn.init.uniform_(bag.weight, -(made.rows**-0.5), made.rows**-0.5)

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[B]`."""
        offsets, count = batch.ids.bag_offsets(), batch.ids.samples
        assert batch.ids.weights is None, "the plain loop's bags take no weights"
        pooled = {}
        for bag, made in zip(self.bags, self.tables, strict=True):
            for feature, pooling in made.poolings.items():
                place = self.places[feature]
                bags = offsets[place * count : (place + 1) * count + 1]
                ids = batch.ids.values[bags[0] : bags[-1]]
                vectors = F.embedding_bag(ids, bag.weight, bags[:-1] - bags[0], mode=pooling, sparse=True)
                pooled[feature] = vectors
        return self.dense_part(batch.dense, pooled)


class RowWiseAdagrad:
    """One sum of squares for each row, as shadowsync's tables have by default; torch has none of that kind."""

    def __init__(self, weight: nn.Parameter, lr: float, eps: float) -> None:
        self.weight, self.lr, self.eps, self.sums = weight, lr, eps, torch.zeros(len(weight))

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Steps the rows that have a gradient."""
        if self.weight.grad is None:
            return
        gradient = self.weight.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        self.sums[rows] += values.square().mean(dim=1)
        scale = -self.lr * factor / (self.sums[rows].sqrt() + self.eps)
        self.weight[rows] += scale[:, None] * values
        self.weight.grad = None


def dense_optimizer(config: Config, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Of the job, as torch has it."""
    train = config.train
    if train.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=train.lr, eps=train.eps, fused=True)
    if train.optimizer == "adam":
        betas = (train.beta1, train.beta2)
        return torch.optim.Adam(parameters, lr=train.lr, betas=betas, eps=train.eps, fused=True)
    return torch.optim.SGD(parameters, lr=train.lr, fused=True)


class PlainLoop:
    """The plain loop over the batches that shadowsync's reader hands out."""

    def __init__(self, run: Run, warmup_samples: int) -> None:
        config = load(None, run.overrides())
        assert config.embedding.optimizer == "rowwise_adagrad", "the plain loop's rows have row-wise Adagrad"
        choices = choose_all(config, own_model=False)
        self.source = choices.source.open("train", config.data.on_bad_row)
        self.test = choices.source.open("test", config.data.on_bad_row)
        tables = make_tables(config, self.source.schema, None, choices.model)
        dense_part = make_module(config, choices, self.source.schema, tables, None)
        torch.manual_seed(config.train.seed)
        self.model = PlainModel(tables, self.source.schema, dense_part)
        self.autocast = PRECISIONS[computing_here(config, dense_part).precision]
        total = self.source.rows * config.data.epochs
        self.rates = Rates(warmup_samples, config.train.decay, config.train.final_lr, total)
        self.clip_norm = config.train.clip_norm
        self.lr = config.train.lr
        self.dense = dense_optimizer(config, self.model.dense_part.parameters())
        embedding = config.embedding
        self.rows = [RowWiseAdagrad(bag.weight, embedding.lr, embedding.eps) for bag in self.model.bags]
        if run.method == "plain-sync":
            data = {"slice_rows": max(config.data.slice_rows, TRAINERS * config.train.batch_size)}
            config = config.model_copy(
                update={
                    "train": config.train.model_copy(update={"batch_size": TRAINERS * config.train.batch_size}),
                    "data": config.data.model_copy(update=data),
                }
            )
        self.config = config

    def run(self) -> dict[str, Any]:
        """Trains and evaluates."""
        torch.set_num_threads(TRAINERS)
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default, said aloud: else it warns
        quality, samples = Quality(1), 0
        batches = list(read_all(self.config, self.source))
        begin = time.perf_counter()
        for batch in batches:
            samples += len(batch)
            quality.update(self._step(batch, self.rates.factor(samples)), batch.labels)
        seconds = time.perf_counter() - begin
        self.model.eval()
        activity = UnitActivity(self.model.dense_part)
        with torch.inference_mode():
            logits, labels, _ = score(self.model, self.test, activity)
        measured = evaluate_scores(logits, labels)
        return {
            "auc": measured.auc,
            "ne": measured.ne,
            "peak": msgspec.to_builtins(quality.peak),
            "units": msgspec.to_builtins(activity.units()),
            "eps": samples / seconds,
            "warmup_samples": self.rates.warmup_samples,
        }

    def _step(self, batch: Batch, factor: float) -> Tensor:
        with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            logits = self.model(batch).float()
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
        self.dense.zero_grad(set_to_none=True)
        loss.backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.dense_part.parameters(), self.clip_norm)
        for group in self.dense.param_groups:
            group["lr"] = self.lr * factor
        self.dense.step()
        for rows in self.rows:
            rows.step(factor)
        return logits.detach()


def train_here(asked: dict[str, Any]) -> dict[str, Any]:
    """What the child does: one run; the figures, or why there are none."""
    run = Run(**{**asked["run"], "candidate": tuple(asked["run"]["candidate"])})
    try:
        return PlainLoop(run, asked["warmup_samples"]).run() if run.method in PLAIN else train_job(run)
    except ShadowSyncError as error:
        if error.exit_status == 2:
            raise
        return {"failed": str(error)}


def in_a_child(run: Run, warmup_samples: int | None) -> dict[str, Any]:
    """The run in a process of its own."""
    asked = json.dumps({"run": asdict(run), "warmup_samples": warmup_samples})
    done = subprocess.run([sys.executable, __file__, "--child", asked], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{run} ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**asdict(run), **found, "commit": commit()}


def run_all(runs: list[Run], record: Path) -> list[dict[str, Any]]:
    """Runs what the record lacks, plain loops after the jobs whose warm-up they take over."""
    lines = record.read_text().splitlines() if record.exists() else []
    done: dict[Run, dict[str, Any]] = {}
    for row in map(json.loads, lines):
        key = {name: row[name] for name in Run.__dataclass_fields__}
        done[Run(**{**key, "candidate": tuple(key["candidate"])})] = row
    for number, run in enumerate(runs):
        if run in done:
            continue
        like = [row for other, row in done.items() if other.cell[:2] == run.cell[:2] and "warmup_samples" in row]
        if run.method in PLAIN and not like:
            sys.exit(f"{run.method} takes over the warm-up of a job on {run.rows} rows: give one of --methods too")
        done[run] = in_a_child(run, like[0]["warmup_samples"] if like else None)
        with record.open("a") as file:
            file.write(json.dumps(done[run]) + "\n")
        outcome = done[run].get("failed") or f"AUC {done[run]['auc']:.4f}"
        print(f"{number + 1}/{len(runs)} {' '.join(run.cell)} seed {run.seed}: {outcome}", file=sys.stderr, flush=True)
    return [done[run] for run in runs]


def _figures(rows: list[dict[str, Any]]) -> list[str]:
    """Of one cell: runs, AUC, collapsed, the worst stretch, speed."""
    ended = [row for row in rows if "failed" not in row]
    if not ended:
        return [str(len(rows)), "-", "-", "-", "-", str(len(rows)), "-", "-", "-"]
    aucs = [row["auc"] for row in ended]
    median = statistics.median(aucs)
    collapsed = len(rows) - len(ended) + sum(auc < median - COLLAPSED for auc in aucs)
    peaks = [row["peak"]["ne"] for row in ended if row["peak"] and row["peak"]["ne"] is not None]
    worst_peak = f"{statistics.median(peaks):.2f} / {max(peaks):.2f}" if peaks else "-"
    eps = statistics.median(row["eps"] for row in ended)
    spread = [f"{value:.4f}" for value in (median, min(aucs), max(aucs))]
    warmup = f"{ended[0]['warmup_samples']:,}"
    return [str(len(rows)), *spread, f"{min(aucs) - median:+.4f}", str(collapsed), worst_peak, f"{eps:,.0f}", warmup]


def _dead(rows: list[dict[str, Any]], layer: str) -> str:
    """`76 / 80 %`: median and worst."""
    shares = [100 * row["units"]["dead"][layer] for row in rows if layer in ((row.get("units") or {}).get("dead", {}))]
    return f"{statistics.median(shares):.0f} / {max(shares):.0f} %" if shares else "-"


def show(rows: list[dict[str, Any]], runs: list[Run]) -> None:
    """The tables: quality and speed, then dead units."""
    cells: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for run, row in zip(runs, rows, strict=True):
        cells.setdefault(run.cell, []).append(row)
    names = ["candidate", "rows", "precision", "method"]
    head = [*names, "runs", "AUC median", "worst", "best", "worst - median", "collapsed", "worst NE of 10,000"]
    print("\n".join(describe()), end="\n\n")
    commits = Counter(row["commit"] for row in rows)
    print("runs by commit: " + ", ".join(f"{name} {count}" for name, count in commits.items()), end="\n\n")
    print(table([*head, "examples/s", "warm-up"], [[*cell, *_figures(cells[cell])] for cell in cells]))
    layers = list(dict.fromkeys(layer for row in rows for layer in (row.get("units") or {}).get("dead", {})))
    print("\ndead units of each layer, median / worst run; NE: median / highest of the runs' worst stretches")
    dead = [[*cell, *(_dead(cells[cell], layer) for layer in layers)] for cell in cells]
    print(table([*names, *layers], dead))


def grid(arguments: argparse.Namespace) -> list[Run]:
    """All runs, the cells in turn; plain loops last in each round."""
    methods = sorted(arguments.methods, key=lambda method: method in PLAIN)
    cells = itertools.product(
        range(arguments.runs), arguments.seeds, arguments.precisions, arguments.rows, methods, arguments.set or [[]]
    )
    return [
        Run(tuple(candidate), method, rows, precision, seed, repeat)
        for repeat, seed, precision, rows, method, candidate in cells
    ]


def main() -> None:
    """Runs the grid and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = [*GRADIENT_METHODS, *REPLICA_METHODS, *PLAIN]
    parser.add_argument("--out", type=Path, help="the record, an append-only JSON-lines file")
    parser.add_argument("--rows", nargs="+", default=["50000", "150000", "all"])
    parser.add_argument("--methods", nargs="+", default=methods, choices=methods)
    parser.add_argument("--precisions", nargs="+", default=["auto"], choices=["auto", "fp32", "bf16"])
    parser.add_argument("--runs", type=int, default=8, help="of each cell and seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", action="append", nargs="*", metavar="KEY=VALUE", help="a candidate; may be repeated")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(train_here(json.loads(arguments.child))))
        return
    if arguments.out is None:
        parser.error("--out FILE is needed")
    runs = grid(arguments)
    show(run_all(runs, arguments.out), runs)


if __name__ == "__main__":
    main()
