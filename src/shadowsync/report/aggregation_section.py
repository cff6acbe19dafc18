"""The page's section on gradient methods: how old gradients were, which were left out, and who was slow when."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import median

from shadowsync.metrics.history import Frame
from shadowsync.report import words
from shadowsync.report.charts import SAMPLES, SECONDS, Card, curve, curve_card, kept
from shadowsync.report.measures import KeyNumber
from shadowsync.report.plots import Axis, Band, Bar, Line, Look, Row, Stretch, bar_chart, line_chart, timeline_chart
from shadowsync.report.result import Aggregation, Result

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
    """The rows of its table, its cards, and step, mode and reason of the last switches; `left_out` are earlier ones."""

    numbers: Sequence[KeyNumber]
    cards: Sequence[Card]
    switches: Sequence[tuple[str, str, str]]
    left_out: int


def make_aggregation(result: Result, frames: Sequence[Frame]) -> AggregationSection | None:
    """None where replicas were merged."""
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
    dropped = curve_card(
        "Dropped gradients",
        "Gradients that no step took, because they came too late or were too old.",
        "flat, or nearly so; a steep stretch says that somebody was very slow then.",
        "dropped",
        curve(kept(frames), SAMPLES, lambda frame: frame.dropped),
        SAMPLES,
        Axis("gradients dropped so far"),
        4,
    )
    cards = [staleness, dropped]
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
    if done.mode is not None and done.mode != done.method:
        rows.append(KeyNumber("at the end", done.mode, METHODS.get(done.mode, "")))
    share = f" ({words.percent(done.dropped / done.received, 1)})" if done.received else ""
    staleness = f"{words.decimal(done.mean_staleness, 2)} / {words.count(done.max_staleness)}"
    rows += [
        KeyNumber("global steps", words.count(done.global_steps), "of the optimizer, resumes included"),
        KeyNumber(
            "gradients dropped",
            f"{words.count(done.dropped)}{share}",
            "left out of every step; their samples count as trained",
        ),
        KeyNumber("staleness, mean / largest", staleness, "global steps, of the gradients that were applied"),
    ]
    if done.switches:
        rows.append(KeyNumber("switches", words.count(len(done.switches)), "from one method to another"))
    if done.step_seconds:
        times = list(done.step_seconds.values())
        spread = f"{1e3 * median(times):.3g} / {1e3 * max(times):.3g} ms"
        rows.append(KeyNumber("step time, median / slowest", spread, "of the workers, mean time of a batch"))
    if done.most_held_bytes is not None:
        held = words.data_size(done.most_held_bytes)
        rows.append(KeyNumber("gradients held, at most", held, "by all servers, as seen"))
    return rows


def histogram(staleness: Sequence[tuple[int, int]]) -> list[Bar]:
    """A bar for each staleness from 0 up to the largest; where that is beyond 12, they are put together."""
    largest = max(steps for steps, _ in staleness)
    width = -(-(largest + 1) // (_LARGEST_SHOWN + 1))
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
    found: dict[str, list[Stretch]] = {}
    for mode, run in groupby(timed, key=lambda one: one[0]):
        parts = list(run)
        if mode is not None:
            stretches = found.setdefault(mode, [])
            stretches.append(Stretch(parts[0][1], parts[-1][2], Look(mode, colour=list(found).index(mode))))
    rows = [Row(mode, stretches) for mode, stretches in found.items()]
    return Card(
        "Mode over time",
        "The method at work at each moment. The reasons of the switches are below.",
        "long stretches; sync while the workers are even, gba while some are slow.",
        timeline_chart("mode", rows, [], SECONDS) if rows else None,
    )


def _step_time_card(frames: Sequence[Frame]) -> Card:
    def of_worker(worker: str, frame: Frame) -> float | None:
        return 1e3 * frame.step_seconds[worker] if worker in frame.step_seconds else None

    def over_workers(pick: Callable[[Iterable[float]], float], frame: Frame) -> float:
        return 1e3 * pick(frame.step_seconds.values())

    timed = [frame for frame in frames if frame.step_seconds]
    workers = list(dict.fromkeys(worker for frame in timed for worker in frame.step_seconds))
    if len(workers) <= _WORKERS_DRAWN:
        band, who = None, "A line for each worker (trainer.worker)."
        curves = ((worker, curve(timed, SECONDS, partial(of_worker, worker))) for worker in workers)
        lines = [Line(*points, label=worker, colour=i) for i, (worker, points) in enumerate(curves)]
    else:
        low, middle, high = (curve(timed, SECONDS, partial(over_workers, pick)) for pick in (min, median, max))
        band, who = Band(low[0], low[1], high[1]), "The grey band is the range of all workers."
        lines = [Line(*middle, label="median")]
    axis = Axis("milliseconds a batch")
    return Card(
        "Step time of the workers",
        f"From the moment a worker begins a batch until its gradients are with the servers, smoothed. {who}",
        "flat and together; whoever rises above the others is a straggler.",
        line_chart("step-time", SECONDS, axis, lines, band, from_zero=True) if lines else None,
    )


def _worker_card(done: Aggregation) -> Card:
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
