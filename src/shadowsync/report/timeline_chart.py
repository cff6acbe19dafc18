"""The chart of a timeline: rows of stretches, each in some state, with marks upon them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.patches import Patch

from shadowsync.report.canvas import CARD, INK, LEGEND, STYLE, Axis, as_svg, blank, series

_MARK: Any = {
    "color": INK,
    "markerfacecolor": CARD,
    "markersize": 6,
    "markeredgewidth": 1.6,
    "clip_on": False,
    "zorder": 3,
}


@dataclass(frozen=True)
class Look:
    """How a state looks; told apart by height and pattern too, not by colour alone."""

    label: str
    colour: int
    height: float = 0.7
    hatch: str = ""

    def style(self) -> dict[str, Any]:
        """What matplotlib calls it."""
        return {"facecolor": series(self.colour), "edgecolor": CARD, "hatch": self.hatch, "linewidth": 0}


@dataclass(frozen=True)
class Stretch:
    """A part of a row, in the units of the axis."""

    start: float
    end: float
    look: Look


@dataclass(frozen=True)
class Row:
    """A row of a timeline; `marks` are crosses upon it, `notes` diamonds."""

    label: str
    stretches: Sequence[Stretch]
    marks: Sequence[float] = ()
    notes: Sequence[float] = ()


def _ends(row: Row) -> list[float]:
    return [*(part.end for part in row.stretches), *row.marks, *row.notes]


def timeline_chart(rows: Sequence[Row], looks: Sequence[Look], name: str, axis: Axis) -> str:
    """One row of stretches each, from the top, under a legend of those of the `looks` that occur."""
    with mpl.rc_context(STYLE):
        figure, axes = blank(axis, Axis(""))
        figure.set_figheight(1.1 + 0.27 * len(rows))
        for place, row in enumerate(rows):
            for part in row.stretches:
                bar = [(part.start, part.end - part.start)], (place - part.look.height / 2, part.look.height)
                axes.broken_barh(*bar, zorder=2, **part.look.style())
            for symbol, points in (("x", row.marks), ("D", row.notes)):
                axes.plot(points, [place] * len(points), symbol, **_MARK)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, max((end for row in rows for end in _ends(row)), default=0.0) or 1.0)
        axes.yaxis.grid(visible=False)
        seen = {part.look for row in rows for part in row.stretches}
        keys = [Patch(label=look.label, **look.style()) for look in looks if look in seen]
        if keys:
            figure.legend(handles=keys, loc="outside upper left", ncols=len(keys), **LEGEND)
        return as_svg(figure, name)
