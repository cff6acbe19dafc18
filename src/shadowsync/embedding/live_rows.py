"""Rows of an embedding server that are copied when they are wanted, while others push to it."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping

from torch import Tensor

from shadowsync.embedding.table import Rows, RowSet, Shard

Copy = Callable[[int, int], Iterator[Mapping[str, Tensor]]]
"""Copies those at positions `first … last − 1`, some rows at a time with all of their tensors; of none, once too."""


class LiveRows:
    """As `RowSource`: each row with its optimizer state as of one moment.

    The first tensor of a run that is asked for has its rows copied. What is copied of the others is held until they are
    asked for.

    Args:
        copy: copies rows.
        wide: names of tensors of the table as a whole: they are as they were after the last row.
    """

    def __init__(self, copy: Copy, wide: Collection[str]) -> None:
        self._copy = copy
        self._wide = wide
        self._held: dict[tuple[int, int], dict[str, deque[Tensor]]] = {}

    def read(self, first: int, last: int, name: str) -> Iterator[Tensor]:
        """As `RowSource.read`."""
        held = self._held.get((first, last), {})
        if name not in held:
            yield from self._copied(first, last, name)
            return
        parts = held.pop(name)
        if not held:
            del self._held[first, last]
        while parts:
            yield parts.popleft()

    def _copied(self, first: int, last: int, name: str) -> Iterator[Tensor]:
        held: dict[str, deque[Tensor]] = {}
        for tensors in self._copy(first, last):
            for other, tensor in tensors.items():
                if other != name:
                    held.setdefault(other, deque(maxlen=1 if other in self._wide else None)).append(tensor)
            yield tensors[name]
        if held:
            self._held[first, last] = held


def live_shard(shard: Shard, nothing: Mapping[str, Tensor], copy: Copy) -> Rows:
    """All rows of a shard.

    Args:
        shard: which.
        nothing: a copy of none of its rows, which tells the tensors' forms.
        copy: copies rows by their positions in the shard.
    """
    forms, source = _live(nothing, shard.rows, copy)
    return Rows(shard.table, shard.start, forms, source)


def live_set(shard: Shard, numbers: Tensor, nothing: Mapping[str, Tensor], copy: Copy) -> RowSet:
    """Some rows of a shard; the arguments as of `live_shard`.

    Args:
        shard: which.
        numbers: of the rows, in the table, int64 `[K]`.
        nothing: a copy of no rows.
        copy: copies rows by their positions among the `numbers`.
    """
    forms, source = _live(nothing, len(numbers), copy)
    return RowSet(shard.table, shard.start, shard.stop, numbers, forms, source)


def _live(nothing: Mapping[str, Tensor], count: int, copy: Copy) -> tuple[dict[str, Tensor], LiveRows]:
    wide = {name for name, tensor in nothing.items() if len(tensor)}
    shapes = {name: t.shape if name in wide else (count, *t.shape[1:]) for name, t in nothing.items()}
    return {name: t.new_empty(shapes[name], device="meta") for name, t in nothing.items()}, LiveRows(copy, wide)
