"""Plots as SVG to be set into a page: text stays text, colours are the page's variables.

Colours are drawn as stand-ins that nothing else uses and replaced by `var(--…)` in the SVG, so that a page can be
light or dark; fonts are left to the page. Imports matplotlib (without pyplot), so `reporter` imports the pages late.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from shadowsync.metrics.quality import CurvePoint
from shadowsync.report import words

SERIES_COLOURS = 8
_INK, _MUTED, _GRID, _CARD = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04"
_ROLES = {_INK: "--ink", _MUTED: "--muted", _GRID: "--grid", _CARD: "--card"}
_SIZE_INCHES = (5.0, 3.0)
_TEXT_POINTS = 10.0
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
_LABEL_GAP = 0.085  # between direct labels, in heights of the axes
_LABELLED = 8
_FLATTENED = 4.0  # whole range over settled range from which the start is cut off


class Axis(NamedTuple):
    """What stands at an axis: its name with the unit, and how its numbers are written."""

    name: str
    number: Callable[[float], str] = words.short


class Line(NamedTuple):
    """One curve of finite points, its label written at its end; `steps`: each value holds until the next point.

    `colour` is the index of the series colour; None draws it muted, in the background.
    """

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    colour: int | None = 0
    steps: bool = False


class Band(NamedTuple):
    """The range between two curves, muted, in the background."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


