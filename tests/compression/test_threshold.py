"""Thresholding: nothing is lost but what rounding loses, the largest cross, and their share stays in its band."""

import numpy as np
import pytest
import torch
from codec_cases import numbers, round_trip
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.compression.channel import Differences
from shadowsync.compression.codec import NotFinite
from shadowsync.compression.threshold import SETTLING, SMALL, Threshold

VALUES = ["fp32", "bf16", "int8", "int4"]


class Books:
    """A stream with what was given to it and what came out."""

    def __init__(self, codec):
        self.codec, self.state, self.shares = codec, None, []

    def send(self, tensor, groups=()):
        encoded = self.codec.encode(tensor, self.state, groups)
        self.state = encoded.state
        self.shares.append(1.0 if encoded.kept is None else len(encoded.kept) / tensor.numel())
        return self.codec.decode(encoded.frames, encoded.shape)

    @property
    def residual(self):
        return 0.0 if self.state.residual is None else self.state.residual.clone()

    def left(self, shape):
        return torch.zeros(shape) if self.state.residual is None else self.state.residual.clone().view(shape)


def thresholds(state):
    """τ of each group."""
    return tuple(state.floors.view(np.float32).tolist())


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    keep=st.sampled_from([0.003, 0.1, 0.5, 0.999, 1.0]),
    count=st.sampled_from([0, 1, 255, 256, 1000]),
    refresh=st.integers(1, 5),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
    seed=st.integers(0, 999),
)
def test_sent_and_residual_are_gradient_and_old_residual_bit_for_bit(keep, count, refresh, scale, seed):
    books = Books(Threshold(keep=keep, refresh=refresh))
    for message in range(7):
        gradient = numbers((count,), seed + message) * scale
        owed = gradient + (0.0 if message == 0 else books.residual)
        sent = books.send(gradient)
        assert torch.equal(sent + books.residual, owed)
        assert not bool((sent.ne(0) & torch.as_tensor(books.residual).ne(0)).any())


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("shape", [(100,), (2000,), (50, 40)])
def test_what_rounding_leaves_is_sent_later(values, shape):
    books, given_, sent = Books(Threshold(keep=0.1, values=values)), torch.zeros(shape), torch.zeros(shape)
    for message in range(30):
        gradient = numbers(shape, message)
        owed = gradient + (books.left(shape) if message else 0.0)
        arrived = books.send(gradient)
        torch.testing.assert_close(arrived + books.left(shape), owed, rtol=2e-7, atol=1e-6)
        given_ += gradient
        sent += arrived
    torch.testing.assert_close(sent + books.left(shape), given_, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(), (255,), (1000,), (30, 40), (0,)])
@pytest.mark.parametrize("keep", [1.0, 0.9999999])
def test_keeping_everything_is_plain_bit_for_bit(shape, keep):
    tensor = numbers(shape)
    tensor.view(-1)[:2] = torch.tensor([0.0, -0.0])[: tensor.numel()]
    books = Books(Threshold(keep=keep))
    for _ in range(3):
        arrived = books.send(tensor)
        if keep == 1:
            assert torch.equal(arrived.view(torch.int32), tensor.view(torch.int32))
        else:
            assert torch.equal(arrived, tensor)
    if keep == 1:
        assert Threshold(keep=1).encode(tensor).byte_count == tensor.nbytes


def test_a_selection_is_exact_and_in_between_the_threshold_stays():
    books = Books(Threshold(keep=0.1, refresh=4, correction=0, band=1e9, feedback=False))
    for message in range(9):
        tensor = numbers((1000,), message) * (1 + message / 100)
        arrived = books.send(tensor)
        if message % 4 == 0:
            largest = tensor.abs().topk(100).indices.sort().values
            assert arrived.nonzero().flatten().tolist() == largest.tolist()
            assert thresholds(books.state) == (float(tensor.abs()[largest].min()),)
        (threshold,) = thresholds(books.state)
        assert torch.equal(arrived, tensor.where(tensor.abs() >= threshold, 0.0))
    assert (books.state.refreshes, books.state.early) == (3, 0)


def test_small_tensors_cross_whole():
    assert torch.equal(round_trip(Threshold(), numbers((SMALL - 1,))), numbers((SMALL - 1,)))
    assert round_trip(Threshold(), numbers((SMALL,))).count_nonzero() == 3


def test_a_share_that_leaves_its_band_brings_a_new_threshold():
    books = Books(Threshold(keep=0.1, correction=0, feedback=False))
    for message in range(40):
        books.send(numbers((2000,), message) * (1 if message < 10 else 1.5))
    assert (books.state.refreshes, books.state.early) == (2, 1)
    assert 0.2 < max(books.shares) < 0.4
    assert books.state.age > 20
    assert books.shares[10 + SETTLING :] == pytest.approx([0.1] * 22, rel=0.4)


