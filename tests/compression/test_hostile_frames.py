"""Frames may come from anyone: they decode to a tensor of the shape, or to one of the errors that callers expect."""

import tracemalloc

import msgspec
import pytest
import torch
from codec_cases import EACH, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shadowsync.compression.auto import Auto
from shadowsync.compression.threshold import Threshold
from shadowsync.embedding.messages import Coded, pack_coded, unpack_coded
from shadowsync.errors import DataError
from shadowsync.rpc.connection import Payload
from shadowsync.rpc.served import _unpack

EXPECTED = (RuntimeError, TypeError, ValueError, IndexError)
DTYPES = [torch.uint8, torch.int8, torch.bfloat16, torch.float32, torch.int64]
SHAPES = [(), (0,), (5,), (300,), (20, 30)]
frames = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.binary(max_size=80)).map(
        lambda made: torch.frombuffer(bytearray(made[1] + bytes(8)), dtype=torch.uint8)[: len(made[1]) // 8 * 8].view(
            made[0]
        )
    ),
    max_size=3,
)


def decoded(codec, received, shape):
    try:
        return codec.decode(received, shape)
    except EXPECTED:
        return None


@EACH
@settings(deadline=None, max_examples=100, derandomize=True)
@given(received=frames, shape=st.sampled_from(SHAPES))
def test_any_frames_are_a_tensor_or_refused(codec, received, shape):
    tensor = decoded(codec, received, shape)
    assert tensor is None or tuple(tensor.shape) == shape


@EACH
@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    shape=st.sampled_from([(300,), (20, 30)]),
    frame=st.integers(0, 2),
    place=st.floats(0, 1, exclude_max=True),
    byte=st.integers(0, 255),
    cut=st.integers(0, 3),
)
def test_a_changed_byte_or_a_lost_end_is_a_tensor_or_refused(codec, shape, frame, place, byte, cut):
    sent = [torch.clone(each.reshape(-1)) for each in codec.encode(numbers(shape)).frames]
    changed = sent[frame % len(sent)].view(torch.uint8)
    if len(changed):
        changed[int(place * len(changed))] = byte
    sent[frame % len(sent)] = sent[frame % len(sent)][: len(sent[frame % len(sent)]) - cut]
    tensor = decoded(codec, sent, shape)
    assert tensor is None or tuple(tensor.shape) == shape


@EACH
def test_frames_of_another_shape_are_refused(codec):
    given_ = numbers((400,))
    given_[-1] = 9.0  # so that the last one crosses
    sent = codec.encode(given_).frames
    for shape in [(100,), (401, 1), (397,)]:
        tensor = decoded(codec, sent, shape)
        if codec.sparse and tensor is not None:  # gaps do not say how many elements follow the last one that crosses
            assert shape == (401, 1)
            assert torch.equal(tensor[:-1, 0], codec.decode(sent, (400,)))
            assert tensor[-1] == 0
        else:
            assert tensor is None


@pytest.mark.parametrize("form", [0, 2, 8, 11, 24])
def test_long_frames_of_a_small_tensor_are_refused_before_memory_is_taken(form):
    codec, long = Threshold(values="int8"), torch.zeros(1 << 22, dtype=torch.uint8)
    long[0] = form
    tracemalloc.start()
    try:
        assert decoded(codec, (long, long.view(torch.int8), long.view(torch.bfloat16)), (1000,)) is None
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(1 << 60,), (1 << 40, 1 << 40), (-3,)])
def test_an_empty_message_of_a_shape_beyond_all_memory_is_refused(shape):
    assert decoded(Threshold(), (), shape) is None


@pytest.mark.parametrize("received", [(torch.zeros(3),), (torch.tensor([8, 9], dtype=torch.uint8), torch.ones(2))])
def test_the_wire_tells_of_data_that_cannot_be_read(received):
    coded = Coded(((300,),), (received,))
    with pytest.raises(DataError, match=r"frames are not a tensor \[300\] in the codec threshold"):
        unpack_coded(coded, Threshold(), ((300,),), "vectors")


@pytest.mark.parametrize("name", ["threshold", "auto", "int2", "PLAIN", "\0", "x" * 1_000_000])
def test_a_codec_that_is_not_among_the_levels_is_one_short_error(name):
    tensor = numbers((4, 16))
    coded = pack_coded([Auto().level("int8").encode(tensor)], name)
    with pytest.raises(
        DataError, match=r"is not one that this job sends in; allowed: plain, bf16, int8, int4$"
    ) as told:
        unpack_coded(coded, Auto(), ((4, 16),), "vectors")
    assert len(str(told.value)) < 200


@pytest.mark.parametrize("name", ["plain", "bf16", "int8", "int4"])
def test_frames_are_read_in_the_codec_that_they_name_and_in_no_other(name):
    tensor, levels = numbers((4, 16)), Auto().levels
    codec = Auto().level(name)
    coded = pack_coded([codec.encode(tensor)], name)
    (found,) = unpack_coded(coded, Auto(), ((4, 16),), "vectors")
    assert torch.equal(found.tensor, codec.decode(*coded.frames, (4, 16)))
    for other in {level.name for level in levels} - {name}:
        with pytest.raises(DataError, match=f"in the codec {other}"):
            unpack_coded(replace(coded, codec=other), Auto(), ((4, 16),), "vectors")


@pytest.mark.parametrize("codec", [3, None, ["int8"], {"name": "int8"}, b"\xff"])
def test_what_is_no_name_is_refused(codec):
    meta = msgspec.msgpack.encode([[[4, 16]], [], codec])
    with pytest.raises(DataError, match=r"a pull is not what it should be: (Expected `str`|Invalid UTF-8)"):
        _unpack(msgspec.msgpack.Decoder(Coded), "a pull", Payload(meta))
