"""Positions of elements cross in as few bytes as the form that fits them best takes, and come back the same."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.compression.positions import MASK, NARROWEST, WIDEST, pack, unpack


def drawn(count, share, seed=0):
    kept = np.flatnonzero(np.random.default_rng(seed).random(count) < share)
    return kept if 0 < len(kept) < count else np.array([count // 2])


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    count=st.integers(1, 3000),
    share=st.sampled_from([0.0005, 0.01, 0.1, 0.5, 0.99]),
    seed=st.integers(0, 9),
)
def test_positions_survive_in_no_more_bytes_than_a_mask(count, share, seed):
    kept = drawn(count, share, seed)
    frame = pack(kept, count)
    assert unpack(frame, count).tolist() == kept.tolist()
    assert len(frame) <= 1 + -(-count // 8)


@pytest.mark.parametrize("kept", [[0], [99_999], [0, 99_999], [5, 6, 7, 8], [*range(50), 70_000], [70_000, 70_001]])
def test_gaps_of_all_lengths(kept):
    frame = pack(np.array(kept), 100_000)
    assert unpack(frame, 100_000).tolist() == kept
    assert len(frame) < 12_500


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.05, 0.1, 0.13, 0.2, 0.3])
def test_gaps_come_close_to_the_entropy(share):
    count = 1 << 18
    frame = pack(kept := drawn(count, share), count)
    real = len(kept) / count
    entropy = -count * (real * math.log2(real) + (1 - real) * math.log2(1 - real)) / 8
    assert len(frame) < 1.13 * entropy + 8


def test_every_width_is_tried_out():
    widths = set()
    for share in (0.3, 0.2, 1 / 9, 1 / 20, 1 / 50, 1e-2, 1e-3, 1e-4, 1e-5):
        for seed in range(3):
            kept = drawn(1 << 20, share, seed)
            frame = pack(kept, 1 << 20)
            widths.add(int(frame[0]))
            assert np.array_equal(unpack(frame, 1 << 20), kept)
    assert {2, 3, 4, 6, 7, 8, 12, 15} <= widths


def test_one_element_of_very_many_crosses():
    assert unpack(pack(np.array([5]), 1 << 26), 1 << 26).tolist() == [5]


def test_all_elements_take_no_byte():
    assert unpack(torch.empty(0, dtype=torch.uint8), 10) is None


@pytest.mark.parametrize(
    "data",
    [
        [1, 0],
        [MASK],
        [MASK, 0, 0],
        [MASK, 255],
        [25, 0, 0, 0],
        [255] * 8,
        [8],
        [8, 255],
        [8, 0, 0, 0],
        [8, 5],
        [8, 3, 255],
        [2, 0b11_11_11_11],
        [3, 255],
        [24, 0],
    ],
    ids=str,
)
def test_what_are_no_positions_is_refused(data):
    with pytest.raises(ValueError, match=r"position|mask|gaps"):
        unpack(torch.tensor(data, dtype=torch.uint8), 5)


@pytest.mark.parametrize(
    "frame", [torch.zeros(4), torch.zeros((2, 2), dtype=torch.uint8), torch.ones(3).to(torch.int8)]
)
def test_positions_are_a_row_of_bytes(frame):
    with pytest.raises(ValueError, match="row of bytes"):
        unpack(frame, 5)


@settings(deadline=None, max_examples=400, derandomize=True)
@given(
    form=st.sampled_from([MASK, *range(NARROWEST, WIDEST + 1)]), body=st.binary(max_size=60), count=st.integers(0, 400)
)
def test_any_bytes_are_ascending_positions_or_refused(form, body, count):
    frame = torch.tensor([form, *body], dtype=torch.uint8)
    try:
        kept = unpack(frame, count)
    except ValueError:
        return
    assert bool((np.diff(kept) > 0).all())
    assert len(kept) == 0 or (kept[0] >= 0 and kept[-1] < count)
