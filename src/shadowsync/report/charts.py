"""The charts of a run's page, each with a sentence that says what it shows and one that says what good looks like.

`P` points of a curve; frames that lack the value are left out.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from shadowsync.metrics.history import Frame
from shadowsync.metrics.units import Units
from shadowsync.report import words
from shadowsync.report.plots import Axis, Band, Bar, Line, bar_chart, calibration_chart, line_chart
from shadowsync.report.result import Result, Wire, dead_of

SAMPLES = Axis("samples trained")
SECONDS = Axis("seconds since the first batch")
_NO_FRAMES = "The run ended before the first report; a smaller report.every_s gives a curve."
_KINDS = {"pull": "pulled embeddings", "push": "pushed gradients", "dense": "dense part"}
_POINTS = 300
_TRAINERS_DRAWN = 8
_LAYERS_DRAWN = 20

Curve = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Card:
    """A chart with its words; where `svg` is None, `missing` says why there is nothing to see."""

    title: str
    shows: str
    good: str
    svg: Markup | None
    missing: str = _NO_FRAMES


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


def curve_card(
    title: str,
    shows: str,
    good: str,
    name: str,
    points: Curve,
    x: Axis,
    y: Axis,
    colour: int = 0,
    missing: str = _NO_FRAMES,
) -> Card:
    """A card of one curve from zero."""
    drawn = line_chart(name, x, y, [Line(*points, colour=colour)], from_zero=True) if points[0] else None
    return Card(title, shows, good, drawn, missing)


def quality_cards(result: Result, frames: Sequence[Frame]) -> list[Card]:
    """Learning curves, calibration, and the share of dead units of each layer, where the model has ReLUs."""
    frames, test = kept(frames), result.test
    window = curve(frames, SAMPLES, lambda frame: frame.ne_window)
    lines = [
        Line(*curve(frames, SAMPLES, lambda frame: frame.ne_lifetime), label="all so far", colour=None),
        Line(*window, label="window"),
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
    lines = [Line(*points, label="so far")]
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


def speed_cards(result: Result, frames: Sequence[Frame]) -> list[Card]:
    """Examples per second, synchronisation and bytes."""
    cards = [_speed_card(steady(frames), emulated=result.throughput.emulated_step_ms is not None)]
    if result.aggregation is None:
        cards.append(
            curve_card(
                "Sync gap",
                "Steps a trainer took between two synchronisations of its replica, on average.",
                "small and flat; it grows when the network or the dense servers cannot keep up, and nobody waits for "
                "them.",
                "gap",
                curve(steady(frames), SECONDS, lambda frame: frame.sync_gap),
                SECONDS,
                Axis("steps per synchronisation"),
                2,
                "Nothing was synchronised while the run was watched; with sync.method=none there is nothing to see "
                "here.",
            )
        )
    else:
        cards.append(
            curve_card(
                "Staleness over time",
                "Global steps between the parameters that a gradient was computed with and the step that took it, on "
                "average.",
                "flat and near 0; it grows with the number of workers that a step does not wait for.",
                "stale",
                curve(frames, SECONDS, lambda frame: frame.staleness),
                SECONDS,
                Axis("global steps"),
                2,
            )
        )
    if any(frame.replica_distance is not None for frame in frames):
        cards.append(
            curve_card(
                "Distance between the replicas",
                "How far the trainers' replicas of the dense part are from their mean, relative to its norm.",
                "small and settled; one that keeps growing says that the replicas drift apart.",
                "distance",
                curve(frames, SECONDS, lambda frame: frame.replica_distance),
                SECONDS,
                Axis("mean distance, share of the norm"),
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
    if 1 < count <= _TRAINERS_DRAWN:
        lines += [Line(x, y, f"trainer {i}", colour=i + 1) for i, (x, y) in enumerate(trainers)]
    elif count > _TRAINERS_DRAWN:
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


def _wire_card(wire: Wire) -> Card:
    bars = []
    for kind, amount in wire.bytes.items():
        bars.append(Bar(_KINDS.get(kind, kind), amount))
        if wire.raw_bytes.get(kind, amount) != amount:
            crossed = f"; kept {100 * wire.kept_share[kind]:.3g} %" if kind in wire.kept_share else ""
            bars.append(Bar(f"… without codec{crossed}", wire.raw_bytes[kind], muted=True))
    codecs = [f"{_KINDS.get(kind, kind)} {codec}" for kind, codec in wire.codecs.items() if codec != "plain"]
    at_the_end = f" Codecs at the end: {'; '.join(codecs)}." if codecs else ""
    return Card(
        "Bytes between roles",
        "What the trainers pulled from and pushed to the embedding servers, and what synchronising the dense part "
        f"took; in one process nothing is sent, and this is what would be.{at_the_end}",
        "as few as the quality allows; a codec (compression.*) makes them fewer.",
        bar_chart("wire", bars, Axis("bytes", words.data_size)) if bars else None,
        "Nothing was sent.",
    )
