"""Plots as SVG to be set into a page: text stays text, and colours are the page's variables.

Colours are drawn as stand-ins that nothing else uses and replaced by `var(--…)` in the SVG, so that a page can be
light or dark; fonts are left to the page. Imports matplotlib (without pyplot), so `reporter` imports the
pages late.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from shadowsync.metrics.scores import CurvePoint
from shadowsync.report import words

SERIES_COLOURS = 8
_INK, _MUTED, _GRID, _CARD = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04"
_ROLES = {_INK: "--ink", _MUTED: "--muted", _GRID: "--grid", _CARD: "--card"}
_SIZE_INCHES = (5.0, 3.0)
_TEXT_POINTS = 10.0
_LABEL_GAP = 0.085  # between direct labels, in heights of the axes
_LABELLED = 8
_FLATTENED = 4.0  # whole range over settled range from which the start is cut off
_STYLE: Any = {
    "svg.fonttype": "none",
    "path.simplify_threshold": 0.5,
    "text.parse_math": False,
    "font.size": _TEXT_POINTS,
}
_LEGEND: Any = {
    "frameon": False,
    "labelcolor": _MUTED,
    "fontsize": _TEXT_POINTS - 1,
    "handlelength": 1.4,
    "handletextpad": 0.4,
    "columnspacing": 1.1,
    "borderpad": 0.0,
}


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        x, y: its points, finite.
        label: written at its end; empty for none.
        colour: index of the series colour; None draws it muted, in the background.
    """

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    colour: int | None = 0


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
class Axis:
    """What stands at an axis: its name with the unit, and how its numbers are written."""

    name: str
    number: Callable[[float], str] = words.short


@dataclass(frozen=True)
class Reference:
    """A dashed horizontal line with its name."""

    y: float
    label: str


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


def line_chart(chart: Chart) -> str:
    """The chart as an `<svg>` element."""
    with mpl.rc_context(_STYLE):
        figure, axes = _blank(chart.x, chart.y)
        if chart.band is not None:
            axes.fill_between(
                chart.band.x, chart.band.low, chart.band.high, color=_MUTED, alpha=0.25, linewidth=0, zorder=1
            )
        for line in chart.lines:
            _draw_line(axes, line)
        _set_limits(axes, chart)
        if chart.reference is not None:
            axes.axhline(chart.reference.y, color=_INK, linewidth=1.1, dashes=(4, 3), zorder=2)
        _label_ends(axes, _ends(chart))
        return _svg(figure, chart.name)


def calibration_chart(curve: Sequence[CurvePoint], name: str) -> str:
    """Mean prediction against mean label of each bin, with two standard errors, beside the diagonal."""
    with mpl.rc_context(_STYLE):
        figure, axes = _blank(Axis("mean prediction of the bin"), Axis("mean label of the bin"))
        most = 1.06 * max(max(point.prediction, point.label) for point in curve) or 1.0
        axes.plot([0, most], [0, most], color=_MUTED, linewidth=1.2, dashes=(4, 3), zorder=1)
        errors = [2 * (point.label * (1 - point.label) / point.count) ** 0.5 for point in curve]
        axes.errorbar(
            [point.prediction for point in curve],
            [point.label for point in curve],
            yerr=errors,
            color=_series(0),
            marker="o",
            markersize=4.5,
            linewidth=1.6,
            elinewidth=1.0,
        )
        axes.set_xlim(0, most)
        axes.set_ylim(0, most)
        axes.annotate(
            "perfect", (0.93 * most, 0.93 * most), (-8, 2), textcoords="offset points", color=_MUTED, ha="right"
        )
        return _svg(figure, name)


@dataclass(frozen=True)
class Bar:
    """One bar; `muted` sets it back behind the others."""

    label: str
    value: float
    muted: bool = False


def bar_chart(bars: Sequence[Bar], name: str, axis: Axis) -> str:
    """Horizontal bars from the top, each with its value written at its end."""
    with mpl.rc_context(_STYLE):
        figure, axes = _blank(axis, Axis(""))
        figure.set_figheight(0.9 + 0.42 * len(bars))
        places = range(len(bars))
        colours = [_MUTED if bar.muted else _series(0) for bar in bars]
        axes.barh(places, [bar.value for bar in bars], height=0.62, color=colours)
        axes.set_yticks(places, [bar.label for bar in bars])
        axes.invert_yaxis()
        axes.margins(x=0.22)
        axes.yaxis.grid(visible=False)
        for place, bar in enumerate(bars):
            axes.annotate(
                axis.number(bar.value), (bar.value, place), (5, 0), textcoords="offset points", color=_INK, va="center"
            )
        return _svg(figure, name)


