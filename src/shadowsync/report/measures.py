"""The tables of what is measured, through which every place that shows figures of a job walks.

`LIVE` is read from the frames of a running job: progress line, TensorBoard, Prometheus. The others are read from the
result of a finished one: key numbers (with the columns of the comparison, and the end of TensorBoard) and those of the
page's sections. All stand in the order of the table. A new figure is a field of `Frame` or of `Result`, and an entry
here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from shadowsync.metrics.history import Frame, RoleState, role_order
from shadowsync.metrics.quality import TestMetrics
from shadowsync.recovery.policy import spoken
from shadowsync.report import words
from shadowsync.report.result import (
    COIN,
    AggregationSection,
    RecoverySection,
    Result,
    TaskSection,
    TestSection,
    ThroughputSection,
    ValidationSection,
    dead_of,
    mostly_dead,
    notable_recovery,
)

Value = float | None
Labels = tuple[str, ...]

METHODS = {
    "sync": "rounds that everybody waits for",
    "async": "every gradient is a step of its own",
    "bsp": "a step for every global batch of gradients, however old",
    "hop_bs": "every gradient is a step, and nobody runs far ahead of the slowest",
    "hop_bw": "rounds that do not wait for the slowest",
    "gba": "a step for every global batch of gradients, less those that are too old",
    "auto": "synchronous while the workers are even, else by gba",
}
_MODES = {
    "full": "after a failure everybody goes back to the last checkpoint",
    "partial": "only the replacement of a dead server goes back to its checkpoint",
    "none": "nothing is saved for it: a replacement starts from what there is",
}
_ASTRAY = f"log loss {{0.astray.logloss:.2f}} over {{0.astray.samples:,}} samples, {COIN:.2f} is guessing"
_ELP = "samples at once (ELP)"
_ROLES_NAMED = 2
_FINE: tuple[RoleState, ...] = ("alive", "saving", "left")


@dataclass(frozen=True)
class Measure:
    """One figure of a running job, or one for each value of its labels.

    Attributes:
        key: what it is called behind `shadowsync_` for Prometheus; empty: it is not there.
        read: its field of a frame, or what reads it from one; with labels a map from theirs (of two labels: from
            pairs).
        tag: for TensorBoard, `{}` standing for the label's value; empty: not shown there.
        kind: a counter only grows.
        line: its part of the progress line, empty where it has nothing to say; None: it has no part there.
        term: explains a word of that part where it first stands.
    """

    key: str
    help: str
    read: Callable[[Frame], Value | Mapping[str, Value] | Mapping[tuple[str, str], Value]] | str
    tag: str = ""
    kind: Literal["gauge", "counter"] = "gauge"
    labels: Labels = ()
    line: Callable[[Frame], str] | None = None
    term: str = ""

    def values(self, frame: Frame) -> Iterator[tuple[Labels, float]]:
        """What there is in a frame, by the values of the labels."""
        found = getattr(frame, self.read) if isinstance(self.read, str) else self.read(frame)
        for labels, value in (found if isinstance(found, Mapping) else {(): found}).items():
            if value is not None:
                yield (labels,) if isinstance(labels, str) else labels, value


class KeyNumber(NamedTuple):
    """One row of a table: what it is, its value, and what the value means."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class Final:
    """A figure of a finished run, as a row of a table, a column of the comparison, or both.

    Attributes:
        read: its place in the result as `section.key` or `section`, or a function of it; None: it is not defined.
        name: of its row, which is there where the section is; empty: it has none.
        meaning: in that row, `{0}` standing for the section; like `name` it may be made from that.
        show: how it is written, with its unit; empty: no row.
        column: heading in the comparison; empty: it is not compared.
        best: picks the best of several; None where there is no best.
    """

    read: Callable[[Result], Any] | str
    name: str | Callable[[Any], str] = ""
    meaning: str | Callable[[Any], str] = ""
    show: Callable[[Any], str] = words.decimal
    column: str = ""
    best: Callable[[Any], float] | None = None

    @property
    def section(self) -> str:
        return "" if callable(self.read) else self.read.partition(".")[0]

    def value(self, result: Result) -> Any:
        """None where it is not defined or does not apply."""
        if callable(self.read):
            return self.read(result)
        found: Any = result
        for part in self.read.split("."):
            found = None if found is None else getattr(found, part)
        return found


def scalars(frame: Frame) -> Iterator[tuple[str, float]]:
    """Tags and values for TensorBoard."""
    for measure in LIVE:
        if measure.tag:
            yield from ((measure.tag.format(*labels), value) for labels, value in measure.values(frame))


