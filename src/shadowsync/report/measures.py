"""The table of what is measured, through which every place that shows figures of a job walks.

Of a running job (its frames): progress line, TensorBoard, Prometheus. Of a finished one (its result): key numbers,
comparison of runs, and the end of TensorBoard. A new figure is a field of `Frame` or of `Result`, and an entry here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from shadowsync.metrics.history import Frame, RoleState, role_order
from shadowsync.report import words
from shadowsync.report.result import COIN, Result, dead_of, mostly_dead, notable_recovery, went_astray

Value: TypeAlias = float | None
Labels: TypeAlias = tuple[str, ...]

_ROLES_NAMED = 2
_FINE: tuple[RoleState, ...] = ("alive", "saving", "left")


@dataclass(frozen=True)
class KeyNumber:
    """One row of a table: what it is, its value, and what the value means."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class Final:
    """How a measure is read from the result of a finished run, and how it is written there.

    Attributes:
        read: its place as `section.key`, or a function; None: it is not defined.
        name: of its row among the key numbers, which is there where the section is; empty: it has none.
        meaning: in that row.
        show: how it is written, with its unit.
        best: picks the best of several; None where there is no best.
        optional: no row without a value, or for 0.
        rows: where one such row does not do: all of them.
    """

    read: Callable[[Result], Any] | str
    name: str = ""
    meaning: Callable[[Result], str] | str = ""
    show: Callable[[Any], str] = words.decimal
    best: Callable[[Any], float] | None = None
    optional: bool = False
    rows: Callable[[Result], Iterator[KeyNumber]] | None = None

    def value(self, result: Result) -> Any:
        """None where it is not defined or does not apply."""
        if callable(self.read):
            return self.read(result)
        found: Any = result
        for part in self.read.split("."):
            found = None if found is None else getattr(found, part)
        return found

    def key_numbers(self, result: Result) -> Iterator[KeyNumber]:
        """Its rows in the table of key numbers."""
        if self.rows is not None:
            yield from self.rows(result)
        elif self.name and isinstance(self.read, str) and getattr(result, self.read.partition(".")[0]) is not None:
            value = self.value(result)
            if value or not self.optional:
                meaning = self.meaning if isinstance(self.meaning, str) else self.meaning(result)
                yield KeyNumber(self.name, self.show(value), meaning)


@dataclass(frozen=True)
class Measure:
    """One figure of a job, or one for each value of its labels.

    Attributes:
        key: what it is called in the comparison, and behind `shadowsync_` for Prometheus; empty: it is in neither.
        help: what it is, in a sentence, for Prometheus.
        live: reads it from a frame; with labels a map from theirs (of two labels: from pairs). None: there is none now.
        tag: for TensorBoard, `{}` standing for the label's value; empty: not shown there.
        kind: a counter only grows.
        labels: names of the labels.
        line: its part of the progress line, empty where it has nothing to say; None: it has no part there.
        final: of a finished run.
    """

    key: str
    help: str = ""
    live: Callable[[Frame], Value | Mapping[str, Value] | Mapping[tuple[str, str], Value]] | None = None
    tag: str = ""
    kind: Literal["gauge", "counter"] = "gauge"
    labels: Labels = ()
    line: Callable[[Frame], str] | None = None
    final: Final | None = None

    def values(self, frame: Frame) -> Iterator[tuple[Labels, float]]:
        """What there is in a frame, by the values of the labels."""
        found = None if self.live is None else self.live(frame)
        for labels, value in (found if isinstance(found, Mapping) else {(): found}).items():
            if value is not None:
                yield (labels,) if isinstance(labels, str) else labels, value


def scalars(frame: Frame) -> Iterator[tuple[str, float]]:
    """Tags and values for TensorBoard."""
    for measure in MEASURES:
        if measure.tag:
            yield from ((measure.tag.format(*labels), value) for labels, value in measure.values(frame))


def final_scalars(result: Result) -> Iterator[tuple[str, float]]:
    """The same of what is known at the end only; what is not defined has none."""
    for measure in MEASURES:
        value = measure.final.value(result) if measure.live is None and measure.final is not None else None
        if measure.tag and value is not None:
            yield measure.tag, value


def figures(frame: Frame) -> Iterator[str]:
    """The parts of the progress line."""
    parts = (measure.line(frame) for measure in MEASURES if measure.line is not None)
    return (part for part in parts if part)


def key_numbers(result: Result) -> list[KeyNumber]:
    """The rows that apply to this result: the same in the terminal and on the page."""
    return [row for measure in MEASURES if measure.final for row in measure.final.key_numbers(result)]


def _digits(digits: int) -> Callable[[Value], str]:
    return partial(words.decimal, digits=digits)


def _text(value: str | None) -> str:
    return value or words.MISSING


