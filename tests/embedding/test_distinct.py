"""Duplicates: against numpy's own search, and sums against a loop."""

import numpy as np
import pytest
import torch
from embedding_cases import CLOSE
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.embedding.distinct import find_distinct

KEYS = st.lists(st.integers(0, 12), max_size=40).map(lambda keys: np.array(keys, dtype=np.int64))


@pytest.mark.parametrize("scale", [1, 2**40, 2**59], ids=["small", "large", "beyond one integer with its position"])
@settings(deadline=None, max_examples=40, derandomize=True)
@given(keys=KEYS)
def test_distinct_keys_and_where_they_occur(scale, keys):
    keys = keys * (scale // 2 or 1)
    found = find_distinct(keys, limit=13 * (scale // 2 or 1))
    expected, inverse = np.unique(keys, return_inverse=True)
    np.testing.assert_array_equal(found.keys, expected)
    np.testing.assert_array_equal(found.inverse.numpy(), inverse)
    np.testing.assert_array_equal(found.order.numpy(), np.argsort(keys, kind="stable"))
    assert found.starts.tolist() == [*np.searchsorted(np.sort(keys), expected), len(keys)]


@settings(deadline=None, max_examples=40, derandomize=True)
@given(keys=KEYS, weighted=st.booleans(), shared=st.booleans())
def test_sums_are_over_the_occurrences(keys, weighted, shared):
    generator = torch.Generator().manual_seed(len(keys))
    vectors = torch.randn(5 if shared else len(keys), 3, generator=generator)
    index = torch.randint(5, (len(keys),), generator=generator) if shared else None
    weights = torch.randn(len(keys), generator=generator) if weighted else None
    expected = torch.zeros(13, 3)
    for occurrence, key in enumerate(keys):
        vector = vectors[occurrence if index is None else index[occurrence]]
        expected[key] += vector if weights is None else vector * weights[occurrence]
    found = find_distinct(keys, limit=13)
    torch.testing.assert_close(found.sum(vectors, index, weights), expected[torch.from_numpy(found.keys)], **CLOSE)
