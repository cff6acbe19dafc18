"""`shadowsync report DIR…`: makes a run's page again, or one page that compares several runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from shadowsync.config import DataConfig
from shadowsync.metrics.history import Frame
from shadowsync.report import words
from shadowsync.report.cards import SAMPLES, SECONDS, Card, curve, kept, three_digits
from shadowsync.report.files import read_events, read_frames, write_atomically
from shadowsync.report.measures import KEY_NUMBERS, Final
from shadowsync.report.page import flat, render, write_page
from shadowsync.report.plots import SERIES_COLOURS, Axis, Line, line_chart
from shadowsync.report.result import Result, notable_recovery, read_result

FILE_NAME = "comparison.html"
_ANY_TEST = frozenset(DataConfig.model_fields) - {"name"} | {"cache", "rows"}
"""Keys of `data` that leave the test rows as they are; where there is a `test_path`, only that and the label count."""
_OF_EVERY_RUN = ("data", "test", "throughput", "sync")
_RUNS_ABREAST = 6
_LABEL_LENGTH = 16  # leaves room for the curves


class PastRun(NamedTuple):
    """A finished run as read from its folder; `name` tells it from the others."""

    name: str
    result: Result
    frames: Sequence[Frame]

    @property
    def label(self) -> str:
        """The name, with a word where the speed is not that of a real machine."""
        return f"{self.name} (emulated)" if self.result.throughput.emulated_step_ms is not None else self.name


class Cell(NamedTuple):
    """One value of the comparison."""

    text: str
    best: bool


def remake_page(folder: Path, path: Path) -> None:
    """Writes the page of the run in `folder` to `path`, from its result.json, metrics.jsonl and events.jsonl.

    Raises:
        DataError: there is no result, or a file is broken.
        SaveError: the page cannot be written.
    """
    write_page(path, read_result(folder), read_frames(folder), read_events(folder))


def read_runs(folders: Sequence[Path]) -> list[PastRun]:
    """The runs in `folders`, called by the folder's name, or by the whole path where names are shared.

    Raises:
        DataError: as `remake_page`.
    """
    names = [folder.resolve().name for folder in folders]
    return [
        PastRun(name if names.count(name) == 1 else str(folder), read_result(folder), read_frames(folder))
        for name, folder in zip(names, folders, strict=True)
    ]


def write_comparison(runs: Sequence[PastRun], path: Path) -> None:
    """Writes the page that compares the runs; `SaveError` if it cannot be written."""
    write_atomically(path, render_comparison(runs).encode())


def render_comparison(runs: Sequence[PastRun]) -> str:
    """The page that compares the runs, as HTML."""
    headings, cells = compare(runs)
    rows = [{"name": run.label, "colour": i % SERIES_COLOURS, "cells": cells[i]} for i, run in enumerate(runs)]
    entropy, auc = Axis("NE of the window", three_digits), Axis("AUC so far", three_digits)
    return render(
        "comparison.html.j2",
        notices=notices(runs),
        introduction="Each run has one colour; the best value of a column, where there is a best, is set in bold.",
        columns=headings,
        runs=rows,
        differences=differences(runs),
        gradients=any(run.result.aggregation is not None for run in runs),
        losses=any(notable_recovery(run.result) is not None for run in runs),
        curve_cards=[
            _overlay("NE against samples", "low, and soon.", SAMPLES, entropy, lambda frame: frame.ne_window, runs),
            _overlay("AUC against samples", "high, and soon.", SAMPLES, auc, lambda frame: frame.auc, runs),
            _overlay("AUC against time", "high, and soon.", SECONDS, auc, lambda frame: frame.auc, runs),
        ],
    )


def compare(runs: Sequence[PastRun]) -> tuple[list[str], list[list[Cell]]]:
    """The headings of the columns, some of them only where a run has a value, and a row of cells for each run."""
    compared = [
        one
        for one in KEY_NUMBERS
        if one.column and (one.section in _OF_EVERY_RUN or any(one.value(run.result) is not None for run in runs))
    ]
    columns = [_column(one, runs) for one in compared]
    return [one.column for one in compared], [list(row) for row in zip(*columns, strict=True)]


def _column(measure: Final, runs: Sequence[PastRun]) -> list[Cell]:
    """What was measured on other rows, or of which some is the speed of no machine, has no best."""
    values = [measure.value(run.result) for run in runs]
    known = {value for value in values if value is not None}
    emulated = {run.result.throughput.emulated_step_ms is None for run in runs}
    unfair = (measure.section == "throughput" and len(emulated) > 1) or (
        measure.section == "test" and bool(different_tests(runs))
    )
    best = None if measure.best is None or unfair or len(known) < 2 else measure.best(known)
    return [Cell(measure.show(value), value is not None and value == best) for value in values]


def different_tests(runs: Sequence[PastRun]) -> list[str]:
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


def notices(runs: Sequence[PastRun]) -> list[str]:
    """What must be known before the runs are compared."""
    if not (different := different_tests(runs)):
        return []
    return [
        f"The runs were not tested on the same rows ({', '.join(different)}): their AUC, NE and log loss say nothing "
        "about which is better, so none of them is in bold."
    ]


def differences(runs: Sequence[PastRun]) -> list[tuple[str, list[str]]]:
    """The configuration keys in which the runs differ, with each run's value."""
    configs = [dict(flat(run.result.config)) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [config.get(key, words.MISSING) for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def comparison_table(runs: Sequence[PastRun]) -> Table:
    """The comparison for the terminal: a column per run while a few fit beside each other, else a row per run."""
    headings, cells = compare(runs)
    corner, across, down = "run", headings, [run.label for run in runs]
    rows: Sequence[Sequence[Cell]] = cells
    if len(runs) <= _RUNS_ABREAST:
        corner, across, down, rows = "", down, across, list(zip(*cells, strict=True))
    table = Table(box=None, pad_edge=False)
    table.add_column(corner, overflow="fold", min_width=12)
    for name in across:
        table.add_column(Text(name), justify="right", overflow="fold")
    for name, row in zip(down, rows, strict=True):
        table.add_row(Text(name), *(Text(cell.text, style="bold" if cell.best else "") for cell in row))
    return table


def _overlay(
    title: str, good: str, x: Axis, y: Axis, value: Callable[[Frame], float | None], runs: Sequence[PastRun]
) -> Card:
    lines = []
    for i, run in enumerate(runs):
        points = curve(kept(run.frames), x, value)
        lines += [Line(*points, words.shortened(run.label, _LABEL_LENGTH), colour=i)] if points[0] else []
    return Card(
        title,
        "Predictions made just before each sample was trained on, one curve per run.",
        good,
        line_chart(title, x, y, lines) if lines else None,
        "None of the runs wrote metrics.jsonl.",
    )
