"""Quality against plain PyTorch: DLRM, DeepFM and DCN-V2 with validation and early stopping, by one replica, by four
trainers with each replica method, and under each gradient method.

    python benchmarks/leaderboard.py --out FOLDER [--files FOLDER] [--sets demo …] [--models dlrm …] [--ways plain …]
        [--seeds 5] [--recipe adagrad] [--rows 400000]
    … --report      prints the tables of what has been run so far
    … --small       the whole grid on 6,000 rows that it makes itself

`demo` is the one set that ranks methods. `--files` names a folder with the heads of two public logs and a table of the
shape of a third; an AUC on so few rows is noise, so they say that the formats are read alike, and no more:

    criteo_kaggle_train.tsv.gz, criteo_kaggle_test.tsv.gz    Criteo's display-ads log in its raw format
    criteo_1tb_like_80k.parquet                              label, i1 … i13, c1 … c26
    avazu_train.csv.gz                                       Avazu's log, with its header

`plain` is a loop of plain PyTorch over `nn.EmbeddingBag`s and the same dense part, with the same initial rows and
weights, the same batches in the same order, and the same optimizers, learning rates, warm-up, validations and
patience; all in fp32. A step takes B samples in each way: of one trainer, or under a gradient method of all four (B / 4
each; but of one under `async` and `hop_bs`, which make a step of every gradient). Under `none` replicas never meet,
which is a yardstick.

Differences of AUC on the test rows are paired by seed, with an interval of 95 % (Student's t). `within` says `yes`
where the whole interval lies within 0.001, `mean` where the mean difference does. Rates have the validations in them.

A finished run is a line of FOLDER/runs.jsonl; started again, the script goes on where it stopped.
"""

import argparse
import contextlib
import copy
import itertools
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from shadowsync import Job
from shadowsync.aggregation.aggregator import Aggregation
from shadowsync.assembly import make_module, make_tables
from shadowsync.choices import choose_all
from shadowsync.cluster.session import reader_options
from shadowsync.config import Config, parse
from shadowsync.data.batch import Batch
from shadowsync.data.reader import Reader
from shadowsync.data.splits import PARTS, open_parts
from shadowsync.embedding.memory import fill
from shadowsync.embedding.table import Shard
from shadowsync.errors import RunError
from shadowsync.inference import score
from shadowsync.metrics.quality import TestMetrics, evaluate_scores
from shadowsync.preparing import prepared
from shadowsync.registry import members
from shadowsync.report.result import cores
from shadowsync.sync.method import SyncMethod
from shadowsync.training.course import Course, Judge

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells
from collapse import PlainModel, RowWiseAdagrad, dense_optimizer
from machine import commit, describe, interval, table

