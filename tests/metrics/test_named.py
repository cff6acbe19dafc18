"""Measures by name, each against a reference in numpy and, where it has one, torchmetrics."""

import math
from collections import defaultdict
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_average_precision
from torchmetrics.functional.regression import mean_absolute_error, mean_squared_error, tweedie_deviance_score
from torchmetrics.functional.retrieval import retrieval_normalized_dcg

from shadowsync.config import TrainConfig
from shadowsync.data.labels import Task
from shadowsync.errors import ConfigError
from shadowsync.metrics.named import gauc, mae, named, ndcg, poisson_deviance, pr_auc, rmse, wanted
from shadowsync.metrics.quality import evaluate_scores

Row = tuple[int, int, int, int]
"""Logit in eighths, so that ties are common, label, group, weight in halves."""
ROWS = st.lists(
    st.tuples(st.integers(-6, 6), st.integers(0, 1), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=40
)
GRADED = st.lists(
    st.tuples(st.integers(-6, 6), st.integers(0, 4), st.integers(0, 3), st.just(2)), min_size=1, max_size=40
)
checked = settings(deadline=None, max_examples=60, derandomize=True)


def frame(rows: list[Row]) -> pl.DataFrame:
    logit, label, group, weight = (np.array(column) for column in zip(*rows, strict=True))
    return pl.DataFrame(
        {
            "logit": logit / 8,
            "prediction": 1 / (1 + np.exp(-logit / 8)),
            "label": label,
            "weight": weight / 2,
            "group": group,
        }
    )


def auc_of(rows: list[Row]) -> tuple[float, float] | None:
    """Won pairs over pairs, by counting them, and the weight of the rows."""
    pairs = won = 0.0
    for z, y, _, w in rows:
        for other, label, _, v in rows:
            if y > label:
                pairs += w * v
                won += w * v * (1.0 if z > other else 0.5 if z == other else 0.0)
    return (won / pairs, sum(w for *_, w in rows)) if pairs else None


@checked
@given(ROWS)
def test_gauc_averages_the_auc_of_groups_that_have_both_labels(rows: list[Row]) -> None:
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row[2]].append(row)
    found = [area for own in groups.values() if (area := auc_of(own)) is not None]
    expected = sum(auc * weight for auc, weight in found) / sum(weight for _, weight in found) if found else None
    assert gauc(frame(rows)) == (None if expected is None else pytest.approx(expected))


@checked
@given(ROWS)
def test_gauc_of_one_group_is_the_auc(rows: list[Row]) -> None:
    table = frame(rows).with_columns(group=pl.lit(7))
    logits, labels, weights = (table[name].to_torch() for name in ("logit", "label", "weight"))
    auc = evaluate_scores(logits, labels, weights=weights).auc
    assert gauc(table) == (None if auc is None else pytest.approx(auc))


@checked
@given(ROWS)
def test_pr_auc_is_the_average_precision(rows: list[Row]) -> None:
    table, plain = frame(rows), frame([(*row[:3], 2) for row in rows])
    total = float((table["weight"] * table["label"]).sum())
    expected, recall = 0.0, 0.0
    for threshold in sorted(table["logit"].unique().to_list(), reverse=True):
        above = table.filter(pl.col("logit") >= threshold)
        hits, all_above = float((above["weight"] * above["label"]).sum()), float(above["weight"].sum())
        if total and all_above:
            expected, recall = expected + (hits / total - recall) * hits / all_above, hits / total
    assert pr_auc(table) == (pytest.approx(expected) if total else None)
    if plain["label"].sum():
        reference = binary_average_precision(plain["prediction"].to_torch(), plain["label"].to_torch())
        assert pr_auc(plain) == pytest.approx(float(reference), abs=1e-5)


@checked
@given(GRADED, st.integers(1, 6))
def test_ndcg_shares_the_places_of_ties(rows: list[Row], k: int) -> None:
    """In a group each tied row gets the mean discount of the places that its logit takes; torchmetrics does so, too."""
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row[2]].append(row)

    def discount(place: int) -> float:
        return 1 / math.log2(place + 2) if place < k else 0.0

    expected = []
    for own in groups.values():
        gained = 0.0
        for z, y, *_ in own:
            first = sum(other > z for other, *_ in own)
            tied = sum(other == z for other, *_ in own)
            gained += y * sum(discount(first + place) for place in range(tied)) / tied
        best = sum(y * discount(place) for place, y in enumerate(sorted((row[1] for row in own), reverse=True)))
        if best:
            expected.append(gained / best)
            logits, labels = torch.tensor([row[0] / 8 for row in own]), torch.tensor([row[1] for row in own])
            assert gained / best == pytest.approx(float(retrieval_normalized_dcg(logits, labels, top_k=k)), abs=1e-5)
    assert ndcg(frame(rows), k) == (pytest.approx(np.mean(expected)) if expected else None)


