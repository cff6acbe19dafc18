"""Plots of lines, bars and calibration, as SVG to be set into a page (see `canvas`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from shadowsync.metrics.scores import CurvePoint
from shadowsync.report.canvas import INK, LEGEND, MUTED, SERIES_COLOURS, STYLE, Axis, as_svg, blank, series

_LABEL_GAP = 0.085  # between direct labels, in heights of the axes
_LABELLED = 8
_FLATTENED = 4.0  # whole range over settled range from which the start is cut off


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        x, y: its points, finite.
        label: written at its end; empty for none.
        colour: index of the series colour; None draws it muted, in the background.
        steps: each value holds until the next point.
    """

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    colour: int | None = 0
    steps: bool = False


@dataclass(frozen=True)
class Band:
    """The range between two curves, muted, in the background."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    def middle(self, label: str) -> Line:
        """A thin line in the middle of the range, which gives it a label."""
        return Line(self.x, [(low + high) / 2 for low, high in zip(self.low, self.high, strict=True)], label, None)


@dataclass(frozen=True)
class Reference:
    """A dashed horizontal line with its name."""

    y: float
    label: str


@dataclass(frozen=True)
class Marks:
    """Events on a line chart, named in a legend.

    Attributes:
        label: what they are.
        x, y: where.
        symbol: as matplotlib names it.
        colour: index of the series colour; None for the colour of text.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    symbol: str
    colour: int | None = None


@dataclass(frozen=True)
class Chart:
    """A line chart; `name` tells its SVG's identifiers from those of others on the page."""

    name: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    band: Band | None = None
    reference: Reference | None = None
    from_zero: bool = False
    marks: Sequence[Marks] = ()


def line_chart(chart: Chart) -> str:
    """The chart as an `<svg>` element."""
    with mpl.rc_context(STYLE):
        figure, axes = blank(chart.x, chart.y)
        if chart.band is not None:
            axes.fill_between(
                chart.band.x, chart.band.low, chart.band.high, color=MUTED, alpha=0.25, linewidth=0, zorder=1
            )
        for line in chart.lines:
            _draw_line(axes, line)
        _set_limits(axes, chart)
        if chart.reference is not None:
            axes.axhline(chart.reference.y, color=INK, linewidth=1.1, dashes=(4, 3), zorder=2)
        _label_ends(axes, _ends(chart))
        if drawn := [_draw_marks(axes, marks) for marks in chart.marks if marks.x]:
            figure.legend(handles=drawn, loc="outside upper left", ncols=len(drawn), **LEGEND)
        return as_svg(figure, chart.name)


def calibration_chart(curve: Sequence[CurvePoint], name: str) -> str:
    """Mean prediction against mean label of each bin, with two standard errors, beside the diagonal."""
    with mpl.rc_context(STYLE):
        figure, axes = blank(Axis("mean prediction of the bin"), Axis("mean label of the bin"))
        most = 1.06 * max(max(point.prediction, point.label) for point in curve) or 1.0
        axes.plot([0, most], [0, most], color=MUTED, linewidth=1.2, dashes=(4, 3), zorder=1)
        errors = [2 * (point.label * (1 - point.label) / point.count) ** 0.5 for point in curve]
        axes.errorbar(
            [point.prediction for point in curve],
            [point.label for point in curve],
            yerr=errors,
            color=series(0),
            marker="o",
            markersize=4.5,
            linewidth=1.6,
            elinewidth=1.0,
        )
        axes.set_xlim(0, most)
        axes.set_ylim(0, most)
        axes.annotate(
            "perfect", (0.93 * most, 0.93 * most), (-8, 2), textcoords="offset points", color=MUTED, ha="right"
        )
        return as_svg(figure, name)


@dataclass(frozen=True)
class Bar:
    """One bar; `muted` sets it back behind the others."""

    label: str
    value: float
    muted: bool = False