TRAINERS = 4
WITHIN = 0.001
PLAIN, ONE = "plain", "one replica"
REPLICA_METHODS = tuple(members("shadowsync.sync", SyncMethod))
GRADIENT_METHODS = members("shadowsync.aggregation", Aggregation)
WAYS = (PLAIN, ONE, *REPLICA_METHODS, *GRADIENT_METHODS)
MODELS = ("dlrm", "deepfm", "dcn")
RECIPES: Mapping[str, dict[str, dict[str, Any]]] = {
    "adagrad": {
        "embedding": {"optimizer": "rowwise_adagrad", "lr": 0.15},
        "train": {"optimizer": "adagrad", "lr": 0.005},
    },
    "adam": {"embedding": {"optimizer": "adam", "lr": 0.001}, "train": {"optimizer": "adam", "lr": 0.001}},
}
AVAZU = ("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category",
         "device_id", "device_ip", "device_model", "device_type", "device_conn_type",
         *(f"C{number}" for number in range(14, 22)))  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What is trained on.

    Attributes:
        batch: samples of a step, B; a multiple of the trainers.
        warmup: samples over which learning rates rise.
        every: training rows between validations, or `epoch`.
        epochs, patience: passes at most, and validations that are not better before it ends sooner.
        models: options by the model's name.
        files: it needs.
    """

    data: dict[str, Any]
    batch: int
    warmup: int
    every: int | str = "epoch"
    epochs: int = 6
    patience: int = 2
    models: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def tasks(files: Path, rows: int | None) -> dict[str, Task]:
    """The public sets, by name; `rows` bounds those of the demo."""
    criteo = [files / f"criteo_kaggle_{part}.tsv.gz" for part in ("train", "test")]
    avazu, terabyte = files / "avazu_train.csv.gz", files / "criteo_1tb_like_80k.parquet"
    tenth = {"valid": {"fraction": 0.1}, "test": {"fraction": 0.1}}
    bounded = {} if rows is None else {"rows": rows}
    raw = {"name": "criteo", "path": str(criteo[0]), "test_path": str(criteo[1]), "hash_size": 2000}
    logged = {"name": "csv", "path": str(avazu), "label": "click", "categorical": list(AVAZU), "hash_size": 2000}
    wide = {"name": "parquet", "path": str(terabyte), "dense": [f"i{n}" for n in range(1, 14)], "log_dense": True,
            "categorical": [f"c{n}" for n in range(1, 27)], "hash_size": 20_000}  # fmt: skip
    every = 300_000 if rows is None else max(1, rows // 4)
    return {
        "demo": Task({"name": "completejourney", "valid": {"fraction": 0.1}, **bounded}, 512, 50_000, every, epochs=3),
        "criteo head": Task(raw | {"valid": tenth["valid"]}, 64, 2000, files=tuple(criteo)),
        "criteo 1tb-like": Task(wide | tenth, 256, 5000, files=(terabyte,)),
        "avazu head": Task(logged | tenth, 64, 2000, files=(avazu,)),
    }


def small() -> dict[str, Task]:
    """A task of seconds, on which a model of these sizes overfits."""
    data = {"name": "synthetic", "rows": 6000, "test_rows": 2000, "dense": 4, "features": 4, "table_rows": 200}
    models = {"dlrm": {"bottom": [16], "top": [16]}, "deepfm": {"deep": [16]}, "dcn": {"cross": 1, "deep": [16]}}
    return {"small": Task(data | {"valid": {"fraction": 0.2}}, 64, 1000, 1500, epochs=8, models=models)}


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    model: str
    way: str
    seed: int
    recipe: str
    rows: int | None

    @property
    def name(self) -> str:
        """Of its file."""
        parts = (self.task, self.model, self.way, self.recipe, f"rows{self.rows or '-all'}", f"seed{self.seed}")
        return "-".join(parts).replace(" ", "_")


def configuration(cell: Cell, task: Task) -> dict[str, Any]:
    """Of the job; the plain loop takes its recipe from that of one replica."""
    recipe, size = RECIPES[cell.recipe], task.batch
    train = {"trainers": TRAINERS, "batch_size": size, "seed": cell.seed, "precision": "fp32",
             "warmup_samples": task.warmup, "validate_every": task.every, "patience": task.patience, "best_by": "auc",
             **recipe["train"]}  # fmt: skip
    merged: dict[str, Any] = {}
    if cell.way in (PLAIN, ONE):
        train["trainers"], merged["sync"] = 1, {"method": "none"}
    elif cell.way in REPLICA_METHODS:
        merged["sync"] = {"method": cell.way}
    else:
        alone = GRADIENT_METHODS[cell.way]().start(TRAINERS).size == 1
        train["batch_size"] = size if alone else size // TRAINERS
        merged["aggregation"] = {"method": cell.way, "global_batch": size, "rows": "buffer"}
    return {
        "data": task.data | {"epochs": task.epochs},
        "model": {"name": cell.model, **task.models.get(cell.model, {})},
        "embedding": recipe["embedding"],
        "train": train,
        "report": {"html": False, "tensorboard": False, "every_s": 5.0},
        **merged,
    }


def by_job(values: dict[str, Any]) -> dict[str, Any]:
    """Figures of a job."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = Job(values, out=Path(folder) / "run").run()
        except RunError as error:
            return {"failed": str(error)}
    assert result.test is not None
    assert result.validation is not None
    return {
        "auc": result.test.auc,
        "ne": result.test.ne,
        "validations": result.validation.validations,
        "best_samples": result.validation.best_samples,
        "samples": result.data.trained_samples,
        "eps": result.throughput.eps,
    }


