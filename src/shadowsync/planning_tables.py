"""What `shadowsync plan recovery` prints."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shadowsync.planning import RecoveryPlan, Weights, option
from shadowsync.recovery.costs import spoken
from shadowsync.recovery.decision import Option
from shadowsync.report import words

_SHOWN: dict[str, Callable[[float], str]] = {
    "save_s": spoken,
    "load_s": spoken,
    "restart_s": spoken,
    "fail_s": spoken,
    "hours": lambda hours: spoken(3600 * hours) if math.isfinite(hours) else words.MISSING,
    "servers": words.count,
    "target_pls": lambda pls: f"{pls:g}",
    "share": lambda share: f"{share:g}",
}
_MEANINGS = {
    "save_s": "a save",
    "load_s": "a load",
    "restart_s": "a restart",
    "fail_s": "between failures",
    "hours": "the job",
    "servers": "embedding servers",
    "target_pls": "target PLS",
    "share": "rows in a save by priority",
}


@dataclass(frozen=True)
class Tracker:
    """What a row priority remembers, and so the memory it takes (CPR, arXiv 2011.02999, section 4.2).

    Attributes:
        copies: of the weights.
        row_bytes: for each row.
        entry_bytes: for each row that one save may take.
        papers_entry_bytes: the same in the paper, whose ids are narrower.
    """

    copies: float = 0.0
    row_bytes: float = 0.0
    entry_bytes: float = 0.0
    papers_entry_bytes: float = 0.0

    def memory(self, weights: Weights, share: float, entry_bytes: float) -> float:
        """In bytes."""
        return self.copies * weights.weight_bytes + (self.row_bytes + share * entry_bytes) * weights.rows


TRACKERS = {
    "all": Tracker(),
    "scar": Tracker(copies=1),
    "mfu": Tracker(row_bytes=4),
    "ssu": Tracker(entry_bytes=8, papers_entry_bytes=4),
}


def plan_tables(plan: RecoveryPlan) -> Iterator[RenderableType]:
    """The numbers used, the two policies, the trackers, and the recommendation."""
    yield _figures(plan)
    yield _policies(plan)
    if plan.weights is None:
        yield Text("Give --rows and --dim, or the folder of a run, to see the memory that each tracker takes.")
    elif not plan.weights.rows:
        yield Text("No table of the run is large enough to be saved by priority (recovery.min_rows).")
    else:
        yield _trackers(plan.weights, plan.share)
    yield Text(f"Recommended is {plan.decision.why}.", style="bold")


def _figures(plan: RecoveryPlan) -> Table:
    table = _table("number", "value", "option", "from", title="Planned with")
    for name, meaning in _MEANINGS.items():
        figure = plan.figures[name]
        table.add_row(meaning, _SHOWN[name](figure.value), option(name), figure.source)
    return table


def _policies(plan: RecoveryPlan) -> Table:
    table = _table("", "full", "partial", title="Recovery")
    decision = plan.decision
    rows: dict[str, Callable[[Option], str]] = {
        "time between saves": lambda one: spoken(one.interval_s),
        "expected overhead": lambda one: words.percent(one.overhead, 2),
        "expected PLS": lambda one: f"{one.expected_pls:.3g}",
    }
    for name, show in rows.items():
        table.add_row(name, show(decision.full), show(decision.partial))
    return table


def _trackers(weights: Weights, share: float) -> Table:
    title = f"Memory of the trackers of {words.count(weights.rows)} rows ({words.data_size(weights.weight_bytes)})"
    table = _table("priority", "memory", "of the weights", "in the paper", title=title)
    for name, tracker in TRACKERS.items():
        ours = tracker.memory(weights, share, tracker.entry_bytes)
        papers = tracker.memory(weights, share, tracker.papers_entry_bytes)
        parts = [words.percent(one / weights.weight_bytes, 2) for one in (ours, papers)]
        table.add_row(name, words.data_size(ours), *parts)
    return table


def _table(*columns: str, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 or column == "from" else "right", overflow="fold")
    return table
