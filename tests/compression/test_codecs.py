"""Every codec, with each of its options, keeps the contract of the seam; lossy ones keep their own bound."""

import dataclasses

import pytest
import torch
from codec_cases import EACH, MEMBERS, numbers, round_trip
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.compression.low_bit import Int4, Int8
from shadowsync.compression.threshold import Threshold

SHAPES = [(), (0,), (1,), (7,), (300,), (1000,), (3, 0), (0, 4), (2, 3, 5), (60, 9), (31, 16), (5, 512), (300, 1)]
floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


def test_the_members_of_the_seam():
    assert list(MEMBERS) == ["auto", "bf16", "int4", "int8", "plain", "threshold"]


@EACH
@pytest.mark.parametrize("shape", SHAPES)
def test_shape_and_type_survive_and_the_input_is_left_alone(codec, shape):
    tensor, state = numbers(shape), None
    before = tensor.clone()
    for _ in range(3):
        encoded = codec.encode(tensor, state)
        decoded, state = codec.decode(encoded.frames, encoded.shape), encoded.state
        assert (decoded.shape, decoded.dtype) == (tensor.shape, torch.float32)
        assert torch.equal(tensor, before)


@EACH
def test_bytes_are_those_of_the_frames(codec):
    encoded = codec.encode(numbers((6, 10)))
    assert encoded.byte_count == sum(len(bytes(frame.view(torch.uint8).flatten().tolist())) for frame in encoded.frames)
    assert 0 < encoded.byte_count <= 6 * 10 * 4
    assert codec.encode(numbers((0, 10))).byte_count == 0