def final_scalars(result: Result) -> Iterator[tuple[str, float]]:
    """The same of the test, which is known at the end only; what is not defined has none. Of the first label plain, of
    others as `test/LABEL/NAME`."""
    if (test := result.test) is None:
        return
    names = [str(one.read).partition(".")[2] for one in KEY_NUMBERS if one.section == "test" and one.column]
    later = list(test.tasks.items())[1:]
    sections: dict[str, TestSection | TaskSection] = {"": test, **{f"{label}/": of for label, of in later}}
    for label, of in sections.items():
        for name, value in {**{name: getattr(of, name) for name in names}, **of.measures}.items():
            if value is not None:
                yield f"test/{label}{name}", value


def figures(frame: Frame) -> Iterator[tuple[str, str]]:
    """The parts of the progress line, each with the explanation of its word, if it needs one."""
    for measure in LIVE:
        if measure.line is not None and (part := measure.line(frame)):
            yield part, measure.term


def key_numbers(result: Result, table: Sequence[Final] | None = None) -> list[KeyNumber]:
    """The rows of a table (the key numbers) that apply to this result: the same in the terminal and on the page."""
    found = []
    for measure in KEY_NUMBERS if table is None else table:
        section = getattr(result, measure.section, None)
        if section is not None and measure.name and (shown := measure.show(measure.value(result))):
            told = [text(section) if callable(text) else text for text in (measure.name, measure.meaning)]
            if told[0]:
                found.append(KeyNumber(told[0], shown, told[1].format(section)))
        elif measure.read == "test" and section is not None:
            found += asked_for(section)
        elif measure.section == "units" and section is not None:
            on = f"units that are 0 on all {words.count(section.rows)} test rows looked at"
            found += [KeyNumber(f"dead in {layer}", dead_of(section, layer), on) for layer in mostly_dead(section)]
    return found


def asked_for(test: TestSection | TestMetrics) -> list[KeyNumber]:
    """The measures by name, or of several labels all measures of each."""
    if not test.tasks:
        return [KeyNumber(name, words.decimal(value), "of the test rows") for name, value in test.measures.items()]
    found = []
    for task, own in test.tasks.items():
        plain = {"AUC": own.auc, "log loss": own.logloss} if own.loss == "logloss" else {}
        each = {**plain, "NE": own.ne, "calibration": own.calibration, **own.measures}
        found += [
            KeyNumber(f"{task}: {name}", words.decimal(value), "of the test rows") for name, value in each.items()
        ]
    return found


def _of_clicks(name: str) -> Callable[[TestSection], str]:
    """No row for other labels."""
    return lambda test: name if test.loss == "logloss" else ""


def _digits(digits: int) -> Callable[[Value], str]:
    return partial(words.decimal, digits=digits)


def _some(show: Callable[[Any], str]) -> Callable[[Any], str]:
    """No row without a value, or for 0."""
    return lambda value: show(value) if value else ""


def _method(result: Result) -> str | None:
    """Of whichever family was at work."""
    done = result.sync if result.aggregation is None else result.aggregation
    return None if done is None else done.method


def _or_missing(text: str | None) -> str:
    return text or words.MISSING


def validated(frame: Frame) -> Mapping[str, Value]:
    """The measures of a validation of this very state; nothing if the last one was of an earlier state."""
    return frame.valid if frame.valid_samples == frame.samples else {}


def _validated_line(frame: Frame) -> str:
    name = next((name for name in ("auc", "ne") if name in frame.valid), None)
    return "" if name is None else f"valid {name.upper()} {words.decimal(frame.valid[name])}"


def _no_clicks(frame: Frame) -> bool:
    """There is a loss, and no NE: labels are numbers, or all alike so far."""
    return frame.loss is not None and frame.ne_lifetime is None


def _best_name(validation: ValidationSection) -> str:
    return f"best validation {validation.best_by}"


def _best_meaning(validation: ValidationSection) -> str:
    return (
        f"of {validation.validations:,}, after {validation.best_samples:,} samples: that state is tested and exported"
    )


def _made_by(done: AggregationSection) -> str:
    if done.method is None:
        return "committed by the aggregator"
    switches = f", {words.plural(len(done.switches), 'switch', 'switches')}" if done.switches else ""
    return f"made by {done.method}{switches}"


def _staleness(done: AggregationSection) -> str:
    return f"{words.decimal(done.mean_staleness, 2)} / {words.count(done.max_staleness)}"


