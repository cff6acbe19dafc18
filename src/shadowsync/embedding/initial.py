"""Initial rows: a function of the seed, the table and the row, never of how tables are cut or placed.

Rows are drawn in blocks of fixed size, each from a generator of its own, so that any run of rows can be made alone, in
any order and by several threads.
"""

import hashlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shadowsync.embedding.table import Shard

ROWS_PER_BLOCK = 4096


@dataclass(frozen=True)
class _Piece:
    """The rows of one block that a shard holds: rows `first … last − 1` of block `number`, to be written to `out`."""

    shard: Shard
    number: int
    first: int
    last: int
    out: NDArray[np.float32]


def fill(shards: list[tuple[Shard, torch.Tensor]], seed: int) -> None:
    """Writes the initial rows, uniform in ±1/sqrt(rows of the whole table), into each shard's weight `[rows, D]`."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        for _ in threads.map(lambda piece: _draw(piece, seed), _pieces(shards)):
            pass


def _pieces(shards: list[tuple[Shard, torch.Tensor]]) -> Iterator[_Piece]:
    for shard, weight in shards:
        rows = weight.numpy()
        for number in range(shard.start // ROWS_PER_BLOCK, -(-shard.stop // ROWS_PER_BLOCK)):
            base = number * ROWS_PER_BLOCK
            start, stop = max(shard.start, base), min(shard.stop, base + ROWS_PER_BLOCK)
            yield _Piece(shard, number, start - base, stop - base, rows[start - shard.start : stop - shard.start])


def _draw(piece: _Piece, seed: int) -> None:
    table = piece.shard.table
    name = int.from_bytes(hashlib.blake2b(table.name.encode(), digest_size=8).digest(), "little")
    generator = np.random.Generator(np.random.SFC64([seed, name, piece.number]))
    if piece.first == 0:
        generator.random(out=piece.out, dtype=np.float32)
    else:
        drawn = generator.random((piece.last, table.dim), dtype=np.float32)
        piece.out[:] = drawn[piece.first :]
    bound = 1 / math.sqrt(table.rows)
    np.multiply(piece.out, np.float32(2 * bound), out=piece.out)
    np.subtract(piece.out, np.float32(bound), out=piece.out)