def test_a_group_counts_in_ndcg_as_much_as_its_rows_do() -> None:
    right, wrong = [(3, 1, 0, 2), (1, 0, 0, 2)], [(1, 1, 1, 6), (3, 0, 1, 6)]
    assert ndcg(frame(right), 5) == 1.0
    last = 1 / math.log2(3)
    assert ndcg(frame(right + wrong), 5) == pytest.approx((1 * 1 + 3 * last) / 4)
    assert ndcg(frame([(3, 0, 2, 2), (1, 0, 2, 2), *right]), 5) == 1.0


@checked
@given(ROWS, st.randoms(use_true_random=False))
def test_the_order_in_which_rows_come_and_copies_of_them_do_not_matter(rows: list[Row], random: Any) -> None:
    """A group's rows may lie anywhere, in any batch; a row of weight 2 is two rows."""
    mixed = [row for row in rows for _ in range(row[3])]
    random.shuffle(mixed)
    table, other = frame(rows), frame([(*row[:3], 2) for row in mixed or [(0, 0, 0, 0)]])
    if mixed:
        for measure in (gauc, pr_auc, rmse, mae):
            found = measure(other)
            assert measure(table) == (None if found is None else pytest.approx(found))


def test_errors_of_predictions_are_those_of_torchmetrics() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(500, generator=generator).double()
    counts = torch.poisson(logits.exp(), generator=generator)
    rates = logits.exp()
    table = pl.DataFrame(
        {"logit": logits.numpy(), "prediction": rates.numpy(), "label": counts.numpy(), "weight": np.ones(500)}
    )
    assert rmse(table) == pytest.approx(float(mean_squared_error(rates, counts)) ** 0.5)
    assert mae(table) == pytest.approx(float(mean_absolute_error(rates, counts)))
    assert poisson_deviance(table) == pytest.approx(float(tweedie_deviance_score(rates, counts, power=1)), rel=1e-5)
    doubled = table.with_columns(weight=pl.Series([3.0, *[1.0] * 499]))
    thrice = pl.concat([table, table.head(1), table.head(1)])
    assert rmse(doubled) == pytest.approx(rmse(thrice))
    assert poisson_deviance(doubled) == pytest.approx(poisson_deviance(thrice))


# --- AUC and NE of weighted rows and of other labels ------------------------------------------------------------------


@checked
@given(ROWS)
def test_a_sample_of_weight_two_counts_as_two(rows: list[Row]) -> None:
    copies = [(*row[:3], 2) for row in rows for _ in range(row[3])]
    table, other = frame(rows), frame(copies or [(0, 0, 0, 0)])
    weighted = evaluate_scores(table["logit"].to_torch(), table["label"].to_torch(), weights=table["weight"].to_torch())
    plain = evaluate_scores(other["logit"].to_torch(), other["label"].to_torch())
    if copies:
        for name in ("auc", "ne", "logloss", "calibration"):
            found = getattr(plain, name)
            assert getattr(weighted, name) == (None if found is None else pytest.approx(found)), name
        assert weighted.only_label == plain.only_label


def test_ne_of_numbers_is_one_less_r_squared_and_of_counts_a_ratio_of_deviances() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(400, generator=generator).double()
    numbers = logits + torch.randn(400, generator=generator)
    found = evaluate_scores(logits, numbers, task=Task("y", "mse"))
    residual, total = (numbers - logits).square().sum(), (numbers - numbers.mean()).square().sum()
    assert found.ne == pytest.approx(float(residual / total))
    assert (found.auc, found.logloss, found.curve, found.only_label, found.loss) == (None, None, (), None, "mse")
    counts = torch.poisson(logits.exp(), generator=generator)
    counted = evaluate_scores(logits, counts, task=Task("y", "poisson"))
    mean = torch.full_like(counts, float(counts.mean()))
    ratio = [tweedie_deviance_score(each, counts, power=1) for each in (logits.exp(), mean)]
    assert counted.ne == pytest.approx(float(ratio[0] / ratio[1]), rel=1e-5)
    assert counted.calibration == pytest.approx(float(logits.exp().mean() / counts.mean()))
    for constant in (torch.zeros(3), torch.full((3,), 2.0)):
        assert evaluate_scores(torch.zeros(3), constant, task=Task("y", "poisson")).ne is None


# --- names -----------------------------------------------------------------------------------------------------------