def test_a_message_that_would_burst_is_selected_anew():
    books = Books(Threshold(keep=0.1, feedback=False))
    for message in range(40):
        books.send(numbers((2000,), message) * (1 if message < 10 else 5))
    assert (books.state.refreshes, books.state.early) == (2, 1)
    assert max(books.shares) < 0.2


def drifting(elements, mean, message):
    """A gradient with a mean: a part that is the same in each message, and noise; sizes as in a model."""
    size = numbers((elements,), 1).exp()
    return size * (mean * numbers((elements,), 2) + (1 - mean) * numbers((elements,), 3 + message))


GRADIENTS = {
    "noise": lambda message: drifting(5000, 0.0, message),
    "a mean": lambda message: drifting(5000, 0.3, message),
    "a large mean": lambda message: drifting(5000, 0.7, message),
    "shrinking": lambda message: drifting(5000, 0.3, message) * (0.05 + 2 ** (-message / 20)),
    "zeros at first": lambda message: drifting(5000, 0.3, message) * (message > 20),
    "of changing size": lambda message: drifting(5000, 0.3, message) * (1 + message % 3),
}


@pytest.mark.parametrize("keep", [0.002, 0.01, 0.1])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_the_share_stays_where_it_was_asked_for(keep, kind):
    """What is not sent piles up, and where gradients have a mean it does so fast."""
    books = Books(Threshold(keep=keep))
    for message in range(300):
        books.send(GRADIENTS[kind](message))
    assert sum(books.shares[21:121]) / 100 < 1.5 * keep
    assert sum(books.shares[100:]) / 200 == pytest.approx(keep, rel=0.2)
    assert max(books.shares) < 5 * keep + SETTLING / 5000
    assert books.state.refreshes < 20


def test_a_threshold_that_is_left_alone_as_in_the_paper_drifts():
    fixed = Books(Threshold(keep=0.01, correction=0, band=1e9))
    for message in range(300):
        fixed.send(GRADIENTS["a mean"](message))
    assert fixed.state.refreshes == 1
    assert sum(fixed.shares[100:]) / 200 > 0.025


def test_a_share_that_cannot_be_reached_is_not_tried_again_and_again():
    few, equal = Books(Threshold(keep=0.1)), Books(Threshold(keep=0.1, feedback=False))
    for message in range(300):
        few.send(numbers((5000,), message) * (numbers((5000,), 1000 + message) > 1.88))
        equal.send(numbers((5000,), message).sign() * (numbers((5000,), 1000 + message) > 0.5))
    assert few.shares == pytest.approx([0.03] * 300, rel=0.4)
    assert few.state.refreshes == 1
    assert equal.shares == pytest.approx([0.31] * 300, rel=0.2)
    assert equal.state.refreshes < 12


def test_differences_from_what_the_receiver_has_keep_their_share_too():
    codec, vector, mirror = Threshold(keep=0.01), torch.zeros(5000), Differences("a test")
    shares, refreshes, early = [], 0, 0
    for number in range(400):
        vector = vector + drifting(5000, 0.5, number)
        message = mirror.encode(codec, vector)
        if not message.whole:
            shares.append(message.kept / 5000)
            refreshes, early = refreshes + message.refreshes, early + message.early
    assert sum(shares[100:]) / len(shares[100:]) == pytest.approx(0.01, rel=0.2)
    assert early < refreshes < 12


def test_the_largest_threshold_is_finite():
    books = Books(Threshold(keep=0.1, feedback=False))
    for _ in range(30):
        assert books.send(torch.full((1000,), 3.4e38)).eq(3.4e38).all()
    assert thresholds(books.state)[0] < float("inf")


def test_zeros_do_not_cross():
    tensor = torch.zeros(1000)
    empty = Threshold(keep=0.5).encode(tensor)
    assert (empty.byte_count, empty.frames) == (0, ())
    tensor[[7, 500]] = torch.tensor([1e-45, -2.0])
    few = Threshold(keep=0.5).encode(tensor)
    assert torch.equal(Threshold().decode(few.frames, few.shape), tensor)
    assert few.byte_count < 20


def test_equal_magnitudes_cross_together():
    equal = Threshold().encode(torch.full((1000,), -2.0))
    assert (equal.kept, equal.byte_count) == (None, 4000)
    tensor = torch.ones(1000)
    tensor[:2] = 2
    books = Books(Threshold(keep=0.002))
    assert books.send(tensor).count_nonzero() == 2


@pytest.mark.parametrize("values", VALUES)
def test_bytes_against_fp32(values):
    bits = {"fp32": 32, "bf16": 16, "int8": 8 + 16 / 256, "int4": 4 + 16 / 256}[values]
    encoded = Threshold(keep=0.01, values=values).encode(numbers((100_000,)))
    assert encoded.byte_count == pytest.approx(1000 * (bits + 8.9) / 8, rel=0.02)


