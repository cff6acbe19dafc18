"""Synthetic rows: random access, the shape of the ids, and a teacher whose AUC is what it says."""

import numpy as np
import pytest
import torch
from data_samples import same
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.data.batch import Batch
from shadowsync.data.reader import Parser, ReaderOptions
from shadowsync.data.source import Slice
from shadowsync.data.synthetic import OpenSynthetic, Synthetic, _Zipf, auc
from shadowsync.errors import ConfigError


def open_train(**options) -> OpenSynthetic:
    return Synthetic(**{"rows": 20_000, "features": 4, "dense": 5, "table_rows": 100, **options}).open("train", "error")


def everything(opened) -> Batch:
    return opened.read(opened.slices(opened.rows)[0])


def test_seeds_and_splits_differ():
    first, other = everything(open_train()), everything(open_train(seed=1))
    test = Synthetic(test_rows=20_000, features=4, dense=5, table_rows=100).open("test", "error")
    for different in (other, everything(test)):
        assert not torch.equal(first.ids.values, different.ids.values)
        assert not torch.equal(first.dense, different.dense)


def test_blocks_repeat_on_demand():
    batch = everything(open_train(rows=3 * 4096, repeat_blocks=2))
    assert same(batch.narrow(0, 4096), batch.narrow(8192, 12288))
    assert not torch.equal(batch.narrow(0, 4096).dense, batch.narrow(4096, 8192).dense)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.2, 3.0])
@pytest.mark.parametrize("rows", [1, 2, 10, 1000])
def test_ids_follow_a_bounded_pareto_distribution(rows, exponent):
    found = _Zipf(rows, exponent).rows_at((np.arange(100_000) + 0.5) / 100_000)
    counts = np.sort(np.bincount(found, minlength=rows))[::-1] / 100_000
    edges = np.arange(1, rows + 2, dtype=float)
    cumulative = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
    expected = np.diff(cumulative) / (cumulative[-1] - cumulative[0])
    assert np.abs(counts - expected).max() < 1e-4


@pytest.mark.parametrize("rows", [2, 7, 100, 4096, 99_999])
def test_ranks_are_scattered_over_all_rows(rows):
    found = _Zipf(rows, 0.0).rows_at((np.arange(rows) + 0.5) / rows)
    assert len(set(found.tolist())) == rows


@pytest.mark.parametrize("multi_hot", [1.0, 1.5, 6.0])
def test_mean_number_of_ids(multi_hot):
    lengths = everything(open_train(multi_hot=multi_hot)).ids.lengths().float()
    assert lengths.mean().item() == pytest.approx(multi_hot, rel=0.02)
    assert (lengths.min() == 0) == (multi_hot > 1)


@pytest.mark.parametrize("base_rate", [0.03, 0.25, 0.6])
@pytest.mark.parametrize("multi_hot", [1, 3])
def test_mean_label(base_rate, multi_hot):
    labels = everything(open_train(rows=50_000, base_rate=base_rate, multi_hot=multi_hot)).labels
    assert labels.mean().item() == pytest.approx(base_rate, abs=0.01)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_share_and_scale_are_those_of_the_logit(share):
    opened = open_train(dense_share=share, scale=1.5)
    dense = np.random.default_rng(0).standard_normal((20_000, 5), dtype=np.float32)
    _, _, hidden = opened._inputs(np.random.default_rng(1))
    teacher = opened._teacher
    by_dense = teacher.logits(dense[:4096], hidden).std()
    fixed = np.repeat(hidden[:, :1], 4096, axis=1)
    assert by_dense == pytest.approx(1.5, rel=0.1)
    assert (teacher.logits(dense[:4096], fixed).std() > 0.1) == (share > 0), "only the network sees the dense columns"


def test_more_scale_makes_a_higher_best_auc():
    best = [open_train(scale=scale, rows=50_000).best_auc for scale in (0.5, 1.0, 2.0, 4.0)]
    assert best == sorted(best)
    assert best[0] > 0.6
    assert best[-1] < 1


def test_best_auc_is_that_of_the_true_probabilities():
    """Knowing less than the probabilities gives less."""
    opened = open_train(rows=4096, dense_share=0.5)
    batch, probabilities = opened._made(0)
    assert opened.best_auc == auc(batch.labels.numpy(), probabilities)
    noisy = probabilities + np.random.default_rng(0).normal(0, 0.2, 4096)
    assert auc(batch.labels.numpy(), noisy) < opened.best_auc


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), min_size=1, max_size=30))
def test_auc_is_the_share_of_pairs_in_the_right_order(pairs):
    positives = [score for label, score in pairs if label]
    negatives = [score for label, score in pairs if not label]
    wins = [(p > n) + (p == n) / 2 for p in positives for n in negatives]
    found = auc(np.array([float(label) for label, _ in pairs]), np.array([float(score) for _, score in pairs]))
    assert found == (pytest.approx(sum(wins) / len(wins)) if wins else None)


def test_sizes_must_be_as_many_as_features():
    with pytest.raises(ConfigError, match=r"data\.table_rows holds 2 numbers; give one, or 4"):
        open_train(table_rows=(5, 6))


def test_slices_of_billions_of_rows_are_made_as_they_are_asked_for():
    slices = open_train(rows=10**10).slices(4096)
    assert len(slices) == -(-(10**10) // 4096)
    assert slices[-1] == Slice(len(slices) - 1, 0, (len(slices) - 1) * 4096, 10**10 % 4096)
    assert [part.start for part in slices[:2]] == [0, 4096]
    assert list(open_train(rows=5).slices(2)) == [Slice(0, 0, 0, 2), Slice(1, 0, 2, 2), Slice(2, 0, 4, 1)]


def test_slices_far_too_many_are_refused_at_once():
    with pytest.raises(
        ConfigError, match=r"data\.slice_rows=1 cuts 1,000,000,000 rows .*: set data\.slice_rows=100 or"
    ):
        Parser(open_train(rows=10**9), ReaderOptions(batch_size=1, slice_rows=1))
