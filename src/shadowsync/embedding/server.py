"""The embedding server: a role that holds shards and answers pulls and pushes.

`K` rows, `K_w` of them in tables that are `D_w` wide.
"""

import itertools
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shadowsync.embedding.distinct import SlotGroups, find_distinct
from shadowsync.embedding.keys import USUAL_RULES, Clock, KeyIndex, KeyRules, Wanted
from shadowsync.embedding.keys import Counts as KeyCounts
from shadowsync.embedding.optimizers import Extent, RowOptimizer
from shadowsync.embedding.requests import (
    AnyLookup,
    Lookup,
    RowLookup,
    Shapes,
    bounds_of,
    check_range,
    check_rows,
    check_shape,
    check_single,
)
from shadowsync.embedding.storage import Storage, StorageCounts, copy_rows
from shadowsync.embedding.table import WAYS, RowNumbers, Rows, RowSet, Shard, slots_of
from shadowsync.embedding.watching import RowTracking, RowWatches
from shadowsync.errors import CheckpointError, DataError
from shadowsync.memory.pages import zeros
from shadowsync.memory.push_gate import PushGate
from shadowsync.memory.room import Disk, Room
from shadowsync.memory.shared import FileGate, SharedMemory

CHUNK_BYTES = 16 << 20
"""Copied in one turn; more makes pushes wait longer, less makes a copy wait for more pushes."""


RowSums = tuple[RowLookup, tuple[Tensor, ...]]
"""What one batch, or several together, brings to the rows of a server: those that occur, and the sums of their
gradients, of the form of the answer to their look-up."""


@dataclass(frozen=True)
class RowStep:
    """A global step as embedding servers carry it out, once each by its number.

    Attributes:
        weights: factor of each batch's gradients, by the batch's number; 0 drops them.
        divisor: of the weighted sum of a row's gradients; None takes, for each row, how many of the batches that are
            not dropped contain it.
        below: batches with lower numbers will not be named any more, so what is held of them is forgotten.
    """

    step: int
    weights: Mapping[int, float]
    divisor: float | None
    lr: float
    below: int


def check_step(weights: Mapping[int, float], divisor: float | None, lr: float) -> None:
    """Raises `DataError` for what is no global step; without a divisor each row has its own."""
    if not all(map(math.isfinite, (lr, divisor or 0.0, *weights.values()))) or not (divisor is None or divisor > 0):
        raise DataError(f"weights {weights}, divisor {divisor} and learning rate {lr} make no global step")


def check_batch(number: int) -> None:
    """Raises `DataError` for a number that no batch has under which a gradient is to be held."""
    if number < 0:
        raise DataError(f"a gradient came for batch {number}: they count from 0")


