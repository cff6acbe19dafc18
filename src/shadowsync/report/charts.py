"""The charts of a run's page, each with a sentence that says what it shows and one that says what good looks like."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shadowsync.metrics.frame import Frame
from shadowsync.report import words
from shadowsync.report.canvas import Axis
from shadowsync.report.plots import Band, Bar, Chart, Line, Reference, bar_chart, calibration_chart, line_chart
from shadowsync.report.result import Result, Wire
from shadowsync.report.series import curve, kept, steady

_NO_FRAMES = "The run ended before the first report; a smaller report.every_s gives a curve."
_TRAINERS_DRAWN = 8

SAMPLES = Axis("samples trained")
SECONDS = Axis("seconds since the first batch")


@dataclass(frozen=True)
class Card:
    """A chart with its words; where `svg` is None, `missing` says why there is nothing to see."""

    title: str
    shows: str
    good: str
    svg: str | None
    missing: str = _NO_FRAMES


def three_digits(value: float) -> str:
    """How NE and AUC are written at an axis."""
    return f"{value:.3f}"


def quality_cards(result: Result, frames: Sequence[Frame]) -> list[Card]:
    """Learning curves and calibration."""
    frames = kept(frames)
    return [_entropy_card(result, frames), _auc_card(result, frames), _calibration_card(result)]


def speed_cards(result: Result, frames: Sequence[Frame]) -> list[Card]:
    """Examples per second, synchronisation and bytes."""
    between = _gap_card(frames) if result.aggregation is None else _staleness_card(frames)
    cards = [_speed_card(frames, emulated=result.throughput.emulated_step_ms is not None), between]
    if any(frame.replica_distance is not None for frame in frames):
        cards.append(_distance_card(frames))
    if result.wire is not None:
        cards.append(_wire_card(result))
    return cards


def _entropy_card(result: Result, frames: Sequence[Frame]) -> Card:
    window = curve(frames, _samples, lambda frame: frame.ne_window)
    lifetime = curve(frames, _samples, lambda frame: frame.ne_lifetime)
    lines = [Line(*lifetime, label="all so far", colour=None), Line(*window, label="window")]
    test = result.test.ne if result.test is not None else None
    chart = Chart("entropy", SAMPLES, Axis("normalized entropy (NE)", three_digits), lines, reference=_test_line(test))
    return Card(
        "Learning curve: normalized entropy",
        "How much uncertainty about the label is left in predictions made just before each sample was trained on "
        "(after the first epoch the model has met it before).",
        "falls fast, then flattens well below 1, and ends near the test's line.",
        line_chart(chart) if window[0] else None,
    )


def _auc_card(result: Result, frames: Sequence[Frame]) -> Card:
    points = curve(frames, _samples, lambda frame: frame.auc)
    test = result.test.auc if result.test is not None else None
    chart = Chart(
        "auc", SAMPLES, Axis("AUC", three_digits), [Line(*points, label="so far")], reference=_test_line(test)
    )
    return Card(
        "Learning curve: AUC",
        "How often a random positive was ranked above a random negative, over all predictions made so far.",
        "rises; as it remembers the poor start, it stays below what the model can do at the end.",
        line_chart(chart) if points[0] else None,
    )


def _test_line(value: float | None) -> Reference | None:
    return None if value is None else Reference(value, f"test {value:.4f}")


def _calibration_card(result: Result) -> Card:
    bins = result.test.curve if result.test is not None else ()
    return Card(
        "Calibration on the test set",
        "Test samples in bins of equal count, by predicted probability: what was predicted against what happened, "
        "with bars of two standard errors.",
        "the points lie on the dashed diagonal; below it the model predicts too many positives, above it too few.",
        calibration_chart(bins, "calibration") if bins else None,
        "There was no test set to measure it on.",
    )


def _speed_card(frames: Sequence[Frame], *, emulated: bool) -> Card:
    frames = steady(frames)
    total = curve(frames, _seconds, lambda frame: frame.eps)
    trainers = _trainer_curves(frames)
    lines, band = [Line(*total, label="total")], None
    if 1 < len(trainers) <= _TRAINERS_DRAWN:
        lines += [Line(x, y, f"trainer {i}", colour=i + 1) for i, (x, y) in enumerate(trainers)]
    elif len(trainers) > _TRAINERS_DRAWN:
        band = _range_of(trainers)
        lines.append(band.middle("each"))
    chart = Chart("speed", SECONDS, Axis("examples/s"), lines, band=band, from_zero=True)
    each = "The grey band is the range of the single trainers." if band is not None else ""
    return Card(
        "Emulated examples per second" if emulated else "Examples per second",
        f"Samples trained per second, of the whole job and of each trainer. {each}".strip(),
        "flat, and the trainers alike; a dip means that something was waited for.",
        line_chart(chart) if total[0] else None,
    )


def _trainer_curves(frames: Sequence[Frame]) -> list[tuple[list[float], list[float]]]:
    """One curve per trainer; a resume may have changed their number, so a frame may lack some."""
    count = max((len(frame.eps_per_trainer) for frame in frames), default=0)
    return [curve(frames, _seconds, partial(_trainer_eps, i)) for i in range(count)]


def _trainer_eps(trainer: int, frame: Frame) -> float | None:
    each = frame.eps_per_trainer
    return each[trainer] if trainer < len(each) else None


def _range_of(curves: Sequence[tuple[list[float], list[float]]]) -> Band:
    longest = max(curves, key=lambda points: len(points[0]))[0]
    values = [[y[i] for x, y in curves if i < len(x)] for i in range(len(longest))]
    return Band(longest, [min(at) for at in values], [max(at) for at in values])


def _gap_card(frames: Sequence[Frame]) -> Card:
    points = curve(steady(frames), _seconds, lambda frame: frame.sync_gap)
    chart = Chart("gap", SECONDS, Axis("steps per synchronisation"), [Line(*points, colour=2)], from_zero=True)
    return Card(
        "Sync gap",
        "Steps a trainer took between two synchronisations of its replica, on average.",
        "small and flat; it grows when the network or the dense servers cannot keep up, and nobody waits for them.",
        line_chart(chart) if points[0] else None,
        "Nothing was synchronised while the run was watched; with sync.method=none there is nothing to see here.",
    )


def _staleness_card(frames: Sequence[Frame]) -> Card:
    points = curve(frames, _seconds, lambda frame: frame.staleness)
    chart = Chart("stale", SECONDS, Axis("global steps"), [Line(*points, colour=2)], from_zero=True)
    return Card(
        "Staleness over time",
        "Global steps between the parameters that a gradient was computed with and the step that took it, on average.",
        "flat and near 0; it grows with the number of workers that a step does not wait for.",
        line_chart(chart) if points[0] else None,
    )


def _distance_card(frames: Sequence[Frame]) -> Card:
    points = curve(frames, _seconds, lambda frame: frame.replica_distance)
    axis = Axis("mean distance, share of the norm")
    return Card(
        "Distance between the replicas",
        "How far the trainers' replicas of the dense part are from their mean, relative to its norm.",
        "small and settled; one that keeps growing says that the replicas drift apart.",
        line_chart(Chart("distance", SECONDS, axis, [Line(*points, colour=3)], from_zero=True)) if points[0] else None,
    )


def _wire_card(result: Result) -> Card:
    assert result.wire is not None
    sent, raw = result.wire.bytes, result.wire.raw_bytes
    bars = []
    for kind, amount in sent.items():
        bars.append(Bar(_KINDS.get(kind, kind), amount))
        if raw.get(kind, amount) != amount:
            bars.append(Bar(f"… without codec{_kept(result.wire, kind)}", raw[kind], muted=True))
    codecs = [f"{_KINDS.get(kind, kind)} {codec}" for kind, codec in result.wire.codecs.items() if codec != "plain"]
    at_the_end = f" Codecs at the end: {'; '.join(codecs)}." if codecs else ""
    return Card(
        "Bytes between roles",
        "What the trainers pulled from and pushed to the embedding servers, and what synchronising the dense part "
        f"took; in one process nothing is sent, and this is what would be.{at_the_end}",
        "as few as the quality allows; a codec (compression.*) makes them fewer.",
        bar_chart(bars, "wire", Axis("bytes", words.data_size)) if bars else None,
        "Nothing was sent.",
    )


def _kept(wire: Wire, kind: str) -> str:
    return f"; {words.shares({'kept': wire.kept_share[kind]})}" if kind in wire.kept_share else ""


_KINDS = {"pull": "pulled embeddings", "push": "pushed gradients", "dense": "dense part"}


def _samples(frame: Frame) -> float:
    return frame.samples


def _seconds(frame: Frame) -> float:
    return frame.seconds
