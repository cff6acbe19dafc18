"""Streaming quality: equal to the exact one, whatever the cut into batches; windows that straddle batches."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowsync.metrics.quality import BINS, LogitHistogram, Quality, bin_of, evaluate_scores, normalized_entropy


def draw(samples: int, seed: int = 0, scale: float = 1.5, shift: float = -1.5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, generator=generator) * scale + shift
    return logits, (torch.rand(samples, generator=generator) < logits.sigmoid()).float()


def feed(quality: Quality, logits: Tensor, labels: Tensor, batch: int) -> Quality:
    for start in range(0, len(logits), batch):
        quality.update(logits[start : start + batch], labels[start : start + batch])
    return quality


@pytest.mark.parametrize("batch", [1_000, 333])
@pytest.mark.parametrize(("scale", "shift"), [(1.5, -1.5), (0.05, -4.0), (4.0, 0.0), (0.02, 0.0)])
def test_streaming_agrees_with_exact(batch: int, scale: float, shift: float) -> None:
    logits, labels = draw(20_000, 1, scale, shift)
    quality, exact = feed(Quality(100), logits, labels, batch), evaluate_scores(logits, labels)
    assert quality.lifetime.count == 20_000
    assert quality.lifetime.logloss == pytest.approx(exact.logloss, rel=1e-6)
    assert quality.lifetime.ne == pytest.approx(exact.ne, rel=1e-6)
    assert quality.lifetime.calibration == pytest.approx(exact.calibration, rel=1e-6)
    assert quality.auc == pytest.approx(exact.auc, abs=1e-4)


@pytest.mark.parametrize(
    ("labels", "only"), [([], None), ([0, 0, 0], 0), ([1, 1], 1), ([0, 0, 1], None), ([1, 1, 0], None)]
)
def test_the_only_label_there_is(labels: list[float], only: int | None) -> None:
    logits, given = torch.zeros(len(labels)), torch.tensor(labels, dtype=torch.float32)
    assert evaluate_scores(logits, given).only_label == only
    assert feed(Quality(2), logits, given, 1).lifetime.only_label == only


def test_auc_of_bf16_logits_is_exact() -> None:
    logits, labels = draw(20_000, 2)
    logits = logits.bfloat16()
    assert feed(Quality(100), logits, labels, 512).auc == pytest.approx(evaluate_scores(logits, labels).auc, abs=1e-12)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.lists(st.tuples(st.floats(-90, 90, width=32), st.booleans()), min_size=2, max_size=40))
def test_auc_errs_by_no_more_than_it_says(pairs: list[tuple[float, bool]]) -> None:
    logits, labels = torch.tensor([z for z, _ in pairs]), torch.tensor([float(y) for _, y in pairs])
    histogram, quality = LogitHistogram(), Quality(10)
    histogram.add(logits, labels)
    quality.update(logits, labels)
    exact = evaluate_scores(logits, labels).auc
    if exact is None:
        assert quality.auc is None
    else:
        groups = histogram.groups()
        shared = groups.positives @ groups.negatives / (groups.positives.sum() * groups.negatives.sum())
        assert abs(quality.auc - exact) <= 0.5 * float(shared) + 1e-12


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.floats(allow_nan=False, width=32), min_size=2, max_size=20))
def test_bins_keep_the_order_of_logits(values: list[float]) -> None:
    bins = bin_of(torch.tensor(sorted(values)))
    assert (bins.diff() >= 0).all()
    assert 0 <= int(bins[0]) <= int(bins[-1]) < BINS


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.integers(1, 20),
)
def test_window_is_the_last_samples_wherever_batches_end(batches: list[int], size: int) -> None:
    logits, labels = draw(sum(batches), 3)
    quality = Quality(size)
    for logits_of, labels_of in zip(logits.split(batches), labels.split(batches), strict=True):
        quality.update(logits_of, labels_of)
    expected = evaluate_scores(logits[-size:], labels[-size:]).ne
    assert quality.ne_window == (None if expected is None else pytest.approx(expected, rel=1e-5))


@pytest.mark.parametrize("size", [1, 4_095, 4_096, 4_097, 10_000, 50_000])
def test_window_straddles_its_chunks(size: int) -> None:
    logits, labels = draw(20_000, 4)
    quality = feed(Quality(size), logits, labels, 700)
    expected = evaluate_scores(logits[-size:], labels[-size:]).ne
    assert quality.ne_window == (None if expected is None else pytest.approx(expected, rel=1e-5))


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_label_leaves_ne_and_auc_undefined(label: float) -> None:
    quality = feed(Quality(10), torch.randn(30), torch.full((30,), label), 7)
    assert (quality.ne_window, quality.lifetime.ne, quality.auc) == (None, None, None)
    assert quality.lifetime.logloss is not None
    assert (quality.lifetime.calibration is None) == (label == 0.0)


def test_nothing_is_defined_before_the_first_sample() -> None:
    empty, restored = Quality(10), Quality(10)
    empty.update(torch.empty(0), torch.empty(0))
    restored.restore(json.loads(json.dumps(Quality(10).state())))
    for quality in (empty, restored):
        lifetime = quality.lifetime
        figures = (lifetime.logloss, quality.ne_window, lifetime.ne, lifetime.calibration, quality.auc)
        assert (lifetime.count, *figures) == (0, *[None] * 5)


def test_state_goes_through_json_and_goes_on() -> None:
    logits, labels = draw(9_000, 5)
    whole = feed(Quality(1_000), logits, labels, 500)
    first = feed(Quality(1_000), logits[:5_000], labels[:5_000], 500)
    second = Quality(1_000)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.ne_window == pytest.approx(first.ne_window, rel=1e-6)
    assert second.auc == first.auc
    feed(second, logits[5_000:], labels[5_000:], 500)
    assert second.auc == whole.auc
    assert second.lifetime.count == whole.lifetime.count
    assert second.lifetime.ne == pytest.approx(whole.lifetime.ne, rel=1e-12)
    assert second.ne_window == pytest.approx(whole.ne_window, rel=1e-9)


def test_restored_window_fades_out_as_samples_come() -> None:
    logits, labels = draw(1_500, 6)
    first = feed(Quality(1_000), logits[:1_000], labels[:1_000], 100)
    second = Quality(1_000)
    second.restore(first.state())
    feed(second, logits[1_000:], labels[1_000:], 100)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    kept = (loss[:1_000].mean() * 500 + loss[1_000:].sum(), labels[:1_000].mean() * 500 + labels[1_000:].sum())
    assert second.ne_window == pytest.approx(normalized_entropy(float(kept[0]), float(kept[1]), 1_000), rel=1e-5)


def test_a_smaller_window_after_a_resume_keeps_the_mean() -> None:
    logits, labels = draw(1_000, 7)
    first, second = feed(Quality(1_000), logits, labels, 100), Quality(10)
    second.restore(first.state())
    assert second.ne_window == pytest.approx(first.ne_window, rel=1e-5)


@pytest.mark.parametrize("batch", [700, 10_000, 25_000])
def test_the_worst_stretch_is_found_wherever_batches_end(batch: int) -> None:
    logits, labels = draw(45_000, 7)
    logits[20_000:30_000] *= -1
    quality = feed(Quality(100), logits, labels, batch)
    expected = evaluate_scores(logits[20_000:30_000], labels[20_000:30_000])
    assert quality.peak is not None
    assert (quality.peak.samples, quality.peak.end) == (10_000, 30_000)
    assert quality.peak.ne == pytest.approx(expected.ne, rel=1e-6)
    assert quality.peak.logloss == pytest.approx(expected.logloss, rel=1e-6)


def test_the_worst_stretch_goes_through_a_checkpoint_also_an_old_one() -> None:
    logits, labels = draw(30_000, 8)
    logits[10_000:20_000] *= -1
    whole = feed(Quality(100), logits, labels, 1_000)
    first, second, old = feed(Quality(100), logits[:15_000], labels[:15_000], 1_000), Quality(100), Quality(100)
    state = json.loads(json.dumps(first.state()))
    second.restore(state)
    feed(second, logits[15_000:], labels[15_000:], 1_000)
    assert second.peak == whole.peak
    del state["stretches"]
    old.restore(state)
    assert old.peak is None
    feed(old, logits[15_000:], labels[15_000:], 1_000)
    assert old.peak is not None
    assert old.peak.end == 25_000
