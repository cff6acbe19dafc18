"""Dynamic tables: which row of a table a key has, as long as it has one.

The rows of a table are cut into sets of `WAYS`, and a key's hash names the only set that its row may be in, as in the
caches of processors. So there is no index beside the rows: each row says whose it is, a look-up reads one set, rows
move between servers and checkpoints as any others, and nothing has to be built anew after a crash. The price: a set may
be full while others are not. With as many keys as rows 10 % of the keys would be one too many for theirs, with 80 % as
many 2 %, with half as many 0.02 % (of balls thrown at random); those compete as all do in a table that is full.

Keys that have no row are told apart (`waiting`). The first look-up of each goes to row 0 of the table, which all of
them train: what to expect of a key that is new. From then on a key shares a row of its set with others, by its hash as
in a table that hashes. A set begins with one such row. The row of a key becomes another, beginning as the one whose
keys it takes over, when those that are shared are looked up twice as often, and goes back to a key that comes twice as
often as they do.

`L` keys looked up, `K` new ones, `R` rows, `W` rows of a set.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shadowsync.config import seconds_of
from shadowsync.embedding.eviction import KEPT, Eviction
from shadowsync.embedding.initial import bound_of, drawn_rows, hashes_of, salt_of, salt_of_rows
from shadowsync.embedding.storage import Storage
from shadowsync.embedding.table import WAYS, RowNumbers, Rows, Shard, Table
from shadowsync.embedding.waiting import Waiting
from shadowsync.errors import DataError
from shadowsync.memory.shared import Allocate
from shadowsync.registry import choose
from shadowsync.rpc.connection import Meta
from shadowsync.serving import Ids, Mask, Words

NOBODY = -(1 << 63)
"""No key: rows without an owner have it. Kept exclusive-or itself, so that new memory, all zero, is of free rows."""
DEFAULT = NOBODY + 1
"""Owner of rows that keys without one share."""
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
    "time": torch.int32,
    "candidate": torch.int32,
    "door": torch.int32,
}
"""What is kept of each row: whose it is, the sample at which it was looked up last, how often it was (at most once a
batch), the minute at which it was by the data, if that is known, and a part of what is known of the keys that wait for
a row of its set (`waiting.Waiting`). In memory they lie beside one another in this order, which look-ups count on: the
key first, wide ones before narrow ones, all together a multiple of 8 bytes."""
OF_SETS = frozenset(("candidate", "door"))
"""Of the set that a row is in, and not of the key whose it is."""
KEY_BYTES = sum(dtype.itemsize for dtype in PARTS.values())
HALVED = 100
"""How often a key was looked up counts half once it was not, for so many samples for each row of its table."""
CROWDED = 2
"""A row goes from a key to those that share rows of its set, or back, where it is looked up so many times as often."""
_DEFAULT = DEFAULT ^ NOBODY  # as it is kept
_SHARED = WAYS - 2  # rows of a set that are shared at most
# the sample it is; owners but for those that came and went since; as `Counts`; samples of the largest batch; the minute
_TOTALS = _SAMPLE, _BEFORE, _ADMITTED, _REFUSED, _EVICTED, _LARGEST, _MINUTE = range(7)
_SETTLED = 1 << 16  # sets looked at together


def sets_of(hashes: Words, sets: Words | Ids | int) -> Ids:
    """Which of a table's sets each key is in."""
    return ((hashes >> np.uint64(32)) * np.asarray(sets).astype(np.uint64, copy=False) >> np.uint64(32)).view(np.int64)


def _first_ways(hashes: Words) -> Ids:
    """Which row of its set a key gets if it can choose, and is looked for first; and if it has none, it shares the
    first from there on that is shared, around the end."""
    return (hashes & np.uint64(WAYS - 1)).view(np.int64)


def drops_keys(table: Table) -> bool:
    """Keys without a row look up nothing, instead of rows that they share."""
    return table.ids is not None and table.ids.unadmitted == "zeros"


