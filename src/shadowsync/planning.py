"""`shadowsync plan recovery`: what full and partial recovery would cost, from numbers given or from a run."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table as ShownTable
from rich.text import Text

from shadowsync.checkpoint.format import MANIFEST
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.choices import server_count
from shadowsync.config import parse
from shadowsync.embedding.watching import RowPriority
from shadowsync.errors import CheckpointError, ConfigError
from shadowsync.recovery.policy import Costs, Decision, Goal, Option, decide, spoken
from shadowsync.recovery.scheduler import Priors, time_between_failures
from shadowsync.recovery.settings import recovery_settings
from shadowsync.registry import members
from shadowsync.report import result, words
from shadowsync.runs import CONFIG_FILE, load_checkpoint

_MEANINGS = {
    "save_s": "a save",
    "load_s": "a load",
    "restart_s": "a restart",
    "fail_s": "between failures",
    "hours": "the job",
    "servers": "embedding servers",
    "lost_servers": "lost at once",
    "target_pls": "target PLS",
    "share": "saved by priority",
}
_LIMITS = {"target_pls": 1.0, "share": 1.0}
_LEAST = {"save_s": 0.0, "load_s": 0.0, "restart_s": 0.0, "lost_servers": 1.0}
_MAY_BE_INFINITE = ("fail_s", "hours")


class Figure(NamedTuple):
    """A number of the plan and where it is from, in words."""

    value: float
    source: str


class RecoveryPlan(NamedTuple):
    """What `shadowsync plan recovery` prints: the numbers by name, both policies, and where tables are known, how many
    rows would be saved by priority, and the bytes of their weights."""

    figures: Mapping[str, Figure]
    decision: Decision
    weights: tuple[int, int] | None


def plan_recovery(folder: Path | None, **numbers: float | None) -> RecoveryPlan:
    """Plans from the numbers given (None: not known); what is missing comes from the run or checkpoints in `folder`.

    They are those of `_MEANINGS`, in the units of `Costs` and hours, and the `rows` and `dim` of tables that are saved
    by priority.

    Raises:
        ConfigError: a number is out of range, or one that nobody can guess is missing, or the folder does not exist.
        CheckpointError: no checkpoint in the folder can be loaded.
        DataError: its result.json is not one.
    """
    given = {name: value for name, value in numbers.items() if value is not None}
    for name, value in given.items():
        least = _LEAST.get(name, math.ulp(0.0))
        most = math.inf if name in _MAY_BE_INFINITE else _LIMITS.get(name, 1e18)
        if not least <= value <= most:
            below = "" if math.isinf(most) else f" and at most {most:g}"
            above = f"{least:g} or above" if name in _LEAST else "above 0"
            raise ConfigError(f"{_option(name)} {value:g}: it must be {above}{below}")
    rows, dim = given.pop("rows", None), given.pop("dim", None)
    if (rows is None) != (dim is None):
        raise ConfigError("--rows and --dim belong together: how many rows the tables have, and how wide they are")
    figures = {name: Figure(value, "given") for name, value in given.items()}
    interval_s, weights = None, None
    if folder is not None:
        measured, interval_s, weights = _of_run(folder)
        figures = measured | figures
    if rows is not None and dim is not None:
        weights = int(rows), 4 * int(rows) * int(dim)
    if missing := [name for name in ("save_s", "servers") if name not in figures]:
        raise ConfigError(
            f"{' and '.join(map(_option, missing))} must be given, or the folder of a run in which it was measured: "
            "shadowsync plan recovery --save-s 318 --servers 8"
        )
    priors = Priors()
    assumed = {
        "load_s": Figure(figures["save_s"].value, "as long as a save"),
        "restart_s": Figure(priors.restart_s, "assumed"),
        "fail_s": Figure(priors.fail_s, "assumed"),
        "target_pls": Figure(Goal().target_pls, "assumed"),
        "hours": Figure(math.inf, "not known"),
        "lost_servers": Figure(priors.lost_servers, "assumed"),
        "share": Figure(0.125, "assumed"),
    }
    figures = assumed | figures
    values = {name: figure.value for name, figure in figures.items()}
    costs = Costs(
        **{name: values[name] for name in ("save_s", "load_s", "restart_s", "fail_s", "lost_servers")},
        servers=int(values["servers"]),
        job_s=3600 * values["hours"],
    )
    decision = decide(Goal(target_pls=values["target_pls"], interval_s=interval_s), costs)
    return RecoveryPlan(figures, decision, weights)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _of_run(folder: Path) -> tuple[dict[str, Figure], float | None, tuple[int, int]]:
    """What the folder of a run, of its checkpoints, or of one of them tells: numbers by name, the time between saves as
    configured, and the tables that are large enough to be saved by priority."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; give the folder of a run, or numbers instead")
    saved = _checkpoint_in(folder)
    config = parse(saved.config)
    settings = recovery_settings(config.recovery, config.cluster.runtime)
    configured = {
        "servers": server_count(config),
        "target_pls": settings.goal.target_pls,
        "fail_s": settings.priors.fail_s,
        "lost_servers": settings.priors.lost_servers,
        "share": config.recovery.share,
    }
    found = {name: Figure(value, "the run's configuration") for name, value in configured.items()}
    measured = result.read_result(folder) if (folder / result.FILE_NAME).exists() else None
    if measured is not None and (recovery := measured.recovery) is not None:
        seconds = recovery.seconds
        saves, what = (recovery.saves, "saves") if recovery.rounds is None else (recovery.rounds, "rounds of saves")
        failures = recovery.failures if recovery.server_failures is None else recovery.server_failures
        if saves:
            found["save_s"] = Figure(seconds.save / saves, f"measured: {saves} {what}")
        if failures:
            found["load_s"] = Figure(seconds.load / failures, f"measured: {failures} failures")
            found["restart_s"] = Figure(seconds.wait / failures, f"measured: {failures} failures")
            seconds_in_all = recovery.emulated_job_s or measured.throughput.seconds
            fail_s = time_between_failures(settings.priors, failures, seconds_in_all)
            found["fail_s"] = Figure(fail_s, f"recovery.prior_fail_s and {failures} failures")
            if recovery.lost_servers is not None:
                found["lost_servers"] = Figure(recovery.lost_servers, f"measured: {failures} failures")
    tables = [table for table in saved.tables if table.rows >= settings.min_rows]
    weights = sum(table.rows for table in tables), sum(4 * table.rows * table.dim for table in tables)
    return found, settings.goal.interval_s, weights


