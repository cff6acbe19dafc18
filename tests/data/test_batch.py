"""Batches: cutting, choosing and joining agree with lists of lists."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.data.batch import Batch, Jagged

Bags = list[list[list[tuple[int, float]]]]  # features, samples, (id, weight)


def jagged(bags: Bags, weighted: bool) -> Jagged:
    flat = [entry for samples in bags for sample in samples for entry in sample]
    lengths = [len(sample) for samples in bags for sample in samples]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    weights = torch.tensor([weight for _, weight in flat], dtype=torch.float32) if weighted else None
    return Jagged(torch.tensor([i for i, _ in flat], dtype=torch.int64), offsets, weights, len(bags), len(bags[0]))


def lists(ids: Jagged) -> Bags:
    weights = torch.ones(len(ids.values)) if ids.weights is None else ids.weights
    pairs = list(zip(ids.values.tolist(), weights.tolist(), strict=True))
    edges = ids.bag_offsets().tolist()
    bags = [pairs[start:stop] for start, stop in itertools.pairwise(edges)]
    return [bags[f * ids.samples : (f + 1) * ids.samples] for f in range(ids.feature_count)]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Bags, bool]:
    features, samples, weighted = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.booleans())
    weight = st.sampled_from([0.5, 2.0]) if weighted else st.just(1.0)
    sample = st.lists(st.tuples(st.integers(0, 9), weight), max_size=3)
    per_feature = st.lists(sample, min_size=samples, max_size=samples)
    return draw(st.lists(per_feature, min_size=features, max_size=features)), weighted


@settings(deadline=None, max_examples=80, derandomize=True)
@given(drawn=batches(), data=st.data())
def test_cutting_choosing_and_joining(drawn, data):
    bags, weighted = drawn
    ids, samples = jagged(bags, weighted), len(bags[0])
    start = data.draw(st.integers(0, samples))
    stop = data.draw(st.integers(start, samples))
    index = data.draw(st.lists(st.integers(0, samples - 1), max_size=6))
    features = data.draw(st.lists(st.integers(0, len(bags) - 1), min_size=1, max_size=4))
    assert lists(ids) == bags
    assert lists(ids.narrow(start, stop)) == [of_feature[start:stop] for of_feature in bags]
    assert lists(ids.take(torch.tensor(index, dtype=torch.int64))) == [[f[k] for k in index] for f in bags]
    assert lists(ids.select(features)) == [bags[feature] for feature in features]
    assert lists(Jagged.join([ids.narrow(0, start), ids.narrow(start, samples)])) == bags


@settings(deadline=None, max_examples=40, derandomize=True)
@given(features=st.integers(1, 4), samples=st.integers(1, 6), data=st.data())
def test_one_hot_ids_need_no_offsets_and_behave_the_same(features, samples, data):
    short = Jagged(torch.arange(features * samples), None, None, features, samples)
    long = Jagged(short.values, short.bag_offsets(), None, features, samples)
    cut = data.draw(st.integers(0, samples))
    index = torch.tensor(data.draw(st.lists(st.integers(0, samples - 1), max_size=5)), dtype=torch.int64)
    for change in (
        lambda ids: ids.narrow(0, cut),
        lambda ids: ids.take(index),
        lambda ids: ids.select([features - 1, 0]),
        lambda ids: Jagged.join([ids.narrow(cut, samples), ids, ids.narrow(0, cut)]),
    ):
        assert change(short).offsets is None
        assert lists(change(short)) == lists(change(long))


def test_a_batch_is_cut_as_a_whole():
    batch = Batch(torch.arange(4.0), torch.arange(8.0).view(4, 2), Jagged(torch.arange(4), None, None, 1, 4))
    joined = Batch.join([batch.narrow(2, 4), batch.take(torch.tensor([0, 1]))])
    assert len(joined) == 4
    assert joined.labels.tolist() == joined.ids.values.tolist() == [2, 3, 0, 1]
    assert joined.dense[:, 0].tolist() == [4, 6, 0, 2]