def bar_chart(bars: Sequence[Bar], name: str, axis: Axis) -> str:
    """Horizontal bars from the top, each with its value written at its end."""
    with mpl.rc_context(STYLE):
        figure, axes = blank(axis, Axis(""))
        figure.set_figheight(0.9 + 0.42 * len(bars))
        places = range(len(bars))
        colours = [MUTED if bar.muted else series(0) for bar in bars]
        axes.barh(places, [bar.value for bar in bars], height=0.62, color=colours)
        axes.set_yticks(places, [bar.label for bar in bars])
        axes.invert_yaxis()
        axes.margins(x=0.22)
        axes.yaxis.grid(visible=False)
        for place, bar in enumerate(bars):
            axes.annotate(
                axis.number(bar.value), (bar.value, place), (5, 0), textcoords="offset points", color=INK, va="center"
            )
        return as_svg(figure, name)


def _draw_line(axes: Axes, line: Line) -> None:
    background = line.colour is None
    axes.plot(
        line.x,
        line.y,
        color=_colour(line),
        linewidth=1.0 if background else 2.0,
        drawstyle="steps-post" if line.steps else "default",
        linestyle="--" if line.colour is not None and line.colour >= SERIES_COLOURS else "-",
        alpha=0.55 if background else 1.0,
        marker="o" if len(line.x) < 8 else None,
        markersize=4,
        solid_capstyle="round",
        zorder=2 if background else 3,
    )


def _draw_marks(axes: Axes, marks: Marks) -> Line2D:
    colour = INK if marks.colour is None else series(marks.colour)
    style: Any = {"linestyle": "none", "color": colour, "markersize": 7, "markeredgewidth": 1.6}
    (drawn,) = axes.plot(marks.x, marks.y, marker=marks.symbol, label=marks.label, clip_on=False, zorder=4, **style)
    return drawn


def _set_limits(axes: Axes, chart: Chart) -> None:
    """Shows the whole run, but for the first tenth of curves that start so far off that all the rest would be flat."""
    drawn = [line.y for line in chart.lines if line.y]
    named = [chart.reference.y] if chart.reference is not None else []
    low, high = _range(drawn, named)
    settled_low, settled_high = _range([y[len(y) // 10 :] for y in drawn], named)
    if high - low > _FLATTENED * (settled_high - settled_low) > 0:
        low, high = settled_low, settled_high
    pad = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    if chart.band is not None:
        high = max([high, *chart.band.high])
    last = [line.x[-1] for line in chart.lines if line.x] + [max(marks.x) for marks in chart.marks if marks.x]
    axes.set_xlim(0, 1.02 * max(last) or 1.0)
    axes.set_ylim(0 if chart.from_zero else low - pad, high + pad)


def _range(curves: Sequence[Sequence[float]], further: Sequence[float]) -> tuple[float, float]:
    values = [*(y for curve in curves for y in curve), *further]
    return min(values), max(values)


def _ends(chart: Chart) -> list[tuple[float, str, str]]:
    """Height, label and colour of what is labelled at its end."""
    labelled = [line for line in chart.lines if line.label and line.y][:_LABELLED]
    ends = [(line.y[-1], line.label, _colour(line)) for line in labelled]
    return [*ends, (chart.reference.y, chart.reference.label, INK)] if chart.reference is not None else ends


def _colour(line: Line) -> str:
    return MUTED if line.colour is None else series(line.colour)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Writes each label, in its colour, right of the height its curve ends at; moved apart where ends are close."""
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end[0])
    heights = spread([(y - low) / (high - low) for y, _, _ in ends], _LABEL_GAP)
    for height, (_, label, colour) in zip(heights, ends, strict=True):
        axes.text(1.015, height, label, color=colour, va="center", transform=axes.transAxes)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights in 0 … 1 moved up, then down from 1, until neighbours are `gap` apart."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else max(height, 0.0))
    ceiling = 1.0
    for place in reversed(range(len(moved))):
        moved[place] = min(moved[place], ceiling)
        ceiling = moved[place] - gap
    return moved