class HeldGradients:
    """Gradients by batch, of one server; any thread may add, one at a time takes."""

    def __init__(self, numbers: RowNumbers) -> None:
        self._numbers = numbers
        self._held: dict[int, list[RowSums]] = {}
        self._below = 0
        self._lock = threading.Lock()

    @property
    def byte_count(self) -> int:
        with self._lock:
            sums = [each for parts in self._held.values() for each in parts]
        return sum(tensor.nbytes for lookup, gradients in sums for tensor in (lookup.rows, *gradients))

    def add(self, number: int, sums: RowSums) -> None:
        """One that will not be named any more is passed over."""
        with self._lock:
            if number >= self._below:
                self._held.setdefault(number, []).append(sums)

    def take(self, step: RowStep) -> RowSums | None:
        """What a step brings to each row, if anything; its batches, and all below, are held no longer."""
        with self._lock:
            named = {number: self._held.pop(number, []) for number in step.weights}
            self._below = max(self._below, step.below)
            for number in [number for number in self._held if number < self._below]:
                del self._held[number]
        # a row that a batch reaches on several ways is in one batch
        joined = {
            n: parts[0] if len(parts) == 1 else self._merged([(p, 1.0) for p in parts], 1.0)
            for n, parts in named.items()
            if parts
        }
        kept = [(sums, step.weights[number]) for number, sums in joined.items() if step.weights[number]]
        return self._merged(kept, step.divisor) if kept else None

    def clear(self) -> None:
        """Forgets everything; the batches will be trained anew."""
        with self._lock:
            self._held.clear()

    def at(self, position: int) -> tuple[int, RowSums] | None:
        """What is held at that position, with the number of its batch; None beyond the last."""
        with self._lock:
            held = ((number, sums) for number, parts in self._held.items() for sums in parts)
            return next(itertools.islice(held, position, None), None) if position >= 0 else None

    def _merged(self, parts: Sequence[tuple[RowSums, float]], divisor: float | None) -> RowSums:
        split = [self._numbers.split(lookup.rows) for (lookup, _), _ in parts]
        rows, gradients = [], []
        for position, width in enumerate(self._numbers.widths):
            keys = torch.cat([by_width[position] for by_width in split])
            own = [(sums[position], weight) for (_, sums), weight in parts]
            vectors = torch.cat([vectors if weight == 1.0 else vectors * weight for vectors, weight in own])
            found = find_distinct(keys.numpy(), self._numbers.total)
            total = found.sum(vectors)
            total /= found.starts.diff()[:, None] if divisor is None else divisor
            rows.append(torch.from_numpy(found.keys) + width.start)
            gradients.append(total)
        shards = tuple(sorted({shard for (lookup, _), _ in parts for shard in lookup.shards}))
        return RowLookup(shards, torch.cat(rows)), tuple(gradients)


