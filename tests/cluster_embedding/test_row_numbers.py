"""Numbers of distinct rows cross as gaps, and come back as they were."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowsync.embedding.messages import pack_rows, unpack_rows
from shadowsync.errors import DataError


@given(st.data())
def test_row_numbers_arrive(data):
    total = data.draw(st.sampled_from([1, 2, 7, 300, 10**6, 2**31 + 5]))
    rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, total - 1), max_size=200))), dtype=torch.int64)
    packed = pack_rows(rows, total)
    assert torch.equal(unpack_rows(packed, total), rows)
    assert packed.nbytes <= len(rows) * (4 if total <= 2**31 else 8)


@pytest.mark.parametrize("total", [1, 5, 1000])
def test_all_rows_and_none(total):
    for rows in (torch.arange(total), torch.zeros(0, dtype=torch.int64)):
        packed = pack_rows(rows, total)
        assert torch.equal(unpack_rows(packed, total), rows)
        assert packed.nbytes <= 1 + -(-total // 8)


def test_a_fifth_of_the_rows_takes_less_than_a_byte_each():
    torch.manual_seed(0)
    rows = torch.randperm(100_000)[:20_000].sort().values
    assert pack_rows(rows, 100_000).nbytes < 0.5 * len(rows)


@pytest.mark.parametrize("frame", [[], [0], [1, 7], [8, 200], [25, 1, 1, 1, 1]])
def test_frames_of_other_rows_are_refused(frame):
    with pytest.raises(DataError, match="row numbers"):
        unpack_rows(torch.tensor(frame, dtype=torch.uint8), 70)