def _dropped(done: AggregationSection) -> str:
    share = f" ({words.percent(done.dropped / done.received, 1)})" if done.received else ""
    return f"{words.count(done.dropped)}{share}"


def _times(seconds: Mapping[str, float]) -> str:
    return "" if not seconds else f"{1e3 * median(seconds.values()):.3g} / {1e3 * max(seconds.values()):.3g} ms"


def _lost(recovery: RecoverySection) -> str:
    target = "" if recovery.target_pls is None else f", the target is {recovery.target_pls:g}"
    return f"{words.pls(recovery.pls)} (portion of lost samples){target}"


def _mode(done: AggregationSection) -> str:
    return "" if done.mode is None or done.mode == done.method else done.mode


def _held(size: float | None) -> str:
    return "" if size is None else words.data_size(size)


def _speed_name(speed: ThroughputSection) -> str:
    return f"{'' if speed.emulated_step_ms is None else 'emulated '}examples/s (EPS)"


def _interval_name(recovery: RecoverySection) -> str:
    return f"{'' if recovery.emulated_job_s is None else 'emulated '}time between saves"


def _interval(seconds: float | None) -> str:
    return words.MISSING if seconds is None else spoken(seconds)


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


LIVE: tuple[Measure, ...] = (
    Measure(
        "normalized_entropy",
        "Of predictions made before training on them.",
        lambda f: {"window": f.ne_window, "lifetime": f.ne_lifetime},
        "quality/ne_{}",
        labels=("over",),
        line=lambda f: "" if _no_clicks(f) else f"NE {words.decimal(f.ne_window)}",
        term="NE: normalized entropy, log loss over that of predicting the mean label",
    ),
    Measure(
        "auc",
        "Of all predictions so far, each made before training on it.",
        "auc",
        "quality/auc",
        line=lambda f: "" if _no_clicks(f) else f"AUC {words.decimal(f.auc)}",
    ),
    Measure(
        "log_loss",
        "Mean loss over the last interval, of clicks in nats.",
        "loss",
        "quality/loss",
        line=lambda f: f"loss {words.decimal(f.loss)}" if _no_clicks(f) else "",
    ),
    Measure(
        "validation",
        "Of the last validation, by measure.",
        "valid",
        labels=("measure",),
        line=_validated_line,
        term="valid: of the last validation, on rows that are kept from training",
    ),
    Measure("", "The same, where it has just been.", validated, "valid/{}"),
    Measure("learning_rate", "As it is now, where it may fall.", "learning_rates", "speed/lr_{}", labels=("part",)),
    Measure("examples_per_second", "Samples trained per second by the whole job.", "eps", "speed/eps"),
    Measure(
        "trainer_examples_per_second",
        "Samples trained per second by each trainer.",
        lambda f: {str(rank): eps for rank, eps in enumerate(f.eps_per_trainer)},
        "speed/eps_trainer_{}",
        labels=("trainer",),
    ),
    Measure(
        "training_seconds", "Time since the first batch, pauses before resumes left out.", "seconds", kind="counter"
    ),
    Measure(
        "emulated_step_seconds",
        "There only if the machine is emulated: the time that each step is made to take.",
        lambda f: None if f.emulated_step_ms is None else f.emulated_step_ms / 1e3,
    ),
    Measure("", "The same in milliseconds.", "emulated_step_ms", "speed/emulated_step_ms"),
    Measure(
        "sync_gap_iterations",
        "Steps of a trainer between two synchronisations.",
        "sync_gap",
        "sync/gap",
        line=lambda f: "" if f.sync_gap is None else f"sync gap {words.decimal(f.sync_gap, 1)}",
        term="sync gap: steps of a trainer between two synchronisations of its replica",
    ),
    Measure("syncs", "Synchronisations of replicas, all trainers.", "sync_count", "sync/count", "counter"),
    Measure(
        "replica_distance_ratio",
        "Mean distance of replicas from their mean.",
        "replica_distance",
        "sync/replica_distance",
    ),
    Measure(
        "global_steps",
        "Steps that a gradient method has made.",
        "global_steps",
        "aggregation/global_steps",
        "counter",
        line=lambda f: "" if f.global_steps is None else f"{f.aggregation_mode} step {words.count(f.global_steps)}",
    ),
    Measure("dropped_gradients", "Gradients that no global step took.", "dropped", "aggregation/dropped", "counter"),
    Measure(
        "staleness_steps",
        "Mean age of the gradients applied over the last interval.",
        "staleness",
        "aggregation/staleness",
        line=lambda f: "" if f.staleness is None else f"staleness {words.decimal(f.staleness, 1)}",
        term="staleness: global steps by which an applied gradient was late",
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
        "step_seconds",
        "aggregation/step_s_worker_{}",
        labels=("worker",),
    ),
    Measure(
        "keys",
        "Of dynamic tables: their rows, keys that have one, and keys admitted, refused and evicted since the start.",
        "keys",
        "keys/{}",
        labels=("what",),
        line=lambda f: f"{words.percent(f.keys['keys'] / f.keys['rows'])} of rows taken" if f.keys else "",
    ),
    Measure(
        "stored",
        "Of rows on disk: rows, those that fit into memory, rows looked up and missed, and bytes read and written.",
        "stored",
        "stored/{}",
        labels=("what",),
        line=lambda f: (
            f"{words.percent(1 - f.stored['missed'] / max(1, f.stored['looked_up']))} of rows in memory"
            if f.stored
            else ""
        ),
    ),
    Measure(
        "held_gradient_bytes", "Memory of gradients that wait for their step.", "held_bytes", "aggregation/held_bytes"
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
        "wire_bytes",
        "wire/{}_bytes",
        "counter",
        ("kind",),
        line=_times_fewer,
    ),
    Measure("wire_raw_bytes", "The same with every float as fp32.", "wire_raw_bytes", kind="counter", labels=("kind",)),
    Measure(
        "wire_kept_ratio",
        "Share of elements that crossed of late.",
        "wire_kept_share",
        "wire/{}_kept_share",
        labels=("kind",),
    ),
    Measure(
        "wire_refreshes", "Thresholds chosen exactly.", "wire_refreshes", "wire/{}_refreshes", "counter", ("kind",)
    ),
    Measure("queue_depth", "Requests that wait at a role.", "queue_depth", "queue/{}", labels=("role",)),
    Measure("samples", "Samples trained, those before a resume included.", "samples", kind="counter"),
    Measure("planned_samples", "Samples to be trained in all.", "total_samples"),
    Measure("checkpoints", "Checkpoints written.", "saves", "recovery/saves", "counter"),
    Measure(
        "checkpointing",
        "1 while a checkpoint is being written.",
        lambda f: float(f.checkpointing),
        line=lambda f: "saving" if f.checkpointing else "",
    ),
    Measure(
        "failures",
        "Roles that died.",
        "failures",
        kind="counter",
        line=lambda f: words.plural(f.failures, "failure") if f.failures else "",
    ),
    Measure(
        "",
        "The same, where one could be seen.",
        lambda f: f.failures if f.failures or f.roles or f.pls is not None else None,
        "recovery/failures",
    ),
    Measure(
        "pls",
        "Portion of samples that failures have lost.",
        "pls",
        "recovery/pls",
        line=_pls,
        term="PLS: portion of lost samples: learned by dead embedding servers since they were last saved",
    ),
    Measure("target_pls", "What it may come to; only where recovery is partial.", "target_pls", "recovery/target_pls"),
    Measure("recovery_seconds", "What recovery has cost.", "recovery_seconds", "", "counter", ("kind",)),
    Measure("", "The same, of time that has passed.", lambda f: _recovery_seconds(f, False), "recovery/{}_s"),
    Measure("", "The same, of an emulated job.", lambda f: _recovery_seconds(f, True), "recovery/emulated_{}_s"),
    Measure(
        "emulated_job_seconds",
        "There only if the job stands for another: its length; recovery_seconds are those of that job.",
        "emulated_job_s",
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
KEY_NUMBERS: tuple[Final, ...] = (
    Final(_method, show=_or_missing, column="method"),
    Final("test.auc", _of_clicks("test AUC"), "1 ranks perfectly, 0.5 guesses", column="test AUC", best=max),
    Final("test.best_auc", "best reachable AUC", "of the true probabilities", _some(words.decimal)),
    Final("test.ne", "test NE", "under 1 beats predicting the mean label", column="test NE", best=min),
    Final("test.calibration", "test calibration", "above 1 it predicts too many positives", _digits(3), "calibration"),
    Final(
        "test.logloss",
        _of_clicks("test log loss"),
        "nats per sample, lower is better",
        column="log loss",
        best=min,
    ),
    Final("test"),
    Final("validation.best", _best_name, _best_meaning, _some(words.decimal)),
    Final("ended.why", "training ended by", "{0.detail}", lambda why: why.replace("_", " ")),
    Final("train.ne_window", "training NE, last window", "predictions made before training on them"),
    Final("units"),
    Final("train.astray", "training NE, worst", _ASTRAY, _some(lambda peak: words.decimal(peak.ne))),
    Final("throughput.eps", _speed_name, "first to last batch, start-up left out", words.count, "examples/s", max),
    Final("throughput.elp", _ELP, "batch size × workers × trainers", words.count, _ELP),
    Final("throughput.seconds", "training time", "first to last batch", words.duration, "time"),
    Final(
        "throughput.emulated_step_ms", "emulated step", "speeds are those of emulated machines", _some(words.step_time)
    ),
    Final("computing.precision", "precision", lambda how: how.why or "of the forward and backward pass", str),
    Final("throughput.startup_seconds", "start-up", "before the first batch", _some(words.duration)),
    Final(
        "sync.average_gap",
        "average sync gap",
        "steps between syncs ({0.method}, {0.schedule})",
        _digits(1),
        "steps between syncs",
    ),
    Final("sync.count", "synchronisations", "all trainers", words.count),
    Final("aggregation.global_steps", "global steps", _made_by, words.count),
    Final("aggregation.dropped", "dropped gradients", "too late or too old to be used", words.count, "dropped"),
    Final("aggregation", "staleness, mean / largest", "global steps", _staleness),
    Final("aggregation.mean_staleness", show=_digits(2), column="staleness"),
    Final("data.trained_samples", "trained samples", "{0.train_samples:,} in an epoch", words.count, "trained"),
    Final("data.test_samples", "test samples", "never trained on", words.count),
    Final("data.skipped_rows", "bad rows skipped", "data.on_bad_row=skip", _some(words.count)),
    Final(
        "keys",
        "ids with a row",
        "of dynamic tables, and how many can have one",
        lambda of: f"{of.keys:,} of {of.rows:,}",
    ),
    Final("keys.admitted", "ids admitted", "got a row since the last start", words.count),
    Final("keys.refused", "look-ups refused", "of ids that were to get a row, and none was free", words.count),
    Final("keys.evicted", "ids evicted", "lost their row to another one, or to time", words.count),
    Final(
        "stored",
        "rows in memory",
        "of those on disk, as many as fit",
        lambda of: f"{min(of.slots, of.rows):,} of {of.rows:,}",
    ),
    Final("stored.hits", "hits of the memory", "look-ups whose row was there", words.percent),
    Final("stored.read_bytes", "rows read", "from disk", words.data_size),
    Final("stored.written_bytes", "rows written back", "to disk", words.data_size),
    Final("recovery.saves", "checkpoints", "recovery mode {0.mode}", words.count),
    Final("recovery.failures", "failures", _lost, _some(words.count)),
    Final(lambda result: (found := notable_recovery(result)) and found.mode, show=_or_missing, column="recovery"),
    Final(lambda result: (found := notable_recovery(result)) and found.pls, column="lost samples (PLS)"),
)
OF_AGGREGATION = (
    Final("aggregation.method", "method", lambda done: METHODS.get(done.method, ""), _some(str)),
    Final("aggregation", "at the end", lambda done: METHODS.get(done.mode, ""), _mode),
    Final("aggregation.global_steps", "global steps", "of the optimizer, resumes included", words.count),
    Final("aggregation", "gradients dropped", "left out of every step; their samples count as trained", _dropped),
    Final("aggregation", "staleness, mean / largest", "global steps, of the gradients that were applied", _staleness),
    Final("aggregation.switches", "switches", "from one method to another", _some(lambda all_of: str(len(all_of)))),
    Final("aggregation.step_seconds", "step time, median / slowest", "of the workers, mean time of a batch", _times),
    Final("aggregation.most_held_bytes", "gradients held, at most", "by all servers, as seen", _held),
)
OF_RECOVERY = (
    Final("recovery.mode", "mode", lambda recovery: _MODES.get(recovery.mode, ""), str),
    Final("recovery.priority", "priority", "which rows are saved first (recovery.priority)", _some(str)),
    Final("recovery.interval_s", _interval_name, "at the end of the run, from start to start", _interval),
    Final("recovery.saves", "checkpoints", "written since the last start", words.count),
    Final("recovery.failures", "failures", "roles that died since the last start", words.count),
    Final("recovery.moves", "moves", "of servers to other machines since the last start", _some(words.count)),
    Final("recovery.pls", "PLS", "portion of lost samples, resumes included", "{:.3g}".format),
    Final("recovery.target_pls", "target PLS", "what it is expected to come to, at most", _some("{:g}".format)),
    Final("recovery.emulated_job_s", "emulated job", "for which this run stands", _some(spoken)),
)
