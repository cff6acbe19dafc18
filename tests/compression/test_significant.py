"""Gaia's filter: what has changed by more than a share of its value crosses, and the share falls with the rate."""

from contextlib import nullcontext

import pytest
import torch
from helpers import WholeCopy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowsync.compression.channel import Channel, Differences, Message
from shadowsync.compression.threshold import Threshold
from shadowsync.compression.wire import WireCounter
from shadowsync.errors import DataError, NonFiniteTensor
from shadowsync.rpc.served import Client, ask
from shadowsync.sync.all_reduce import LocalAverages, PublicCopy
from shadowsync.sync.dense import DenseServer
from shadowsync.sync.method import group_of
from shadowsync.training.pieces import Pieces

SIZE = 1000


def filtering(significance: float = 0.01, **options: str) -> Threshold:
    codec = Threshold(select="significant", significance=significance, **options)  # type: ignore[arg-type]
    return codec.resolved("compression.dense")


def drawn(seed: int, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([256, 300, SIZE, 4099]),
    significance=st.sampled_from([1e-4, 0.01, 0.5, 100]),
    rate=st.sampled_from([0.0, 0.03, 1.0]),
    unchanged=st.floats(0, 1),
    zeros=st.floats(0, 1),
)
@settings(deadline=None, max_examples=40, derandomize=True)
def test_what_crosses_is_what_has_changed_by_so_much_of_its_value(
    seed: int, size: int, significance: float, rate: float, unchanged: float, zeros: float
) -> None:
    known, change = drawn(seed, size), 0.05 * drawn(seed + 1, size)
    change[torch.rand(size, generator=torch.Generator().manual_seed(seed)) < unchanged] = 0
    known[torch.rand(size, generator=torch.Generator().manual_seed(seed + 1)) < zeros] = 0
    codec = filtering(significance)
    encoded = codec.encode_change(change, known, rate)
    least = known.abs() * torch.tensor(significance * rate, dtype=torch.float32)
    crosses = (change.abs() >= least) & (change != 0)
    kept = torch.arange(size) if encoded.kept is None else encoded.kept
    assert torch.equal(kept, crosses.nonzero().flatten())
    assert torch.equal(codec.decode(encoded.frames, encoded.shape), torch.where(crosses, change, 0.0))


def test_where_nothing_is_known_everything_crosses() -> None:
    vector = drawn(0)
    assert filtering().encode(vector).kept is None
    small = drawn(1, 255)
    assert filtering(100).encode_change(small, drawn(2, 255), 1.0).kept is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["vector", "known"])
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_what_is_not_finite_is_refused_whatever_its_value_was(bad: float, where: str, rate: float) -> None:
    ends = Differences("a replica")
    vector = drawn(0)
    ends.encode(filtering(100), vector)
    if where == "known":
        assert ends.known is not None
        ends.known[7] = bad
    else:
        vector[7] = bad
    with pytest.raises(NonFiniteTensor, match=r"^a replica cannot be sent: 1 of 1,000 elements"):
        ends.encode(filtering(100), vector, rate)


@pytest.mark.parametrize("values", ["fp32", "int8"])
def test_both_ends_know_the_same_and_nothing_is_ever_further_off_than_it_may_be(values: str) -> None:
    codec, here, there = filtering(0.05, values=values), Differences("it"), Differences("it")
    vector = drawn(0)
    for step in range(50):
        message = here.encode(codec, vector)
        known = there.take(codec, message, (SIZE,))
        assert known is not None
        assert here.known is not None
        assert torch.equal(known, here.known)
        if values == "fp32" and step:
            assert bool(((vector - known).abs() < 0.05 * known.abs() + 1e-6).all())
        vector = vector + 0.01 * drawn(1 + step)


def test_each_parameter_is_held_against_its_own_values() -> None:
    known = torch.cat([torch.full((300,), 1.0), torch.full((300,), 100.0)])
    codec = Pieces(filtering(0.1), ("first", "second"), (300, 300))
    assert codec.by_known
    encoded = codec.encode_change(torch.full((600,), 0.5), known, 1.0)
    assert encoded.kept is not None
    assert encoded.kept.tolist() == list(range(300))


class Rated:
    """Rates that are asked for one after the other."""

    def __init__(self, *rates: float) -> None:
        self.left = list(rates)

    def __call__(self) -> float:
        return self.left.pop(0)


def test_an_average_is_made_of_what_is_significant_at_each_trainers_rate() -> None:
    counter = WireCounter()
    averages = LocalAverages(range(2), Channel("dense", filtering(0.2), counter), nullcontext)
    replicas = [drawn(0), drawn(0)]
    averages.combine(dict(enumerate(replicas)))
    averages.of[0].strategy.rate, averages.of[1].strategy.rate = Rated(1.0), Rated(0.0)
    for replica in replicas:
        replica.mul_(1.1)
    average = averages.combine(dict(enumerate(replicas)))
    torch.testing.assert_close(average, (drawn(0) + replicas[1]) / 2)
    assert counter.totals().kept["dense"] == SIZE


@pytest.mark.parametrize("servers", [1, 3])
def test_an_exchange_takes_and_brings_what_is_significant_at_the_trainers_rate(servers: int) -> None:
    copy = WholeCopy(torch.zeros(SIZE), servers, Channel("dense", filtering(0.2), WireCounter()))
    end, weights = copy.of(0), drawn(0)
    end.rate = Rated(1.0, 1.0, 1.0, 1.0, 0.0)
    weights = weights - end.elastic(weights, 0.5)
    weights *= 1.1
    before = copy.read()
    assert not end.elastic(weights, 0.5).any(), "what has not crossed is not known to move anything"
    assert torch.equal(copy.read(), before)
    copy.write(before)
    weights = weights - end.elastic(weights, 0.5)
    copy.of(1).elastic(0.9 * copy.read(), 1.0)  # another trainer moves the central copy a little
    assert end.elastic(weights, 0.5).count_nonzero() == 0, "the server owes less than is significant"
    assert bool(end.elastic(weights, 0.5).all()), "it brings all of that where nothing is too little"


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_rate_that_is_none_changes_nothing(rate: float) -> None:
    copy = WholeCopy(torch.zeros(SIZE), 1, Channel("dense", filtering(), WireCounter()))
    way = copy.of(0).connections[0]
    with pytest.raises(DataError, match="not at a share of it"):
        ask(way, DenseServer.elastic, Client(""), 0, 0.5, "threshold", Message((drawn(0),), rate=rate))
    assert not copy.read().any()


def test_a_group_hands_its_trainers_rate_to_both_ends() -> None:
    averages = LocalAverages([0], Channel("dense", filtering(), WireCounter()), nullcontext)
    servers, rate = WholeCopy(torch.zeros(SIZE), 1, Channel("dense", filtering(), WireCounter())).of(0), Rated()
    group_of(drawn(0), averages.of[0], servers, rate)
    assert averages.of[0].strategy.rate is servers.rate is rate


def test_an_average_that_is_tried_again_sends_the_same_although_the_rate_has_changed() -> None:
    copy = PublicCopy(filtering(0.2), WireCounter(), "a replica")
    first = copy.pack(drawn(0))
    copy.settle(first, drawn(0), 2)
    copy.rate = Rated(1.0)
    payload = copy.pack(1.1 * drawn(0))
    copy._begin(payload, complete=True)
    message = payload.message
    copy._begin(payload, complete=True)
    assert payload.message is message
