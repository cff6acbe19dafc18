"""What is measured of predictions on a set of rows: AUC, NE and the measures that are asked for, of each label."""

import dataclasses
from collections.abc import Sequence

import polars as pl
import torch
from torch import Tensor

from shadowsync.config import Config
from shadowsync.data.labels import Task, column
from shadowsync.data.reader import EVALUATION_ROWS
from shadowsync.data.source import OpenSource, Slice
from shadowsync.data.splits import whole
from shadowsync.data.tables import OpenTable
from shadowsync.errors import ConfigError
from shadowsync.metrics.named import Measure, Wanted, wanted
from shadowsync.metrics.quality import Scored, TestMetrics, evaluate_scores
from shadowsync.registry import nearest

_MADE_UP = {"logloss": (0.0, 1.0, 0.0, 1.0), "mse": (0.5, 2.5, 1.5, 3.0), "poisson": (0.0, 3.0, 1.0, 2.0)}
"""Labels of four rows by their kind, which measures are tried on."""


class Measuring:
    """Measures predictions on the rows of one source, whose groups are read once.

    Attributes:
        wanted: what is measured.
    """

    def __init__(self, config: Config, tasks: Sequence[Task], rows: OpenSource) -> None:
        self.wanted: Wanted = wanted(config.train, tasks)
        self._tasks, self._rows = tasks, rows
        self._groups: dict[str, pl.Series] = {}
        for name in {measure.column for measure in self.wanted.measures} - {None}:
            _values(rows, rows.slices(EVALUATION_ROWS)[0], str(name))  # what is wrong with it is said before training
        self._asked = self._tried()

    def _tried(self) -> dict[str, list[Measure]]:
        """Of each label the measures that can be made of four rows with such labels: one that is code takes what it
        takes.

        Raises:
            ConfigError: one can be made of no label, or not of that by which validations are compared.
        """
        found: dict[str, list[Measure]] = {task.name: [] for task in self._tasks}
        for measure in self.wanted.measures:
            errors = {}
            for task in self._tasks:
                if task.kind not in measure.kinds:
                    continue
                try:
                    rows = _frame(task, torch.tensor([0.5, 1.0, 0.2, 2.0]), torch.tensor(_MADE_UP[task.kind]))
                    measure.value(rows.with_columns(group=pl.Series([0, 0, 1, 1])))
                    found[task.name].append(measure)
                except ConfigError as error:
                    errors[measure.name if task is self._tasks[0] else f"{task.name}/{measure.name}"] = error
            if self.wanted.best_by in errors:
                raise errors[self.wanted.best_by]
            if errors and not any(measure in asked for asked in found.values()):
                raise next(iter(errors.values()))
        return found

    def of(self, scored: Scored) -> TestMetrics:
        """Of all rows that can be used, in their order."""
        found = {task.name: self._of_task(number, task, scored) for number, task in enumerate(self._tasks)}
        first = found[self._tasks[0].name]
        return dataclasses.replace(first, tasks=found) if len(found) > 1 else first

    def _of_task(self, number: int, task: Task, scored: Scored) -> TestMetrics:
        logits, labels = column(scored.logits, number), column(scored.labels, number)
        plain = evaluate_scores(logits, labels, weights=scored.weights, task=task)
        if not (asked := self._asked[task.name]) or not len(labels):
            return plain
        rows = _frame(task, logits, labels, scored.weights)
        values = {}
        for measure in asked:
            groups = [] if measure.column is None else [self._group(measure.column)]
            values[measure.name] = measure.value(rows.with_columns(groups))
        return dataclasses.replace(plain, measures=values)

    def _group(self, name: str) -> pl.Series:
        """A number for each value of a column, or for each id of a feature where columns have no names."""
        if name not in self._groups:
            parts = [_values(self._rows, part, name).to_frame(name) for part in self._rows.slices(EVALUATION_ROWS)]
            try:
                values = pl.concat(parts, how="vertical_relaxed")[name].rank("dense")
            except pl.exceptions.PolarsError as error:
                raise ConfigError(
                    f"train.measures: column {name!r} makes no groups ({str(error).splitlines()[0]}): give one "
                    "that holds numbers, text or dates"
                ) from error
            self._groups[name] = values.fill_null(0).cast(pl.Int64).alias("group")
        return self._groups[name]


def _frame(task: Task, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> pl.DataFrame:
    """What measures are made of, but for their groups."""
    logits, weights = logits.double(), torch.ones(len(labels)) if weights is None else weights
    return pl.DataFrame(
        {
            "logit": logits.numpy(),
            "prediction": task.family.predict(logits).numpy(),
            "label": (labels.long() if task.clicks else labels.double()).numpy(),
            "weight": weights.double().numpy(),
        }
    )


def _values(rows: OpenSource, part: Slice, name: str) -> pl.Series:
    """Of those rows of a slice that can be used; that is known of slices that were read."""
    if isinstance(whole(rows), OpenTable):
        return rows.kept_column(name, part, "train.measures")
    names = [feature.name for feature in rows.schema.features]
    if name not in names:
        raise ConfigError(
            f"train.measures: {name!r} is no feature of these rows{nearest(name, names)}; they have {', '.join(names)}"
        )
    ids = rows.read(part).ids.select([names.index(name)])
    if not bool((ids.lengths() == 1).all()):
        raise ConfigError(f"train.measures: feature {name} has no single id in each row: give one that has")
    return pl.Series(name, ids.values.numpy())
