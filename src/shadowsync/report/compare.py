"""`shadowsync report DIR…`: makes a run's page again, or one page that compares several runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from shadowsync.config import DataConfig
from shadowsync.metrics.frame import Frame
from shadowsync.report import words
from shadowsync.report.canvas import SERIES_COLOURS, Axis
from shadowsync.report.charts import SAMPLES, SECONDS, Card, three_digits
from shadowsync.report.files import write_atomically
from shadowsync.report.history import read_frames
from shadowsync.report.page import flat, marked, render, terms_of, write_page
from shadowsync.report.plots import Chart, Line, line_chart
from shadowsync.report.recovery_section import notable_recovery
from shadowsync.report.result import Result, read_result
from shadowsync.report.role_log import read_events
from shadowsync.report.series import curve, kept

FILE_NAME = "comparison.html"
_ANY_TEST = frozenset(DataConfig.model_fields) - {"name"} | {"cache", "rows"}
"""Keys of `data` that leave the test rows as they are; where there is a `test_path`, only that and the label count."""
_RUNS_ABREAST = 6
_LABEL = 16


@dataclass(frozen=True)
class Run:
    """A finished run as read from its folder; `name` tells it from the others."""

    name: str
    result: Result
    frames: Sequence[Frame]

    @property
    def label(self) -> str:
        """The name, with a word where the speed is not that of a real machine."""
        return f"{self.name} (emulated)" if self.result.throughput.emulated_step_ms is not None else self.name


@dataclass(frozen=True)
class Column:
    """A measure of the comparison; `best` picks the best of several values, None where there is none.

    A `timed` one has no best among runs of which some are emulated: their speed is not that of a machine. A `tested`
    one has none among runs that were tested on different rows. One that is `of_some` is left out where no run has it.
    """

    name: str
    value: Callable[[Result], float | str | None]
    show: Callable[[Any], str]
    best: Callable[[Sequence[float]], float] | None = None
    timed: bool = False
    tested: bool = False
    of_some: bool = False


@dataclass(frozen=True)
class Cell:
    """One value of the comparison."""

    text: str
    best: bool


def _mode(result: Result) -> str | None:
    recovery = notable_recovery(result)
    return None if recovery is None else recovery.mode


def _method(result: Result) -> str | None:
    """Of whichever family was at work."""
    if (done := result.aggregation) is not None:
        return done.method
    return None if result.sync is None else result.sync.method


def _pls(result: Result) -> float | None:
    recovery = notable_recovery(result)
    return None if recovery is None else recovery.pls


COLUMNS = (
    Column("method", _method, lambda v: v or words.MISSING),
    Column("test AUC", lambda r: r.test.auc if r.test else None, words.decimal, max, tested=True),
    Column("test NE", lambda r: r.test.ne if r.test else None, words.decimal, min, tested=True),
    Column("log loss", lambda r: r.test.logloss if r.test else None, words.decimal, min, tested=True),
    Column("calibration", lambda r: r.test.calibration if r.test else None, lambda v: words.decimal(v, 3), None),
    Column("examples/s", lambda r: r.throughput.eps, words.count, max, timed=True),
    Column("samples at once (ELP)", lambda r: r.throughput.elp, words.count),
    Column("steps between syncs", lambda r: r.sync.average_gap if r.sync else None, lambda v: words.decimal(v, 1)),
    Column(
        "staleness",
        lambda r: r.aggregation.mean_staleness if r.aggregation else None,
        lambda v: words.decimal(v, 2),
        of_some=True,
    ),
    Column("dropped", lambda r: r.aggregation.dropped if r.aggregation else None, words.count, of_some=True),
    Column("trained", lambda r: r.data.trained_samples, words.count),
    Column("time", lambda r: r.throughput.seconds, words.duration),
    Column("recovery", _mode, lambda v: v or words.MISSING, of_some=True),
    Column("lost samples (PLS)", _pls, lambda v: words.decimal(v, 4), of_some=True),
)


def remake_page(folder: Path, path: Path) -> None:
    """Writes the page of the run in `folder` to `path`, from its result.json, metrics.jsonl and events.jsonl.

    Raises:
        DataError: there is no result, or a file is broken.
        SaveError: the page cannot be written.
    """
    write_page(path, read_result(folder), read_frames(folder), read_events(folder))


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in `folders`, called by the folder's name, or by the whole path where names are shared.

    Raises:
        DataError: as `remake_page`.
    """
    names = [folder.resolve().name for folder in folders]
    return [
        Run(name if names.count(name) == 1 else str(folder), read_result(folder), read_frames(folder))
        for name, folder in zip(names, folders, strict=True)
    ]


def write_comparison(runs: Sequence[Run], path: Path) -> None:
    """Writes the page that compares the runs.

    Raises:
        SaveError: it cannot be written.
    """
    write_atomically(path, render_comparison(runs).encode())


def render_comparison(runs: Sequence[Run]) -> str:
    """The page that compares the runs, as HTML."""
    cells = compare(runs)
    rows = [{"name": run.label, "colour": i % SERIES_COLOURS, "cells": cells[i]} for i, run in enumerate(runs)]
    return render(
        "comparison.html.j2",
        notices=notices(runs),
        introduction="Each run has one colour; the best value of a column, where there is a best, is set in bold.",
        columns=[column.name for column in columns_of(runs)],
        runs=rows,
        differences=differences(runs),
        terms=terms_of(
            gradients=any(run.result.aggregation is not None for run in runs),
            losses=any(notable_recovery(run.result) is not None for run in runs),
            units=False,
        ),
        curve_cards=marked([_card(overlay, runs) for overlay in _OVERLAYS]),
    )


