"""What `shadowsync plan recovery` prints."""

import math
from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shadowsync.planning import RecoveryPlan, Weights, option
from shadowsync.recovery.costs import spoken
from shadowsync.recovery.decision import Option
from shadowsync.recovery.priority import RowPriority
from shadowsync.registry import members
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
    table = _table("priority", "memory", "of the weights", title=title)
    dim = round(weights.weight_bytes / 4 / weights.rows)
    for name, priority in members("shadowsync.recovery", RowPriority).items():
        taken = priority().memory_bytes(weights.rows, dim, share)
        table.add_row(name, words.data_size(taken), words.percent(taken / weights.weight_bytes, 2))
    return table


def _table(*columns: str, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 or column == "from" else "right", overflow="fold")
    return table
