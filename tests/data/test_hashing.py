"""The hash: known values, evenness, and one value per string."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.data.values import hash_strings
from shadowsync.serving import mix, to_rows


def test_mix_is_splitmix64():
    """The first outputs of the reference generator from seed 0: its state grows by the golden ratio each time."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([0, golden, 2 * golden % (1 << 64)], dtype=np.uint64)
    assert mix(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("rows", [2, 3, 1000, 1 << 32])
def test_rows_lie_above_the_reserved_one_and_are_even(rows):
    found = to_rows(mix(np.arange(200_000, dtype=np.uint64)), np.uint64(rows))
    assert found.min() >= 1
    assert found.max() < rows
    counts = np.histogram(found, bins=min(rows - 1, 50), range=(1, rows))[0]
    assert np.abs(counts / counts.mean() - 1).max() < 0.1


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.lists(st.text(max_size=40) | st.none(), max_size=12))
def test_a_string_has_one_hash_wherever_it_stands(strings):
    together = hash_strings(pl.Series(strings, dtype=pl.String)).tolist()
    alone = [hash_strings(pl.Series([string], dtype=pl.String)).tolist()[0] for string in strings]
    assert together == alone
    texts = {string or "" for string in strings}
    assert len(set(together)) == len(texts), "64 bits do not collide among a dozen strings"


def test_string_hashes_never_change():
    """A trained model depends on them."""
    hashes = hash_strings(pl.Series(["", "a", "12345678", "123456789", "Zürich"]))
    assert to_rows(hashes, np.uint64(1_000_000)).tolist() == [883310, 367224, 515075, 488105, 731273]


def test_padding_and_length_count():
    hashes = hash_strings(pl.Series(["a", "a\0", "a\0\0\0\0\0\0\0", "\0a", "aa"]))
    assert len(set(hashes.tolist())) == 5
