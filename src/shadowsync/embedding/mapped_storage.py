"""Storage of rows that need not all be in memory: they are in a file of a fast disk, and those in use in memory, too.

What is in memory is a storage of its own (`auto`), with so many slots of each width, and looked up and stepped like any
other. A row that is looked up and has no slot is read from the file, and takes the slot of one that has not been looked
up for long (GCLOCK, Smith 1978), which is written back. A gradient for a row without a slot steps it in the file.

Rows and not pages are kept: of the 60 rows on a page one is in use, so that with a quarter of the memory and ids that
follow Zipf's law (1.2) pages miss 8.7 % of the look-ups and rows 1.9 %. A row and its state lie side by side in the
file, so that a miss reads one page. A row that nobody has changed is in neither: it is made when it is looked up.

`R` rows of one width `D`, `C` slots, `L` looked-up ids, `K` distinct rows, `S` shards.
"""

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.distinct import SlotGroups
from shadowsync.embedding.initial import bound_of, drawn_rows, salt_of_rows
from shadowsync.embedding.memory import parts_of
from shadowsync.embedding.optimizers import Block, Extent, RowOptimizer
from shadowsync.embedding.requests import KNOWN_REQUESTS
from shadowsync.embedding.storage import AUTO, Storage, StorageCounts, storage_class
from shadowsync.embedding.table import RowNumbers, Shard, Table, Width
from shadowsync.errors import ConfigError, DataError
from shadowsync.memory.pages import expect_at_random, memory_bytes, read_ahead
from shadowsync.memory.room import Disk, Room

INDEX_BYTES = 4
"""In memory for each row: where it is."""
SLOT_BYTES = 5
"""In memory for each slot beside its row: whose it is, and how often it was looked up of late."""
FEWEST = 16
"""Slots of a width, where it has as many rows."""
_MOST, _KEPT = 3, 255  # of `used`: counted so far; not to be taken
_LOOKS = 1024  # slots looked at together, at least
_MOST_ROWS = (1 << 31) - 2
_MOVING, _SEED = 4, 5  # of the counters: rows are being moved; the seed of initial rows and one, 0 for zeros

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """Of a record, the columns that hold each tensor of a row; one of what is kept once for a row."""

    columns: Mapping[str, slice | int]
    floats: int

    @classmethod
    def of(cls, optimizer: RowOptimizer, dim: int) -> "Layout":
        columns: dict[str, slice | int] = {}
        end = 0
        for name, extent in {"weight": Extent.ELEMENT, **optimizer.state}.items():
            if extent is Extent.ELEMENT:
                columns[name], end = slice(end, end + dim), end + dim
            elif extent is Extent.ROW:
                columns[name], end = end, end + 1
        return cls(columns, end)

    @property
    def row_bytes(self) -> int:
        return 4 * self.floats

    def views(self, records: Tensor) -> dict[str, Tensor]:
        """Live: `[R, D]` or `[R]`."""
        return {name: records[:, columns] for name, columns in self.columns.items()}


def slots_of(numbers: RowNumbers, optimizer: RowOptimizer, memory: int) -> dict[int, int]:
    """How many rows of each width so many bytes hold; raises `ConfigError` if they do not hold the index."""
    if max((w.stop - w.start for w in numbers.widths), default=0) > _MOST_ROWS:
        raise ConfigError(f"a server holds {_MOST_ROWS:,} mapped rows of one width at most: raise embedding.servers")
    index = INDEX_BYTES * numbers.total
    full = sum((w.stop - w.start) * (optimizer.row_bytes(w.dim) + SLOT_BYTES) for w in numbers.widths)
    share = (memory - index) / max(1, full)
    if numbers.total and share <= 0:
        raise ConfigError(
            f"embedding.memory_gib gives a server {memory / 2**30:.3g} GiB and the index of its {numbers.total:,} rows "
            f"takes {index / 2**30:.3g}: raise it to {2 * index / 2**30:.3g} or more"
        )
    slots = {w.dim: max(min(w.stop - w.start, FEWEST), int(min(1, share) * (w.stop - w.start))) for w in numbers.widths}
    if sum(slots.values()) > _MOST_ROWS:
        raise ConfigError(f"a server keeps {_MOST_ROWS:,} rows in memory at most: lower embedding.memory_gib")
    return slots


