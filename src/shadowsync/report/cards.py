"""What a run's page shows section by section: charts, each with a sentence that says what it shows and one that says
what good looks like, numbers, and what happened in words.

`P` points of a curve; frames that lack the value are left out.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from markupsafe import Markup

from shadowsync.metrics.history import Frame, RoleEvent, role_order, spans
from shadowsync.metrics.units import Units
from shadowsync.recovery.policy import spoken
from shadowsync.report import words
from shadowsync.report.measures import OF_AGGREGATION, OF_RECOVERY, KeyNumber, key_numbers, validated
from shadowsync.report.plots import (
    Axis,
    Band,
    Bar,
    Line,
    Look,
    Marks,
    Row,
    bar_chart,
    calibration_chart,
    line_chart,
    timeline_chart,
)
from shadowsync.report.result import AggregationSection, RecoverySection, Result, WireSection, dead_of, notable_recovery

SAMPLES = Axis("samples trained")
SECONDS = Axis("seconds since the first batch")
_NO_FRAMES = "The run ended before the first report; a smaller report.every_s gives a curve."
_WIRE = {"pull": "pulled embeddings", "push": "pushed gradients", "dense": "dense part"}
_COSTS = {
    "save": "saving held training up",
    "load": "loading checkpoints",
    "lost": "training repeated",
    "wait": "until replacements stood",
}
_LOOKS = {
    "alive": Look(colour=2, height=0.3),
    "saving": Look(colour=0),
    "restarting": Look(colour=1, hatch="////"),
    "unreachable": Look(colour=6, hatch="...."),
    "dead": Look(colour=4, hatch="xxxx"),
}
_UNITS = ((120, 1, "seconds"), (7200, 60, "minutes"), (math.inf, 3600, "hours"))
_POINTS = 300
_DRAWN = 8  # trainers or workers, each by a line
_LAYERS_DRAWN = 20
_LARGEST_STALENESS = 12
_WORKERS_LISTED = 16
_SWITCHES, _DECISIONS, _EVENTS = 50, 20, 200  # listed
_MARKED_PLACES = 300
_ROLES_DRAWN = 24
_NAME_LENGTH = 18

Curve = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Card:
    """A chart with its words; where `svg` is None, `missing` says why there is nothing to see."""

    title: str
    shows: str
    good: str
    svg: Markup | None
    missing: str = _NO_FRAMES


@dataclass(frozen=True)
class PageSection:
    """A section of the page: its charts, the rows of its table, what happened in words, and how much more did."""

    cards: Sequence[Card]
    numbers: Sequence[KeyNumber] = ()
    told: Sequence[tuple[str, ...]] = ()
    left_out: int = 0


def three_digits(value: float) -> str:
    """How NE and AUC are written at an axis."""
    return f"{value:.3f}"


def curve(frames: Sequence[Frame], x: Axis, y: Callable[[Frame], float | None], points: int = _POINTS) -> Curve:
    """`x` (`SAMPLES` or `SECONDS`) and `y` of the frames, `[P]` each, runs of frames averaged to at most `points`."""
    found = [(frame, value) for frame in frames if (value := y(frame)) is not None and math.isfinite(value)]
    size = math.ceil(len(found) / points) or 1
    runs = [found[start : start + size] for start in range(0, len(found), size)]
    ends = [run[-1][0] for run in runs]
    at: list[float] = [frame.samples if x is SAMPLES else frame.seconds for frame in ends]
    return at, [statistics.fmean(value for _, value in run) for run in runs]


def kept(frames: Sequence[Frame]) -> list[Frame]:
    """The frames without those of training that was lost, after which the job went back to fewer samples."""
    found: list[Frame] = []
    for frame in reversed(frames):
        if not found or frame.samples <= found[-1].samples:
            found.append(frame)
    return found[::-1]


def steady(frames: Sequence[Frame]) -> list[Frame]:
    """The frames without those of unusually short intervals (the last, mostly), whose rates are noise."""
    starts = [0.0, *(frame.seconds for frame in frames)]
    intervals = [frame.seconds - start for frame, start in zip(frames, starts, strict=False)]
    least = 0.3 * statistics.median(intervals) if intervals else 0.0
    return [frame for frame, interval in zip(frames, intervals, strict=True) if interval > 0 and interval >= least]


def _curve_card(
    title: str, shows: str, good: str, points: Curve, x: Axis, y: str, colour: int, missing: str = _NO_FRAMES
) -> Card:
    """A card of one curve from zero."""
    lines = [Line(*points, colour=colour)]
    drawn = line_chart(title, x, Axis(y), lines, from_zero=True) if points[0] else None
    return Card(title, shows, good, drawn, missing)


# --- quality ---------------------------------------------------------------------------------------------------------


def quality_cards(result: Result, frames: Sequence[Frame]) -> list[Card]:
    """Learning curves, calibration, and the share of dead units of each layer, where the model has ReLUs."""
    frames, test = kept(frames), result.test
    window = curve(frames, SAMPLES, lambda frame: frame.ne_window)
    lines = [
        Line(*curve(frames, SAMPLES, lambda frame: frame.ne_lifetime), label="all so far", colour=None),
        Line(*window, label="window"),
        *_validation_line(frames, "ne"),
    ]
    reference = None if test is None or test.ne is None else (test.ne, f"test {test.ne:.4f}")
    axis = Axis("normalized entropy (NE)", three_digits)
    entropy = Card(
        "Learning curve: normalized entropy",
        "How much uncertainty about the label is left in predictions made just before each sample was trained on "
        "(after the first epoch the model has met it before).",
        "falls fast, then flattens well below 1, and ends near the test's line.",
        line_chart("entropy", SAMPLES, axis, lines, reference=reference) if window[0] else None,
    )
    points = curve(frames, SAMPLES, lambda frame: frame.auc)
    lines = [Line(*points, label="so far"), *_validation_line(frames, "auc")]
    reference = None if test is None or test.auc is None else (test.auc, f"test {test.auc:.4f}")
    auc = Card(
        "Learning curve: AUC",
        "How often a random positive was ranked above a random negative, over all predictions made so far.",
        "rises; as it remembers the poor start, it stays below what the model can do at the end.",
        line_chart("auc", SAMPLES, Axis("AUC", three_digits), lines, reference=reference) if points[0] else None,
    )
    calibration = Card(
        "Calibration on the test set",
        "Test samples in bins of equal count, by predicted probability: what was predicted against what happened, "
        "with bars of two standard errors.",
        "the points lie on the dashed diagonal; below it the model predicts too many positives, above it too few.",
        calibration_chart("calibration", test.curve) if test is not None and test.curve else None,
        "There was no test set to measure it on.",
    )
    return [entropy, auc, calibration, *([] if result.units is None else [_units_card(result.units)])]


def _validation_line(frames: Sequence[Frame], measure: str) -> list[Line]:
    """A measure of the validations, where there were any."""
    points = curve(frames, SAMPLES, lambda frame: validated(frame).get(measure))
    return [Line(*points, label="validation", colour=1)] if points[0] else []


def _units_card(units: Units) -> Card:
    worst = sorted(units.dead, key=lambda layer: units.dead[layer], reverse=True)[:_LAYERS_DRAWN]
    drawn = [layer for layer in units.dead if layer in worst]
    left_out = len(units.dead) - len(drawn)
    bars = [Bar(f"{layer}: {dead_of(units, layer)}", units.dead[layer]) for layer in drawn]
    rest = f" {words.plural(left_out, 'layer')} with fewer of them {'is' if left_out == 1 else 'are'} in result.json."
    return Card(
        "Dead units",
        f"Share of each layer's units (of its ReLU) that were 0 on all {words.count(units.rows)} test rows looked "
        f"at.{rest if left_out else ''}",
        "none or a few; a layer that is wholly dead lets nothing through of what lies in front of it.",
        bar_chart("dead-units", bars, Axis("share of the layer's units", partial(words.percent, digits=1))),
    )


# --- speed -----------------------------------------------------------------------------------------------------------


def speed_cards(result: Result, frames: Sequence[Frame]) -> list[Card]:
    """Examples per second, synchronisation and bytes."""
    cards = [_speed_card(steady(frames), emulated=result.throughput.emulated_step_ms is not None)]
    if result.aggregation is None:
        cards.append(
            _curve_card(
                "Sync gap",
                "Steps a trainer took between two synchronisations of its replica, on average.",
                "small and flat; it grows when the network or the dense servers cannot keep up, and nobody waits for "
                "them.",
                curve(steady(frames), SECONDS, lambda frame: frame.sync_gap),
                SECONDS,
                "steps per synchronisation",
                2,
                "Nothing was synchronised while the run was watched; with sync.method=none there is nothing to see "
                "here.",
            )
        )
    else:
        cards.append(
            _curve_card(
                "Staleness over time",
                "Global steps between the parameters that a gradient was computed with and the step that took it, on "
                "average.",
                "flat and near 0; it grows with the number of workers that a step does not wait for.",
                curve(frames, SECONDS, lambda frame: frame.staleness),
                SECONDS,
                "global steps",
                2,
            )
        )
    if any(frame.replica_distance is not None for frame in frames):
        cards.append(
            _curve_card(
                "Distance between the replicas",
                "How far the trainers' replicas of the dense part are from their mean, relative to its norm.",
                "small and settled; one that keeps growing says that the replicas drift apart.",
                curve(frames, SECONDS, lambda frame: frame.replica_distance),
                SECONDS,
                "mean distance, share of the norm",
                3,
            )
        )
    return [*cards, *([] if result.wire is None else [_wire_card(result.wire)])]


def _speed_card(frames: Sequence[Frame], *, emulated: bool) -> Card:
    def of_trainer(rank: int, frame: Frame) -> float | None:
        return frame.eps_per_trainer[rank] if rank < len(frame.eps_per_trainer) else None

    total = curve(frames, SECONDS, lambda frame: frame.eps)
    count = max((len(frame.eps_per_trainer) for frame in frames), default=0)  # a resume may have changed it
    trainers = [curve(frames, SECONDS, partial(of_trainer, rank)) for rank in range(count)]
    lines, band = [Line(*total, label="total")], None
    if 1 < count <= _DRAWN:
        lines += [Line(x, y, f"trainer {i}", colour=i + 1) for i, (x, y) in enumerate(trainers)]
    elif count > _DRAWN:
        longest = max(trainers, key=lambda points: len(points[0]))[0]
        values = [[y[i] for x, y in trainers if i < len(x)] for i in range(len(longest))]
        band = Band(longest, [min(at) for at in values], [max(at) for at in values])
        lines.append(Line(longest, [(min(at) + max(at)) / 2 for at in values], "each", None))
    each = " The grey band is the range of the single trainers." if band is not None else ""
    return Card(
        "Emulated examples per second" if emulated else "Examples per second",
        f"Samples trained per second, of the whole job and of each trainer.{each}",
        "flat, and the trainers alike; a dip means that something was waited for.",
        line_chart("speed", SECONDS, Axis("examples/s"), lines, band, from_zero=True) if total[0] else None,
    )


def _wire_card(wire: WireSection) -> Card:
    bars = []
    for kind, amount in wire.bytes.items():
        bars.append(Bar(_WIRE.get(kind, kind), amount))
        if wire.raw_bytes.get(kind, amount) != amount:
            crossed = f"; kept {100 * wire.kept_share[kind]:.3g} %" if kind in wire.kept_share else ""
            bars.append(Bar(f"… without codec{crossed}", wire.raw_bytes[kind], muted=True))
    codecs = [f"{_WIRE.get(kind, kind)} {codec}" for kind, codec in wire.codecs.items() if codec != "plain"]
    at_the_end = f" Codecs at the end: {'; '.join(codecs)}." if codecs else ""
    return Card(
        "Bytes between roles",
        "What the trainers pulled from and pushed to the embedding servers, and what synchronising the dense part "
        f"took; in one process nothing is sent, and this is what would be.{at_the_end}",
        "as few as the quality allows; a codec (compression.*) makes them fewer.",
        bar_chart("wire", bars, Axis("bytes", words.data_size)) if bars else None,
        "Nothing was sent.",
    )


# --- gradient methods: how old gradients were, which were left out, and who was slow when ----------------------------


def aggregation_section(result: Result, frames: Sequence[Frame]) -> PageSection | None:
    """None where replicas were merged; what is told are step, mode and reason of the last switches."""
    done = result.aggregation
    if done is None:
        return None
    staleness = Card(
        "Staleness",
        "How many of the applied gradients were computed with parameters so many global steps old.",
        "short bars below the first few; old gradients pull where the model no longer is.",
        bar_chart("staleness", histogram(done.staleness), Axis("gradients")) if done.staleness else None,
        "No gradient was applied.",
    )
    dropped = _curve_card(
        "Dropped gradients",
        "Gradients that no step took, because they came too late or were too old.",
        "flat, or nearly so; a steep stretch says that somebody was very slow then.",
        curve(kept(frames), SAMPLES, lambda frame: frame.dropped),
        SAMPLES,
        "gradients dropped so far",
        4,
    )
    cards = [staleness, dropped]
    if done.switches or done.mode != done.method:
        cards.append(_mode_card(frames))
    cards.append(_step_time_card(frames))
    if len(done.step_seconds) > 1:
        cards.append(_worker_card(done))
    switches = [(words.count(switch.step), switch.mode, switch.why) for switch in done.switches]
    return PageSection(
        cards, key_numbers(result, OF_AGGREGATION), switches[-_SWITCHES:], max(0, len(switches) - _SWITCHES)
    )


def histogram(staleness: Sequence[tuple[int, int]]) -> list[Bar]:
    """A bar for each staleness from 0 up to the largest; where that is beyond 12, they are put together."""
    largest = max(steps for steps, _ in staleness)
    width = -(-(largest + 1) // (_LARGEST_STALENESS + 1))
    counts = [0] * (largest // width + 1)
    for steps, count in staleness:
        counts[steps // width] += count
    bars = []
    for first, count in zip(range(0, largest + 1, width), counts, strict=True):
        name = str(first) if width == 1 else f"{first} to {first + width - 1}"
        bars.append(Bar("1 step" if name == "1" else f"{name} steps", count))
    return bars


def _mode_card(frames: Sequence[Frame]) -> Card:
    starts = [0.0, *(frame.seconds for frame in frames)]
    timed = [(frame.aggregation_mode, start, frame.seconds) for frame, start in zip(frames, starts, strict=False)]
    found: dict[str, list[tuple[float, float, str]]] = {}
    for mode, run in groupby(timed, key=lambda one: one[0]):
        parts = list(run)
        if mode is not None:
            found.setdefault(mode, []).append((parts[0][1], parts[-1][2], mode))
    rows = [Row(mode, stretches) for mode, stretches in found.items()]
    looks = {mode: Look(colour=i) for i, mode in enumerate(found)}
    return Card(
        "Mode over time",
        "The method at work at each moment. The reasons of the switches are below.",
        "long stretches; sync while the workers are even, gba while some are slow.",
        timeline_chart("mode", rows, looks, SECONDS, legend=False) if rows else None,
    )


def _step_time_card(frames: Sequence[Frame]) -> Card:
    def of_worker(worker: str, frame: Frame) -> float | None:
        return 1e3 * frame.step_seconds[worker] if worker in frame.step_seconds else None

    def over_workers(pick: Callable[[Iterable[float]], float], frame: Frame) -> float:
        return 1e3 * pick(frame.step_seconds.values())

    timed = [frame for frame in frames if frame.step_seconds]
    workers = list(dict.fromkeys(worker for frame in timed for worker in frame.step_seconds))
    if len(workers) <= _DRAWN:
        band, who = None, "A line for each worker (trainer.worker)."
        curves = ((worker, curve(timed, SECONDS, partial(of_worker, worker))) for worker in workers)
        lines = [Line(*points, label=worker, colour=i) for i, (worker, points) in enumerate(curves)]
    else:
        picks = (min, statistics.median, max)
        low, middle, high = (curve(timed, SECONDS, partial(over_workers, pick)) for pick in picks)
        band, who = Band(low[0], low[1], high[1]), "The grey band is the range of all workers."
        lines = [Line(*middle, label="median")]
    axis = Axis("milliseconds a batch")
    return Card(
        "Step time of the workers",
        f"From the moment a worker begins a batch until its gradients are with the servers, smoothed. {who}",
        "flat and together; whoever rises above the others is a straggler.",
        line_chart("step-time", SECONDS, axis, lines, band, from_zero=True) if lines else None,
    )


def _worker_card(done: AggregationSection) -> Card:
    slowest = sorted(done.step_seconds.items(), key=lambda item: -item[1])[:_WORKERS_LISTED]
    more = len(done.step_seconds) - len(slowest)
    faster = f" {words.plural(more, 'faster one')} {'is' if more == 1 else 'are'} not drawn." if more else ""
    bars = [Bar(name, 1e3 * step_s) for name, step_s in slowest]
    return Card(
        "Mean step time by worker",
        f"Over the whole run since its last start, by trainer.worker, the slowest first.{faster}",
        "bars of one length; under sync the longest sets the pace of all.",
        bar_chart("workers", bars, Axis("milliseconds a batch")),
    )


# --- failures: what recovery chose and lost and took, and who was at work when ---------------------------------------


def switch_sentences(result: Result) -> frozenset[str]:
    """What the driver said of switches from one gradient method to another."""
    return frozenset(switch.sentence for switch in (result.aggregation.switches if result.aggregation else ()))


def recovery_section(result: Result, frames: Sequence[Frame], events: Sequence[RoleEvent]) -> PageSection | None:
    """None where there is nothing to tell; else time and sentence of the last decisions on recovery are told."""
    recovery = notable_recovery(result)
    if recovery is None:
        return None
    switches = switch_sentences(result)
    decisions = [
        (words.clock(event.seconds), event.detail)
        for event in events
        if event.event == "decided" and event.about != "codec" and event.detail not in switches
    ]
    cards = [_loss_card(recovery, frames), _time_card(recovery)]
    left_out = max(0, len(decisions) - _DECISIONS)
    return PageSection(cards, key_numbers(result, OF_RECOVERY), decisions[-_DECISIONS:], left_out)


def _loss_card(recovery: RecoverySection, frames: Sequence[Frame]) -> Card:
    points = curve(kept(frames), SAMPLES, lambda frame: frame.pls)
    target = recovery.target_pls
    drawn = None
    if points[0]:
        failures = _risen(frames, lambda frame: frame.failures)
        saves = _risen(frames, lambda frame: frame.saves)
        drawn = line_chart(
            "pls",
            SAMPLES,
            Axis("portion of lost samples (PLS)", lambda value: f"{value:.3g}"),
            [Line(*points, label="lost", colour=4, steps=True)],
            reference=None if target is None else (target, f"target {target:g}"),
            from_zero=True,
            marks=[
                Marks("failure", [f.samples for f in failures], [f.pls or 0.0 for f in failures], "x"),
                Marks("checkpoint", [f.samples for f in saves], [0.0] * len(saves), "|", 0),
            ],
        )
    return Card(
        "Lost samples",
        "What failures of embedding servers have lost so far. Crosses mark failures of any role, ticks checkpoints.",
        "steps that are small against the target and leave the curve below it at the end."
        if recovery.mode == "partial"
        else "flat; where everybody goes back nothing is lost, and the price is time.",
        drawn,
    )


def _risen(frames: Sequence[Frame], count: Callable[[Frame], int]) -> list[Frame]:
    """Where a count rose, at most one in each of `_MARKED_PLACES` places. A count begins anew with a resume."""
    last = max((frame.samples for frame in frames), default=0) or 1
    before, found = 0, dict[int, Frame]()
    for frame in frames:
        if count(frame) and count(frame) != before:
            found[_MARKED_PLACES * frame.samples // last] = frame
        before = count(frame)
    return list(found.values())


def _time_card(recovery: RecoverySection) -> Card:
    emulated = "" if recovery.emulated_job_s is None else "emulated "
    seconds = {kind: getattr(recovery.seconds, kind) for kind in _COSTS}
    unit_s, unit = next((unit_s, unit) for below, unit_s, unit in _UNITS if max(seconds.values()) < below)
    bars = [Bar(_COSTS[kind], value / unit_s) for kind, value in seconds.items()]
    axis = Axis(f"{emulated}{unit}", lambda value: f"{value:.3g}")
    return Card(
        "Emulated time that recovery took" if emulated else "Time that recovery took",
        f"By kind, since the last start; {emulated}{spoken(sum(seconds.values()))} in all. While a replacement is made "
        "ready, the others go on training unless everybody goes back.",
        "little of the training time; where everybody goes back, saving and repeating cost about the same.",
        bar_chart("recovery-time", bars, axis) if any(seconds.values()) else None,
        "Recovery took no time.",
    )


def timeline_section(
    events: Sequence[RoleEvent], frames: Sequence[Frame], real: Collection[str] = (), *, emulated: bool = False
) -> PageSection | None:
    """None without events; else time, role, event and detail of those that are not too many to list are told.

    `emulated`: the times that decisions speak of, but for `real` ones, are those of another job.
    """
    if not events:
        return None
    ordered = sorted(events, key=lambda event: event.seconds)
    # a little after the last event, so that what it led to is seen
    last = max(ordered[-1].seconds, frames[-1].seconds if frames else 0.0)
    end = max(last, ordered[-1].seconds + 0.02 * (last - ordered[0].seconds))
    states = spans(ordered, end)
    eventful = sorted(states, key=lambda role: -sum(span.state not in ("alive", "saving") for span in states[role]))
    rows = []
    for role in sorted(eventful[:_ROLES_DRAWN], key=role_order):
        own = [event for event in ordered if event.role == role]
        deaths, decisions = ([event.seconds for event in own if event.event == kind] for kind in ("dead", "decided"))
        rows.append(Row(words.shortened(role, _NAME_LENGTH), states[role], deaths, decisions))
    listed = ordered
    if len(listed) > _EVENTS:
        listed = [event for event in listed if event.event not in ("saving", "saved")][:_EVENTS]
    told = []
    for event in listed:
        of_another_job = emulated and event.event == "decided" and event.detail not in real
        detail = f"emulated: {event.detail}" if of_another_job else event.detail
        told.append((words.clock(event.seconds), event.role, event.event, detail))
    hidden = len(states) - len(rows)
    decided = " A diamond marks a decision." if any(row.notes for row in rows) else ""
    more = f" {words.plural(hidden, 'further role')} had fewer troubles and are not drawn." if hidden else ""
    card = Card(
        "Timeline of the roles",
        f"The state of each role over the run; a cross marks a death, however short.{decided}{more}",
        "long thin lines; a role that dies is back soon, and the others go on meanwhile.",
        timeline_chart("timeline", rows, _LOOKS, Axis("seconds since the first start")),
    )
    return PageSection([card], told=told, left_out=len(ordered) - len(listed))