def parts_of(shards: Sequence[Shard]) -> list[tuple[int, torch.dtype]]:
    """Elements and type of what is allocated beside the rows of these shards."""
    rows = sum(shard.rows for shard in shards if shard.table.ids is not None)
    return [(rows * KEY_BYTES, torch.uint8), (len(_TOTALS), torch.int64)] if rows else []


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
        minute: since 1970 at which it was by the data; 0 if that is not known.
    """

    shards: tuple[int, ...]
    counts: tuple[int, ...]
    keys: Tensor
    samples: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)] = 0
    minute: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0


@dataclass(frozen=True)
class _Tables:
    """Of the table of each key `[L]`: its place among the dynamic shards, its salt, its sets, and how far those of its
    shard are moved in `KeyIndex`."""

    places: Ids
    salts: Words
    sets: Words
    shift: Ids


class Clock(Meta, frozen=True):
    """How late it is: samples of training that looked keys up, and the latest minute since 1970 of a batch."""

    samples: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    minutes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0


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
        storage: of the rows, whose state is written to.

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
        storage: Storage,
    ) -> None:
        self._kept_calls = max(KEPT_CALLS, rules.kept_calls)
        self._state, self._numbers, self._singly = state, numbers, singly
        self._changing, self._storage = changing, storage
        self._mine = [index for index, own in enumerate(state) if own.table.ids is not None]
        rows = [state[index].stop - state[index].start for index in self._mine]
        shards = [Shard(own.table, own.start, own.stop) for own in state]
        records, totals = (allocate(*part) for part in parts_of(shards))
        self._flat = _columns(records.view(-1, KEY_BYTES))
        self._records = records.numpy().view(np.int64).reshape(-1, WAYS * KEY_BYTES // 8)
        self._totals = totals.numpy()
        starts = [0, *accumulate(rows)]
        self.tensors: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(state))}
        for index, (start, stop) in zip(self._mine, pairwise(starts), strict=True):
            self.tensors[index] = {name: flat[start:stop] for name, flat in self._flat.items()}
        self._sets = {name: flat.numpy().reshape(-1, WAYS) for name, flat in self._flat.items()}
        tables = [state[index].table for index in self._mine]
        self._of_rows = [
            [name for name, tensor in state[index].tensors.items() if len(tensor) == count]
            for index, count in zip(self._mine, rows, strict=True)
        ]
        self._place = {index: place for place, index in enumerate(self._mine)}
        self._salts = np.array([salt_of(table.name) for table in tables], dtype=np.uint64)
        self._salts_of_rows = np.array([salt_of_rows(table, rules.seed) for table in tables], dtype=np.uint64)
        self._dims = np.array([table.dim for table in tables], dtype=np.int64)
        self._bounds = np.array([bound_of(table) for table in tables], dtype=np.float32)
        self._of_table = np.array([table.rows // WAYS for table in tables], dtype=np.int64)
        self._halved = HALVED * WAYS * self._of_table
        self._shortest = self._halved.min(initial=KEPT)
        self._whole = all(shard.rows == shard.table.rows for shard in shards)
        self._laid_out = lru_cache(4)(self._tables_of)  # alike for each batch where a feature has as many ids in each
        self._first = np.array([start // WAYS for start in starts], dtype=np.int64)  # sets of each, in `_sets`
        before = np.array([state[index].start // WAYS for index in self._mine], dtype=np.int64)
        self._shift = self._first[:-1] - before
        self._options = [options for table in tables if (options := table.ids) is not None]
        self._evictions = [choose("evict", o.evict, "shadowsync.embedding", Eviction)() for o in self._options]
        ttls = [o.ttl for o in self._options]
        self._ttl = np.array([ttl if isinstance(ttl, int) else KEPT for ttl in ttls], dtype=np.int64)
        self._minutes = np.array([seconds_of(ttl) / 60 if isinstance(ttl, str) else KEPT for ttl in ttls])
        self._ages = any(o.ttl is not None for o in self._options)
        self._drops = np.array([drops_keys(table) for table in tables], dtype=np.bool_)
        self._waiting = Waiting(self._sets["candidate"], self._sets["door"])
        self._alike = np.array([self._options.index(o) for o in self._options], dtype=np.int64)
        self._pinned = [np.sort(np.array(o.pinned, dtype=np.int64)) for o in self._options]
        self._random = np.random.default_rng(rules.seed)
        if self._take_all_defaults():  # not where other processes are at work
            self.recount()

    def _take_defaults(self, place: int, begin: int, end: int) -> bool:
        """Each of these sets of a shard has a row that keys without one share, or, where they look up nothing, none;
        whether one had to be told."""
        owners = self._sets["key"][begin:end]
        shared = owners == _DEFAULT
        if self._drops[place]:
            owners[shared] = 0
            return bool(shared.any())
        without = np.flatnonzero(~shared.any(1))
        self._sets["count"][begin + without, 0] = 0
        owners[without, 0] = _DEFAULT
        return bool(len(without))

    def _take_all_defaults(self) -> bool:
        spans = enumerate(pairwise(self._first.tolist()))
        told = [self._take_defaults(place, *span) for place, span in spans]
        return any(told)

    def reset(self) -> None:
        """No row has an owner, as at the start."""
        for flat in self._flat.values():
            flat.zero_()
        self._take_all_defaults()
        self.recount()

    @property
    def counts(self) -> Counts:
        before, admitted, refused, evicted = self._totals[_BEFORE:_LARGEST].tolist()
        return Counts(len(self._flat["key"]), before + admitted - evicted, admitted, refused, evicted)

    def catch_up(self, clock: Clock) -> Clock:
        """It is so late at least; how late it is."""
        self._totals[_SAMPLE] = max(int(self._totals[_SAMPLE]), clock.samples)
        self._totals[_MINUTE] = max(int(self._totals[_MINUTE]), clock.minutes)
        return Clock(int(self._totals[_SAMPLE]), int(self._totals[_MINUTE]))

    def go_on_from(self, before: Counts) -> None:
        """Counts what came and went from there on, as the one whose keys these were until now."""
        self.catch_up(Clock(int(self._flat["seen"].max()), int(self._flat["time"].max())))
        self._totals[_ADMITTED:_LARGEST] = before.admitted, before.refused, before.evicted
        self.recount()

    def recount(self) -> None:
        """How many rows have owners; nobody else changes rows meanwhile."""
        self._totals[_BEFORE] = _owned(self._flat["key"]) - self._totals[_ADMITTED] + self._totals[_EVICTED]

    def find(self, wanted: Wanted) -> Tensor:
        """The row of each key, counted from the start of its shard, int64 `[L]`: its own, or one that it shares; −1 for
        a key that was not looked up before, or looks up nothing without a row.

        In training, keys that have none get one where the options of their table allow it.

        Raises:
            DataError: the shards have no keys, or these keys are not theirs.
        """
        keys, places, sets, hashes = self._sought(wanted)
        rows = self._at(keys, sets, hashes)
        missing = rows < 0
        if wanted.samples:
            self._totals[_SAMPLE] += wanted.samples
            self._totals[_LARGEST] = max(self._totals[_LARGEST], wanted.samples)
            self._totals[_MINUTE] = max(self._totals[_MINUTE], wanted.minute)
            expired = self._seen(rows, places)
            missing |= expired
        at = np.flatnonzero(missing)
        if len(at):
            keys, places_of, sets, hashes = keys[at], places[at], sets[at], hashes[at]
            known = self._waiting.knows(sets, hashes)
            if wanted.samples:
                self._admit(keys, places_of, sets, hashes, known)
                found = self._at(keys, sets, hashes)
                found[expired[at] & self._too_old(found, places_of)] = -1  # their keys got none
                rows[at] = found
            sharing = np.flatnonzero((rows[at] < 0) & known)
            rows[at[sharing]] = self._shared(sets[sharing], _first_ways(hashes[sharing]))
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
        of = self._laid_out(wanted.shards, wanted.counts)
        folded: Ids = np.maximum(keys.numpy(), LOWEST)
        hashes = hashes_of(folded, of.salts)
        sets: Ids = sets_of(hashes, of.sets)
        sets += of.shift
        if not self._whole and ((sets < self._first[of.places]) | (sets >= self._first[of.places + 1])).any():
            raise DataError("keys are asked for at a shard that does not have their rows")
        return folded ^ NOBODY, of.places, sets, hashes

    def _tables_of(self, shards: tuple[int, ...], counts: tuple[int, ...]) -> _Tables:
        places = np.array([self._place[shard] for shard in shards], dtype=np.int64).repeat(counts)
        return _Tables(places, self._salts[places], self._of_table[places].view(np.uint64), self._shift[places])

    def _at(self, keys: Ids, sets: Ids, hashes: Words) -> Ids:
        """The row of each key among all dynamic rows; −1 where it has none."""
        rows = sets * WAYS + _first_ways(hashes)
        others = np.flatnonzero(self._flat["key"].numpy()[rows] != keys)
        if len(others):
            rows[others] = -1
            hits = np.flatnonzero(self._keys_of(sets[others]) == keys[others, None])
            rows[others[hits // WAYS]] = sets[others[hits // WAYS]] * WAYS + hits % WAYS
        return rows

    def _keys_of(self, sets: Ids) -> Ids:
        """Of all rows of these sets, int64 `[K, W]`; much faster than from the column of keys."""
        return self._records.take(sets, axis=0)[:, :: KEY_BYTES // 8]

    def _shared(self, sets: Ids, ways: Ids) -> Ids:
        """The row that is shared, in these sets from these ways on, among all dynamic rows; −1 where none is."""
        shared = self._keys_of(sets) == _DEFAULT
        way = np.where(shared, (np.arange(WAYS) - ways[:, None]) % WAYS, WAYS).argmin(1)
        return np.where(shared.any(1), sets * WAYS + way, -1)

    def _seen(self, rows: Ids, places: Ids) -> Mask:
        """Takes note of a look-up of these rows; which of their keys had been there for too long, `[L]`."""
        seen, count, now = self._flat["seen"].numpy(), self._flat["count"].numpy(), self._totals[_SAMPLE]
        expired = self._too_old(rows, places)
        theirs = rows >= 0
        if self._ages:
            theirs &= ~expired
        known, their_places = (rows, places) if theirs.all() else (rows[theirs], places[theirs])
        before, last = count[known], seen[known]
        if now - last.min(initial=now) >= self._shortest:
            before = self._aged(before, now - last, their_places)
        seen[known] = now
        if self._totals[_MINUTE]:
            self._flat["time"].numpy()[known] = self._totals[_MINUTE]
        count[known] = before + (before < PINNED - 1)  # once for a row, however often it is in the batch
        return expired

    def _aged(self, counts: NDArray[np.int32], idle: Ids, places: Ids) -> NDArray[np.int32]:
        """How often keys were looked up, halved for those that were not for long."""
        halvings = np.clip(idle // self._halved[places], 0, 31).astype(np.int32)  # another may have been here since
        return np.where(counts == PINNED, counts, counts >> halvings)

    def _too_old(self, rows: Ids, places: Ids) -> Mask:
        """Which of these rows was not looked up for longer than its key may keep it, `[L]`."""
        if not self._ages:
            return np.zeros(rows.shape, dtype=np.bool_)
        seen, time, count = (self._flat[name].numpy()[rows] for name in ("seen", "time", "count"))
        old: Mask = self._totals[_SAMPLE] - seen > self._ttl[places]
        old |= (time > 0) & (self._totals[_MINUTE] - time > self._minutes[places])
        old &= (rows >= 0) & (count != PINNED)
        return old

    def _under_way(self, seen: Ids) -> Mask:
        """Rows that were looked up then may be in batches that are under way."""
        recent: Mask = self._totals[_SAMPLE] - seen <= self._kept_calls * self._totals[_LARGEST]
        return recent

    # --- new owners --------------------------------------------------------------------------------------------------

    def _admit(self, keys: Ids, places: Ids, sets: Ids, hashes: Words, known: Mask) -> None:
        _, first = np.unique(hashes ^ self._salts[places], return_index=True)  # of tables that hash a key alike, both
        with self._singly():
            while len(first):  # one key of each set at a time
                _, apart = np.unique(sets[first], return_index=True)
                chosen, first = first[apart], np.delete(first, apart)
                for place in np.unique(self._alike[places[chosen]]):
                    own = chosen[self._alike[places[chosen]] == place]
                    self._admit_apart(places[own], keys[own], sets[own], hashes[own], known[own])

    def _admit_apart(self, places: Ids, keys: Ids, sets: Ids, hashes: Words, known: Mask) -> None:
        """Keys of shards with the same options, each in another set."""
        place, now = int(places[0]), int(self._totals[_SAMPLE])
        pinned, times = np.isin(keys ^ NOBODY, self._pinned[place]), self._waiting.count(sets, hashes, known)
        wanting = np.flatnonzero(pinned | self._may_enter(self._options[place].admit, times))
        places, keys, sets, hashes = places[wanting], keys[wanting], sets[wanting], hashes[wanting]
        owners = self._sets["key"][sets]
        mine, rows = owners == keys[:, None], sets[:, None] * WAYS + np.arange(WAYS)
        late = self._too_old(rows, places[:, None]) & (owners != 0) & (owners != _DEFAULT)
        there = (mine & ~late).any(1)  # another process was quicker
        if there.any():
            left = ~there
            places, keys, sets, hashes, wanting = (each[left] for each in (places, keys, sets, hashes, wanting))
            owners, mine, late = owners[left], mine[left], late[left]
        pinned, times = pinned[wanting], times[wanting]
        each, ways = np.arange(len(keys)), _first_ways(hashes)
        free = mine | (owners == 0)  # its own, which it has outlived, and those that are nobody's
        if self._ages:
            free |= late & ~self._under_way(self._sets["seen"][sets])
        way = np.where(free[each, ways], ways, free.argmax(1))
        way = np.where(mine.any(1), mine.argmax(1), way)
        takes, crowded = free.any(1), np.zeros(len(keys), dtype=np.bool_)
        full = np.flatnonzero(~takes)
        if len(full):
            way[full], takes[full], crowded[full] = self._contest(places[full], sets[full], pinned[full], times[full])
        self._refuse(places[~takes], sets[~takes], ways[~takes], now)
        changed = takes | crowded
        self._totals[_ADMITTED] += takes.sum()
        before = owners[each, way]
        self._totals[_EVICTED] += (changed & (before != 0) & (before != _DEFAULT)).sum()
        self._waiting.remove(sets[takes], hashes[takes])
        counts = np.where(crowded, 0, np.where(pinned, PINNED, times))
        self._give((sets * WAYS + way)[changed], np.where(crowded, _DEFAULT, keys)[changed], counts[changed], now)

    def _contest(self, places: Ids, sets: Ids, pinned: Mask, times: Ids) -> tuple[Ids, Mask, Mask]:
        """Of full sets which row goes next, whether to a key that was looked up so often, and whether to all that share
        rows of the set, `[K]`."""
        eviction, each = self._evictions[int(places[0])], np.arange(len(sets))
        held, seen = self._sets["count"][sets], self._sets["seen"][sets]
        shared, idle = self._sets["key"][sets] == _DEFAULT, self._totals[_SAMPLE] - seen
        counts = self._aged(held, idle, places[:, None]).astype(np.int64)
        rank = eviction.rank(counts, seen)
        rank = np.where((held == PINNED) | shared | self._under_way(seen), KEPT, rank)
        way = rank.argmin(1)
        theirs, goes = counts[each, way], rank[each, way] < KEPT
        takes = goes & (pinned | eviction.yields(theirs, times))
        load, shares = np.where(shared, counts, 0).sum(1), shared.sum(1)
        claim = np.maximum(np.where(takes, times, 0), np.maximum(theirs, 1))
        crowded = goes & ~pinned & (shares < _SHARED) & (load > CROWDED * shares * claim)
        takes &= ~crowded
        # a row that is shared goes back to a key that comes much more often than those that share it; never the first
        back = ~takes & ~crowded & (shares > 1) & (pinned | (times * shares > CROWDED * load))
        least = np.where(shared & (np.arange(WAYS) > 0), counts, KEPT).argmin(1)
        return np.where(back, least, way), takes | back, crowded

    def _refuse(self, places: Ids, sets: Ids, ways: Ids, now: int) -> None:
        """Keys, each of another set, have no row of their own, and look up the one that they share."""
        self._totals[_REFUSED] += len(sets)
        if len(sets) and not self._drops[places[0]]:
            rows, (seen, count) = self._shared(sets, ways), (self._flat[name].numpy() for name in ("seen", "count"))
            since = np.maximum(now - seen[rows], 0)
            count[rows] = self._aged(count[rows], since, places) + 1
            seen[rows] += since - since % self._halved[places]  # when they were halved last: idle they never are

    def _may_enter(self, admit: float, times: Ids) -> Mask:
        """Which keys have been looked up often enough, or are lucky, `[K]`."""
        return self._random.random(len(times)) < admit if admit < 1 else times >= admit

    def _give(self, rows: Ids, keys: Ids, counts: Ids, now: int) -> None:
        """Rows, by their numbers among all dynamic ones, to new owners, anew."""
        order = np.argsort(rows)
        rows, keys, counts = rows[order], keys[order], counts[order]
        for place, part in self._pieces(rows):
            self._changing(self._local(place, rows[part]) + self._numbers.starts[self._mine[place]])
        owner, shared = self._flat["key"].numpy(), keys == _DEFAULT
        owner[rows] = 0
        self._begin_anew(rows[~shared], keys[~shared] ^ NOBODY)
        crowded = rows[shared]
        for place, part in self._pieces(crowded):
            self._begin_shared(place, crowded[part])
        self._flat["count"].numpy()[rows] = counts
        self._flat["seen"].numpy()[rows], self._flat["time"].numpy()[rows] = now, self._totals[_MINUTE]
        owner[rows] = keys

    def _pieces(self, rows: Ids) -> list[tuple[int, slice]]:
        """Places of the shards that these rows are of, ascending, and which of them are."""
        edges = np.searchsorted(rows, self._first * WAYS)
        return [(place, slice(edges[place], edges[place + 1])) for place in np.flatnonzero(np.diff(edges)).tolist()]

    def _local(self, place: int, rows: Ids) -> Tensor:
        """Rows of a shard, counted from its start."""
        return torch.from_numpy(rows - self._first[place] * WAYS)

    def _begin_anew(self, rows: Ids, keys: Ids) -> None:
        """Rows, ascending, are as of keys that nobody has trained."""
        places = np.searchsorted(self._first * WAYS, rows, side="right") - 1
        for dim in np.unique(self._dims[places]).tolist():
            alike = np.flatnonzero(self._dims[places] == dim)
            salts, bounds = self._salts_of_rows[places[alike]], self._bounds[places[alike]]
            drawn = torch.from_numpy(drawn_rows(keys[alike], salts, bounds, dim))
            for place, part in self._pieces(rows[alike]):
                tensors, local = self._state[self._mine[place]].tensors, self._local(place, rows[alike[part]])
                tensors["weight"].index_copy_(0, local, drawn[part])
                for name in self._of_rows[place]:
                    if name != "weight":
                        tensors[name].index_fill_(0, local, 0)
                self._storage.written(self._mine[place], local)

    def _begin_shared(self, place: int, rows: Ids) -> None:
        """Rows of a shard are as those that the keys which will share them have shared until now."""
        own, local = self._state[self._mine[place]], self._local(place, rows)
        until_now = self._local(place, self._shared(rows // WAYS, rows % WAYS))
        found = {name: torch.empty_like(own.tensors[name][: len(rows)]) for name in self._of_rows[place]}
        self._storage.copy(self._mine[place], until_now, found)
        for name, values in found.items():
            own.tensors[name].index_copy_(0, local, values)
        self._storage.written(self._mine[place], local)

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
        before = _owned(owners)
        yield
        newest = (int(self.tensors[shard][name][start:stop].max()) for name in ("seen", "time"))
        self.catch_up(Clock(*(max(0, each) for each in newest)))
        self._settle(begin, end)
        self._pin(self._place[shard], begin * WAYS, end * WAYS)
        self._take_defaults(self._place[shard], begin, end)
        self._totals[_BEFORE] += _owned(owners) - before

    def _pin(self, place: int, begin: int, end: int) -> None:
        """Keys of a shard's rows from `begin` to `end` are pinned as its table says."""
        keys, count = self._flat["key"].numpy()[begin:end] ^ NOBODY, self._flat["count"].numpy()[begin:end]
        pinned = np.isin(keys, self._pinned[place])
        count[(count == PINNED) & ~pinned] = PINNED - 1
        count[pinned] = PINNED

    def _settle(self, begin: int, end: int) -> None:
        """No key of these sets has two rows."""
        for first in range(begin, end, _SETTLED):
            owners = self._sets["key"][first : min(first + _SETTLED, end)]
            order = np.lexsort((self._sets["seen"][first : first + len(owners)], owners), axis=1)
            ranked = np.take_along_axis(owners, order, 1)
            double = np.zeros(owners.shape, dtype=np.bool_)
            double[:, :-1] = (ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] != 0) & (ranked[:, 1:] != _DEFAULT)
            if double.any():
                sets, at = double.nonzero()
                self._sets["key"][first + sets, order[sets, at]] = 0


