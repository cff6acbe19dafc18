"""`result.json`: what came out of a run. Its keys are stable from the first release on.

Sections that do not apply are absent; a measure that is not defined (the AUC of a test set of one label) is null.
Readers ignore keys they do not know, so later versions may add some.
"""

import functools
import html
import math
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from shadowsync.aggregation.aggregator import Switch
from shadowsync.errors import DataError
from shadowsync.memory.pages import memory_bytes
from shadowsync.metrics.quality import CurvePoint, Peak
from shadowsync.metrics.units import Units
from shadowsync.report import words
from shadowsync.report.files import read_bytes, write_atomically
from shadowsync.training.kernels import processor

if TYPE_CHECKING:
    from shadowsync.report.measures import KeyNumber

FILE_NAME = "result.json"
DEAD_SHARE = 0.5
"""Of a layer's units; from there on it is worth a warning."""
COIN = math.log(2)
"""Log loss of whoever always predicts 0.5, in nats."""
WILD = 1.5 * COIN
"""Log loss above which training did not just begin but went astray. A bound on NE would not do: where positives are
rare every model begins with a high one, as it begins near 0.5."""
_PACKAGES = ("shadowsync", "torch", "fbgemm-gpu-cpu", "numpy", "polars", "pyarrow")


class _ResultSection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Its keys without a default are always written."""


class DataSection(_ResultSection, frozen=True):
    """Samples; `valid_samples` are the validation rows, bad ones too, where there are any; `skipped_rows` are the bad
    rows left out under `data.on_bad_row=skip`."""

    train_samples: int
    trained_samples: int
    test_samples: int
    valid_samples: int | None = None
    skipped_rows: int | None = None


class EndedSection(_ResultSection, frozen=True):
    """Why training ended: at the last row of `data.epochs`, by `train.patience` or by `train.time_limit`; `detail` says
    it as a sentence."""

    why: Literal["epochs", "early_stopping", "time_limit"]
    detail: str


class ValidationSection(_ResultSection, frozen=True):
    """How validations went, those before a resume included.

    Attributes:
        best_by: the measure by which they were compared.
        rows: that were validated on, bad ones too.
        validations: how many there were.
        best: the value of the best one, and `best_samples` how many samples had been trained by then.
        checkpoint: that holds it: what was tested, and what is exported.
        last: all measures of the last one.
        seconds: for which training stood still since the last start.
        lr_scale: what both learning rates had come down to at the end, as a share.
        stopped: why training ended before its last row, as a sentence, and `stopped_samples` after how many samples.
    """

    best_by: str
    rows: int
    validations: int
    best: float | None
    best_samples: int
    checkpoint: str | None
    last: dict[str, float]
    seconds: float
    lr_scale: float = 1.0
    stopped: str | None = None
    stopped_samples: int | None = None


class TaskSection(_ResultSection, frozen=True):
    """Quality on the test set of one of several labels, as `TestMetrics`."""

    auc: float | None
    ne: float | None
    logloss: float | None
    calibration: float | None
    loss: str = "logloss"
    measures: dict[str, float | None] = {}


class TestSection(_ResultSection, frozen=True):
    """Quality on the test set of the first label, as `TestMetrics`; `best_auc` is that of the probabilities that made
    the labels, where the source knows them. Where there are several labels, `tasks` has each by name."""

    __test__ = False  # pytest would take the class for a test

    auc: float | None
    ne: float | None
    logloss: float | None
    calibration: float | None
    best_auc: float | None = None
    curve: tuple[CurvePoint, ...] = ()
    loss: str = "logloss"
    measures: dict[str, float | None] = {}
    tasks: dict[str, TaskSection] = {}


class TrainSection(_ResultSection, frozen=True):
    """Quality of the predictions made before each sample was trained on; `peak` is the worst 10,000 samples."""

    ne_window: float | None
    ne_lifetime: float | None
    auc: float | None = None
    peak: Peak | None = None

    @property
    def astray(self) -> Peak | None:
        """The peak, if that was far worse than knowing nothing."""
        return self.peak if self.peak is not None and self.peak.logloss > WILD else None


class ThroughputSection(_ResultSection, frozen=True):
    """Speed; `seconds` from the first to the last trained batch, `startup_seconds` before that. `emulated_step_ms` is
    there only if steps were made to take that long: the speed is then that of an emulated machine."""

    seconds: float
    eps: float
    elp: int
    eps_per_trainer: tuple[float, ...]
    startup_seconds: float | None = None
    emulated_step_ms: float | None = None


class ComputingSection(_ResultSection, frozen=True):
    """How workers computed: the precision of the forward and backward pass and what decided about it if it was not the
    user, the library for each product of each layer (as `train.kernels` takes it), what other trainers did instead.
    """

    precision: str
    kernels: str
    why: str | None = None
    others: tuple[str, ...] = ()


class SyncSection(_ResultSection, frozen=True):
    """Synchronisation of the replicas; `average_gap` in iterations, null where there was none."""

    method: str
    schedule: str
    count: int
    average_gap: float | None


class WireSection(_ResultSection, frozen=True):
    """What crossed between roles, by kind, as `WireTotals`; `codecs` are those at the end: where trainers chose
    different ones (`auto`), all of them, the weakest first and with commas between."""

    bytes: dict[str, int]
    raw_bytes: dict[str, int]
    codecs: dict[str, str] = {}
    kept_share: dict[str, float] = {}
    refreshes: dict[str, int] = {}
    early_refreshes: dict[str, int] = {}


class AggregationSection(_ResultSection, frozen=True):
    """What a gradient method did, resumes included.

    Attributes:
        dropped: gradients that were left out of every step.
        mean_staleness, max_staleness: of the others: global steps between the parameters that a gradient was computed
            with and those that it was applied to.
        mode: the method at work at the end; another than `method` under `auto`.
        received: gradients of which a step has decided.
        staleness: pairs, of a staleness and how many gradients were applied with it.
        switches: from one method to another, in order.
        step_seconds: what each worker took for a batch on average since the last start, by `trainer.worker`.
        most_held_bytes: memory of gradients that waited for their step, at the most that was seen, all servers.
    """

    global_steps: int
    dropped: int
    mean_staleness: float | None
    max_staleness: int
    method: str | None = None
    mode: str | None = None
    received: int | None = None
    staleness: tuple[tuple[int, int], ...] = ()
    switches: tuple[Switch, ...] = ()
    step_seconds: dict[str, float] = {}
    most_held_bytes: int | None = None


class StoredSection(_ResultSection, frozen=True):
    """Of rows on disk.

    Attributes:
        rows: in all.
        slots: how many of them fit into the memory that they may take.
        looked_up: since the last start, ids or distinct rows that servers were asked for.
        missed: rows that had to be read from the disk for it or ahead of it.
        read_bytes, written_bytes: of the rows that were read and written back; a disk moves whole pages.
    """

    rows: int
    slots: int
    looked_up: int
    missed: int
    read_bytes: int
    written_bytes: int

    @property
    def hits(self) -> float:
        """Share of the look-ups whose row was in memory, or had been read for another one."""
        return 1 - self.missed / max(1, self.looked_up)


class KeysSection(_ResultSection, frozen=True):
    """Of the dynamic tables.

    Attributes:
        rows: keys that can have one at a time.
        keys: that have one.
        admitted, refused, evicted: since the last start, keys that got a row, that found none free, and that lost
            theirs to another one or to time. One that is refused again counts again.
    """

    rows: int
    keys: int
    admitted: int
    refused: int
    evicted: int


class RecoverySeconds(_ResultSection, frozen=True):
    """Where recovery's time went: by how much saving held up training (standing still, and processors that it took),
    loading checkpoints, training that was repeated, and from failures until replacements stood ready.
    """

    save: float
    load: float
    lost: float
    wait: float


class RecoverySection(_ResultSection, frozen=True):
    """Failures and what they cost; `pls` is the portion of lost samples.

    Attributes:
        mode: at the end; `why` is what spoke for it, as a sentence.
        target_pls, priority: as configured, under `partial`.
        emulated_job_s: the seconds are those of a job of this length, for which this one stands.
        rounds: saves of everything; by priority it takes several of the `saves` to come to one.
        server_failures: those of the `failures` that took embedding servers, several at once counted as one.
        lost_servers: embedding servers that one of those took, on average.
        moves: servers that changed their machine while training went on; None where they stay.
    """

    failures: int
    pls: float
    saves: int
    seconds: RecoverySeconds
    interval_s: float | None
    mode: str
    target_pls: float | None = None
    priority: str | None = None
    why: str | None = None
    emulated_job_s: float | None = None
    rounds: int | None = None
    server_failures: int | None = None
    lost_servers: float | None = None
    moves: int | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything `result.json` holds."""

    config: dict[str, Any]
    seed: int
    versions: dict[str, str]
    data: DataSection
    throughput: ThroughputSection
    ended: EndedSection | None = None
    computing: ComputingSection | None = None
    train: TrainSection | None = None
    validation: ValidationSection | None = None
    test: TestSection | None = None
    units: Units | None = None
    sync: SyncSection | None = None
    wire: WireSection | None = None
    aggregation: AggregationSection | None = None
    recovery: RecoverySection | None = None
    keys: KeysSection | None = None
    stored: StoredSection | None = None
    machine: dict[str, str | int | float] | None = None

    def __str__(self) -> str:
        """The key numbers, a line each."""
        return "\n".join(f"{name:<28}{value:>14}  {meaning}" for name, value, meaning in self._key_numbers())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same, as a notebook shows it."""
        cells = ("".join(f"<td>{html.escape(text)}</td>" for text in line) for line in self._key_numbers())
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"

    def _key_numbers(self) -> "list[KeyNumber]":
        from shadowsync.report.measures import key_numbers  # noqa: PLC0415 which reads results

        return key_numbers(self)


def write_result(folder: Path, result: Result) -> Path:
    """Writes `folder/result.json` whole or not at all, which may be a `SaveError`."""
    path = folder / FILE_NAME
    write_atomically(path, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return path


def read_result(folder: Path) -> Result:
    """The result of the run in `folder`; `DataError` if there is none, or not what `write_result` writes."""
    path = folder / FILE_NAME
    content = read_bytes(path, f"give the --out folder of a finished run, in which training wrote {FILE_NAME}")
    try:
        return msgspec.json.decode(content, type=Result)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a result of shadowsync train: {error}") from error


def notable_recovery(result: Result) -> RecoverySection | None:
    """None where there is nothing to tell: nothing was saved to recover from, and nobody failed."""
    recovery = result.recovery
    return None if recovery is None or (recovery.mode == "none" and not recovery.failures) else recovery


def mostly_dead(units: Units) -> list[str]:
    """The layers of which more than half of the units are dead, as the model calls them."""
    return [layer for layer, share in units.dead.items() if share > DEAD_SHARE]


def dead_of(units: Units, layer: str) -> str:
    """`11 of 16`."""
    return f"{round(units.dead[layer] * units.sizes[layer]):,} of {units.sizes[layer]:,}"


def warnings(result: Result) -> Iterator[str]:
    """What a user must not overlook, a sentence each that says what to do."""
    train = result.config.get("train", {})
    do = f"lower train.lr (it is {train.get('lr')}) or raise train.warmup_samples ({train.get('warmup_samples')})"
    if (units := result.units) is not None and (layers := mostly_dead(units)):
        found = ", ".join(f"{dead_of(units, layer)} of {layer}" for layer in layers)
        blocked = [layer for layer in layers if units.dead[layer] == 1]
        through = f", and nothing of what lies in front of {' and '.join(blocked)} gets through" if blocked else ""
        yield f"dead units: {found} were 0 on all {words.count(units.rows)} test rows looked at{through}: {do}"
    if result.train is not None and (peak := result.train.astray) is not None:
        yield (
            f"training went astray: the log loss of samples {words.count(peak.end - peak.samples + 1)} to "
            f"{words.count(peak.end)} was {peak.logloss:.2f} (NE {words.decimal(peak.ne, 2)}), and always guessing 0.5 "
            f"gives {COIN:.2f}: {do}"
        )


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python and of the packages a result depends on; those not installed are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str | int | float]:
    """System, processor, cores this process may use, and memory in GB (10⁹ bytes); no name or address."""
    system = f"{platform.system()} {platform.release()}"
    facts: dict[str, str | int | float] = {"system": system, "processor": processor(), "cores": cores()}
    memory = memory_bytes()
    return {**facts, "memory_gb": round(memory / 1e9, 1)} if memory else facts


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
