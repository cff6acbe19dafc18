"""Rows that nobody has trained: each is a function of seed, table and number or key alone, so that any can be made at
any time, however tables are cut or placed.

`K` rows, `D` their width.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from shadowsync.embedding.table import Table
from shadowsync.serving import Ids, Words, mix

_STEP = np.uint64(0xD1B54A32D192ED03)  # odd, between the elements of a row


def salt_of(name: str) -> np.uint64:
    """Lets tables hash apart."""
    return np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def hashes_of(keys: Ids, salts: Words | np.uint64) -> Words:
    """Of keys of tables with these salts."""
    return mix(keys.view(np.uint64) ^ salts)


def salt_of_rows(table: Table, seed: int) -> np.uint64:
    """Of the table's initial rows."""
    return salt_of(f"{seed} {table.name}")


def bound_of(table: Table) -> float:
    """Of the elements of its initial rows: 1/sqrt(rows of the whole table)."""
    return float(table.rows**-0.5)


def initial_rows(table: Table, keys: Ids, seed: int) -> NDArray[np.float32]:
    """Uniform in ±`bound_of` the table, float32 `[K, D]`, for numbers of its rows, or keys."""
    return drawn_rows(keys, salt_of_rows(table, seed), bound_of(table), table.dim)


def drawn_rows(
    keys: Ids, salts: Words | np.uint64, bounds: NDArray[np.float32] | float, dim: int
) -> NDArray[np.float32]:
    """As `initial_rows`, of several tables: each row's salt and bound, or one for all."""
    words = hashes_of(keys, salts)[:, None] + np.arange(dim, dtype=np.uint64) * _STEP
    rows = (mix(words) >> np.uint64(40)).astype(np.float32)
    scale = np.asarray(bounds, dtype=np.float32)
    scale = scale[:, None] if scale.ndim else scale
    rows *= scale * np.float32(2**-23)
    rows -= scale
    return rows
