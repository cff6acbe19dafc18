"""int8 and int4: bounds of the error, scales by row and block, and rounding at random whose mean is right."""

import pytest
import torch
from codec_cases import numbers, round_trip
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.compression.codec import NotFinite
from shadowsync.compression.low_bit import CHUNK, Int4, Int8, row_width

KINDS = pytest.mark.parametrize("kind", [Int8, Int4])
ROUGHER = 1 + 2**-7
"""How much coarser a scale becomes by being bfloat16."""
magnitudes = st.floats(width=32, min_value=2.0**-100, max_value=2.0**100)


@KINDS
@settings(deadline=None, max_examples=50, derandomize=True)
@given(largest=magnitudes, seed=st.integers(0, 99), width=st.integers(8, 40))
def test_an_element_is_off_by_half_a_level_of_its_row(kind, largest, seed, width):
    tensor = numbers((3, width), seed) * torch.tensor([[1.0], [1e-3], [0.0]]) * largest
    error = (round_trip(kind(), tensor) - tensor).abs()
    level = tensor.abs().amax(1, keepdim=True) / kind.steps * ROUGHER
    assert bool((error <= level * 0.5001).all())


@KINDS
def test_rounding_at_random_is_off_by_a_level_and_right_on_average(kind):
    codec, state, tensor = kind(rounding="stochastic"), None, numbers((50, 16))
    total, times = torch.zeros(50, 16), 400
    level = tensor.abs().amax(1, keepdim=True) / kind.steps * ROUGHER
    for _ in range(times):
        encoded = codec.encode(tensor, state)
        decoded, state = codec.decode(encoded.frames, encoded.shape), encoded.state
        assert bool(((decoded - tensor).abs() <= level * 1.0001).all())
        total += decoded
    spread = level / 2 / times**0.5
    assert bool(((total / times - tensor).abs() <= 5 * spread).all())
    assert abs(float(((total / times - tensor) / level).mean())) < 0.003


def test_rounding_at_random_repeats_with_the_seed_and_differs_between_messages_and_tensors():
    tensor, codec = numbers((1000,)), Int4(rounding="stochastic", seed=3)
    first = codec.encode(tensor)
    second = codec.encode(tensor, first.state)

    def levels(encoded):
        return encoded.frames[0].tolist()

    assert levels(codec.encode(tensor)) == levels(first) != levels(second)
    assert levels(Int4(rounding="stochastic", seed=4).encode(tensor)) != levels(first)
    errors = [codec.decode(e.frames, e.shape) - t for t in (tensor, tensor * 2) for e in (codec.encode(t),)]
    assert not torch.equal(errors[0] * 2, errors[1])


def test_torch_draws_what_it_would_have_drawn():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    round_trip(Int8(rounding="stochastic"), numbers((100,)))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("shape", "usual", "asked"),
    [
        ((), 256, 256),
        ((5000,), 256, 256),
        ((10, 16), 16, 256),
        ((10, 416), 416, 416),
        ((10, 512), 256, 256),
        ((10, 4), 256, 256),
        ((2, 3, 40), 40, 40),
    ],
)
def test_what_shares_a_scale(shape, usual, asked):
    assert (row_width(shape, None), row_width(shape, 256)) == (usual, asked)


@pytest.mark.parametrize(
    ("groups", "width"),
    [
        ((16,) * 26, 16),
        ((16, 64, 32), 16),
        ((10,) * 7, 10),
        ((4,) * 26, 8),
        ((4,) * 5, 20),
        ((10, 16), 26),
        ((7, 9, 16), 8),
        ((416,), 416),
    ],
)
def test_what_shares_a_scale_where_there_are_features(groups, width):
    shape = (10, sum(groups))
    assert row_width(shape, None, groups) == width
    assert row_width(shape, 10007, groups) == sum(groups)
    assert row_width((10, 3), None, (1, 2)) == 256