def _method(result: Result) -> str | None:
    """Of whichever family was at work."""
    if (done := result.aggregation) is not None:
        return done.method
    return None if result.sync is None else result.sync.method


def _dead_rows(result: Result) -> Iterator[KeyNumber]:
    if (units := result.units) is not None:
        for layer in mostly_dead(units):
            meaning = f"units that are 0 on all {words.count(units.rows)} test rows looked at"
            yield KeyNumber(f"dead in {layer}", dead_of(units, layer), meaning)


def _astray_row(result: Result) -> Iterator[KeyNumber]:
    if (peak := went_astray(result)) is not None:
        meaning = f"log loss {peak.logloss:.2f} over {words.count(peak.samples)} samples, {COIN:.2f} is guessing"
        yield KeyNumber("training NE, worst", words.decimal(peak.ne), meaning)


def _speed_row(result: Result) -> Iterator[KeyNumber]:
    emulated = "" if result.throughput.emulated_step_ms is None else "emulated "
    speed = words.count(result.throughput.eps)
    yield KeyNumber(f"{emulated}examples/s (EPS)", speed, "first to last batch, start-up left out")


def _precision_words(result: Result) -> str:
    return (result.computing and result.computing.why) or "of the forward and backward pass"


def _gap_words(result: Result) -> str:
    return f"steps between syncs ({result.sync.method}, {result.sync.schedule})" if result.sync else ""


def _made_by(result: Result) -> str:
    done = result.aggregation
    if done is None or done.method is None:
        return "committed by the aggregator"
    switches = f", {words.plural(len(done.switches), 'switch', 'switches')}" if done.switches else ""
    return f"made by {done.method}{switches}"


def _staleness_row(result: Result) -> Iterator[KeyNumber]:
    if (done := result.aggregation) is not None:
        both = f"{words.decimal(done.mean_staleness, 2)} / {words.count(done.max_staleness)}"
        yield KeyNumber("staleness, mean / largest", both, "global steps")


def _epoch_words(result: Result) -> str:
    return f"{words.count(result.data.train_samples)} in an epoch"


def _mode_words(result: Result) -> str:
    return f"recovery mode {result.recovery.mode}" if result.recovery else ""


def _failures_row(result: Result) -> Iterator[KeyNumber]:
    if (recovery := result.recovery) is not None and recovery.failures:
        target = "" if recovery.target_pls is None else f", the target is {recovery.target_pls:g}"
        lost = f"{words.pls(recovery.pls)} (portion of lost samples){target}"
        yield KeyNumber("failures", words.count(recovery.failures), lost)


def _codecs(frame: Frame) -> str:
    chosen = " ".join(f"{kind}={codec.replace(', ', '/')}" for kind, codec in frame.wire_codecs.items())
    return f"codecs {chosen}" if chosen else ""


def _times_fewer(frame: Frame) -> str:
    """`wire pull 7.9x push 15x`: how many times fewer bytes than in fp32 have crossed, of kinds that have a codec."""
    raw, sent = frame.wire_raw_bytes, frame.wire_bytes
    times = {kind: raw[kind] / sent[kind] for kind in raw if sent.get(kind) and raw[kind] != sent[kind]}
    shown = " ".join(f"{kind} {ratio:.1f}x" if ratio < 10 else f"{kind} {ratio:.0f}x" for kind, ratio in times.items())
    return f"wire {shown}" if shown else ""


def _pls(frame: Frame) -> str:
    if not frame.pls:
        return ""
    return words.pls(frame.pls) if frame.target_pls is None else f"{words.pls(frame.pls)}/{frame.target_pls:g}"


def _visible_failures(frame: Frame) -> Value:
    """None where nobody could have seen one."""
    return frame.failures if frame.failures or frame.roles or frame.pls is not None else None


def _recovery_seconds(frame: Frame, emulated: bool) -> Mapping[str, Value]:
    return frame.recovery_seconds if (frame.emulated_job_s is not None) == emulated else {}


def _role_counts(frame: Frame) -> dict[str, Value]:
    states = list(frame.roles.values())
    return {state: states.count(state) for state in get_args(RoleState)} if states else {}


def _in_trouble(frame: Frame) -> str:
    """The roles that are not at work, the first ones by name."""
    roles = frame.roles
    troubled = [f"{role} {roles[role]}" for role in sorted(roles, key=role_order) if roles[role] not in _FINE]
    more = len(troubled) - _ROLES_NAMED
    return ", ".join(troubled[:_ROLES_NAMED]) + (f" and {more} more" if more > 0 else "")


