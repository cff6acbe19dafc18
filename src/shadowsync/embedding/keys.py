"""Dynamic tables: which row of a table a key has, as long as it has one.

The rows of a table are cut into sets of `WAYS`, and a key's hash names the only set that its row may be in, as in the
caches of processors. So there is no index beside the rows: each row says whose it is, a look-up reads one set, rows
move between servers and checkpoints as any others, and nothing has to be built anew after a crash. The price: a set may
be full while others are not. With as many keys as rows 10 % of the keys would be one too many for theirs, with 80 % as
many 2 %, with half as many 0.02 % (of balls thrown at random); those compete as all do in a table that is full.

`L` keys looked up, `K` new ones, `R` rows, `W` rows of a set.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from shadowsync.embedding.eviction import KEPT, Eviction
from shadowsync.embedding.initial import hashes_of, initial_rows, salt_of
from shadowsync.embedding.table import WAYS, RowNumbers, Rows, Shard, Table
from shadowsync.errors import DataError
from shadowsync.memory.shared import Allocate
from shadowsync.registry import choose
from shadowsync.rpc.connection import Meta
from shadowsync.serving import Ids, Mask, Words

NOBODY = -(1 << 63)
"""No key: rows without an owner have it. Kept exclusive-or itself, so that new memory, all zero, is of free rows."""
DEFAULT = NOBODY + 1
"""Owner of the row that keys without one share."""
LOWEST = NOBODY + 2
"""The keys below it are none, and count as this one."""
PINNED = (1 << 31) - 1
"""The count of rows that never change their owner."""
KEPT_CALLS = 32
"""A row is its key's for so many look-ups at least, so that the gradient of a batch under way comes to its own row."""
PARTS: Mapping[str, torch.dtype] = {
    "key": torch.int64,
    "seen": torch.int64,
    "count": torch.int32,
    "candidate": torch.int32,
}
"""What is kept of each row: whose it is, the sample at which it was looked up last, how often it was (at most once a
batch), and a key of its set that may get a row: 24 bits of its hash, and its look-ups."""
KEY_BYTES = sum(dtype.itemsize for dtype in PARTS.values())
_MOST = 255  # look-ups of a candidate
_SETTLED = 1 << 16  # sets looked at together


def sets_of(hashes: Words, sets: Ids | int) -> Ids:
    """Which of a table's sets each key is in."""
    return ((hashes >> np.uint64(32)) * np.asarray(sets).astype(np.uint64) >> np.uint64(32)).view(np.int64)


def _first_ways(hashes: Words) -> Ids:
    """Which row of its set a key gets if it can choose, and is looked for first."""
    return (hashes & np.uint64(WAYS - 1)).view(np.int64)


def drops_keys(table: Table) -> bool:
    """Keys without a row look up nothing, instead of the row that they share."""
    return table.ids is not None and table.ids.unadmitted == "zeros"


def parts_of(shards: Sequence[Shard]) -> list[tuple[int, torch.dtype]]:
    """Elements and type of what is allocated beside the rows of these shards."""
    rows = sum(shard.rows for shard in shards if shard.table.ids is not None)
    return [*((rows, dtype) for dtype in PARTS.values()), (len(fields(Counts)) + 1, torch.int64)] if rows else []


@dataclass(frozen=True)
class KeyRules:
    """What all that change the keys of a server have in common.

    Attributes:
        seed: of new rows.
        kept_calls: a row is its key's for so many batches at least after it was looked up, or `KEPT_CALLS`.
    """

    seed: int = 0
    kept_calls: int = 0


USUAL_RULES = KeyRules()


@dataclass(frozen=True)
class Counts:
    """Of a server's dynamic rows: how many there are, and how many have an owner; and since its start, keys that got
    one, that found none free, and that lost theirs to another or to time."""

    rows: int
    keys: int
    admitted: int
    refused: int
    evicted: int

    def plus(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, own.name) + getattr(other, own.name) for own in fields(self)))


class Wanted(Meta, frozen=True):
    """Keys of a server's shards that look rows up.

    Attributes:
        shards: positions of shards, a run of keys for each.
        counts: keys of each run.
        keys: int64 `[L]`.
        samples: of the batch in training, so that keys are admitted; 0 changes nothing.
    """

    shards: tuple[int, ...]
    counts: tuple[int, ...]
    keys: Tensor
    samples: int = 0


