"""Anything that can be gone through: here a generator of batches, each a dict of columns."""

from collections.abc import Iterator
from typing import Any

from clicks import TEST, TRAIN, made, train


def batches(rows: int, seed: int) -> Iterator[dict[str, Any]]:
    """A hundred rows at a time, as a query of a database might give them."""
    for part in made(rows, seed).iter_slices(100):
        yield part.to_dict(as_series=False)


train(data=batches(TRAIN, seed=0), test_data=batches(TEST, seed=1))