def test_groups_of_columns_have_thresholds_of_their_own():
    tensor = numbers((100, 10)) * torch.tensor([1.0] * 2 + [100.0] * 5 + [1e-3] * 3)
    books = Books(Threshold(keep=0.2, scope="group", feedback=False))
    arrived = books.send(tensor, (2, 5, 3))
    for columns in (slice(0, 2), slice(2, 7), slice(7, 10)):
        part, sent = tensor[:, columns], arrived[:, columns]
        least = part.abs().flatten().topk(round(part.numel() * 0.2)).values[-1]
        assert torch.equal(sent, part.where(part.abs() >= least, 0.0))
    assert len(thresholds(books.state)) == 3
    assert torch.equal(books.send(tensor[:77], (2, 5, 3)), arrived[:77])
    one = Books(Threshold(keep=0.2, feedback=False)).send(tensor, (2, 5, 3))
    assert not one[:, 7:].any()


def test_many_columns_and_rows_are_compared_piece_by_piece():
    tensor = numbers((3001, 130)) * torch.cat((torch.ones(100), torch.full((30,), 9.0)))
    books = Books(Threshold(keep=0.1, scope="group", feedback=False))
    arrived = books.send(tensor, (100, 30))
    levels = torch.tensor(thresholds(books.state)).repeat_interleave(torch.tensor([100, 30]))
    assert torch.equal(arrived, tensor.where(tensor.abs() >= levels, 0.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("options", [{}, {"keep": 1}, {"feedback": False}, {"values": "int4"}], ids=str)
@pytest.mark.parametrize("shape", [(20, 50), (3,)])
def test_what_is_not_finite_is_refused_whenever_it_comes(value, options, shape):
    codec, tensor = Threshold(**options), numbers(shape)
    state = codec.encode(tensor).state
    before = None if state.residual is None else state.residual.clone()
    bad = tensor.clone()
    bad.view(-1)[2] = value
    for remembered in (None, state):
        with pytest.raises(NotFinite, match=r"1 of .* elements are NaN or infinite, the first at"):
            codec.encode(bad, remembered)
    assert before is None or torch.equal(state.residual, before)


def test_a_stream_with_feedback_keeps_its_size():
    codec = Threshold()
    with pytest.raises(ValueError, match="900 elements came after 1,000"):
        codec.encode(numbers((900,)), codec.encode(numbers((1000,))).state)
    free = Threshold(feedback=False)
    assert free.encode(numbers((900,)), free.encode(numbers((1000,))).state).shape == (900,)


def test_a_stored_state_is_not_written_to():
    books = Books(Threshold(keep=0.05))
    books.send(numbers((1000,)))
    stored = books.state.tensors()
    before = {name: tensor.clone() for name, tensor in stored.items()}
    for message in range(3):
        books.send(numbers((1000,), message))
    assert all(torch.equal(stored[name], before[name]) for name in before)
    assert set(stored) == {"age", "early", "floors", "keep", "pause", "reached", "refreshes", "residual", "share"}


@pytest.mark.parametrize("values", VALUES)
def test_what_was_not_sent_survives_a_change_of_the_values(values):
    books = Books(Threshold(keep=0.05, values="int8", rounding="stochastic"))
    for message in range(3):
        books.send(numbers((1000,), message))
    after = Threshold(keep=0.05, values=values).restored(books.state.tensors())
    assert torch.equal(after.residual, books.state.residual)
    assert (thresholds(after), after.age, after.share) == (thresholds(books.state), 3, books.state.share)
    assert (after.draws is None) == (values in ("fp32", "bf16"))


def test_another_share_is_selected_for_at_once():
    books = Books(Threshold(keep=0.05))
    for message in range(3):
        books.send(numbers((1000,), message))
    resumed = Threshold(keep=0.3)
    encoded = resumed.encode(numbers((1000,), 3), resumed.restored(books.state.tensors()))
    assert (encoded.kept_count, encoded.refreshes, encoded.early) == (300, 1, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"floors": torch.ones((1, 2), dtype=torch.int32)},
        {"floors": torch.ones(1)},
        {"floors": torch.ones(0, dtype=torch.int32)},
        {"residual": torch.zeros((10, 100))},
        {"residual": torch.tensor(0.0)},
        {"residual": torch.zeros(1000, dtype=torch.int64)},
        {"age": torch.tensor(-1)},
        {"age": torch.tensor([1, 2])},
        {"age": torch.zeros(0)},
        {"share": torch.tensor(float("nan"))},
        {"reached": torch.tensor(float("inf"))},
        {"pause": torch.tensor(-7)},
        {"floor": torch.tensor(1)},
    ],
    ids=str,
)
def test_a_state_that_is_none_is_refused(wrong):
    codec = Threshold(keep=0.05)
    stored = codec.encode(numbers((1000,))).state.tensors()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        codec.restored(stored | wrong)