MEASURES: tuple[Measure, ...] = (
    Measure("method", final=Final(_method, show=_text)),
    Measure(
        "test_auc", tag="test/auc", final=Final("test.auc", "test AUC", "1 ranks perfectly, 0.5 guesses", best=max)
    ),
    Measure("best_auc", final=Final("test.best_auc", "best reachable AUC", "of the true probabilities", optional=True)),
    Measure(
        "test_ne", tag="test/ne", final=Final("test.ne", "test NE", "under 1 beats predicting the mean label", best=min)
    ),
    Measure(
        "test_calibration",
        tag="test/calibration",
        final=Final("test.calibration", "test calibration", "above 1 it predicts too many positives", _digits(3)),
    ),
    Measure(
        "test_logloss",
        tag="test/logloss",
        final=Final("test.logloss", "test log loss", "nats per sample, lower is better", best=min),
    ),
    Measure(
        "normalized_entropy",
        "Of predictions made before training on them.",
        lambda f: {"window": f.ne_window, "lifetime": f.ne_lifetime},
        "quality/ne_{}",
        labels=("over",),
        line=lambda f: f"NE {words.decimal(f.ne_window)}",
        final=Final("train.ne_window", "training NE, last window", "predictions made before training on them"),
    ),
    Measure(
        "auc",
        "Of all predictions so far, each made before training on it.",
        lambda f: f.auc,
        "quality/auc",
        line=lambda f: f"AUC {words.decimal(f.auc)}",
    ),
    Measure("log_loss", "Mean over the last interval, in nats.", lambda f: f.loss, "quality/loss"),
    Measure("dead_units", final=Final("units.dead", rows=_dead_rows)),
    Measure("worst_normalized_entropy", final=Final("train.peak", rows=_astray_row)),
    Measure(
        "examples_per_second",
        "Samples trained per second by the whole job.",
        lambda f: f.eps,
        "speed/eps",
        final=Final("throughput.eps", show=words.count, best=max, rows=_speed_row),
    ),
    Measure(
        "trainer_examples_per_second",
        "Samples trained per second by each trainer.",
        lambda f: {str(rank): eps for rank, eps in enumerate(f.eps_per_trainer)},
        "speed/eps_trainer_{}",
        labels=("trainer",),
    ),
    Measure(
        "samples_at_once",
        final=Final("throughput.elp", "samples at once (ELP)", "batch size × workers × trainers", words.count),
    ),
    Measure(
        "training_seconds",
        "Time since the first batch, pauses before resumes left out.",
        lambda f: f.seconds,
        kind="counter",
        final=Final("throughput.seconds", "training time", "first to last batch", words.duration),
    ),
    Measure(
        "emulated_step_seconds",
        "There only if the machine is emulated: the time that each step is made to take.",
        lambda f: None if f.emulated_step_ms is None else f.emulated_step_ms / 1e3,
        final=Final(
            "throughput.emulated_step_ms",
            "emulated step",
            "speeds are those of emulated machines",
            words.step_time,
            optional=True,
        ),
    ),
    Measure("", "The same in milliseconds.", lambda f: f.emulated_step_ms, "speed/emulated_step_ms"),
    Measure("precision", final=Final("computing.precision", "precision", _precision_words, str)),
    Measure(
        "startup_seconds",
        final=Final("throughput.startup_seconds", "start-up", "before the first batch", words.duration, optional=True),
    ),
    Measure(
        "sync_gap_iterations",
        "Steps of a trainer between two synchronisations.",
        lambda f: f.sync_gap,
        "sync/gap",
        line=lambda f: "" if f.sync_gap is None else f"sync gap {words.decimal(f.sync_gap, 1)}",
        final=Final("sync.average_gap", "average sync gap", _gap_words, _digits(1)),
    ),
    Measure(
        "syncs",
        "Synchronisations of replicas, all trainers.",
        lambda f: f.sync_count,
        "sync/count",
        "counter",
        final=Final("sync.count", "synchronisations", "all trainers", words.count),
    ),
    Measure(
        "replica_distance_ratio",
        "Mean distance of replicas from their mean.",
        lambda f: f.replica_distance,
        "sync/replica_distance",
    ),
    Measure(
        "global_steps",
        "Steps that a gradient method has made.",
        lambda f: f.global_steps,
        "aggregation/global_steps",
        "counter",
        line=lambda f: "" if f.global_steps is None else f"{f.aggregation_mode} step {words.count(f.global_steps)}",
        final=Final("aggregation.global_steps", "global steps", _made_by, words.count),
    ),
    Measure(
        "dropped_gradients",
        "Gradients that no global step took.",
        lambda f: f.dropped,
        "aggregation/dropped",
        "counter",
        final=Final("aggregation.dropped", "dropped gradients", "too late or too old to be used", words.count),
    ),
    Measure(
        "staleness_steps",
        "Mean age of the gradients applied over the last interval.",
        lambda f: f.staleness,
        "aggregation/staleness",
        line=lambda f: "" if f.staleness is None else f"staleness {words.decimal(f.staleness, 1)}",
        final=Final("aggregation.mean_staleness", show=_digits(2), rows=_staleness_row),
    ),
    Measure(
        "aggregation_mode",
        "1 for the gradient method at work.",
        lambda f: {} if f.aggregation_mode is None else {f.aggregation_mode: 1.0},
        "aggregation/mode_{}",
        labels=("mode",),
    ),
    Measure(
        "worker_step_seconds",
        "What a worker takes for a batch, smoothed.",
        lambda f: f.step_seconds,
        "aggregation/step_s_worker_{}",
        labels=("worker",),
    ),
    Measure(
        "held_gradient_bytes",
        "Memory of gradients that wait for their step.",
        lambda f: f.held_bytes,
        "aggregation/held_bytes",
    ),
    Measure(
        "wire_codec",
        "1 for a codec that a trainer has chosen.",
        lambda f: {(kind, codec): 1.0 for kind, all_of in f.wire_codecs.items() for codec in all_of.split(", ")},
        labels=("kind", "codec"),
        line=_codecs,
    ),
    Measure(
        "wire_bytes",
        "Bytes between roles as sent.",
        lambda f: f.wire_bytes,
        "wire/{}_bytes",
        "counter",
        ("kind",),
        line=_times_fewer,
    ),
    Measure(
        "wire_raw_bytes",
        "The same with every float as fp32.",
        lambda f: f.wire_raw_bytes,
        kind="counter",
        labels=("kind",),
    ),
    Measure(
        "wire_kept_ratio",
        "Share of elements that crossed of late.",
        lambda f: f.wire_kept_share,
        "wire/{}_kept_share",
        labels=("kind",),
    ),
    Measure(
        "wire_refreshes",
        "Thresholds chosen exactly.",
        lambda f: f.wire_refreshes,
        "wire/{}_refreshes",
        "counter",
        ("kind",),
    ),
    Measure("queue_depth", "Requests that wait at a role.", lambda f: f.queue_depth, "queue/{}", labels=("role",)),
    Measure(
        "samples",
        "Samples trained, those before a resume included.",
        lambda f: f.samples,
        kind="counter",
        final=Final("data.trained_samples", "trained samples", _epoch_words, words.count),
    ),
    Measure("planned_samples", "Samples to be trained in all.", lambda f: f.total_samples),
    Measure("test_samples", final=Final("data.test_samples", "test samples", "never trained on", words.count)),
    Measure(
        "skipped_rows",
        final=Final("data.skipped_rows", "bad rows skipped", "data.on_bad_row=skip", words.count, optional=True),
    ),
    Measure(
        "checkpoints",
        "Checkpoints written.",
        lambda f: f.saves,
        "recovery/saves",
        "counter",
        final=Final("recovery.saves", "checkpoints", _mode_words, words.count),
    ),
    Measure(
        "checkpointing",
        "1 while a checkpoint is being written.",
        lambda f: float(f.checkpointing),
        line=lambda f: "saving" if f.checkpointing else "",
    ),
    Measure(
        "failures",
        "Roles that died.",
        lambda f: f.failures,
        kind="counter",
        line=lambda f: words.plural(f.failures, "failure") if f.failures else "",
        final=Final("recovery.failures", rows=_failures_row),
    ),
    Measure("", "The same, where one could be seen.", _visible_failures, "recovery/failures"),
    Measure("recovery_mode", final=Final(lambda r: (found := notable_recovery(r)) and found.mode, show=_text)),
    Measure(
        "pls",
        "Portion of samples that failures have lost.",
        lambda f: f.pls,
        "recovery/pls",
        line=_pls,
        final=Final(lambda r: (found := notable_recovery(r)) and found.pls),
    ),
    Measure(
        "target_pls",
        "What it may come to; only where recovery is partial.",
        lambda f: f.target_pls,
        "recovery/target_pls",
    ),
    Measure("recovery_seconds", "What recovery has cost.", lambda f: f.recovery_seconds, "", "counter", ("kind",)),
    Measure("", "The same, of time that has passed.", lambda f: _recovery_seconds(f, False), "recovery/{}_s"),
    Measure("", "The same, of an emulated job.", lambda f: _recovery_seconds(f, True), "recovery/emulated_{}_s"),
    Measure(
        "emulated_job_seconds",
        "There only if the job stands for another: its length; recovery_seconds are those of that job.",
        lambda f: f.emulated_job_s,
    ),
    Measure("roles", "How many roles are in a state.", _role_counts, labels=("state",)),
    Measure(
        "role_up",
        "1 where a role is alive, saving included.",
        lambda f: {role: float(state in ("alive", "saving")) for role, state in f.roles.items()},
        labels=("role",),
        line=_in_trouble,
    ),
)
"""Key numbers and the figures of the progress line stand in this order."""
