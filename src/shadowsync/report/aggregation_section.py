"""The page's section on gradient methods: how old gradients were, which were left out, and who was slow when."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import median

from shadowsync.metrics.frame import Frame
from shadowsync.report import words
from shadowsync.report.canvas import Axis
from shadowsync.report.charts import SAMPLES, SECONDS, Card
from shadowsync.report.plots import Band, Bar, Chart, Line, bar_chart, line_chart
from shadowsync.report.result import Aggregation, Result
from shadowsync.report.series import curve, kept
from shadowsync.report.summary import KeyNumber
from shadowsync.report.timeline_chart import Look, Row, Stretch, timeline_chart

AGGREGATION_TERMS = (
    (
        "Trainer, worker",
        "Workers are threads that compute gradients; a trainer is a group of them. The dense part and every row are "
        "stepped in one place, by global steps.",
    ),
    (
        "Global step",
        "One step of the optimizer, from the gradients that the method puts together (aggregation.method).",
    ),
    (
        "Staleness",
        "Of an applied gradient: global steps made between the parameters that it was computed with and the step that "
        "took it. 0 is synchronous.",
    ),
)
METHODS = {
    "sync": "rounds that everybody waits for",
    "async": "every gradient is a step of its own",
    "bsp": "a step for every global batch of gradients, however old",
    "hop_bs": "every gradient is a step, and nobody runs far ahead of the slowest",
    "hop_bw": "rounds that do not wait for the slowest",
    "gba": "a step for every global batch of gradients, less those that are too old",
    "auto": "synchronous while the workers are even, else by gba",
}
_LARGEST_SHOWN = 12
_WORKERS_LISTED = 16
_WORKERS_DRAWN = 8
_SWITCHES = 50


@dataclass(frozen=True)
class AggregationSection:
    """What the section holds.

    Attributes:
        numbers: the rows of its table.
        cards: staleness, dropped gradients, mode over time, and step times.
        switches: step, mode and reason of the last ones.
        left_out: of earlier ones.
    """

    numbers: Sequence[KeyNumber]
    cards: Sequence[Card]
    switches: Sequence[tuple[str, str, str]]
    left_out: int


def make_aggregation(result: Result, frames: Sequence[Frame]) -> AggregationSection | None:
    """None where replicas were merged."""
    done = result.aggregation
    if done is None:
        return None
    cards = [_histogram_card(done), _dropped_card(frames)]
    if done.switches or done.mode != done.method:
        cards.append(_mode_card(frames))
    cards.append(_step_time_card(frames))
    if len(done.step_seconds) > 1:
        cards.append(_worker_card(done))
    switches = [(words.count(switch.step), switch.mode, switch.why) for switch in done.switches]
    return AggregationSection(_numbers(done), cards, switches[-_SWITCHES:], max(0, len(switches) - _SWITCHES))


def _numbers(done: Aggregation) -> list[KeyNumber]:
    rows = []
    if done.method is not None:
        rows.append(KeyNumber("method", done.method, METHODS.get(done.method, "")))
    if done.mode not in (None, done.method):
        rows.append(KeyNumber("at the end", done.mode or "", METHODS.get(done.mode or "", "")))
    staleness = f"{words.decimal(done.mean_staleness, 2)} / {words.count(done.max_staleness)}"
    rows += [
        KeyNumber("global steps", words.count(done.global_steps), "of the optimizer, resumes included"),
        KeyNumber("gradients dropped", _dropped(done), "left out of every step; their samples count as trained"),
        KeyNumber("staleness, mean / largest", staleness, "global steps, of the gradients that were applied"),
    ]
    if done.switches:
        rows.append(KeyNumber("switches", words.count(len(done.switches)), "from one method to another"))
    if done.step_seconds:
        times = list(done.step_seconds.values())
        spread = f"{1e3 * median(times):.3g} / {1e3 * max(times):.3g} ms"
        rows.append(KeyNumber("step time, median / slowest", spread, "of the workers, mean time of a batch"))
    if done.most_held_bytes is not None:
        rows.append(
            KeyNumber("gradients held, at most", words.data_size(done.most_held_bytes), "by all servers, as seen")
        )
    return rows


def _dropped(done: Aggregation) -> str:
    if not done.received:
        return words.count(done.dropped)
    return f"{words.count(done.dropped)} ({words.percent(done.dropped / done.received, 1)})"


def _histogram_card(done: Aggregation) -> Card:
    return Card(
        "Staleness",
        "How many of the applied gradients were computed with parameters so many global steps old.",
        "short bars below the first few; old gradients pull where the model no longer is.",
        bar_chart(histogram(done.staleness), "staleness", Axis("gradients")) if done.staleness else None,
        "No gradient was applied.",
    )


def histogram(staleness: Sequence[tuple[int, int]]) -> list[Bar]:
    """A bar for each staleness from 0 up to the largest; where that is beyond 12, they are put together."""
    largest = max(steps for steps, _ in staleness)
    width = -(-(largest + 1) // (_LARGEST_SHOWN + 1))
    counts = [0] * (largest // width + 1)
    for steps, count in staleness:
        counts[steps // width] += count
    return [Bar(_named(place * width, width), count) for place, count in enumerate(counts)]


def _named(first: int, width: int) -> str:
    steps = str(first) if width == 1 else f"{first} to {first + width - 1}"
    return f"{steps} steps" if steps != "1" else "1 step"


def _dropped_card(frames: Sequence[Frame]) -> Card:
    points = curve(kept(frames), _samples, lambda frame: frame.dropped)
    chart = Chart("dropped", SAMPLES, Axis("gradients dropped so far"), [Line(*points, colour=4)], from_zero=True)
    return Card(
        "Dropped gradients",
        "Gradients that no step took, because they came too late or were too old.",
        "flat, or nearly so; a steep stretch says that somebody was very slow then.",
        line_chart(chart) if points[0] else None,
    )


def _mode_card(frames: Sequence[Frame]) -> Card:
    rows = _mode_rows(frames)
    return Card(
        "Mode over time",
        "The method at work at each moment. The reasons of the switches are below.",
        "long stretches; sync while the workers are even, gba while some are slow.",
        timeline_chart(rows, [], "mode", SECONDS) if rows else None,
    )


def _mode_rows(frames: Sequence[Frame]) -> list[Row]:
    starts = [0.0, *(frame.seconds for frame in frames)]
    timed = [(frame.aggregation_mode, start, frame.seconds) for frame, start in zip(frames, starts, strict=False)]
    found: dict[str, list[Stretch]] = {}
    for mode, run in groupby(timed, key=lambda one: one[0]):
        parts = list(run)
        if mode is not None:
            stretches = found.setdefault(mode, [])
            stretches.append(Stretch(parts[0][1], parts[-1][2], Look(mode, colour=list(found).index(mode))))
    return [Row(mode, stretches) for mode, stretches in found.items()]


def _step_time_card(frames: Sequence[Frame]) -> Card:
    timed = [frame for frame in frames if frame.step_seconds]
    workers = list(dict.fromkeys(worker for frame in timed for worker in frame.step_seconds))
    if len(workers) <= _WORKERS_DRAWN:
        band, who = None, "A line for each worker (trainer.worker)."
        curves = ((worker, curve(timed, _seconds, partial(_step_ms, worker))) for worker in workers)
        lines = [Line(*points, label=worker, colour=i) for i, (worker, points) in enumerate(curves)]
    else:
        low, middle, high = (curve(timed, _seconds, partial(_over_workers, pick)) for pick in (min, median, max))
        band, who = Band(low[0], low[1], high[1]), "The grey band is the range of all workers."
        lines = [Line(*middle, label="median")]
    chart = Chart("step-time", SECONDS, Axis("milliseconds a batch"), lines, band=band, from_zero=True)
    return Card(
        "Step time of the workers",
        f"From the moment a worker begins a batch until its gradients are with the servers, smoothed. {who}",
        "flat and together; whoever rises above the others is a straggler.",
        line_chart(chart) if lines else None,
    )


def _worker_card(done: Aggregation) -> Card:
    slowest = sorted(done.step_seconds.items(), key=lambda item: -item[1])[:_WORKERS_LISTED]
    more = len(done.step_seconds) - len(slowest)
    faster = f" {words.plural(more, 'faster one')} {'is' if more == 1 else 'are'} not drawn." if more else ""
    return Card(
        "Mean step time by worker",
        f"Over the whole run since its last start, by trainer.worker, the slowest first.{faster}",
        "bars of one length; under sync the longest sets the pace of all.",
        bar_chart([Bar(name, 1e3 * step_s) for name, step_s in slowest], "workers", Axis("milliseconds a batch")),
    )


def _step_ms(worker: str, frame: Frame) -> float | None:
    return 1e3 * frame.step_seconds[worker] if worker in frame.step_seconds else None


def _over_workers(pick: Callable[[Iterable[float]], float], frame: Frame) -> float:
    return 1e3 * pick(frame.step_seconds.values())


def _samples(frame: Frame) -> float:
    return frame.samples


def _seconds(frame: Frame) -> float:
    return frame.seconds