class MappedStorage(Storage):
    """In memory are `where` each row is (0: nowhere, it is as at the start; −1: in the file; else its slot's number and
    one, numbered as rows are, by width), whose each slot is (0: nobody's; else a row's number and one), and how often
    it was looked up of late.

    Rows move while nobody pushes, so that for a push each is where it is. A pull takes no lock: it looks up where the
    rows are, reads the slots, and looks again. Whoever is killed while rows move leaves each in the file or in its
    slot: a row is written back before it loses its slot, and has one when it stands there.
    """

    name: ClassVar[str] = "mapped"
    on_disk: ClassVar[bool] = True

    def __init__(
        self,
        shards: Sequence[Shard],
        features: Sequence[int],
        optimizer: RowOptimizer,
        seed: int | None,
        room: Room | None = None,
    ) -> None:
        room = Room() if room is None else room
        self._shards, self._optimizer, self._gate = tuple(shards), optimizer, room.gate
        self._numbers = RowNumbers(shards)
        self._features = tuple(features)
        self._slots = slots_of(self._numbers, optimizer, _memory_of(room.disk))
        held = _held(self._slots)
        inner = storage_class(AUTO)
        of_width = {dim: index for index, dim in enumerate(self._slots)}
        dims = [shard.table.dim for shard in shards]
        self._inner = inner(held, [of_width[dims[f]] for f in self._features], optimizer, None, room)
        self._inner_numbers = RowNumbers(held)
        *index, steps = (room.allocate(*part) for part in _index_parts(self._numbers, self._slots, len(shards)))
        self._where, owner, used, self._hands, self._counters = index
        self._step = steps if Extent.SHARD in optimizer.state.values() else None
        self._count_lock = threading.Lock()
        take = room.file(_file_parts(self._numbers, optimizer), "the rows of one embedding server")
        self._groups = SlotGroups(shards, features, self._numbers)
        self._shifts = lru_cache(KNOWN_REQUESTS)(self._shifts_of)
        state = self._inner.state()
        self._widths = {}
        for number, (width, shard) in enumerate(zip(self._numbers.widths, held, strict=True)):
            layout, first = Layout.of(optimizer, width.dim), self._inner_numbers.starts[number]
            records = take((width.stop - width.start) * layout.floats, torch.float32).view(-1, layout.floats)
            expect_at_random(records)
            mine = slice(first, first + shard.rows)
            slots = {name: state[shard.key][name] for name in layout.columns}
            where = self._where[width.start : width.stop]
            hand = self._hands[number : number + 1]
            initial = Initial(shards, self._numbers, width.dim, self._counters[_SEED:])
            parts = where, owner[mine], used[mine], hand
            self._widths[width.dim] = _Held(width, first, records, layout, slots, *parts, initial)
        self._used = used
        self._state = {shard.key: self._views(index) for index, shard in enumerate(shards)}
        if seed is not None:
            self._counters[_SEED] = seed + 1

    @classmethod
    def memory_parts(
        cls, shards: Sequence[Shard], optimizer: RowOptimizer, disk: Disk | None
    ) -> list[tuple[int, torch.dtype]]:
        numbers = RowNumbers(shards)
        slots = slots_of(numbers, optimizer, _memory_of(disk))
        return [*parts_of(_held(slots), optimizer), *_index_parts(numbers, slots, len(shards))]

    @classmethod
    def file_parts(cls, shards: Sequence[Shard], optimizer: RowOptimizer) -> list[tuple[int, torch.dtype]]:
        return _file_parts(RowNumbers(shards), optimizer)

    def _views(self, index: int) -> dict[str, Tensor]:
        shard = self._shards[index]
        held, first = self._widths[shard.table.dim], self._numbers.starts[index]
        start = first - held.width.start
        views = {name: view[start : start + shard.rows] for name, view in held.file.items()}
        return views if self._step is None else {**views, "step": self._step[index : index + 1]}

    # --- look-ups ----------------------------------------------------------------------------------------------------

    def pull(self, ids: Jagged, features: Sequence[int]) -> Tensor:
        if not len(ids.values):
            return self._inner.pull(ids, features)
        shifts, numbers = self._numbered(ids, features)

        def read(slots: Tensor) -> Tensor:
            return self._inner.pull(replace(ids, values=slots - 1 - shifts), features)

        if (pooled := self._read(numbers, read)) is not None:
            return pooled
        if ids.samples == 1:
            raise self._too_small("the ids of one sample")
        middle = ids.samples // 2
        return torch.cat([self.pull(ids.narrow(*part), features) for part in ((0, middle), (middle, ids.samples))])

    def read_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        if (found := self._read(rows, lambda slots: self._inner.read_rows(slots - 1))) is not None:
            return found
        if len(rows) == 1:
            raise self._too_small("one row")
        parts = [self.read_rows(part) for part in rows.tensor_split(2)]
        return tuple(torch.cat(pair) for pair in zip(*parts, strict=True))

    def expect(self, ids: Jagged, features: Sequence[int]) -> None:
        if len(ids.values):
            self.expect_rows(self._numbered(ids, features)[1])

    def expect_rows(self, rows: Tensor) -> None:
        if not _all_there(self._where.index_select(0, rows)):
            with self._gate.moving():
                self._bring(rows, must=False)

    def _too_small(self, what: str) -> DataError:
        slots = ", ".join(f"{count:,} of width {dim}" for dim, count in self._slots.items())
        return DataError(f"{what} are more rows than embedding.memory_gib keeps in memory ({slots}): raise it")

    def _read(self, numbers: Tensor, read: Callable[[Tensor], T]) -> T | None:
        """What `read` makes of the slots of these rows, given as in `where`, int64 `[L]`; None if there are not as many
        slots as rows."""
        self._counters[0] += len(numbers)  # threads may lose a look-up to each other
        slots = self._where.index_select(0, numbers)
        if _all_there(slots):
            used, places = self._used.numpy(), slots.numpy() - 1
            before = used[places]
            count = before < _MOST  # whoever moves rows may write the others
            used[places[count]] = before[count] + 1
        else:
            with self._gate.moving():
                if not self._bring(numbers):
                    return None
            slots = self._where.index_select(0, numbers)
        if _all_there(slots):
            found = read(slots.long())
            if torch.equal(self._where.index_select(0, numbers), slots):
                return found
        with self._gate.moving():  # others want memory, too: now nobody takes these slots away
            while self._bring(numbers):
                slots = self._where.index_select(0, numbers)
                if _all_there(slots):  # not so if others' look-ups have counted over what was to be kept
                    return read(slots.long())
        return None

    def _bring(self, numbers: Tensor, must: bool = True) -> bool:
        """Gives slots to all of these rows and keeps those that have one; false if there are too few. Unless it `must`,
        as many as do not push out too much. Nobody else moves rows."""
        used = self._used.numpy()
        if self._counters[_MOVING]:  # whoever did so was killed
            used[used == _KEPT] = 0
        self._counters[_MOVING] = 1
        slots = self._where.index_select(0, numbers)
        kept = slots[slots > 0].numpy() - 1
        used[kept] = _KEPT
        rows = torch.from_numpy(np.unique(numbers[slots <= 0].numpy()))
        pairs = zip(self._widths.values(), self._numbers.split(rows), strict=True)
        done = [self._bring_apart(held, part if must else part[: len(held.owner) // 4]) for held, part in pairs]
        used[kept] = _MOST
        self._counters[_MOVING] = 0
        return all(done)

    def _bring_apart(self, held: "_Held", rows: Tensor) -> bool:
        if not len(rows):
            return True
        if (slots := held.choose(len(rows))) is None:
            return False
        held.touch(rows, slots)
        with self._gate.alone():
            self._counters[1] += len(rows)
            read, written = held.swap(rows, slots)
            self._counters[2] += read * held.layout.row_bytes
            self._counters[3] += written * held.layout.row_bytes
        return True

    def _numbered(self, ids: Jagged, features: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of each id, where the slots of its width start, and the number of its row, int64 `[L]`."""
        shifts, starts = self._shifts(tuple(features))
        if ids.offsets is None:
            counts = torch.full((ids.feature_count,), ids.samples)
        else:
            counts = ids.offsets[:: ids.samples].diff()
        return shifts.repeat_interleave(counts), ids.values + starts.repeat_interleave(counts)

    def _shifts_of(self, features: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        shards = [self._features[feature] for feature in features]
        first = [self._widths[self._shards[shard].table.dim].first for shard in shards]
        return torch.tensor(first), torch.tensor([self._numbers.starts[shard] for shard in shards])

    # --- steps -------------------------------------------------------------------------------------------------------

    def push(self, ids: Jagged, features: Sequence[int], gradient: Tensor, lr: float) -> None:
        if not features or not ids.samples:
            return
        if self._step is None and len(ids.values):
            shifts, numbers = self._numbered(ids, features)
            slots = self._where.index_select(0, numbers)
            if _all_there(slots):
                self._inner.push(replace(ids, values=slots - 1 - shifts), features, gradient, lr)
                return
        pushes = self._count({self._features[feature] for feature in features})
        for group in self._groups.plan(features):
            rows, sums = self._groups.sum_by_row(ids, gradient, group)
            if len(rows):
                self._update(self._widths[group.dim], rows, sums, pushes, lr)

    def step_rows(self, rows: Tensor, gradients: Sequence[Tensor], shards: Sequence[int], lr: float) -> None:
        pushes = self._count(set(shards))
        for held, part, gradient in zip(self._widths.values(), self._numbers.split(rows), gradients, strict=True):
            if len(part):
                self._update(held, part, gradient, pushes, lr)

    def _update(self, held: "_Held", rows: Tensor, gradient: Tensor, pushes: Tensor | None, lr: float) -> None:
        slots = held.where.index_select(0, rows).long() - 1
        here = slots >= 0
        if pushes is None and bool(here.all()):
            of_width = [gradient if own is held else gradient.new_zeros(0, dim) for dim, own in self._widths.items()]
            self._inner.step_rows(slots, of_width, (), lr)
            return
        with self._gate.one():
            held.make(rows)
        per_row = None if pushes is None else pushes[held.initial.members_of(rows)]
        for chosen, block, at in ((here, held.slots, slots - held.first), (~here, held.file, rows)):
            if bool(chosen.any()):
                mine, own = at[chosen], None if per_row is None else per_row[chosen]
                self._optimizer.apply(block, mine, self._optimizer.penalised(block, mine, gradient[chosen]), own, lr)

    def _count(self, shards: Set[int]) -> Tensor | None:
        """One push more for each of these shards; the counts of all shards, `[S]`."""
        if self._step is None:
            return None
        with self._count_lock:
            self._step[torch.tensor(sorted(shards), dtype=torch.int64)] += 1
            return self._step.clone()

    # --- the file ----------------------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self._state

    def reset(self, seed: int | None) -> None:
        for held in self._widths.values():
            held.where.zero_()
        self._counters[_SEED] = 0 if seed is None else seed + 1
        if self._step is not None:
            self._step.zero_()

    def copy(self, shard: int, rows: Tensor | range, out: Mapping[str, Tensor]) -> None:
        held, chosen = self._rows(shard, rows)
        part = slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen
        where = held.where[part]
        there, nowhere = (where > 0).nonzero().flatten(), (where == 0).nonzero().flatten()
        slots = where[there].long() - 1 - held.first
        numbers = nowhere + chosen.start if isinstance(chosen, range) else chosen[nowhere]
        for name, target in out.items():
            if len(there) + len(nowhere) < len(where):
                target.copy_(held.file[name][part])
            target.index_copy_(0, there, held.slots[name].index_select(0, slots))
            if len(nowhere):
                target.index_copy_(0, nowhere, held.begun(name, numbers))

    def settle(self, shard: int) -> None:
        held, chosen = self._rows(shard, range(self._shards[shard].rows))
        held.make(torch.arange(chosen.start, chosen.stop))
        rows = (held.where[chosen.start : chosen.stop] > 0).nonzero().flatten() + chosen.start
        slots = held.where.index_select(0, rows).long() - 1 - held.first
        for name, view in held.file.items():
            view.index_copy_(0, rows, held.slots[name].index_select(0, slots))

    def approach(self, shard: int, rows: Tensor | range) -> None:
        held, chosen = self._rows(shard, rows)
        if not isinstance(chosen, range):
            read_ahead(held.records, chosen[held.where.index_select(0, chosen) < 0])
        elif bool((held.where[chosen.start : chosen.stop] < 0).any()):
            read_ahead(held.records, chosen)

    def written(self, shard: int, rows: Tensor | range) -> None:
        held, chosen = self._rows(shard, rows)
        if isinstance(chosen, range):
            chosen = torch.arange(chosen.start, chosen.stop)
        where = held.where.index_select(0, chosen)
        held.where.index_fill_(0, chosen[where == 0], -1)
        chosen, slots = chosen[where > 0], where[where > 0].long() - 1 - held.first
        for name, tensor in held.slots.items():
            tensor.index_copy_(0, slots, held.file[name].index_select(0, chosen))

    @property
    def counts(self) -> StorageCounts:
        return StorageCounts(self._numbers.total, sum(self._slots.values()), *self._counters[:_MOVING].tolist())

    @overload
    def _rows(self, shard: int, rows: range) -> tuple["_Held", range]: ...
    @overload
    def _rows(self, shard: int, rows: Tensor | range) -> tuple["_Held", Tensor | range]: ...
    def _rows(self, shard: int, rows: Tensor | range) -> tuple["_Held", Tensor | range]:
        """What holds the shard's rows, and theirs among all of their width."""
        held = self._widths[self._shards[shard].table.dim]
        start = self._numbers.starts[shard] - held.width.start
        return held, range(rows.start + start, rows.stop + start) if isinstance(rows, range) else rows + start


def _all_there(slots: Tensor) -> bool:
    return bool((slots > 0).all())


class Initial:
    """The rows of one width as they are before anybody changes them: those of a seed, zeros of dynamic tables.

    Args:
        seed: where the seed stands now, and one; 0: all are zeros.
    """

    def __init__(self, shards: Sequence[Shard], numbers: RowNumbers, dim: int, seed: Tensor) -> None:
        self._dim, self._seed, self._members = dim, seed, torch.tensor(numbers.members(dim))
        self._shards = [shards[index] for index in self._members.tolist()]
        first = numbers.width(dim).start
        self._starts = torch.tensor([numbers.starts[index] - first for index in self._members.tolist()])
        self._shift = torch.tensor([shard.start for shard in self._shards]) - self._starts
        self._bounds = np.array([0 if s.table.ids else bound_of(s.table) for s in self._shards], dtype=np.float32)
        self._salts = lru_cache(1)(self._salts_of)

    def members_of(self, rows: Tensor) -> Tensor:
        """Positions of the shards of these rows of the width."""
        return self._members[self._places(rows)]

    def rows(self, rows: Tensor) -> Tensor:
        """Float32 `[K, D]`."""
        seed, place = int(self._seed[0]) - 1, self._places(rows)
        if seed < 0:
            return torch.zeros(len(rows), self._dim)
        numbers, at = (rows + self._shift[place]).numpy(), place.numpy()
        return torch.from_numpy(drawn_rows(numbers, self._salts(seed)[at], self._bounds[at], self._dim))

    def _places(self, rows: Tensor) -> Tensor:
        return torch.searchsorted(self._starts, rows, right=True) - 1

    def _salts_of(self, seed: int) -> NDArray[np.uint64]:
        return np.array([salt_of_rows(shard.table, seed) for shard in self._shards], dtype=np.uint64)


@dataclass(frozen=True, eq=False)
class _Held:
    """The rows of one width.

    Attributes:
        first: the number of its first slot.
        records: of the file, float32 `[R, floats]`.
        slots: tensors of the slots by name, `[C, D]` or `[C]`.
        where, owner, used: its parts of what `MappedStorage` has, int32 `[R]`, int32 `[C]`, uint8 `[C]`.
        hand: the slot that is looked at next, int64 `[1]`.
    """

    width: Width
    first: int
    records: Tensor
    layout: Layout
    slots: Block
    where: Tensor
    owner: Tensor
    used: Tensor
    hand: Tensor
    initial: Initial

    @cached_property
    def file(self) -> Block:
        return self.layout.views(self.records)

    def choose(self, count: int) -> NDArray[np.int64] | None:
        """So many slots whose turn it is, none twice, which nobody takes any more; None if there are not so many."""
        used, total = self.used.numpy(), len(self.owner)
        hand, chosen, looked = int(self.hand[0]) % total, np.zeros(0, np.int64), 0
        while len(chosen) < count and looked < (_MOST + 2) * total:
            left = count - len(chosen)
            part = used[hand : hand + max(_LOOKS, 4 * left)]
            free = np.flatnonzero(part == 0)[:left]
            end = int(free[-1]) + 1 if len(free) == left else len(part)
            part[:end] -= (part[:end] > 0) & (part[:end] <= _MOST)
            part[free] = _KEPT
            # others may have counted over what was marked, so that it comes twice
            chosen = np.union1d(chosen, free + hand)
            hand, looked = (hand + end) % total, looked + end
        self.hand[0] = hand
        if len(chosen) == count:
            return chosen
        used[chosen] = 0
        return None

    def touch(self, rows: Tensor, slots: NDArray[np.int64]) -> None:
        """Has what `swap` reads and writes of the file in memory."""
        owners = self.owner.index_select(0, torch.from_numpy(slots)).long()
        stored = rows[self.where.index_select(0, rows) < 0]
        read_ahead(self.records, torch.cat([stored, owners[owners > 0] - 1]))

    def begun(self, name: str, rows: Tensor) -> Tensor:
        """A tensor of rows that nobody has changed."""
        shape = (len(rows), *self.slots[name].shape[1:])
        return self.initial.rows(rows) if name == "weight" else torch.zeros(shape)

    def make(self, rows: Tensor) -> None:
        """Those of these rows that are nowhere are in the file; one at a time of those who may push."""
        rows = rows[self.where.index_select(0, rows) == 0]
        if len(rows):
            for name, view in self.file.items():
                view.index_copy_(0, rows, self.begun(name, rows))
            self.where.index_fill_(0, rows, -1)

    def swap(self, rows: Tensor, slots: NDArray[np.int64]) -> tuple[int, int]:
        """Rows take the place of those that have these slots; how many were read, and written back. Nobody pushes."""
        at = torch.from_numpy(slots)
        names = (at + self.first + 1).int()
        old = self.owner.index_select(0, at).long() - 1
        theirs = (old >= 0) & (self.where.index_select(0, old.clamp(min=0)) == names)  # or killed before it had it
        old, back = old[theirs], at[theirs]
        parts = [tensor.index_select(0, back).unsqueeze(1).flatten(1) for tensor in self.slots.values()]
        self.records.index_copy_(0, old, torch.cat(parts, 1))
        self.where.index_fill_(0, old, -1)
        stored = self.where.index_select(0, rows) < 0
        for name, read in self.layout.views(self.records.index_select(0, rows[stored])).items():
            self.slots[name].index_copy_(0, at[stored], read)
        if (count := int(stored.sum())) < len(rows):
            for name, tensor in self.slots.items():
                tensor.index_copy_(0, at[~stored], self.begun(name, rows[~stored]))
        self.owner.index_copy_(0, at, (rows + 1).int())
        self.where.index_copy_(0, rows, names)
        self.used.numpy()[slots] = 1
        return count, len(back)


def _memory_of(disk: Disk | None) -> int:
    return (memory_bytes() or 1 << 33) // 2 if disk is None else disk.memory_bytes


def _held(slots: Mapping[int, int]) -> list[Shard]:
    """The slots as shards of a storage."""
    return [Shard(Table(f"slots of {dim}", count, dim, ()), 0, count) for dim, count in slots.items()]


def _index_parts(numbers: RowNumbers, slots: Mapping[int, int], shards: int) -> list[tuple[int, torch.dtype]]:
    """Where each row is, whose each slot is, how often it was used; hands, counters, steps of the shards."""
    count = sum(slots.values())
    of_rows = [(numbers.total, torch.int32), (count, torch.int32), (count, torch.uint8)]
    return [*of_rows, (len(slots), torch.int64), (_SEED + 1, torch.int64), (shards, torch.int64)]


def _file_parts(numbers: RowNumbers, optimizer: RowOptimizer) -> list[tuple[int, torch.dtype]]:
    return [((w.stop - w.start) * Layout.of(optimizer, w.dim).floats, torch.float32) for w in numbers.widths]
