"""Measures that are asked for by name (`train.measures`), on all rows of a set at once.

They are in a frame: `logit`, `prediction`, `label` (of clicks int64), `weight`, and `group`, the value of the measure's
column as a word of 64 bits.
"""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import polars as pl

from shadowsync.config import TrainConfig
from shadowsync.data.labels import FAMILIES, Task
from shadowsync.errors import ConfigError
from shadowsync.registry import imported, names_code, nearest

PLAIN: Mapping[str, bool] = {"auc": True, "ne": False, "logloss": False}
"""Measures that there always are, each with whether more is better."""
_FED_ROWS = 8192
_WEIGHTS = ("weights", "weight", "sample_weights", "sample_weight")
"""What a metric may call the rows' weights, behind predictions and labels."""
_FORM = re.compile(r"(?P<name>[^@(]+)(@(?P<k>[1-9]\d{0,8}))?(\((?P<column>.+)\))?")

Value = Callable[[pl.DataFrame], float | None]


class Metric(Protocol):
    """What is used of a metric of torchmetrics."""

    higher_is_better: bool | None

    def update(self, *rows: Any, **more: Any) -> None: ...

    def compute(self) -> Any: ...


@dataclass(frozen=True)
class Measure:
    """A measure as it was asked for.

    Attributes:
        name: by which it was.
        value: of the rows; None where it is not defined.
        higher: more is better; None: who wrote it does not say.
        kinds: of labels that it can be measured on.
        column: whose values make groups of rows.
    """

    name: str
    value: Value
    higher: bool | None
    kinds: Collection[str]
    column: str | None = None


def gauc(rows: pl.DataFrame) -> float | None:
    """AUC within each group, averaged by the weight of its rows, ties counting half; groups of one label are left out
    (Zhu et al., Optimized Cost per Click in Taobao Display Advertising, KDD 2017)."""
    ties = _ties(rows, "group", "logit").sort("group", "logit")
    below = pl.col("negatives").cum_sum().over("group") - pl.col("negatives") / 2
    groups = ties.with_columns(won=pl.col("positives") * below).group_by("group", maintain_order=True)
    each = groups.agg(pl.col("won", "positives", "negatives").sum())
    each = each.filter(pl.col("positives") > 0, pl.col("negatives") > 0)
    size = each["positives"] + each["negatives"]
    area = each["won"] / each["positives"] / each["negatives"]
    return float(np.average(area.to_numpy(), weights=size.to_numpy())) if len(each) else None


def pr_auc(rows: pl.DataFrame) -> float | None:
    """Average precision, `Σ (R_n − R_{n−1}) P_n` over thresholds: the area under the steps of the curve."""
    ties = _ties(rows, "logit").filter(pl.col("positives") + pl.col("negatives") > 0).sort("logit", descending=True)
    found = ties["positives"].cum_sum()
    precision = found / (found + ties["negatives"].cum_sum())
    weight = ties["positives"].to_numpy()
    return float(np.average(precision.to_numpy(), weights=weight)) if weight.sum() > 0 else None


def ndcg(rows: pl.DataFrame, k: int) -> float | None:
    """Mean over groups of DCG within the first `k` over that of the best order: the label is the gain, `1 / log2(1 +
    rank)` the discount (Järvelin and Kekäläinen, TOIS 2002); rows of one logit share their places, as scikit-learn has
    it. Groups without a gain are left out; a group counts as much as its rows do on average."""
    found, best = _dcg(rows, "logit", k), _dcg(rows, "label", k)
    weight = rows.group_by("group").agg(pl.col("weight").mean()).sort("group")["weight"].to_numpy()
    used = (best > 0) & (weight > 0)
    return float(np.average(found[used] / best[used], weights=weight[used])) if used.any() else None


def rmse(rows: pl.DataFrame) -> float | None:
    """Root of the mean squared error of predictions."""
    squares = _mean(rows, (rows["prediction"] - rows["label"]) ** 2)
    return None if squares is None else squares**0.5


def mae(rows: pl.DataFrame) -> float | None:
    """Mean absolute error of predictions."""
    return _mean(rows, (rows["prediction"] - rows["label"]).abs())


def poisson_deviance(rows: pl.DataFrame) -> float | None:
    """Mean of `2 (y log(y / ŷ) − y + ŷ)`."""
    logits, labels = (rows[name].to_torch() for name in ("logit", "label"))
    return _mean(rows, pl.Series(2 * FAMILIES["poisson"].loss(logits, labels).numpy()))


_BUILT_IN: Mapping[str, tuple[Value, bool, Collection[str]]] = {
    "gauc": (gauc, True, ("logloss",)),
    "pr_auc": (pr_auc, True, ("logloss",)),
    "rmse": (rmse, False, FAMILIES),
    "mae": (mae, False, FAMILIES),
    "poisson_deviance": (poisson_deviance, False, ("poisson",)),
}
_BY_GROUP = ("gauc", "ndcg")
ALWAYS: Mapping[str, tuple[str, ...]] = {"logloss": (), "mse": ("rmse",), "poisson": ("poisson_deviance",)}
"""By kind of label, what is measured without being asked for."""


