"""Curves out of a run's frames, short enough to be drawn.

`P` points of a curve; frames that lack the value are left out.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from shadowsync.metrics.frame import Frame

Curve = tuple[list[float], list[float]]

_POINTS = 300


def curve(
    frames: Sequence[Frame], x: Callable[[Frame], float], y: Callable[[Frame], float | None], points: int = _POINTS
) -> Curve:
    """`x` and `y` of the frames, `[P]` each, runs of frames averaged to at most `points`."""
    pairs = [(x(frame), value) for frame in frames if (value := y(frame)) is not None and math.isfinite(value)]
    means = [_mean(run) for run in _runs(pairs, points)]
    return [at for at, _ in means], [value for _, value in means]


def _runs(pairs: list[tuple[float, float]], points: int) -> Iterable[list[tuple[float, float]]]:
    size = math.ceil(len(pairs) / points) or 1
    return (pairs[start : start + size] for start in range(0, len(pairs), size))


def _mean(run: list[tuple[float, float]]) -> tuple[float, float]:
    return run[-1][0], statistics.fmean(value for _, value in run)


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