@dataclass(frozen=True)
class Look:
    """How a state looks; told apart by height and pattern too, not by colour alone."""

    label: str
    colour: int
    height: float = 0.7
    hatch: str = ""

    def style(self) -> dict[str, Any]:
        """What matplotlib calls it."""
        return {"facecolor": _series(self.colour), "edgecolor": _CARD, "hatch": self.hatch, "linewidth": 0}


@dataclass(frozen=True)
class Stretch:
    """A part of a row, in the units of the axis."""

    start: float
    end: float
    look: Look


@dataclass(frozen=True)
class Row:
    """A row of a timeline; `marks` are crosses upon it."""

    label: str
    stretches: Sequence[Stretch]
    marks: Sequence[float] = ()


def timeline_chart(rows: Sequence[Row], looks: Sequence[Look], name: str, axis: Axis) -> str:
    """One row of stretches each, from the top, under a legend of those of the `looks` that occur."""
    with mpl.rc_context(_STYLE):
        figure, axes = _blank(axis, Axis(""))
        figure.set_figheight(1.1 + 0.27 * len(rows))
        for place, row in enumerate(rows):
            for part in row.stretches:
                bar = [(part.start, part.end - part.start)], (place - part.look.height / 2, part.look.height)
                axes.broken_barh(*bar, zorder=2, **part.look.style())
            axes.plot(row.marks, [place] * len(row.marks), "x", color=_INK, markersize=6, markeredgewidth=1.6, zorder=3)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, max((part.end for row in rows for part in row.stretches), default=0.0) or 1.0)
        axes.yaxis.grid(visible=False)
        seen = {part.look for row in rows for part in row.stretches}
        keys = [Patch(label=look.label, **look.style()) for look in looks if look in seen]
        if keys:
            figure.legend(handles=keys, loc="outside upper left", ncols=len(keys), **_LEGEND)
        return _svg(figure, name)


def _blank(x: Axis, y: Axis) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for axis, described in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _place, number=described.number: number(value)))
        axis.set_tick_params(colors=_MUTED, length=0, labelsize=_TEXT_POINTS - 1)
    axes.set_xlabel(x.name, color=_MUTED)
    # above the axis rather than turned beside it: it reads without tilting the head and leaves the width to the curve
    axes.set_title(y.name, loc="left", color=_MUTED, fontsize=_TEXT_POINTS)
    return figure, axes


def _draw_line(axes: Axes, line: Line) -> None:
    background = line.colour is None
    axes.plot(
        line.x,
        line.y,
        color=_colour(line),
        linewidth=1.0 if background else 2.0,
        linestyle="--" if line.colour is not None and line.colour >= SERIES_COLOURS else "-",
        alpha=0.55 if background else 1.0,
        marker="o" if len(line.x) < 8 else None,
        markersize=4,
        solid_capstyle="round",
        zorder=2 if background else 3,
    )


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
    axes.set_xlim(0, 1.02 * max(line.x[-1] for line in chart.lines if line.x) or 1.0)
    axes.set_ylim(0 if chart.from_zero else low - pad, high + pad)


def _range(curves: Sequence[Sequence[float]], further: Sequence[float]) -> tuple[float, float]:
    values = [*(y for curve in curves for y in curve), *further]
    return min(values), max(values)


def _ends(chart: Chart) -> list[tuple[float, str, str]]:
    """Height, label and colour of what is labelled at its end."""
    labelled = [line for line in chart.lines if line.label and line.y][:_LABELLED]
    ends = [(line.y[-1], line.label, _colour(line)) for line in labelled]
    return [*ends, (chart.reference.y, chart.reference.label, _INK)] if chart.reference is not None else ends


def _colour(line: Line) -> str:
    return _MUTED if line.colour is None else _series(line.colour)


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


def _series(index: int) -> str:
    return f"#0a0c{index % SERIES_COLOURS:02d}"


def _svg(figure: Figure, name: str) -> str:
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _for_page(buffer.getvalue())


def _for_page(svg: str) -> str:
    """Only the `<svg>` element, sized by the page, with the page's fonts and colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # names that nothing refers to, and that every plot repeats
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r"#0a0c(\d\d)", lambda match: f"var(--series-{int(match[1])})", svg)
    return re.sub(r"#0a0b\d\d", lambda match: f"var({_ROLES[match[0]]})", svg)