def _columns(records: Tensor) -> dict[str, Tensor]:
    """`PARTS` of rows that lie beside one another, as a look-up wants several of them: uint8 `[R, KEY_BYTES]`."""
    ends = accumulate(dtype.itemsize for dtype in PARTS.values())
    return {
        name: records.view(dtype)[:, end // dtype.itemsize - 1]
        for (name, dtype), end in zip(PARTS.items(), ends, strict=True)
    }


def _owned(owners: Tensor) -> int:
    return int(((owners != 0) & (owners != _DEFAULT)).sum())


def new_rows(table: Table, keys: Ids, counts: Ids) -> Ids:
    """Which row of a dynamic table each of so many distinct keys gets, `[K]`, with as many look-ups each as they had:
    of too many for a set those with the most; −1 for the others, and for `NOBODY`. Of rows that are shared, given in
    their order, the first of each part of them becomes that of the set which has the same part of the hashes."""
    rows = np.full(len(keys), -1, dtype=np.int64)
    sets, reserved = table.rows // WAYS, 0 if drops_keys(table) else 1
    shared = np.flatnonzero(keys == DEFAULT) if reserved else np.empty(0, dtype=np.int64)
    of_set, first = np.unique(shared * sets // max(1, len(keys)), return_index=True)
    rows[shared[first]] = of_set * WAYS
    given = np.flatnonzero(keys >= LOWEST)
    places = sets_of(hashes_of(keys[given], salt_of(table.name)), sets)
    order = np.lexsort((-counts[given], places))
    given, places = given[order], places[order]
    ways = np.arange(len(places)) - np.searchsorted(places, places) + reserved
    room = ways < WAYS
    rows[given[room]] = places[room] * WAYS + ways[room]
    return rows