@EACH
@pytest.mark.parametrize("count", [5, 400])
def test_zeros_and_signs_are_kept(codec, count):
    tensor = torch.tensor([0.0, 1.0, -1.0, 2.0, -0.8]).repeat(count // 5)
    decoded = round_trip(codec, tensor)
    sent = decoded != 0
    assert torch.equal(decoded[sent].sign(), tensor[sent].sign())
    assert sent.sum() >= (count * 2 // 5 if codec.sparse else count * 4 // 5) // 2
    if not codec.sparse or count < 256:
        assert torch.equal(decoded.sign(), tensor.sign())


@EACH
@settings(deadline=None, max_examples=30, derandomize=True)
@given(values=st.lists(floats, max_size=20), times=st.sampled_from([1, 40]))
def test_nothing_becomes_infinite(codec, values, times):
    decoded = round_trip(codec, torch.tensor(values * times, dtype=torch.float32))
    assert bool(torch.isfinite(decoded).all())


@EACH
@pytest.mark.parametrize("shape", [(2,), (400,), (40, 16)])
def test_the_largest_numbers_stay_finite_there_and_back_with_what_is_left(codec, shape):
    largest = torch.finfo(torch.float32).max
    tensor = torch.where(numbers(shape) > 0, largest, -0.999 * largest)
    encoded = codec.encode(tensor)
    assert bool(torch.isfinite(codec.decode(encoded.frames, encoded.shape)).all())
    left = getattr(encoded.state, "residual", None)
    assert left is None or bool(torch.isfinite(left).all())


@EACH
def test_a_column_slice_is_encoded_like_a_copy_of_it(codec):
    for rows in (4, 400):
        tensor = numbers((rows, 12))[:, 1:11]
        assert torch.equal(round_trip(codec, tensor), round_trip(codec, tensor.contiguous()))


@EACH
@pytest.mark.parametrize("shape", [(64, 16), (1000,), (9, 3)])
def test_a_gradient_crosses_under_the_mask_of_its_activations(codec, shape):
    activations, gradient = numbers(shape), numbers(shape, 1)
    forward = codec.encode(activations)
    known = codec.decode_kept(forward.frames, forward.shape)
    assert (known.kept is None) == (forward.kept is None)
    mask = torch.ones(shape, dtype=torch.bool)
    if forward.kept is not None:
        assert torch.equal(known.kept, forward.kept)
        mask = torch.zeros(mask.numel(), dtype=torch.bool).index_fill(0, forward.kept, True).view(shape)
    assert not known.tensor[~mask].any()
    back = codec.encode_under(gradient, forward.kept)
    arrived = codec.decode_under(back.frames, back.shape, known.kept)
    assert (arrived.shape, arrived.dtype) == (gradient.shape, torch.float32)
    assert not arrived[~mask].any()
    assert torch.equal(arrived[mask].sign() * gradient[mask].sign() >= 0, torch.ones(int(mask.sum()), dtype=torch.bool))
    assert back.byte_count <= 4 * mask.sum()


@EACH
def test_a_state_goes_through_a_checkpoint(codec):
    state = None
    for seed in range(3):
        state = codec.encode(numbers((40, 16), seed), state).state
    stored = {} if state is None else state.tensors()
    there, here = codec.restored(stored), state
    for seed in range(3, 6):
        one, other = codec.encode(numbers((40, 16), seed), there), codec.encode(numbers((40, 16), seed), here)
        assert [frame.tolist() for frame in one.frames] == [frame.tolist() for frame in other.frames]
        there, here = one.state, other.state
    with pytest.raises(ValueError, match="wrong"):
        codec.restored({"wrong": torch.zeros(1)})


@pytest.mark.parametrize("draws", [torch.zeros(2), torch.tensor(-1)], ids=str)
def test_draws_that_no_stream_has_made_are_refused(draws):
    with pytest.raises(ValueError, match=r"^draws are "):
        Int8(rounding="stochastic").restored({"draws": draws})


@EACH
def test_a_message_that_was_given_up_is_encoded_again(codec):
    state = codec.encode(numbers((40, 16)), codec.encode(numbers((40, 16), 1)).state).state
    first = [frame.tolist() for frame in codec.encode(numbers((40, 16), 2), state).frames]
    assert [frame.tolist() for frame in codec.encode(numbers((40, 16), 2), state).frames] == first


@pytest.mark.parametrize("codec", [Int8(), Int4(), Threshold(scope="group")], ids=lambda codec: codec.name)
@pytest.mark.parametrize("groups", [(3, 3), (4, 0), (5, -1), (3, 2)])
def test_groups_are_the_columns(codec, groups):
    with pytest.raises(ValueError, match="groups"):
        codec.encode(numbers((100, 4)), None, groups)


@EACH
def test_hyper_parameters_only(codec):
    with pytest.raises(AttributeError):
        codec.anything = 1
    assert dataclasses.replace(codec) == codec


def test_plain_changes_and_copies_nothing():
    tensor = numbers((3, 4))
    before = tensor.clone()
    decoded = round_trip(MEMBERS["plain"](), tensor)
    assert decoded.data_ptr() == tensor.data_ptr()
    assert torch.equal(decoded, before)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(values=st.lists(floats, min_size=1, max_size=20))
def test_bf16_errs_by_at_most_half_of_its_last_place(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    error = (round_trip(MEMBERS["bf16"](), tensor) - tensor).abs()
    normal = tensor.abs() >= torch.finfo(torch.bfloat16).tiny
    assert bool((error[normal] <= tensor[normal].abs() * 2**-8).all())
    assert bool((error[~normal] <= torch.finfo(torch.bfloat16).tiny).all())


def test_bf16_carries_what_is_not_finite():
    tensor = torch.tensor([3.4e38, float("inf"), float("nan"), -float("inf"), -3.4e38, 1.0])
    largest = torch.finfo(torch.bfloat16).max
    expected = torch.tensor([largest, float("inf"), float("nan"), -float("inf"), -largest, 1.0])
    assert torch.equal(round_trip(MEMBERS["bf16"](), tensor).nan_to_num(7.0), expected.nan_to_num(7.0))


def test_bf16_rounds_to_nearest_even_and_halves_the_bytes():
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    assert round_trip(MEMBERS["bf16"](), halfway).tolist() == [1.0, 1 + 2**-6]
    assert MEMBERS["bf16"]().encode(halfway).byte_count == 4
