"""Pictures of what `quality.py` ran, one for each of its parts."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import interval
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
COLOURS = {"none": "#777777", "easgd": "#0b6bcb", "ma": "#c8552b", "bmuf": "#2e8b57"}
STYLES = {"-": ":", "background": "-", "every_k 5": "--", "every_k 30": "-.", "matched": (0, (1, 1))}


def of_methods(tasks: Sequence[str], rows: Rows, path: Path) -> None:
    """AUC against the number of trainers, one panel per task, one line per method and schedule."""
    figure = Figure(figsize=(6.5 * len(tasks), 5), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        lines: dict[tuple[str, str], dict[int, list[float]]] = {}
        for row in rows:
            if (row["task"], row["workers"]) == (task, 1):
                mine = lines.setdefault((row["method"], row["schedule"]), {})
                mine.setdefault(row["trainers"], []).append(row["auc"])
        for (method, schedule), points in lines.items():
            counts = sorted(points)
            means = [statistics.mean(points[count]) for count in counts]
            label = method if schedule == "-" else f"{method}, {schedule}"
            axes.plot(counts, means, color=COLOURS[method], linestyle=STYLES[schedule], marker="o", ms=4, label=label)
        axes.set(title=f"{task}: test AUC, mean over seeds", xlabel="trainers", xscale="log")
        ticks = sorted({row["trainers"] for row in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.grid(alpha=0.3)
    figure.axes[-1].legend(fontsize=7, loc="lower left")
    figure.savefig(path, dpi=130)


def of_parameters(tasks: Sequence[str], rows: Rows, path: Path) -> None:
    """What other parameters gain over the defaults, a row of panels for each task, a column for each schedule."""
    schedules = "background", "every_k 30"
    figure = Figure(figsize=(13, 4 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), len(schedules), squeeze=False, sharex=True, sharey="row").flat
    for axes, (task, schedule) in zip(panels, itertools.product(tasks, schedules), strict=True):
        mine = [row for row in rows if (row["task"], row["schedule"], row["trainers"]) == (task, schedule, 4)]
        usual = {(row["method"], row["seed"]): row["auc"] for row in mine if not row["options"]}
        gains: dict[tuple[str, str], list[float]] = {}
        for row in mine:
            if row["options"] and (row["method"], row["seed"]) in usual:
                gain = row["auc"] - usual[row["method"], row["seed"]]
                gains.setdefault((row["method"], " ".join(row["options"])), []).append(gain)
        _bars(axes, [(f"{method}\n{options}", COLOURS[method], each) for (method, options), each in gains.items()])
        axes.set(title=f"{task}, {schedule}", ylabel="AUC over the defaults")
    figure.savefig(path, dpi=110)


def _bars(axes: Axes, bars: Sequence[tuple[str, str, Sequence[float]]]) -> None:
    """Means with their intervals of 95 %."""
    places = range(len(bars))
    means, reach = [statistics.mean(each) for *_, each in bars], [interval(each) or 0.0 for *_, each in bars]
    axes.bar(places, means, yerr=reach, color=[colour for _, colour, _ in bars], error_kw={"lw": 0.8})
    axes.set_xticks(places, [name for name, *_ in bars], rotation=90, fontsize=7)
    axes.axhline(0, color="0.4", lw=0.8)
    axes.set_yscale("symlog", linthresh=0.001)


def of_hogwild(tasks: Sequence[str], rows: Rows, path: Path) -> None:
    """Speed over workers beside what would be linear, and AUC lost to one worker, a line for each task."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speed, loss = figure.subplots(1, 2)
    for task in tasks:
        mine = [row for row in rows if row["task"] == task]
        counts = sorted({row["workers"] for row in mine})
        one = {row["seed"]: row for row in mine if row["workers"] == counts[0]}
        rates = [statistics.median(row["eps"] for row in mine if row["workers"] == count) for count in counts]
        speed.plot(counts, rates, "o-", label=task)
        changes = [
            [row["auc"] - one[row["seed"]]["auc"] for row in mine if row["workers"] == n and row["seed"] in one]
            for n in counts
        ]
        means, reach = [statistics.mean(each) for each in changes], [interval(each) or 0.0 for each in changes]
        loss.errorbar(counts, means, yerr=reach, marker="o", capsize=3, label=task)
    speed.plot(counts, [rates[0] * count / counts[0] for count in counts], ":", color="0.5", label="linear")
    speed.set(ylabel="examples/s, emulated", yscale="log")
    loss.set(ylabel="AUC to one worker")
    loss.set_yscale("symlog", linthresh=0.001)
    for axes in (speed, loss):
        axes.set(xlabel="workers of each of two trainers", xscale="log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