class Marks(NamedTuple):
    """Events on a line chart, named in a legend; `symbol` as matplotlib names it, `colour` None for that of text."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    symbol: str
    colour: int | None = None


class Bar(NamedTuple):
    """One bar; `muted` sets it back behind the others."""

    label: str
    value: float
    muted: bool = False


class Look(NamedTuple):
    """How a state looks on a timeline; told apart by height and pattern too, not by colour alone."""

    colour: int
    height: float = 0.7
    hatch: str = ""

    def style(self) -> dict[str, Any]:
        return {"facecolor": _series(self.colour), "edgecolor": _CARD, "hatch": self.hatch, "linewidth": 0}


class Row(NamedTuple):
    """A row of a timeline: stretches by start, end and state; `marks` are crosses upon it, `notes` diamonds."""

    label: str
    stretches: Sequence[tuple[float, float, str]]
    marks: Sequence[float] = ()
    notes: Sequence[float] = ()


def line_chart(
    name: str,
    x: Axis,
    y: Axis,
    lines: Sequence[Line],
    band: Band | None = None,
    reference: tuple[float, str] | None = None,
    from_zero: bool = False,
    marks: Sequence[Marks] = (),
) -> Markup:
    """Curves; the `reference` is a dashed horizontal line with its name.

    `name` tells the identifiers of a chart from those of others on the page, here and below.
    """
    with mpl.rc_context(_STYLE):
        figure, axes = _blank(x, y)
        if band is not None:
            axes.fill_between(*band, color=_MUTED, alpha=0.25, linewidth=0, zorder=1)
        for line in lines:
            background = line.colour is None
            axes.plot(
                line.x,
                line.y,
                color=_series(line.colour),
                linewidth=1.0 if background else 2.0,
                drawstyle="steps-post" if line.steps else "default",
                linestyle="--" if line.colour is not None and line.colour >= SERIES_COLOURS else "-",
                alpha=0.55 if background else 1.0,
                marker="o" if len(line.x) < 8 else None,
                markersize=4,
                solid_capstyle="round",
                zorder=2 if background else 3,
            )
        marks = [one for one in marks if one.x]
        last = max([line.x[-1] for line in lines if line.x] + [max(one.x) for one in marks])
        axes.set_xlim(0, 1.02 * last or 1.0)
        low, high = _limits([line.y for line in lines if line.y], [] if reference is None else [reference[0]], band)
        axes.set_ylim(0 if from_zero else low, high)
        ends = [(line.y[-1], line.label, _series(line.colour)) for line in lines if line.label and line.y][:_LABELLED]
        if reference is not None:
            axes.axhline(reference[0], color=_INK, linewidth=1.1, dashes=(4, 3), zorder=2)
            ends.append((*reference, _INK))
        low, high = axes.get_ylim()
        ends.sort(key=lambda end: end[0])
        heights = spread([(y - low) / (high - low) for y, _, _ in ends], _LABEL_GAP)  # of labels right of the curves
        for height, (_, label, colour) in zip(heights, ends, strict=True):
            axes.text(1.015, height, label, color=colour, va="center", transform=axes.transAxes)
        drawn = []
        for one in marks:
            colour = _INK if one.colour is None else _series(one.colour)
            style: Any = {"linestyle": "none", "color": colour, "markersize": 7, "markeredgewidth": 1.6}
            drawn += axes.plot(one.x, one.y, marker=one.symbol, label=one.label, clip_on=False, zorder=4, **style)
        if drawn:
            figure.legend(handles=drawn, loc="outside upper left", ncols=len(drawn), **_LEGEND)
        return _as_svg(figure, name)


def _limits(curves: list[Sequence[float]], named: list[float], band: Band | None) -> tuple[float, float]:
    """Shows the whole run, but for the first tenth of curves that start so far off that all the rest would be flat."""
    values = [*(value for curve in curves for value in curve), *named]
    settled = [*(value for curve in curves for value in curve[len(curve) // 10 :]), *named]
    low, high = min(values), max(values)
    if high - low > _FLATTENED * (max(settled) - min(settled)) > 0:
        low, high = min(settled), max(settled)
    pad = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return low - pad, (high if band is None else max([high, *band.high])) + pad


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


def calibration_chart(name: str, curve: Sequence[CurvePoint]) -> Markup:
    """Mean prediction against mean label of each bin, with two standard errors, beside the diagonal."""
    with mpl.rc_context(_STYLE):
        figure, axes = _blank(Axis("mean prediction of the bin"), Axis("mean label of the bin"))
        most = 1.06 * max(max(point.prediction, point.label) for point in curve) or 1.0
        axes.plot([0, most], [0, most], color=_MUTED, linewidth=1.2, dashes=(4, 3), zorder=1)
        predictions, labels = [point.prediction for point in curve], [point.label for point in curve]
        errors = [2 * (point.label * (1 - point.label) / point.count) ** 0.5 for point in curve]
        style: Any = {"marker": "o", "markersize": 4.5, "linewidth": 1.6, "elinewidth": 1.0}
        axes.errorbar(predictions, labels, yerr=errors, color=_series(0), **style)
        axes.set_xlim(0, most)
        axes.set_ylim(0, most)
        end = (0.93 * most, 0.93 * most)
        axes.annotate("perfect", end, (-8, 2), textcoords="offset points", color=_MUTED, ha="right")
        return _as_svg(figure, name)


def bar_chart(name: str, bars: Sequence[Bar], axis: Axis) -> Markup:
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
            end = (bar.value, place)
            axes.annotate(axis.number(bar.value), end, (5, 0), textcoords="offset points", color=_INK, va="center")
        return _as_svg(figure, name)


def timeline_chart(
    name: str, rows: Sequence[Row], looks: Mapping[str, Look], axis: Axis, *, legend: bool = True
) -> Markup:
    """One row of stretches each, from the top; a legend tells those of the states' `looks` that occur."""
    style: Any = {"color": _INK, "markerfacecolor": _CARD, "markersize": 6, "markeredgewidth": 1.6}
    with mpl.rc_context(_STYLE):
        figure, axes = _blank(axis, Axis(""))
        figure.set_figheight(1.1 + 0.27 * len(rows))
        for place, row in enumerate(rows):
            for start, end, state in row.stretches:
                look = looks[state]
                extent = (place - look.height / 2, look.height)
                axes.broken_barh([(start, end - start)], extent, zorder=2, **look.style())
            for symbol, points in (("x", row.marks), ("D", row.notes)):
                axes.plot(points, [place] * len(points), symbol, clip_on=False, zorder=3, **style)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        ends = [end for row in rows for end in (*(end for _, end, _ in row.stretches), *row.marks, *row.notes)]
        axes.set_xlim(0, max(ends, default=0.0) or 1.0)
        axes.yaxis.grid(visible=False)
        seen = {state for row in rows for _, _, state in row.stretches if legend}
        if keys := [Patch(label=state, **look.style()) for state, look in looks.items() if state in seen]:
            figure.legend(handles=keys, loc="outside upper left", ncols=len(keys), **_LEGEND)
        return _as_svg(figure, name)


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


def _series(index: int | None) -> str:
    """What stands for a series colour until it is on a page (None: for the muted one); the colours come round again."""
    return _MUTED if index is None else f"#0a0c{index % SERIES_COLOURS:02d}"


def _as_svg(figure: Figure, name: str) -> Markup:
    """The figure as an `<svg>` element, sized by the page, with the page's fonts and colours."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # names that nothing refers to, and that every plot repeats
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r"#0a0c(\d\d)", lambda match: f"var(--series-{int(match[1])})", svg)
    svg = re.sub(r"#0a0b\d\d", lambda match: f"var({_ROLES[match[0]]})", svg)
    return Markup(svg)  # noqa: S704 matplotlib has escaped the texts in it
