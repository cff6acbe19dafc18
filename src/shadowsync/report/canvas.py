"""The paper that charts are drawn on, as SVG to be set into a page: text stays text, colours are the page's variables.

Colours are drawn as stand-ins that nothing else uses and replaced by `var(--…)` in the SVG, so that a page can be
light or dark; fonts are left to the page. Imports matplotlib (without pyplot), so `reporter` imports the
pages late.
"""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from shadowsync.report import words

SERIES_COLOURS = 8
INK, MUTED, GRID, CARD = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04"
_ROLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", CARD: "--card"}
_SIZE_INCHES = (5.0, 3.0)
TEXT_POINTS = 10.0
STYLE: Any = {
    "svg.fonttype": "none",
    "path.simplify_threshold": 0.5,
    "text.parse_math": False,
    "font.size": TEXT_POINTS,
}
LEGEND: Any = {
    "frameon": False,
    "labelcolor": MUTED,
    "fontsize": TEXT_POINTS - 1,
    "handlelength": 1.4,
    "handletextpad": 0.4,
    "columnspacing": 1.1,
    "borderpad": 0.0,
}


@dataclass(frozen=True)
class Axis:
    """What stands at an axis: its name with the unit, and how its numbers are written."""

    name: str
    number: Callable[[float], str] = words.short


def blank(x: Axis, y: Axis) -> tuple[Figure, Axes]:
    """A figure with empty axes."""
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for axis, described in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _place, number=described.number: number(value)))
        axis.set_tick_params(colors=MUTED, length=0, labelsize=TEXT_POINTS - 1)
    axes.set_xlabel(x.name, color=MUTED)
    # above the axis rather than turned beside it: it reads without tilting the head and leaves the width to the curve
    axes.set_title(y.name, loc="left", color=MUTED, fontsize=TEXT_POINTS)
    return figure, axes


def series(index: int) -> str:
    """What stands for a series colour until it is on a page; the colours come round again."""
    return f"#0a0c{index % SERIES_COLOURS:02d}"


def as_svg(figure: Figure, name: str) -> str:
    """The figure as an `<svg>` element; `name` tells its identifiers from those of others on the page."""
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