def named(key: str, name: str) -> Measure:
    """The measure that `name` asks for at `key` of the configuration: `pr_auc`, `gauc(user)`, `ndcg@10(session)`, or a
    metric of torchmetrics as `package.module:Class`, with a column where it wants `indexes`. That is given the rows'
    weights if its `update` takes any.

    Raises:
        ConfigError: there is none of that name, or it is not written so.
    """
    allowed = "gauc(COLUMN), ndcg@K(COLUMN), pr_auc, rmse, mae, poisson_deviance, package.module:Class"
    form = _FORM.fullmatch(name)
    base, k, column = form.group("name", "k", "column") if form else (name, None, None)
    if names_code(base):
        return _of_torchmetrics(key, name, base, column)
    if base not in (*_BUILT_IN, "ndcg"):
        raise ConfigError(f"{key}={name} is not known{nearest(base, (*_BUILT_IN, 'ndcg'))}; allowed: {allowed}")
    if (column is None) == (base in _BY_GROUP) or (k is None) == (base == "ndcg"):
        way = f"{base}@10(COLUMN)" if base == "ndcg" else f"{base}(COLUMN)" if base in _BY_GROUP else base
        raise ConfigError(f"{key}={name} is written as {way}; allowed: {allowed}")
    if k is not None:
        return Measure(name, lambda rows: ndcg(rows, int(k)), True, FAMILIES, column)
    value, higher, kinds = _BUILT_IN[base]
    return Measure(name, value, higher, kinds, column)


@dataclass(frozen=True)
class Wanted:
    """What is measured, and by what validations are compared.

    Attributes:
        measures: those of `train.measures`, the one of `best_by`, and those that labels have anyway.
        best_by: as of `TestMetrics.by_name`.
        higher: more of it is better.
    """

    measures: tuple[Measure, ...]
    best_by: str
    higher: bool


def compared_by(train: TrainConfig, tasks: Sequence[Task]) -> str:
    """`train.best_by`; left open, labels that are no clicks are compared by NE."""
    return train.best_by if tasks[0].clicks or "best_by" in train.model_fields_set else "ne"


def wanted(train: TrainConfig, tasks: Sequence[Task]) -> Wanted:
    """What `train.measures` and `train.best_by` ask for.

    Raises:
        ConfigError: one is not known, cannot be measured on the labels, or cannot be compared.
    """
    always = [name for task in tasks for name in ALWAYS[task.kind]]
    found = {name: named("train.measures", name) for name in dict.fromkeys((*train.measures, *always))}
    best_by = compared_by(train, tasks)
    label = next((task for task in tasks[1:] if best_by.startswith(f"{task.name}/")), tasks[0])
    name = best_by if label is tasks[0] else best_by.removeprefix(f"{label.name}/")
    if name not in PLAIN and name not in found:
        found[name] = named("train.best_by", name)
    of = (
        found[name] if name in found else Measure(name, pr_auc, PLAIN[name], FAMILIES if name == "ne" else ("logloss",))
    )
    for key, measure, some in (("best_by", of, [label]), *(("measures", each, tasks) for each in found.values())):
        if not any(task.kind in measure.kinds for task in some):
            has = ", ".join(f"{task.name} ({task.kind})" for task in some)
            raise ConfigError(
                f"train.{key}: {measure.name} is for labels of {' or '.join(measure.kinds)}, not {has}: set it to "
                f"{' or '.join(('ne', *ALWAYS[some[0].kind])) if key == 'best_by' else 'others, or leave it out'}"
            )
    if of.higher is None:
        raise ConfigError(f"train.best_by={best_by}: set higher_is_better of that class to true or false")
    return Wanted(tuple(found.values()), best_by, of.higher)


def _of_torchmetrics(key: str, name: str, path: str, column: str | None) -> Measure:
    made = imported(key, path)
    try:
        metric = cast("Metric", made())
        higher, _ = metric.higher_is_better, metric.compute
        weights = next((each for each in [*inspect.signature(metric.update).parameters][2:] if each in _WEIGHTS), None)
    except Exception as error:
        raise ConfigError(
            f"{key}={name}: {path.partition(':')[2]}() gives no metric of torchmetrics ({error}): name a class that "
            "needs no arguments, for instance a subclass that sets them"
        ) from error

    def value(rows: pl.DataFrame) -> float | None:
        metric = cast("Metric", made())
        try:
            for part in rows.iter_slices(_FED_ROWS):
                label = part["label"].to_torch()
                more = {} if column is None else {"indexes": part["group"].to_torch()}
                if weights is not None:
                    more[weights] = part["weight"].to_torch().float()
                label = label.float() if label.is_floating_point() else label
                metric.update(part["prediction"].to_torch().float(), label, **more)
            return float(metric.compute())
        except Exception as error:
            raise ConfigError(f"{key}={name} cannot be measured on these rows: {str(error).splitlines()[0]}") from error

    return Measure(name, value, higher, FAMILIES, column)


def _ties(rows: pl.DataFrame, *by: str) -> pl.DataFrame:
    """The weight of positives and of negatives where these columns are alike."""
    positives = (pl.col("weight") * pl.col("label")).sum()
    return rows.group_by(*by).agg(positives=positives, negatives=pl.col("weight").sum() - positives)


def _dcg(rows: pl.DataFrame, by: str, k: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of each group, ascending, within the first `k` rows in descending order; rows alike share their places."""
    ties = rows.group_by("group", by).agg(gain=pl.col("label").mean(), count=pl.len())
    ties = ties.sort("group", by, descending=[False, True]).with_columns(end=pl.col("count").cum_sum().over("group"))
    discounts = np.append(0, np.cumsum(1 / np.log2(np.arange(2, min(k, len(rows)) + 2))))
    end, count = (ties[name].to_numpy().astype(np.int64) for name in ("end", "count"))
    share = discounts[np.minimum(end, len(discounts) - 1)] - discounts[np.minimum(end - count, len(discounts) - 1)]
    ties = ties.with_columns(gained=pl.Series(share) * ties["gain"])
    found: np.ndarray[Any, np.dtype[np.float64]] = (
        ties.group_by("group").agg(pl.col("gained").sum()).sort("group")["gained"].to_numpy()
    )
    return found


def _mean(rows: pl.DataFrame, values: pl.Series) -> float | None:
    total = float(rows["weight"].sum())
    return float((rows["weight"] * values).sum()) / total if total > 0 else None
