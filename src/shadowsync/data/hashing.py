"""Hashes ids of any range to the rows of a table, the same in every process, run and version.

The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), a bijection of 64-bit numbers; polars' own hash may change with its version, which would scramble the
rows of a trained model.
"""

from typing import Any

import numpy as np
import polars as pl
import pyarrow
from numpy.typing import NDArray

pa: Any = pyarrow  # has no types

Words = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mix(words: Words) -> Words:
    """SplitMix64's finaliser of `words + golden ratio`, in place; returns `words`."""
    words += _GOLDEN
    shifted = words >> np.uint64(30)
    words ^= shifted
    words *= _FIRST
    np.right_shift(words, np.uint64(27), out=shifted)
    words ^= shifted
    words *= _SECOND
    np.right_shift(words, np.uint64(31), out=shifted)
    words ^= shifted
    return words


def to_rows(hashes: Words, rows: Words | np.uint64) -> NDArray[np.int64]:
    """Scales hashes to `[1, rows)`, in place: row 0 is left for missing values.

    Args:
        hashes: evenly spread words; their upper 32 bits decide.
        rows: 2 … 2³², broadcast against `hashes`.
    """
    hashes >>= np.uint64(32)
    hashes *= rows - np.uint64(1)
    hashes >>= np.uint64(32)
    hashes += np.uint64(1)
    return hashes.view(np.int64)


def hash_strings(strings: pl.Series) -> Words:
    """One word per string, from its UTF-8 bytes, eight at a time; a missing string counts as empty."""
    given = strings.fill_null("") if strings.null_count() else strings
    array = given.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.large_binary())
    _, offsets, data = array.buffers()
    edges = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    text = np.zeros(edges[-1] + 8, dtype=np.uint8)  # eight more, so that every byte begins a word
    if data is not None:
        text[: edges[-1]] = np.frombuffer(data, dtype=np.uint8, count=edges[-1])
    every_word = np.ndarray((len(text) - 7,), dtype="<u8", buffer=text, strides=(1,))
    starts, lengths = edges[:-1], np.diff(edges)
    hashes = mix(lengths.astype(np.uint64))
    shortest = int(lengths.min()) if len(lengths) else 0
    for position in range(0, int(lengths.max(initial=0)), 8):
        longer: Any = slice(None) if position < shortest else np.flatnonzero(lengths > position)
        words = every_word[starts[longer] + position]
        if position + 8 > shortest:
            unused_bits = (8 * (8 - np.minimum(lengths[longer] - position, 8))).astype(np.uint64)
            words = (words << unused_bits) >> unused_bits
        hashes[longer] = mix(hashes[longer] ^ words)
    return hashes