def columns_of(runs: Sequence[Run]) -> list[Column]:
    """Those of every run, and of the others those of which some run has a value."""
    return [
        column for column in COLUMNS if not column.of_some or any(column.value(run.result) is not None for run in runs)
    ]


def compare(runs: Sequence[Run]) -> list[list[Cell]]:
    """One row of cells per run, one cell per column."""
    columns = columns_of(runs)
    values = [[column.value(run.result) for column in columns] for run in runs]
    mixed = len({run.result.throughput.emulated_step_ms is None for run in runs}) > 1
    elsewhere = bool(different_tests(runs))
    best = [
        None if (column.timed and mixed) or (column.tested and elsewhere) else _best(column, [row[i] for row in values])
        for i, column in enumerate(columns)
    ]
    return [
        [
            Cell(column.show(value), value is not None and value == top)
            for column, value, top in zip(columns, row, best, strict=True)
        ]
        for row in values
    ]


def _best(column: Column, values: Sequence[float | str | None]) -> float | None:
    known = [value for value in values if isinstance(value, float | int)]
    return column.best(known) if column.best is not None and len(set(known)) > 1 else None


def different_tests(runs: Sequence[Run]) -> list[str]:
    """What says that the runs were not tested on the same rows; runs without a test are left out."""
    tested = [run.result for run in runs if run.result.test is not None]
    counts = {result.data.test_samples for result in tested}
    found = [] if len(counts) <= 1 else [f"{' and '.join(map(words.count, sorted(counts)))} test rows"]
    given = [_test_settings(result.config.get("data")) for result in tested]
    keys = dict.fromkeys(key for data in given for key in data)
    return found + [f"data.{key}" for key in keys if len({data.get(key) for data in given}) > 1]


def _test_settings(data: Any) -> dict[str, str]:
    """The keys of a section `data` that say which the test rows are."""
    if not isinstance(data, Mapping):
        return {}
    by_path = {"name", "test_path", "label"} if data.get("test_path") is not None else None
    deciding = by_path or set(data) - _ANY_TEST
    return {key: words.setting(value) for key, value in data.items() if key in deciding}


def notices(runs: Sequence[Run]) -> list[str]:
    """What must be known before the runs are compared."""
    if not (different := different_tests(runs)):
        return []
    return [
        f"The runs were not tested on the same rows ({', '.join(different)}): their AUC, NE and log loss say nothing "
        "about which is better, so none of them is in bold."
    ]


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The configuration keys in which the runs differ, with each run's value."""
    configs = [dict(flat(run.result.config)) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [config.get(key, words.MISSING) for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def comparison_table(runs: Sequence[Run]) -> Table:
    """The comparison for the terminal: a column per run while a few fit beside each other, else a row per run."""
    rows = [[Text(cell.text, style="bold" if cell.best else "") for cell in cells] for cells in compare(runs)]
    names, measures = [run.label for run in runs], [column.name for column in columns_of(runs)]
    if len(runs) > _RUNS_ABREAST:
        return _table("run", measures, names, rows)
    return _table("", names, measures, list(zip(*rows, strict=True)))


def _table(corner: str, across: Sequence[str], down: Sequence[str], rows: Sequence[Sequence[Text]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(corner, overflow="fold", min_width=12)
    for name in across:
        table.add_column(Text(name), justify="right", overflow="fold")
    for name, row in zip(down, rows, strict=True):
        table.add_row(Text(name), *row)
    return table


@dataclass(frozen=True)
class _Overlay:
    """What an overlaid chart shows of every run."""

    title: str
    good: str
    x: Axis
    y: Axis
    at: Callable[[Frame], float]
    value: Callable[[Frame], float | None]


_ENTROPY, _AUC = Axis("NE of the window", three_digits), Axis("AUC so far", three_digits)
_OVERLAYS = (
    _Overlay("NE against samples", "low, and soon.", SAMPLES, _ENTROPY, lambda f: f.samples, lambda f: f.ne_window),
    _Overlay("AUC against samples", "high, and soon.", SAMPLES, _AUC, lambda f: f.samples, lambda f: f.auc),
    _Overlay("AUC against time", "high, and soon.", SECONDS, _AUC, lambda f: f.seconds, lambda f: f.auc),
)


def _brief(label: str) -> str:
    """A label that leaves room for the curves; begin and end tell runs apart."""
    return label if len(label) <= _LABEL else f"{label[: _LABEL // 2]}…{label[-(_LABEL // 2 - 1) :]}"


def _card(overlay: _Overlay, runs: Sequence[Run]) -> Card:
    curves = [curve(kept(run.frames), overlay.at, overlay.value) for run in runs]
    labels = [_brief(run.label) for run in runs]
    lines = [Line(x, y, labels[i], colour=i) for i, (x, y) in enumerate(curves) if x]
    chart = Chart(overlay.title, overlay.x, overlay.y, lines)
    return Card(
        overlay.title,
        "Predictions made just before each sample was trained on, one curve per run.",
        overlay.good,
        line_chart(chart) if lines else None,
        "None of the runs wrote metrics.jsonl.",
    )
