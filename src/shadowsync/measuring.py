"""What is measured of predictions on a set of rows: AUC, NE and the measures that are asked for, of each label."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import polars as pl

from shadowsync.config import Config
from shadowsync.data.labels import Task, column
from shadowsync.data.reader import EVALUATION_ROWS
from shadowsync.data.source import OpenSource, Slice
from shadowsync.data.splits import whole
from shadowsync.data.tables import OpenTable
from shadowsync.errors import ConfigError
from shadowsync.metrics.named import Wanted, wanted
from shadowsync.metrics.quality import Scored, TestMetrics, evaluate_scores
from shadowsync.registry import nearest


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

    def of(self, scored: Scored) -> TestMetrics:
        """Of all rows that can be used, in their order."""
        found = {task.name: self._of_task(number, task, scored) for number, task in enumerate(self._tasks)}
        first = found[self._tasks[0].name]
        return dataclasses.replace(first, tasks=found) if len(found) > 1 else first

    def _of_task(self, number: int, task: Task, scored: Scored) -> TestMetrics:
        logits, labels = column(scored.logits, number), column(scored.labels, number)
        plain = evaluate_scores(logits, labels, weights=scored.weights, task=task)
        if not (asked := [measure for measure in self.wanted.measures if task.kind in measure.kinds]) or not len(
            labels
        ):
            return plain
        logits, weights = logits.double(), np.ones(len(labels)) if scored.weights is None else scored.weights.numpy()
        rows = pl.DataFrame(
            {
                "logit": logits.numpy(),
                "prediction": task.family.predict(logits).numpy(),
                "label": (labels.long() if task.clicks else labels.double()).numpy(),
                "weight": weights.astype(np.float64),
            }
        )
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
