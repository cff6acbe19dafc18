"""The table of what is measured while a job trains: progress line, TensorBoard and Prometheus walk through it.

A new figure is a field of `Frame` and a line here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from shadowsync.metrics.frame import Frame
from shadowsync.metrics.roles import RoleState
from shadowsync.report import words
from shadowsync.report.trainer_words import roles_in_trouble

Value: TypeAlias = float | None
Labels: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Measure:
    """One figure of a frame, or one for each value of its labels.

    Attributes:
        name: for Prometheus, behind `shadowsync_`; empty: not shown there.
        help: what it is, in a sentence.
        read: its value; with labels a map from theirs (of two labels: from pairs). None: there is none now.
        kind: a counter only grows.
        labels: names of the labels.
        tag: for TensorBoard, `{}` standing for the label's value; empty: not shown there.
        line: its part of the progress line, empty where it has nothing to say; None: it has no part there.
    """

    name: str
    help: str
    read: Callable[[Frame], Value | Mapping[str, Value] | Mapping[tuple[str, str], Value]]
    kind: Literal["gauge", "counter"] = "gauge"
    labels: Labels = ()
    tag: str = ""
    line: Callable[[Frame], str] | None = None

    def values(self, frame: Frame) -> Iterator[tuple[Labels, float]]:
        """What there is, by the values of the labels."""
        found = self.read(frame)
        for labels, value in (found if isinstance(found, Mapping) else {(): found}).items():
            if value is not None:
                yield (labels,) if isinstance(labels, str) else labels, value


def scalars(frame: Frame) -> Iterator[tuple[str, float]]:
    """Tags and values for TensorBoard."""
    for measure in MEASURES:
        if measure.tag:
            yield from ((measure.tag.format(*labels), value) for labels, value in measure.values(frame))


def figures(frame: Frame) -> Iterator[str]:
    """The parts of the progress line."""
    parts = (measure.line(frame) for measure in MEASURES if measure.line is not None)
    return (part for part in parts if part)


def _eps(frame: Frame) -> str:
    emulated = "emulated " if frame.emulated_step_ms is not None else ""
    return f"{words.count(frame.eps)} {emulated}examples/s"


def _gap(frame: Frame) -> str:
    return "" if frame.sync_gap is None else f"sync gap {words.decimal(frame.sync_gap, 1)}"


def _steps(frame: Frame) -> str:
    return "" if frame.global_steps is None else f"{frame.aggregation_mode} step {words.count(frame.global_steps)}"


def _staleness(frame: Frame) -> str:
    return "" if frame.staleness is None else f"staleness {words.decimal(frame.staleness, 1)}"


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


def _states(frame: Frame) -> dict[str, Value]:
    states = list(frame.roles.values())
    return {state: states.count(state) for state in get_args(RoleState)} if states else {}


def _told_failures(frame: Frame) -> Value:
    """None where nobody could have seen one."""
    return frame.failures if frame.failures or frame.roles or frame.pls is not None else None


def _recovery_seconds(frame: Frame, emulated: bool) -> Mapping[str, Value]:
    return frame.recovery_seconds if (frame.emulated_job_s is not None) == emulated else {}


MEASURES: tuple[Measure, ...] = (
    Measure(
        "examples_per_second",
        "Samples trained per second by the whole job.",
        lambda f: f.eps,
        tag="speed/eps",
        line=_eps,
    ),
    Measure(
        "trainer_examples_per_second",
        "Samples trained per second by each trainer.",
        lambda f: {str(rank): eps for rank, eps in enumerate(f.eps_per_trainer)},
        labels=("trainer",),
        tag="speed/eps_trainer_{}",
    ),
    Measure("samples", "Samples trained, those before a resume included.", lambda f: f.samples, "counter"),
    Measure("planned_samples", "Samples to be trained in all.", lambda f: f.total_samples),
    Measure(
        "training_seconds",
        "Time since the first batch, pauses before resumes left out.",
        lambda f: f.seconds,
        "counter",
    ),
    Measure(
        "emulated_step_seconds",
        "There only if the machine is emulated: the time that each step is made to take.",
        lambda f: None if f.emulated_step_ms is None else f.emulated_step_ms / 1e3,
    ),
    Measure("", "The same in milliseconds.", lambda f: f.emulated_step_ms, tag="speed/emulated_step_ms"),
    Measure(
        "normalized_entropy",
        "Of predictions made before training on them.",
        lambda f: {"window": f.ne_window, "lifetime": f.ne_lifetime},
        labels=("over",),
        tag="quality/ne_{}",
        line=lambda f: f"NE {words.decimal(f.ne_window)}",
    ),
    Measure(
        "auc",
        "Of all predictions so far, each made before training on it.",
        lambda f: f.auc,
        tag="quality/auc",
        line=lambda f: f"AUC {words.decimal(f.auc)}",
    ),
    Measure("log_loss", "Mean over the last interval, in nats.", lambda f: f.loss, tag="quality/loss"),
    Measure(
        "syncs", "Synchronisations of replicas, all trainers.", lambda f: f.sync_count, "counter", tag="sync/count"
    ),
    Measure(
        "sync_gap_iterations",
        "Steps of a trainer between two synchronisations.",
        lambda f: f.sync_gap,
        tag="sync/gap",
        line=_gap,
    ),
    Measure(
        "replica_distance_ratio",
        "Mean distance of replicas from their mean.",
        lambda f: f.replica_distance,
        tag="sync/replica_distance",
    ),
    Measure(
        "global_steps",
        "Steps that a gradient method has made.",
        lambda f: f.global_steps,
        "counter",
        tag="aggregation/global_steps",
        line=_steps,
    ),
    Measure(
        "dropped_gradients",
        "Gradients that no global step took.",
        lambda f: f.dropped,
        "counter",
        tag="aggregation/dropped",
    ),
    Measure(
        "staleness_steps",
        "Mean age of the gradients applied over the last interval.",
        lambda f: f.staleness,
        tag="aggregation/staleness",
        line=_staleness,
    ),
    Measure(
        "aggregation_mode",
        "1 for the gradient method at work.",
        lambda f: {} if f.aggregation_mode is None else {f.aggregation_mode: 1.0},
        labels=("mode",),
        tag="aggregation/mode_{}",
    ),
    Measure(
        "worker_step_seconds",
        "What a worker takes for a batch, smoothed.",
        lambda f: f.step_seconds,
        labels=("worker",),
        tag="aggregation/step_s_worker_{}",
    ),
    Measure(
        "held_gradient_bytes",
        "Memory of gradients that wait for their step.",
        lambda f: f.held_bytes,
        tag="aggregation/held_bytes",
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
        "counter",
        ("kind",),
        tag="wire/{}_bytes",
        line=_times_fewer,
    ),
    Measure("wire_raw_bytes", "The same with every float as fp32.", lambda f: f.wire_raw_bytes, "counter", ("kind",)),
    Measure(
        "wire_kept_ratio",
        "Share of elements that crossed of late.",
        lambda f: f.wire_kept_share,
        labels=("kind",),
        tag="wire/{}_kept_share",
    ),
    Measure(
        "wire_refreshes",
        "Thresholds chosen exactly.",
        lambda f: f.wire_refreshes,
        "counter",
        ("kind",),
        tag="wire/{}_refreshes",
    ),
    Measure("queue_depth", "Requests that wait at a role.", lambda f: f.queue_depth, labels=("role",), tag="queue/{}"),
    Measure("checkpoints", "Checkpoints written.", lambda f: f.saves, "counter", tag="recovery/saves"),
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
        "counter",
        line=lambda f: words.plural(f.failures, "failure") if f.failures else "",
    ),
    Measure("", "The same, where one could be seen.", _told_failures, tag="recovery/failures"),
    Measure("pls", "Portion of samples that failures have lost.", lambda f: f.pls, tag="recovery/pls", line=_pls),
    Measure(
        "target_pls",
        "What it may come to; only where recovery is partial.",
        lambda f: f.target_pls,
        tag="recovery/target_pls",
    ),
    Measure("recovery_seconds", "What recovery has cost.", lambda f: f.recovery_seconds, "counter", ("kind",)),
    Measure("", "The same, of time that has passed.", lambda f: _recovery_seconds(f, False), tag="recovery/{}_s"),
    Measure("", "The same, of an emulated job.", lambda f: _recovery_seconds(f, True), tag="recovery/emulated_{}_s"),
    Measure(
        "emulated_job_seconds",
        "There only if the job stands for another: its length; recovery_seconds are those of that job.",
        lambda f: f.emulated_job_s,
    ),
    Measure("roles", "How many roles are in a state.", _states, labels=("state",)),
    Measure(
        "role_up",
        "1 where a role is alive, saving included.",
        lambda f: {role: float(state in ("alive", "saving")) for role, state in f.roles.items()},
        labels=("role",),
        line=lambda f: roles_in_trouble(f.roles),
    ),
)
"""Figures of the progress line stand in this order."""