@KINDS
@pytest.mark.parametrize("groups", [(16,) * 26, (16, 64, 32), (4,) * 26, (10, 16)])
def test_each_feature_has_a_scale_and_the_other_side_need_not_know(kind, groups):
    sizes = torch.cat([torch.full((width,), 10.0 ** -(place % 7)) for place, width in enumerate(groups)])
    tensor = numbers((50, sum(groups))) * sizes
    encoded = kind().encode(tensor, None, groups)
    decoded = kind(block=64).decode(encoded.frames, encoded.shape)
    width = row_width(encoded.shape, None, groups)
    error, of = ((decoded - tensor).view(-1, width), tensor.view(-1, width))
    assert bool((error.abs() <= of.abs().amax(1, keepdim=True) / kind.steps * ROUGHER * 0.5001).all())
    assert encoded.byte_count == -(-tensor.numel() * (8 if kind is Int8 else 4) // 8) + 2 * tensor.numel() // width


@KINDS
@pytest.mark.parametrize("count", [0, 1, 39, 80, 50 * 416 // 4, 50 * 416])
def test_scales_of_no_cut_of_a_row_are_refused(kind, count):
    packed, _ = kind().encode(numbers((40, 416))).frames
    with pytest.raises(ValueError, match="scales"):
        kind().decode((packed, torch.ones(count + 7, dtype=torch.bfloat16)), (40, 416))


@pytest.mark.parametrize(("kind", "levels"), [(Int8, 1000), (Int4, 500)])
def test_bytes(kind, levels):
    assert kind().encode(numbers((1000,))).byte_count == levels + 4 * 2
    assert kind(block=100).encode(numbers((1000,))).byte_count == levels + 10 * 2
    assert kind().encode(numbers((50, 20))).byte_count == levels + 50 * 2


@KINDS
def test_blocks_of_a_row_have_scales_of_their_own(kind):
    tensor = torch.cat((numbers((4, 16)), 1e-4 * numbers((4, 16), 1)), 1)
    assert not round_trip(kind(), tensor)[:, 16:].any()
    assert round_trip(kind(block=16), tensor)[:, 16:].any(1).all()


@KINDS
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 101])
def test_several_rows_share_a_scale(kind, rows):
    tensor = numbers((rows, 16))
    encoded = kind(block=64).encode(tensor)
    assert encoded.frames[1].numel() == -(-rows // 4)
    decoded = kind(block=64).decode(encoded.frames, encoded.shape)
    for first in range(0, rows, 4):
        error, of = (decoded - tensor)[first : first + 4], tensor[first : first + 4]
        assert error.abs().max() <= of.abs().max() / kind.steps * ROUGHER * 0.5001


INFINITE, NANS = (0x7F800000, -0x800000), (0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x7FFFFF)


@KINDS
@pytest.mark.parametrize("bits", [*INFINITE, *NANS])
@pytest.mark.parametrize("shape", [(CHUNK + 100,), (40, 25), (5,)])
def test_what_is_not_finite_is_refused_in_whatever_piece_it_is(kind, bits, shape):
    tensor = numbers(shape)
    tensor.view(-1)[-2] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert int(tensor.view(-1)[-2:-1].view(torch.int32)) == bits
    with pytest.raises(NotFinite, match=f"1 of {tensor.numel():,} elements are NaN or infinite, the first at"):
        kind().encode(tensor)


@KINDS
@pytest.mark.parametrize("value", [0.0, 1.0, -3e38, 3.4028e38, -3.4e38, 1e-40, 1e-45])
def test_all_equal(kind, value):
    decoded = round_trip(kind(), torch.full((300,), value))
    assert bool(((decoded - value).abs() <= max(abs(value) * ROUGHER / kind.steps, 1e-37)).all())


@KINDS
def test_frames_of_another_length_or_type_are_refused(kind):
    packed, scales = kind().encode(numbers((40, 25))).frames
    for frames in [
        (),
        (packed,),
        (packed, scales, scales),
        (packed[:-1], scales),
        (packed, scales[:-1]),
        (packed.to(torch.int32), scales),
        (packed, scales.to(torch.float32)),
        (torch.cat((packed, packed)), scales),
    ]:
        with pytest.raises(ValueError):  # noqa: PT011
            kind().decode(frames, (40, 25))
    with pytest.raises(ValueError, match="scales"):
        kind().decode((packed, scales), (1 << 40, 25))