class Hits(Metric):
    """Share of predictions on the right side of a half."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hits", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("seen", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        assert not labels.is_floating_point()
        self.hits += ((predictions > 0.5) == labels.bool()).sum()
        self.seen += len(labels)

    def compute(self) -> torch.Tensor:
        return self.hits / self.seen


class Weighted(Hits):
    """Takes the weights of rows."""

    def update(self, predictions: Any, labels: Any, weights: Any) -> None:  # type: ignore[override]
        self.hits += (((predictions > 0.5) == labels.bool()) * weights).sum()
        self.seen += weights.sum()


class ByKeyword(Weighted):
    """Calls them as scikit-learn does."""

    def update(self, predictions: Any, labels: Any, *, sample_weight: Any = None) -> None:  # type: ignore[override]
        super().update(predictions, labels, sample_weight)


class OfTwo(Hits):
    """What it calls weight is the labels' place."""

    def update(self, value: torch.Tensor, weight: torch.Tensor) -> None:  # type: ignore[override]
        super().update(value, weight)


class Undecided(Hits):
    """Nobody says what is better."""

    higher_is_better = None


class Picky(Hits):
    """Takes an argument."""

    def __init__(self, needed: int) -> None:
        super().__init__()


def test_a_metric_of_torchmetrics_is_fed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsync.metrics.named._FED_ROWS", 7)
    table = frame([(z % 13 - 6, z % 3 % 2, z % 5, 2) for z in range(50)])
    expected = float(((table["prediction"] > 0.5) == (table["label"] == 1)).mean())
    assert named("train.measures", f"{__name__}:Hits").value(table) == pytest.approx(expected)
    by_group = named("train.measures", "torchmetrics.retrieval:RetrievalMRR(user)")
    assert by_group.column == "user"
    ranks = []
    for _, own in table.group_by("group"):
        labels = own.sort("prediction", descending=True)["label"].to_list()
        ranks.append(1 / (labels.index(1) + 1) if 1 in labels else 0.0)
    assert by_group.value(table.filter(pl.int_range(pl.len()).over("group", "logit") == 0)) is not None
    assert 0 < np.mean(ranks) <= 1


@pytest.mark.parametrize(("name", "weighted"), [("Weighted", 1), ("ByKeyword", 1), ("Hits", 0), ("OfTwo", 0)])
def test_a_metric_that_takes_weights_is_given_those_of_the_rows(
    monkeypatch: pytest.MonkeyPatch, name: str, weighted: int
) -> None:
    monkeypatch.setattr("shadowsync.metrics.named._FED_ROWS", 7)
    table = frame([(z % 13 - 6, z % 3 % 2, 0, z % 4) for z in range(50)])
    right = ((table["prediction"] > 0.5) == (table["label"] == 1)).to_numpy()
    expected = np.average(right, weights=table["weight"].to_numpy() if weighted else None)
    assert named("train.measures", f"{__name__}:{name}").value(table) == pytest.approx(expected)


CLICK, NUMBER = Task("click"), Task("watched", "mse")


@pytest.mark.parametrize(
    ("train", "tasks", "told"),
    [
        ({"measures": ["gaucc(user)"]}, [CLICK], "is not known, did you mean gauc?"),
        ({"measures": ["gauc"]}, [CLICK], "is written as gauc(COLUMN)"),
        ({"measures": ["pr_auc(user)"]}, [CLICK], "is written as pr_auc"),
        ({"measures": ["ndcg(user)"]}, [CLICK], "is written as ndcg@10(COLUMN)"),
        ({"measures": ["poisson_deviance"]}, [CLICK, NUMBER], "is for labels of poisson, not click (logloss), watched"),
        ({"measures": ["nowhere.at_all:Metric"]}, [CLICK], "there is no module nowhere: pip install nowhere"),
        ({"measures": [f"{__name__}:Hit"]}, [CLICK], "has no Hit, did you mean Hits?"),
        ({"measures": [f"{__name__}:Picky"]}, [CLICK], "name a class that needs no arguments"),
        ({"best_by": f"{__name__}:Undecided"}, [CLICK], "set higher_is_better of that class to true or false"),
        ({"best_by": "rmsee"}, [CLICK], "train.best_by=rmsee is not known, did you mean rmse?"),
        ({"best_by": "auc"}, [NUMBER], "auc is for labels of logloss, not watched (mse): set it to ne or rmse"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(train: dict[str, Any], tasks: list[Task], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wanted(TrainConfig(**train), tasks)
    assert told in str(caught.value)


def test_what_is_compared_knows_its_direction() -> None:
    def found(best_by: str, *tasks: Task) -> tuple[str, bool, list[str]]:
        given = wanted(TrainConfig(**({"best_by": best_by} if best_by else {})), tasks)
        return given.best_by, given.higher, [measure.name for measure in given.measures]

    assert found("", CLICK) == ("auc", True, [])
    assert found("", NUMBER) == ("ne", False, ["rmse"])
    assert found("ndcg@5(a/b)", CLICK) == ("ndcg@5(a/b)", True, ["ndcg@5(a/b)"])
    assert found("watched/rmse", CLICK, NUMBER) == ("watched/rmse", False, ["rmse"])
    assert found("watched/mae", CLICK, NUMBER) == ("watched/mae", False, ["rmse", "mae"])