def _checkpoint_in(folder: Path) -> LoadedCheckpoint:
    if (folder / MANIFEST).exists():
        return CheckpointStore(str(folder.parent)).load(folder.name)
    if (folder / CONFIG_FILE).exists() or (folder / "checkpoints").is_dir():
        return load_checkpoint(folder, verify=False)
    store = CheckpointStore(str(folder))
    if (newest := store.newest()) is None:
        raise CheckpointError(f"{folder} holds no checkpoint: give the folder of a run, or numbers instead")
    return store.load(newest)


def plan_tables(plan: RecoveryPlan) -> Iterator[RenderableType]:
    """The numbers used, the two policies, the trackers, and the recommendation."""
    shown: dict[str, Callable[[float], str]] = {
        **dict.fromkeys(("save_s", "load_s", "restart_s", "fail_s"), spoken),
        "hours": lambda hours: spoken(3600 * hours) if math.isfinite(hours) else words.MISSING,
        "servers": words.count,
    }
    table = _table("number", "value", "option", "from", title="Planned with")
    for name, meaning in _MEANINGS.items():
        figure = plan.figures[name]
        table.add_row(meaning, shown.get(name, "{:g}".format)(figure.value), _option(name), figure.source)
    yield table
    table = _table("", "full", "partial", title="Recovery")
    rows: dict[str, Callable[[Option], str]] = {
        "time between saves": lambda one: spoken(one.interval_s),
        "expected overhead": lambda one: words.percent(one.overhead, 2),
        "expected PLS": lambda one: f"{one.expected_pls:.3g}",
    }
    for name, show in rows.items():
        table.add_row(name, show(plan.decision.full), show(plan.decision.partial))
    yield table
    if plan.weights is None:
        yield Text("Give --rows and --dim, or the folder of a run, to see the memory that each tracker takes.")
    elif not plan.weights[0]:
        yield Text("No table of the run is large enough to be saved by priority (recovery.min_rows).")
    else:
        yield _trackers(*plan.weights, plan.figures["share"].value)
    yield Text(f"Recommended is {plan.decision.why}.", style="bold")


def _trackers(rows: int, weight_bytes: int, share: float) -> ShownTable:
    title = f"Memory of the trackers of {words.count(rows)} rows ({words.data_size(weight_bytes)})"
    table = _table("priority", "memory", "of the weights", title=title)
    for name, priority in members("shadowsync.recovery", RowPriority).items():
        taken = priority.memory_bytes(rows, round(weight_bytes / 4 / rows), share)
        table.add_row(name, words.data_size(taken), words.percent(taken / weight_bytes, 2))
    return table


def _table(*columns: str, title: str) -> ShownTable:
    table = ShownTable(title=title, title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 or column == "from" else "right", overflow="fold")
    return table
