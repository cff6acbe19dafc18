"""The formulas against torchmetrics and against what one would write by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from shadowsync.metrics.quality import evaluate_scores, normalized_entropy

LOGITS = st.lists(st.tuples(st.integers(-60, 60), st.booleans()), min_size=1, max_size=60)


def tensors(pairs: list[tuple[int, bool]]) -> tuple[Tensor, Tensor]:
    """Logits on a coarse grid, so that ties are common, and labels."""
    return torch.tensor([z / 8 for z, _ in pairs]), torch.tensor([float(y) for _, y in pairs])


@settings(deadline=None, max_examples=80, derandomize=True)
@given(LOGITS)
def test_auc_counts_ordered_pairs(pairs: list[tuple[int, bool]]) -> None:
    positives = [z for z, y in pairs if y]
    negatives = [z for z, y in pairs if not y]
    auc = evaluate_scores(*tensors(pairs)).auc
    if not positives or not negatives:
        assert auc is None
        return
    ordered = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    assert auc == pytest.approx(ordered / len(positives) / len(negatives))


@settings(deadline=None, max_examples=40, derandomize=True)
@given(LOGITS)
def test_logloss_ne_and_calibration_are_the_formulas_of_the_literature(pairs: list[tuple[int, bool]]) -> None:
    logits, labels = tensors(pairs)
    found = evaluate_scores(logits, labels)
    predictions = [1 / (1 + math.exp(-z / 8)) for z, _ in pairs]
    loss = -sum(math.log(p if y else 1 - p) for p, (_, y) in zip(predictions, pairs, strict=True)) / len(pairs)
    mean = float(labels.mean())
    assert found.logloss == pytest.approx(loss, rel=1e-6)
    if 0 < mean < 1:
        background = -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))
        assert found.ne == pytest.approx(loss / background, rel=1e-6)
    else:
        assert found.ne is None
    if mean > 0:
        assert found.calibration == pytest.approx(sum(predictions) / len(pairs) / mean, rel=1e-6)
    else:
        assert found.calibration is None


def test_exact_auc_and_logloss_agree_with_torchmetrics() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5_000, generator=generator).bfloat16().float() * 2 - 1  # bf16, so that there are ties
    labels = (torch.rand(5_000, generator=generator) < logits.sigmoid()).float()
    found = evaluate_scores(logits, labels)
    reference = binary_auroc(logits.sigmoid().double(), labels.long())  # sums in float32
    assert found.auc == pytest.approx(float(reference), abs=2e-6)
    reference = torch.nn.functional.binary_cross_entropy(logits.double().sigmoid(), labels.double())
    assert found.logloss == pytest.approx(float(reference), abs=1e-9)


def test_logloss_stays_finite_where_the_sigmoid_saturates() -> None:
    found = evaluate_scores(torch.tensor([100.0, -100.0]), torch.tensor([0.0, 1.0]))
    assert found.logloss == pytest.approx(100.0)
    assert found.auc == 0.0


def test_auc_tells_logits_apart_whose_sigmoids_are_equal_in_float32() -> None:
    assert evaluate_scores(torch.tensor([20.0, 30.0]), torch.tensor([0.0, 1.0])).auc == 1.0


def test_nothing_is_defined_without_samples() -> None:
    found = evaluate_scores(torch.empty(0), torch.empty(0))
    assert (found.samples, found.auc, found.ne, found.logloss, found.calibration, found.curve) == (0, *[None] * 4, ())


def test_always_predicting_the_mean_has_an_ne_of_one() -> None:
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
    found = evaluate_scores(torch.full((4,), math.log(1 / 3)), labels)
    assert found.ne == pytest.approx(1.0)
    assert found.calibration == pytest.approx(1.0)
    assert found.auc == 0.5


@settings(deadline=None, max_examples=40, derandomize=True)
@given(LOGITS, st.integers(1, 12))
def test_curve_keeps_every_sample_and_both_means(pairs: list[tuple[int, bool]], bins: int) -> None:
    logits, labels = tensors(pairs)
    curve = evaluate_scores(logits, labels, bins).curve
    assert 1 <= len(curve) <= bins
    assert sum(point.count for point in curve) == len(pairs)
    assert sum(point.count * point.label for point in curve) == pytest.approx(float(labels.sum()))
    assert sum(point.count * point.prediction for point in curve) == pytest.approx(float(logits.sigmoid().sum()))
    assert [point.prediction for point in curve] == sorted(point.prediction for point in curve)


def test_bins_hold_equal_counts_where_logits_are_distinct() -> None:
    logits = torch.linspace(-3, 3, 100)
    assert [point.count for point in evaluate_scores(logits, torch.ones(100), bins=10).curve] == [10] * 10


def test_the_ne_of_a_certain_label_is_not_defined() -> None:
    assert normalized_entropy(1.0, 0.0, 5) is normalized_entropy(1.0, 5.0, 5) is None