class SparseAdam:
    """torch's, for one table."""

    def __init__(self, weight: torch.nn.Parameter, config: Config) -> None:
        rows = config.embedding
        self.lr = rows.lr
        self.optimizer = torch.optim.SparseAdam([weight], rows.lr, (rows.beta1, rows.beta2), rows.eps)

    def step(self, factor: float) -> None:
        """Steps the rows that have a gradient."""
        self.optimizer.param_groups[0]["lr"] = self.lr * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class PlainLoop:
    """A model in plain PyTorch, and its optimizers."""

    def __init__(self, config: Config, model: PlainModel) -> None:
        self.model, self.lr, self.warmup = model, config.train.lr, config.train.warmup_samples or 1
        self.dense = dense_optimizer(config, model.dense_part.parameters())
        weights = [bag.weight for bag in model.bags]
        if config.embedding.optimizer == "adam":
            self.rows: list[Any] = [SparseAdam(weight, config) for weight in weights]
        else:
            self.rows = [RowWiseAdagrad(weight, config.embedding.lr, config.embedding.eps) for weight in weights]

    def step(self, batch: Batch, samples: int) -> None:
        """Trains a batch, with which so many samples have been trained."""
        factor = min(1.0, samples / self.warmup)
        self.dense.param_groups[0]["lr"] = self.lr * factor
        self.dense.zero_grad(set_to_none=True)
        F.binary_cross_entropy_with_logits(self.model(batch), batch.labels).backward()
        self.dense.step()
        for rows in self.rows:
            rows.step(factor)

    @torch.inference_mode()
    def measured(self, source: Any) -> TestMetrics:
        """On these rows."""
        logits, labels, _ = score(self.model, source)
        return evaluate_scores(logits, labels)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """That many inside torch's operators, and then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def by_plain_torch(values: dict[str, Any]) -> dict[str, Any]:
    """As `by_job`, of the job of one replica, by plain PyTorch with as many threads as there are cores."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, said aloud: else it warns
    config = parse(values)
    config, choices = prepared(config, choose_all(config, own_model=False), None, lambda _: None)
    parts, train = open_parts(choices.source, config.data, *PARTS), config.train
    schema = parts["train"].schema
    made = make_tables(config, schema, None, choices.model)
    model = PlainModel(made, schema, make_module(config, choices, schema, made, None))
    whole = [Shard(one, 0, one.rows) for one in made]
    fill([(shard, bag.weight.detach()) for shard, bag in zip(whole, model.bags, strict=True)], train.seed)
    loop, judge, course = PlainLoop(config, model), Judge("auc", patience=train.patience), Course()
    every = train.validate_every if isinstance(train.validate_every, int) else parts["train"].rows
    with contextlib.closing(Reader(parts["train"], reader_options(config))) as reader, threads(cores()):
        feed, best, began = reader.feed(0), copy.deepcopy(model.state_dict()), time.perf_counter()
        while not (reader.finished or judge.is_over(course)):
            reader.leases.go_on_to((course.passed // every + 1) * every, 1.0, lambda: None)
            while (leased := feed.next(wait=False)) is not None:
                loop.step(leased.batch, reader.trained + len(leased.batch))
                feed.done(leased)
            measures = {"auc": loop.measured(parts["valid"]).auc}
            course = judge.after(course, measures, reader.trained, reader.leases.passed)
            if course.best_samples == reader.trained:
                best = copy.deepcopy(model.state_dict())
        seconds, samples = time.perf_counter() - began, reader.trained
        model.load_state_dict(best)
        test = loop.measured(parts["test"])
    for part in parts.values():
        part.close()
    return {
        "auc": test.auc,
        "ne": test.ne,
        "validations": course.validations,
        "best_samples": course.best_samples,
        "samples": samples,
        "eps": samples / seconds,
    }


def line(rows: Sequence[Mapping[str, Any]], plain: Mapping[int, float]) -> tuple[str, ...]:
    """Of the runs of one way that ended; `plain` are the AUCs of plain PyTorch by seed."""
    aucs = {row["seed"]: row["auc"] for row in rows if row.get("auc") is not None}
    if not aucs:
        return (str(len(rows)), *["-"] * 7)
    ended = [row for row in rows if row["seed"] in aucs]
    differences = [auc - plain[seed] for seed, auc in aucs.items() if seed in plain]
    told = ["-"] * 3
    if differences:
        mean, half = statistics.fmean(differences), interval(differences)
        inside = "yes" if abs(mean) + (half or 0.0) <= WITHIN else "mean" if abs(mean) <= WITHIN else "no"
        told = [f"{mean:+.5f}", "-" if half is None else f"±{half:.5f}", inside]
    return (
        f"{len(ended)}/{len(rows)}",
        f"{statistics.fmean(aucs.values()):.5f}",
        *told,
        f"{statistics.fmean(row['ne'] for row in ended):.4f}",
        f"{statistics.fmean(row['best_samples'] for row in ended):,.0f}",
        f"{statistics.median(row['eps'] for row in ended):,.0f}",
    )


def show(cells: Sequence[Cell], kept: Cells) -> None:
    """The machine, the commits of the runs, and a table for each set and model."""
    found = {cell: row for cell in cells if (row := kept.read(cell.name)) is not None}
    commits = Counter(row["commit"] for row in found.values())
    print("\n".join([*describe(), "runs by commit: " + ", ".join(f"{name} {n}" for name, n in commits.items())]))
    for task, model in dict.fromkeys((cell.task, cell.model) for cell in found):
        mine = {cell: row for cell, row in found.items() if (cell.task, cell.model) == (task, model)}
        plain = {c.seed: row["auc"] for c, row in mine.items() if c.way == PLAIN and row.get("auc") is not None}
        ways = list(dict.fromkeys(cell.way for cell in mine))
        lines = [(way, *line([row for cell, row in mine.items() if cell.way == way], plain)) for way in ways]
        head = [f"{task}, {model}", "runs", "test AUC", "to plain", "95 %", "within", "NE", "best after", "examples/s"]
        print("", table(head, lines), sep="\n")


def main() -> None:
    """Runs what is missing of the grid, seed by seed, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--files", type=Path, default=Path(), help="folder of the public logs; the current one")
    parser.add_argument("--sets", nargs="+", default=None, help="of the sets; all that are there")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--recipe", default="adagrad", choices=list(RECIPES))
    parser.add_argument("--rows", type=int, help="of the demo, at most")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    found = small() if given.small else tasks(given.files, given.rows)
    if unknown := set(given.sets or ()) - found.keys():
        parser.error(f"--sets {' '.join(sorted(unknown))}: there are {', '.join(found)}")
    wanted = {name: task for name, task in found.items() if given.sets is None or name in given.sets}
    for name, task in list(wanted.items()):
        if missing := [path.name for path in task.files if not path.exists()]:
            print(f"{name} is skipped: --files has no {' and no '.join(missing)}", file=sys.stderr)
            del wanted[name]
    kept = Cells(given.out)
    cells = [
        Cell(task, model, way, seed, given.recipe, given.rows)
        for seed, task, model, way in itertools.product(range(given.seeds), wanted, given.models, given.ways)
    ]
    for cell in [] if given.report else cells:
        if kept.read(cell.name) is None:
            measure = by_plain_torch if cell.way == PLAIN else by_job
            figures = measure(configuration(cell, wanted[cell.task]))
            kept.write(cell.name, {"seed": cell.seed, "commit": commit(), **figures})
            print(cell.name, figures, file=sys.stderr, flush=True)
    show(cells, kept)


if __name__ == "__main__":
    main()