class KeyIndex:
    """The owners of the rows of a server's dynamic shards.

    Any number of threads and processes may `find` at once, lock-free. New owners are written one at a time, the row
    before its owner, so that whoever is killed meanwhile leaves a row free or its key's, and no key has two. A look-up
    that runs into a change of owner may read the old one: then one gradient is learnt by another key's row, as any
    Hogwild worker's may be overwritten.

    Args:
        state: live views of all shards, whose rows have these `numbers`.
        rules: of the job.
        singly: what one thread of all processes is in at a time, and nobody who copies rows.
        changing: called with the numbers of rows, ascending, that are about to change.
        written: called with a shard's position and rows of it that were written.

    Attributes:
        tensors: `PARTS` of each shard, by its position; none of those that are not dynamic.
    """

    def __init__(
        self,
        state: Sequence[Rows],
        numbers: RowNumbers,
        rules: KeyRules,
        allocate: Allocate,
        singly: Callable[[], AbstractContextManager[None]],
        changing: Callable[[Tensor], None],
        written: Callable[[int, Tensor], None],
    ) -> None:
        self._seed, self._kept_calls = rules.seed, max(KEPT_CALLS, rules.kept_calls)
        self._state, self._numbers, self._singly = state, numbers, singly
        self._changing, self._written = changing, written
        self._mine = [index for index, own in enumerate(state) if own.table.ids is not None]
        rows = [state[index].stop - state[index].start for index in self._mine]
        *flat, totals = (allocate(*part) for part in parts_of([Shard(own.table, own.start, own.stop) for own in state]))
        self._flat = dict(zip(PARTS, flat, strict=True))
        # the sample it is; owners but for those that came and went since; as `Counts`; samples of the largest batch
        self._totals = totals.numpy()
        starts = [0, *accumulate(rows)]
        self.tensors: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(state))}
        for index, (start, stop) in zip(self._mine, pairwise(starts), strict=True):
            self.tensors[index] = {name: flat[start:stop] for name, flat in self._flat.items()}
        self._sets = {name: flat.numpy().reshape(-1, WAYS) for name, flat in self._flat.items()}
        tables = [state[index].table for index in self._mine]
        self._place = {index: place for place, index in enumerate(self._mine)}
        self._salts = np.array([salt_of(table.name) for table in tables], dtype=np.uint64)
        self._of_table = np.array([table.rows // WAYS for table in tables], dtype=np.int64)
        self._first = np.array([start // WAYS for start in starts], dtype=np.int64)  # sets of each, in `_sets`
        before = np.array([state[index].start // WAYS for index in self._mine], dtype=np.int64)
        self._shift = self._first[:-1] - before
        self._options = [options for table in tables if (options := table.ids) is not None]
        self._evictions = [choose("evict", o.evict, "shadowsync.embedding", Eviction)() for o in self._options]
        self._ttl = np.array([o.ttl or KEPT for o in self._options], dtype=np.int64)
        self._ages = any(o.ttl is not None for o in self._options)
        self._alike = np.array([self._options.index(o) for o in self._options], dtype=np.int64)
        self._pinned = [np.sort(np.array(o.pinned, dtype=np.int64)) for o in self._options]
        self._random = np.random.default_rng(rules.seed)
        if self._take_defaults():  # not where other processes are at work
            self.recount()

    def _take_defaults(self) -> bool:
        """The row that keys without one share is taken, where it is here; whether it was not."""
        first = [self.tensors[index] for index in self._mine if self._state[index].start == 0]
        free = [own for own in first if own["key"][0] != DEFAULT ^ NOBODY or own["count"][0] != PINNED]
        for own in free:
            own["count"][0], own["key"][0] = PINNED, DEFAULT ^ NOBODY
        return bool(free)

    def reset(self) -> None:
        """No row has an owner, as at the start."""
        for flat in self._flat.values():
            flat.zero_()
        self._take_defaults()
        self.recount()

    @property
    def counts(self) -> Counts:
        _, before, admitted, refused, evicted, _ = self._totals.tolist()
        return Counts(len(self._flat["key"]), before + admitted - evicted, admitted, refused, evicted)

    def go_on_from(self, before: Counts) -> None:
        """Counts what came and went from there on, as the one whose keys these were until now."""
        self._totals[0] = max(self._totals[0], int(self._flat["seen"].max()))
        self._totals[2:5] = before.admitted, before.refused, before.evicted
        self.recount()

    def recount(self) -> None:
        """How many rows have owners; nobody else changes rows meanwhile."""
        self._totals[1] = torch.count_nonzero(self._flat["key"]) - self._totals[2] + self._totals[4]

    def find(self, wanted: Wanted) -> Tensor:
        """The row of each key, counted from the start of its shard, int64 `[L]`; −1 where it has none.

        In training, keys that have none get one where the options of their table allow it.

        Raises:
            DataError: the shards have no keys, or these keys are not theirs.
        """
        keys, places, sets, hashes = self._sought(wanted)
        rows = self._at(keys, sets, hashes)
        if wanted.samples:
            self._totals[0] += wanted.samples
            self._totals[5] = max(self._totals[5], wanted.samples)
            expired = self._seen(rows, places)
            missing = np.flatnonzero((rows < 0) | expired)
            if len(missing):
                self._admit(keys[missing], places[missing], sets[missing], hashes[missing])
                rows[missing] = self._at(keys[missing], sets[missing], hashes[missing])
                rows[expired & self._too_old(rows, places)] = -1  # their keys got none
        return torch.from_numpy(np.where(rows < 0, -1, rows - self._first[places] * WAYS))

    def _sought(self, wanted: Wanted) -> tuple[Ids, Ids, Ids, Words]:
        """Keys as they are kept, the place of each one's shard, its set and its hash."""
        if any(shard not in self._place for shard in wanted.shards) or len(wanted.shards) != len(wanted.counts):
            raise DataError(f"rows by key are asked for in shards {wanted.shards}, which have none")
        keys = wanted.keys
        if (
            keys.dtype != torch.int64
            or keys.dim() != 1
            or min(wanted.counts, default=0) < 0
            or (sum(wanted.counts) != len(keys) or wanted.samples < 0)
        ):
            raise DataError(f"keys are int64 [{sum(wanted.counts)}], not {keys.dtype} {list(keys.shape)}")
        places = np.array([self._place[shard] for shard in wanted.shards], dtype=np.int64).repeat(wanted.counts)
        folded: Ids = np.maximum(keys.numpy(), LOWEST)
        hashes = hashes_of(folded, self._salts[places])
        sets: Ids = sets_of(hashes, self._of_table[places]) + self._shift[places]
        if ((sets < self._first[places]) | (sets >= self._first[places + 1])).any():
            raise DataError("keys are asked for at a shard that does not have their rows")
        return folded ^ NOBODY, places, sets, hashes

    def _at(self, keys: Ids, sets: Ids, hashes: Words) -> Ids:
        """The row of each key among all dynamic rows; −1 where it has none."""
        rows = sets * WAYS + _first_ways(hashes)
        others = np.flatnonzero(self._flat["key"].numpy()[rows] != keys)
        if len(others):
            rows[others] = -1
            hits = np.flatnonzero(self._sets["key"].take(sets[others], axis=0) == keys[others, None])
            rows[others[hits // WAYS]] = sets[others[hits // WAYS]] * WAYS + hits % WAYS
        return rows

    def _seen(self, rows: Ids, places: Ids) -> Mask:
        """Takes note of a look-up of these rows; which of their keys had been there for too long, `[L]`."""
        seen, count, now = self._flat["seen"].numpy(), self._flat["count"].numpy(), self._totals[0]
        expired = self._too_old(rows, places)
        known = rows[(rows >= 0) & ~expired]
        seen[known] = now
        before = count[known]
        count[known] = before + (before < PINNED - 1)  # once for a row, however often it is in the batch
        return expired

    def _too_old(self, rows: Ids, places: Ids) -> Mask:
        """Which of these rows was not looked up for longer than its key may keep it, `[L]`."""
        if not self._ages:
            return np.zeros(len(rows), dtype=np.bool_)
        seen, count = self._flat["seen"].numpy()[rows], self._flat["count"].numpy()[rows]
        old: Mask = (rows >= 0) & (self._totals[0] - seen > self._ttl[places]) & (count != PINNED)
        return old

    # --- new owners --------------------------------------------------------------------------------------------------

    def _admit(self, keys: Ids, places: Ids, sets: Ids, hashes: Words) -> None:
        _, first = np.unique(hashes ^ self._salts[places], return_index=True)  # of tables that hash a key alike, both
        with self._singly():
            while len(first):  # one key of each set at a time
                _, apart = np.unique(sets[first], return_index=True)
                chosen, first = first[apart], np.delete(first, apart)
                for place in np.unique(self._alike[places[chosen]]):
                    own = chosen[self._alike[places[chosen]] == place]
                    self._admit_apart(int(place), keys[own], sets[own], hashes[own])

    def _admit_apart(self, place: int, keys: Ids, sets: Ids, hashes: Words) -> None:
        """Keys of shards with the options of this one, each in another set."""
        options, now = self._options[place], int(self._totals[0])
        owners = self._sets["key"][sets]
        seen = self._sets["seen"][sets]
        pinned = np.isin(keys ^ NOBODY, self._pinned[place])
        old = (now - seen > self._ttl[place]) & (self._sets["count"][sets] != PINNED) & (owners != 0)
        there = (owners == keys[:, None]) & ~old  # another process was quicker
        wanting = ~there.any(1) & (pinned | self._may_enter(options.admit, sets, hashes))
        given = (keys, sets, hashes, owners, seen, old, pinned)
        keys, sets, hashes, owners, seen, old, pinned = (each[wanting] for each in given)
        if not len(keys):
            return
        counts = self._sets["count"][sets].astype(np.int64)
        eviction = self._evictions[place]
        rank = eviction.rank(counts, seen)
        rank = np.where((counts == PINNED) | (now - seen <= self._kept_calls * self._totals[5]), KEPT, rank)
        rank = np.where((owners == 0) | old, -1, rank)
        rank = np.where((rank == -1) & (np.arange(WAYS) == _first_ways(hashes)[:, None]), -2, rank)
        rank = np.where(owners == keys[:, None], -3, rank)  # its own, which was too old
        way = rank.argmin(1)
        each = np.arange(len(keys))
        room = rank[each, way] < KEPT
        self._totals[3] += len(room) - room.sum()
        keys, sets, way, pinned, each = keys[room], sets[room], way[room], pinned[room], each[room]
        gone = owners[each, way] != 0
        self._totals[4] += gone.sum()
        self._totals[2] += len(keys)
        before = np.where(gone & ~old[each, way], counts[each, way], 0)
        first = np.where(before > 0, np.minimum(eviction.first_count(before), PINNED - 1), 1)
        self._give(sets * WAYS + way, keys, np.where(pinned, PINNED, first), now)

    def _may_enter(self, admit: float, sets: Ids, hashes: Words) -> Mask:
        """Which keys, each of another set, have been looked up often enough, or are lucky, `[K]`."""
        if admit < 1:
            return self._random.random(len(sets)) < admit
        if admit == 1:
            return np.ones(len(sets), dtype=np.bool_)
        candidates = self._sets["candidate"]
        held = candidates[sets].astype(np.int64)
        mark = (hashes & np.uint64(0x7FFFFF)).astype(np.int64) << 8  # 23 bits: the number is not negative
        same = (held >> 8 << 8 == mark[:, None]) & (held & _MOST > 0)
        known = same.any(1)
        # a new candidate takes the place of the one that came least often; of several any, by its hash
        way = np.arange(WAYS)
        ranks = (held & _MOST) * WAYS + (way - (mark >> 8)[:, None]) % WAYS
        chosen = np.where(known, same.argmax(1), ranks.argmin(1))
        times = np.where(known, held[np.arange(len(sets)), chosen] & _MOST, 0) + 1
        enters = times >= admit
        candidates[sets, chosen] = np.where(enters, 0, mark | np.minimum(times, _MOST)).astype(np.int32)
        return np.asarray(enters)

    def _give(self, rows: Ids, keys: Ids, counts: Ids, now: int) -> None:
        """Rows, by their numbers among all dynamic ones, to new owners, anew."""
        order = np.argsort(rows)
        rows, keys, counts = rows[order], keys[order], counts[order]
        edges = np.searchsorted(rows, self._first * WAYS)
        parts = [(place, slice(edges[place], edges[place + 1])) for place in np.flatnonzero(np.diff(edges)).tolist()]
        for place, part in parts:
            local = torch.from_numpy(rows[part] - self._first[place] * WAYS)
            self._changing(local + self._numbers.starts[self._mine[place]])
        owner = self._flat["key"].numpy()
        owner[rows] = 0
        for place, part in parts:
            self._begin_anew(place, rows[part] - self._first[place] * WAYS, keys[part] ^ NOBODY)
        self._flat["count"].numpy()[rows] = counts
        self._flat["seen"].numpy()[rows] = now
        owner[rows] = keys

    def _begin_anew(self, place: int, rows: Ids, keys: Ids) -> None:
        """Rows of a shard are as of keys that nobody has trained."""
        own, at = self._state[self._mine[place]], torch.from_numpy(rows)
        own.tensors["weight"].index_copy_(0, at, torch.from_numpy(initial_rows(own.table, keys, self._seed)))
        for name, tensor in own.tensors.items():
            if name not in ("weight", *PARTS) and len(tensor) == own.stop - own.start:
                tensor.index_fill_(0, at, 0)
        self._written(self._mine[place], at)

    # --- after rows were loaded --------------------------------------------------------------------------------------

    @contextmanager
    def loading(self, shard: int, start: int, stop: int) -> Iterator[None]:
        """Within it rows `start … stop − 1` of the table of the shard at that position are overwritten with those of a
        checkpoint, and nobody else changes rows.

        Afterwards time goes on from there; of a key that has two rows, as rows are copied at different moments, the one
        looked up last is its own; and those keys are pinned that the table says now.
        """
        own = self._state[shard]
        start, stop = max(start, own.start) - own.start, min(stop, own.stop) - own.start
        if shard not in self._place or start >= stop:
            yield
            return
        first = self._first[self._place[shard]]
        begin, end = first + start // WAYS, first - (-stop // WAYS)
        owners = self._flat["key"][begin * WAYS : end * WAYS]
        before = torch.count_nonzero(owners)
        yield
        self._totals[0] = max(self._totals[0], int(self.tensors[shard]["seen"][start:stop].max()))
        self._settle(begin, end)
        self._pin(self._place[shard], begin * WAYS, end * WAYS)
        self._take_defaults()
        self._totals[1] += torch.count_nonzero(owners) - before

    def _pin(self, place: int, begin: int, end: int) -> None:
        """Keys of a shard's rows from `begin` to `end` are pinned as its table says."""
        keys, count = self._flat["key"].numpy()[begin:end] ^ NOBODY, self._flat["count"].numpy()[begin:end]
        pinned = np.isin(keys, self._pinned[place])
        count[(count == PINNED) & ~pinned & (keys != DEFAULT)] = PINNED - 1
        count[pinned] = PINNED

    def _settle(self, begin: int, end: int) -> None:
        """No key of these sets has two rows."""
        for first in range(begin, end, _SETTLED):
            owners = self._sets["key"][first : min(first + _SETTLED, end)]
            order = np.lexsort((self._sets["seen"][first : first + len(owners)], owners), axis=1)
            ranked = np.take_along_axis(owners, order, 1)
            double = np.zeros(owners.shape, dtype=np.bool_)
            double[:, :-1] = (ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] != 0)
            if double.any():
                sets, at = double.nonzero()
                self._sets["key"][first + sets, order[sets, at]] = 0


def new_rows(table: Table, keys: Ids, counts: Ids) -> Ids:
    """Which row of a dynamic table each of so many distinct keys gets, `[K]`, with as many look-ups each as they had:
    of too many for a set those with the most; −1 for the others, and for `NOBODY`."""
    rows = np.full(len(keys), -1, dtype=np.int64)
    rows[keys == DEFAULT] = 0
    given = np.flatnonzero(keys >= LOWEST)
    sets = sets_of(hashes_of(keys[given], salt_of(table.name)), table.rows // WAYS)
    order = np.lexsort((-counts[given], sets))
    given, sets = given[order], sets[order]
    ways = np.arange(len(sets)) - np.searchsorted(sets, sets) + (sets == 0)  # the first row is nobody's own
    room = ways < WAYS
    rows[given[room]] = sets[room] * WAYS + ways[room]
    return rows
