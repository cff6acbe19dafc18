"""`result.json`: what came out of a run. Its keys are stable from the first release on.

Sections that do not apply are absent; a measure that is not defined (the AUC of a test set of one label) is null.
Readers ignore keys they do not know, so later versions may add some.
"""

from pathlib import Path
from typing import Any

import msgspec

from shadowsync.aggregation.aggregator import Switch
from shadowsync.errors import DataError
from shadowsync.metrics.quality import Peak
from shadowsync.metrics.scores import CurvePoint
from shadowsync.metrics.units import Units
from shadowsync.report.files import read_bytes, write_atomically

FILE_NAME = "result.json"


class _Section(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A section whose keys without a default are always written."""


class Data(_Section, frozen=True):
    """Samples; `skipped_rows` are the bad rows left out under `data.on_bad_row=skip`."""

    train_samples: int
    trained_samples: int
    test_samples: int
    skipped_rows: int | None = None


class Test(_Section, frozen=True):
    """Quality on the test set.

    Attributes:
        auc: area under the ROC curve.
        ne: normalized entropy.
        logloss: in nats.
        calibration: mean prediction over mean label.
        best_auc: the AUC of the probabilities that made the labels, where the source knows them.
        curve: calibration curve, bins of equal count.
    """

    __test__ = False  # pytest would take the class for a test

    auc: float | None
    ne: float | None
    logloss: float | None
    calibration: float | None
    best_auc: float | None = None
    curve: tuple[CurvePoint, ...] = ()


class Train(_Section, frozen=True):
    """Quality of the predictions made before each sample was trained on: over the window and over all samples.

    `peak` is the worst stretch of 10,000 samples.
    """

    ne_window: float | None
    ne_lifetime: float | None
    auc: float | None = None
    peak: Peak | None = None


class Throughput(_Section, frozen=True):
    """Speed; `seconds` from the first to the last trained batch, `startup_seconds` before that.

    `emulated_step_ms` is there only if steps were made to take that long: the speed is then that of an emulated
    machine.
    """

    seconds: float
    eps: float
    elp: int
    eps_per_trainer: tuple[float, ...]
    startup_seconds: float | None = None
    emulated_step_ms: float | None = None


class Computing(_Section, frozen=True):
    """How workers computed.

    Attributes:
        precision: of the forward and backward pass.
        kernels: the library for each product of each layer, as `train.kernels` takes it.
        why: what decided about the precision, if it was not the user.
        others: on a cluster, what other trainers did instead.
    """

    precision: str
    kernels: str
    why: str | None = None
    others: tuple[str, ...] = ()


class Sync(_Section, frozen=True):
    """Synchronisation of the replicas; `average_gap` in iterations, null where there was none."""

    method: str
    schedule: str
    count: int
    average_gap: float | None


class Wire(_Section, frozen=True):
    """What crossed between roles, by kind (`pull`, `push`, `dense`).

    Attributes:
        bytes: as sent.
        raw_bytes: as they would be without a codec.
        codecs: the codec at the end; where trainers chose different ones (`auto`), all of them, the weakest first and
            with commas between.
        kept_share: of the elements, those that crossed; only of messages whose codec sends a part of them.
        refreshes: thresholds chosen exactly for that.
        early_refreshes: those of them that came early, because the share had left its band.
    """

    bytes: dict[str, int]
    raw_bytes: dict[str, int]
    codecs: dict[str, str] = {}
    kept_share: dict[str, float] = {}
    refreshes: dict[str, int] = {}
    early_refreshes: dict[str, int] = {}


class Aggregation(_Section, frozen=True):
    """What a gradient method did, resumes included.

    Attributes:
        global_steps: k.
        dropped: gradients that were left out of every step.
        mean_staleness, max_staleness: of the others: global steps between the parameters that a gradient was computed
            with and those that it was applied to.
        method: as configured.
        mode: the method at work at the end; another one under `auto`.
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


class RecoverySeconds(_Section, frozen=True):
    """Where recovery's time went.

    Attributes:
        save: by which saving held up training: standing still, and processors that it took.
        load: loading checkpoints.
        lost: training that was repeated.
        wait: from failures until replacements stood ready.
    """

    save: float
    load: float
    lost: float
    wait: float


class Recovery(_Section, frozen=True):
    """Failures and what they cost; `pls` is the portion of lost samples.

    Attributes:
        mode: at the end: after a failure of an embedding server everybody goes back (`full`), only its replacement does
            (`partial`), or nothing is saved for that (`none`).
        why: what spoke for the mode, as a sentence.
        target_pls, priority: as configured, under `partial`.
        emulated_job_s: the seconds are those of a job of this length, for which this one stands.
        rounds: saves of everything; by priority it takes several of the `saves` to come to one.
        server_failures: those of the `failures` that took embedding servers, several at once counted as one.
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


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything `result.json` holds."""

    config: dict[str, Any]
    seed: int
    versions: dict[str, str]
    data: Data
    throughput: Throughput
    computing: Computing | None = None
    train: Train | None = None
    test: Test | None = None
    units: Units | None = None
    sync: Sync | None = None
    wire: Wire | None = None
    aggregation: Aggregation | None = None
    recovery: Recovery | None = None
    machine: dict[str, str | int | float] | None = None


def write_result(folder: Path, result: Result) -> Path:
    """Writes `folder/result.json` whole or not at all.

    Raises:
        SaveError: it cannot be written.
    """
    path = folder / FILE_NAME
    write_atomically(path, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return path


def read_result(folder: Path) -> Result:
    """The result of the run in `folder`.

    Raises:
        DataError: there is none, or the file is not what `write_result` writes.
    """
    path = folder / FILE_NAME
    content = read_bytes(path, f"give the --out folder of a finished run, in which training wrote {FILE_NAME}")
    try:
        return msgspec.json.decode(content, type=Result)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a result of shadowsync train: {error}") from error
