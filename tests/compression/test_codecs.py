"""Every codec keeps the contract of the seam; lossy ones keep their own bound."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.compression.codec import Codec
from shadowsync.registry import build, members

MEMBERS = members("shadowsync.compression", Codec)
CODECS = [pytest.param(build(member, {}, "compression"), id=name) for name, member in MEMBERS.items()]
EACH = pytest.mark.parametrize("codec", CODECS)
SHAPES = [(), (0,), (1,), (7,), (3, 0), (0, 4), (2, 3, 5)]
floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


def numbers(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def round_trip(codec, tensor):
    encoded = codec.encode(tensor)
    return codec.decode(encoded.frames, encoded.shape)


def test_the_members_of_the_seam():
    assert {"bf16", "plain"} <= set(MEMBERS)


@EACH
@pytest.mark.parametrize("shape", SHAPES)
def test_shape_and_type_survive_and_the_input_is_left_alone(codec, shape):
    tensor = numbers(shape)
    before = tensor.clone()
    decoded = round_trip(codec, tensor)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, torch.float32)
    assert torch.equal(tensor, before)


@EACH
def test_bytes_are_those_of_the_frames(codec):
    encoded = codec.encode(numbers((6, 10)))
    assert encoded.byte_count == sum(len(bytes(frame.view(torch.uint8).flatten().tolist())) for frame in encoded.frames)
    assert 0 < encoded.byte_count <= 6 * 10 * 4
    assert codec.encode(numbers((0, 10))).byte_count == 0


@EACH
def test_zeros_and_signs_are_kept(codec):
    tensor = torch.tensor([0.0, 1.0, -1.0, 2.0, -0.5])
    assert torch.equal(round_trip(codec, tensor), tensor)


@EACH
@settings(deadline=None, max_examples=50, derandomize=True)
@given(values=st.lists(floats, max_size=20))
def test_nothing_becomes_infinite(codec, values):
    tensor = torch.tensor(values, dtype=torch.float32)
    decoded = round_trip(codec, tensor)
    assert bool(torch.isfinite(decoded).all())


@EACH
def test_a_column_slice_is_encoded_like_a_copy_of_it(codec):
    tensor = numbers((4, 6))[:, 1:5]
    assert torch.equal(round_trip(codec, tensor), round_trip(codec, tensor.contiguous()))


@EACH
def test_hyper_parameters_only(codec):
    with pytest.raises(AttributeError):
        codec.anything = 1


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


def test_bf16_rounds_to_nearest_even_and_halves_the_bytes():
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    assert round_trip(MEMBERS["bf16"](), halfway).tolist() == [1.0, 1 + 2**-6]
    assert MEMBERS["bf16"]().encode(halfway).byte_count == 4