class EmbeddingServer:
    """Holds the only copy of its shards; any number of threads may call it at once, without waiting for each other.

    Whoever copies or overwrites rows may do so meanwhile: pushes then wait for a short turn (`PushGate`), pulls never.

    Every id is checked here, so that no request reads or writes memory beyond the rows: what takes a look-up raises
    `DataError` where an id or a row number is outside its shard, or tensors do not fit each other.

    Args:
        seed: of the initial rows; None leaves them zero, for who loads all of them, or as they are in `memory`.
        tracking: which rows are to be saved next; None saves every shard as a whole.
        memory: where the rows are, if other processes of this machine have them, too: each of them has a server of its
            own over the same rows, which outlive them.
        initial: rows, by the key of their shard, that it begins with in place of those of the seed, `[rows, D]`.
        key_rules: of dynamic tables, in all processes that have the memory the same.
        disk: of a storage that has rows on disk.
        moving: follows which rows change while they are copied to another machine; None where they stay.

    Attributes:
        watches: know which rows are to be saved next.
        moves: know which rows have changed since they were copied elsewhere.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        storage: type[Storage],
        optimizer: RowOptimizer,
        seed: int | None,
        tracking: RowTracking | None = None,
        memory: SharedMemory | None = None,
        initial: Mapping[str, Tensor] | None = None,
        key_rules: KeyRules = USUAL_RULES,
        disk: Disk | None = None,
        moving: RowTracking | None = None,
    ) -> None:
        self.shards, self.optimizer = tuple(shards), optimizer
        self.slots, self.numbers = slots_of(self.shards), RowNumbers(self.shards)
        shard_of_slot = [index for index, shard in enumerate(self.shards) for _ in shard.table.features]
        allocate = zeros if memory is None else memory.take
        self._gate: PushGate | FileGate = PushGate() if memory is None else FileGate(memory)
        on_disk = None if memory is None or memory.file is None else memory.file.take
        room = Room(allocate, self._gate, disk, on_disk)
        self._storage = storage(self.shards, shard_of_slot, optimizer, seed, room)
        self._bounds, self._seed = bounds_of(self.slots), seed
        tensors = self._storage.state()
        rows = tuple(Rows(shard.table, shard.start, tensors[shard.key]) for shard in self.shards)
        self._keys = None
        if seed is not None and self._storage.counts is None:
            for tensor in (t for own in rows if own.table.ids is not None for t in own.tensors.values()):
                tensor.zero_()  # as it is, but in memory from now on, and not only when a key gets its row
        if any(shard.table.ids is not None for shard in self.shards):
            told = self._gate.singly, self._changing, self._storage
            self._keys = KeyIndex(rows, self.numbers, key_rules, allocate, *told)
            rows = tuple(replace(own, tensors={**own.tensors, **self._keys.tensors[i]}) for i, own in enumerate(rows))
        self._rows, self._stored = rows, tuple(tensors[shard.key] for shard in self.shards)
        self._initial = dict(initial or {})
        self._put_initial()
        self._parts: dict[str, list[int]] = {}  # positions of a table's shards by their rows
        for index in sorted(range(len(self.shards)), key=lambda index: self.shards[index].start):
            self._parts.setdefault(self.shards[index].table.name, []).append(index)
        self.watches = RowWatches(self._rows, self.numbers, tracking, allocate, memory is not None)
        self.moves = RowWatches(self._rows, self.numbers, moving, allocate, memory is not None)
        self._groups = SlotGroups(self.shards, shard_of_slot, self.numbers)
        self._held = HeldGradients(self.numbers)
        self._stepped = -1
        self._stepping = threading.Lock()

    def inherit(self) -> None:
        """This server takes the place of one that is gone, whose rows are in its memory."""
        self.watches.inherit()

    def shard(self, position: int) -> Shard:
        """The shard at that position; raises `DataError` if there is none."""
        if not 0 <= position < len(self.shards):
            raise DataError(f"shard {position} is asked for and this server has {len(self.shards)} shards")
        return self.shards[position]

    # --- pulls and pushes --------------------------------------------------------------------------------------------

    def rows_of(self, wanted: Wanted) -> Tensor:
        """As `KeyIndex.find`."""
        if self._keys is None:
            raise DataError("rows are asked for by key and this server has no dynamic table")
        return self._keys.find(wanted)

    def _changing(self, numbers: Tensor) -> None:
        self.watches.stepped(numbers)
        self.moves.stepped(numbers)

    @property
    def keys(self) -> KeyCounts | None:
        """Of the dynamic tables, if there are any."""
        return None if self._keys is None else self._keys.counts

    def catch_up(self, clock: Clock) -> Clock:
        """Where keys are it is so late at least; how late it is."""
        return Clock() if self._keys is None else self._keys.catch_up(clock)

    def take_over(self, keys: KeyCounts | None) -> None:
        """This server, which has been given the rows of another, takes its place: its dynamic tables had these counts,
        and nobody has saved any of its rows yet."""
        if self._keys is not None and keys is not None:
            self._keys.go_on_from(keys)
        self.watches.inherit()
        self.watches.reset()

    @property
    def stored(self) -> StorageCounts | None:
        """Of rows on disk, where they are."""
        return self._storage.counts

    def expect(self, lookup: AnyLookup) -> None:
        """This is going to be pulled: rows that are on disk may be read ahead."""
        if isinstance(lookup, RowLookup):
            check_rows(lookup.rows, lookup.shards, self.shards, self.numbers)
            self._storage.expect_rows(lookup.rows)
            return
        self._check_ids(lookup)
        self._storage.expect(lookup.ids, lookup.slots)

    def shapes(self, lookup: AnyLookup) -> Shapes:
        """Of `pull`'s answer and of its gradients, without a look at the ids of pooled rows."""
        if isinstance(lookup, RowLookup):
            check_rows(lookup.rows, lookup.shards, self.shards, self.numbers)
            return self.numbers.shapes(lookup.rows)
        bounds = self._bounds(lookup.slots)
        check_shape(lookup.ids, len(lookup.slots))
        return ((lookup.ids.samples, bounds.width),)

    def pull(self, lookup: AnyLookup) -> tuple[Tensor, ...]:
        """Rows, pooled or as they are, in the form that the look-up tells."""
        if isinstance(lookup, RowLookup):
            check_rows(lookup.rows, lookup.shards, self.shards, self.numbers)
            return self._storage.read_rows(lookup.rows)
        self._check_ids(lookup)
        return (self._storage.pull(lookup.ids, lookup.slots),)

    def push(self, lookup: AnyLookup, gradients: Sequence[Tensor], lr: float) -> None:
        """Applies the optimizer once to every row that occurs in the look-up, given the gradients of the loss with
        respect to `pull`'s answer."""
        self._check(lookup, gradients)
        if isinstance(lookup, RowLookup):
            self._step(lookup, gradients, lr)
            return
        with self._gate:
            self.watches.pushed(lookup.slots, lookup.ids)  # first: who is killed in between has told what may differ
            self.moves.pushed(lookup.slots, lookup.ids)
            self._storage.push(lookup.ids, lookup.slots, gradients[0], lr)

    def _step(self, lookup: RowLookup, gradients: Sequence[Tensor], lr: float) -> None:
        with self._gate:
            self._changing(lookup.rows)  # first, as in `push`
            self._storage.step_rows(lookup.rows, gradients, lookup.shards, lr)

    def _check_ids(self, lookup: Lookup) -> int:
        """Columns of the answer."""
        bounds = self._bounds(lookup.slots)
        check_shape(lookup.ids, len(lookup.slots))
        check_range(lookup.ids, bounds)
        return bounds.width

    def _check(self, lookup: AnyLookup, gradients: Sequence[Tensor]) -> None:
        if isinstance(lookup, RowLookup):
            shapes = self.shapes(lookup)
        else:
            shapes = ((lookup.ids.samples, self._check_ids(lookup)),)
        if tuple(tuple(g.shape) for g in gradients) != shapes or any(g.dtype != torch.float32 for g in gradients):
            raise DataError(
                f"gradients of {', '.join(f'{g.dtype} {list(g.shape)}' for g in gradients) or 'nothing'} do not fit "
                f"a look-up of float32 {', '.join(str(list(shape)) for shape in shapes) or 'nothing'}"
            )

    # --- gradients that wait for a global step -----------------------------------------------------------------------

    def hold(self, batch: int, lookup: AnyLookup, gradients: Sequence[Tensor]) -> None:
        """As `push`, but nothing is stepped before a `commit` names the batch."""
        self._check(lookup, gradients)
        if isinstance(lookup, RowLookup):
            self._held.add(batch, (lookup, tuple(gradients)))
            return
        groups = self._groups.plan(lookup.slots)
        found = {group.dim: self._groups.sum_by_row(lookup.ids, gradients[0], group) for group in groups}
        rows, sums = [], []
        for width in self.numbers.widths:
            keys, total = found.get(width.dim, (torch.zeros(0, dtype=torch.int64), torch.zeros(0, width.dim)))
            rows.append(keys + width.start)
            sums.append(total)
        shards = tuple(sorted({self._groups.features[slot] for slot in lookup.slots}))
        self._held.add(batch, (RowLookup(shards, torch.cat(rows)), tuple(sums)))

    def commit(self, step: RowStep) -> None:
        """Carries a global step out: every row in one of its batches is stepped once.

        Steps come in ascending order; one that came already changes nothing.
        """
        with self._stepping:
            if step.step <= self._stepped:
                return
            self._stepped = step.step
            sums = self._held.take(step)
            if sums is not None:
                self._step(*sums, step.lr)

    def forget_held(self, stepped: int = -1) -> None:
        """Forgets all gradients that wait; the next step is one beyond `stepped`."""
        with self._stepping:
            self._held.clear()
            self._stepped = stepped

    @property
    def held_bytes(self) -> int:
        return self._held.byte_count

    @property
    def stepped(self) -> int:
        """The global step that was carried out last; −1 for none."""
        return self._stepped

    def held(self, position: int) -> tuple[int, RowSums] | None:
        """The one at that position among the gradients that wait for a global step, with the number of its batch; None
        beyond the last."""
        return self._held.at(position)

    # --- rows in and out ---------------------------------------------------------------------------------------------

    def state(self) -> tuple[Rows, ...]:
        """As live views."""
        return self._rows

    def load(self, saved: Iterable[Rows | RowSet], partial: bool = False) -> None:
        """Overwrites this server's rows with those of `saved` that it holds, however they were cut, later ones over
        earlier ones; `partial`, it may lack some, which stay as they are.

        Raises:
            CheckpointError: rows of another width or optimizer, of a table of another size, numbers that are no rows,
                or rows missing. All is compared before anything is written.
        """
        pieces = [(shard, rows) for rows in saved for shard in self._fitting(rows)]
        if not partial:
            found: dict[int, list[Rows | RowSet]] = {}
            for shard, rows in pieces:
                found.setdefault(shard, []).append(rows)
            for shard, own in enumerate(self._rows):
                _check_covered(own, found.get(shard, []))
        with self.watches.turn, self._gate.alone():
            for shard, rows in pieces:
                self._put(shard, rows)

    def take(self, found: Rows | RowSet) -> None:
        """As `load`, of rows of a server whose place this one is going to take; they are its own when all have come
        (`take_over`)."""
        with self.watches.turn, self._gate.alone():
            for shard in self._fitting(found):
                self._put(shard, found, whole=False)

    def lose(self, saved: Iterable[Rows | RowSet] | None) -> None:
        """As if this server had failed and a replacement had its place: pushes wait until it is over.

        It loads `saved`, read bit by bit, or has initial rows without optimizer state. Raises as `load`, but rows may
        be missing, and those before the one that does not fit are written.
        """
        self._held.clear()
        with self.watches.turn, self._gate.alone():
            if saved is None:
                self._storage.reset(self._seed)
                self._put_initial()
                if self._keys is not None:
                    self._keys.reset()
                self.watches.reset()
                return
            if self._keys is not None:
                self._keys.reset()  # what is there is not a part of what was saved
            for rows in saved:
                for shard in self._fitting(rows):
                    self._put(shard, rows)

    def _put_initial(self) -> None:
        """Of a server that begins with initial rows, those that were given."""
        given = [] if self._seed is None else [(n, s) for n, s in enumerate(self.shards) if s.key in self._initial]
        for number, shard in given:
            for name, tensor in self._stored[number].items():
                tensor.copy_(self._initial[shard.key]) if name == "weight" else tensor.zero_()
            self._storage.written(number, range(shard.rows))

    def _fitting(self, saved: Rows | RowSet) -> list[int]:
        """Positions of the shards that share a row with `saved`; parts of a table have one form, so one is compared."""
        same = self._parts.get(saved.table.name, [])
        if not same:
            return []
        check_fits(self._rows[same[0]], saved, self.optimizer)
        first = bisect_right(same, saved.start, key=lambda shard: self.shards[shard].stop)
        return same[first : bisect_left(same, saved.stop, key=lambda shard: self.shards[shard].start)]

    def _put(self, shard: int, saved: Rows | RowSet, whole: bool = True) -> None:
        """Copies what `saved` has of the shard's rows; tensors of the table as a whole come along with any row. Where
        it is not `whole`, owners of rows may be there twice until others have come."""
        own, wide = self._rows[shard], _wide_names(self.optimizer)
        start, stop = max(own.start, saved.start), min(own.stop, saved.stop)
        if start >= stop:
            return
        if isinstance(saved, RowSet):
            held, places = _inside(own, saved)
        else:
            held, places = slice(start - saved.start, stop - saved.start), torch.arange(start, stop) - own.start
        run = places if isinstance(saved, RowSet) else range(start - own.start, stop - own.start)
        self._storage.approach(shard, run)
        with self._keys.loading(shard, start, stop) if self._keys is not None and whole else nullcontext():
            for name, target in own.tensors.items():
                source = saved.tensors[name]
                if name in wide:
                    target.copy_(source)
                elif isinstance(saved, RowSet):
                    target.index_copy_(0, places, source[held].to(target.dtype))
                else:
                    target[start - own.start : stop - own.start].copy_(source[held])
            self._storage.written(shard, run)
        if len(places):
            self.watches.loaded(shard, places)

    # --- on the way to another machine -------------------------------------------------------------------------------

    def follow(self) -> None:
        """From now on it is known which rows change; raises `DataError` where rows stay where they are."""
        for shard in range(len(self.shards)):
            self.changed(shard)

    def changed(self, shard: int) -> Tensor:
        """Numbers in the table of rows of the shard at that position that changed since this was asked last, ascending,
        int64 `[K]`. One thread at a time asks."""
        start, rows = self.shard(shard).start, self.moves.take(shard)
        if rows is None:
            raise DataError("rows of this job stay where they are: set cluster.max_servers")
        return rows + start

    # --- saves beside training ---------------------------------------------------------------------------------------

    def pick(self, shard: int, end_of_round: bool) -> Tensor | None:
        """The rows of the shard at that position that are to be saved now, by their numbers in the table, distinct and
        ascending, int64 `[K]`; None for the whole shard. Small tables are due at the `end_of_round`."""
        start = self.shard(shard).start
        if self.watches.compares:
            with self._gate.alone():
                self._storage.settle(shard)
        picked = self.watches.pick(shard, end_of_round)
        return None if picked is None else picked + start

    def copy_rows(self, shard: int, rows: Tensor | range) -> dict[str, Tensor]:
        """Copies of rows with their optimizer state, of each row as it is between two pushes.

        They are made in turns of `CHUNK_BYTES` at most (one row at least) of which pushes keep out; what belongs to the
        table as a whole is copied last, so that none is behind a row. Raises `DataError` unless `rows` are numbers in
        the table of rows of the shard at that position: a run, or distinct and ascending, int64 `[K]`.
        """
        check_single(rows, self.shard(shard))
        own, wide = self._rows[shard], _wide_names(self.optimizer)
        places = _shifted(rows, own.start)
        live = {name: tensor for name, tensor in own.tensors.items() if name not in wide}
        copies = {name: tensor.new_empty((len(rows), *tensor.shape[1:])) for name, tensor in live.items()}
        # whole sets of a dynamic table, so that a key that moves within its set is copied once
        step = max(1, CHUNK_BYTES // (WAYS * sum(tensor[:1].nbytes for tensor in live.values()))) * WAYS
        for first in range(0, len(rows), step):
            part = places[first : first + step]
            targets = {name: copy[first : first + len(part)] for name, copy in copies.items()}
            self._storage.approach(shard, part)
            with self._gate.alone():
                self._storage.copy(shard, part, {n: t for n, t in targets.items() if n in self._stored[shard]})
                for name in targets.keys() - self._stored[shard].keys():
                    copy_rows(live[name], part, targets[name])
        return {name: copies[name] if name in copies else tensor.clone() for name, tensor in own.tensors.items()}

    def rows_saved(self, save: int, shard: int, rows: Tensor | range, weights: Tensor | None = None) -> bool:
        """Rows, as in `copy_rows`, are safely written as they were copied for the save of that number.

        `weights` are as written, float32 `[K, D]`; needed where the `watches` compare. False if the save is not under
        way here any more: nothing is taken note of. Raises as `copy_rows`, and for weights that are not of such rows.
        """
        check_single(rows, self.shard(shard))
        form = (len(rows), self.shards[shard].table.dim)
        if (weights is None and self.watches.compares) or (
            weights is not None and (tuple(weights.shape) != form or weights.dtype != torch.float32)
        ):
            found = "nothing" if weights is None else f"{weights.dtype} {list(weights.shape)}"
            raise DataError(f"{found} is not what was saved of rows of float32 {list(form)}")
        places = _shifted(rows, self.shards[shard].start)
        if isinstance(places, range):
            places = torch.arange(places.start, places.stop)
        return self.watches.saved(save, shard, places, weights)


def _shifted(rows: Tensor | range, start: int) -> Tensor | range:
    """Rows of a table as positions in a run of them that begins at `start`."""
    return range(rows.start - start, rows.stop - start) if isinstance(rows, range) else rows - start


def check_fits(own: Rows, saved: Rows | RowSet, optimizer: RowOptimizer) -> None:
    """Raises `CheckpointError` unless `saved` is of the table and the optimizer of the shard's rows."""
    table, there = own.table, saved.table
    if (table.rows, table.dim) != (there.rows, there.dim):
        raise CheckpointError(
            f"table {table.name} has {there.rows} rows of {there.dim} in the checkpoint and {table.rows} of "
            f"{table.dim} in this job"
        )
    if set(own.tensors) != set(saved.tensors):
        raise CheckpointError(
            f"table {table.name} was saved with {', '.join(sorted(saved.tensors))}, and "
            f"embedding.optimizer={optimizer.name} needs {', '.join(sorted(own.tensors))}: "
            "resume with the optimizer it was trained with"
        )
    called, wide = there.name, _wide_names(optimizer)
    if isinstance(saved, RowSet):
        _check_numbers(saved)
    count = len(saved.numbers) if isinstance(saved, RowSet) else saved.stop - saved.start
    for name, target in own.tensors.items():
        form = list(target.shape if name in wide else (count, *target.shape[1:]))
        if (found := list(saved.tensors[name].shape)) != form:
            raise CheckpointError(f"{name} of {count} rows of table {called} has the form {found} and not {form}")


def _check_numbers(saved: RowSet) -> None:
    """Raises `CheckpointError` unless the set's rows are rows of its range, distinct and ascending."""
    numbers, called = saved.numbers, saved.table.name
    if numbers.dtype != torch.int64 or numbers.dim() != 1:
        raise CheckpointError(f"row numbers of table {called} are int64 [K], not {numbers.dtype} {list(numbers.shape)}")
    if not 0 <= saved.start < saved.stop <= saved.table.rows:
        raise CheckpointError(f"table {called} has no rows {saved.start} to {saved.stop}: it has {saved.table.rows}")
    if len(numbers) and not (
        bool((numbers.diff() > 0).all()) and saved.start <= int(numbers[0]) and int(numbers[-1]) < saved.stop
    ):
        raise CheckpointError(
            f"row numbers of table {called} must be distinct, in ascending order and from {saved.start} to "
            f"{saved.stop - 1}"
        )


def _check_covered(own: Rows, found: Sequence[Rows | RowSet]) -> None:
    """Raises `CheckpointError` for the first row of the shard that `found` lacks; takes a byte for each row."""
    covered = torch.zeros(own.stop - own.start, dtype=torch.bool)
    for saved in found:
        if isinstance(saved, RowSet):
            covered[_inside(own, saved)[1]] = True
        else:
            covered[max(0, saved.start - own.start) : max(0, saved.stop - own.start)] = True
    if not covered.all():
        row = own.start + int(covered.logical_not().to(torch.uint8).argmax())
        raise CheckpointError(f"row {row} of table {own.table.name} is not in the checkpoint")


def _inside(own: Rows, saved: RowSet) -> tuple[slice, Tensor]:
    """Which of the set's rows the shard holds, and their places in it."""
    bounds = torch.tensor([own.start, own.stop])
    first, last = torch.searchsorted(saved.numbers, bounds).tolist()
    return slice(first, last), saved.numbers[first:last] - own.start


def _wide_names(optimizer: RowOptimizer) -> Collection[str]:
    """Names of the tensors of a table as a whole."""
    return [name for name, extent in optimizer.state.items() if extent is Extent.SHARD]
