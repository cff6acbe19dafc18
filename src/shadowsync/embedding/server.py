"""The embedding server: a role that holds shards and answers pulls and pushes."""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.copying import (
    as_tensor,
    check_covered,
    check_fits,
    copy_rows,
    held_rows,
    local_rows,
    overwrite,
    wide_names,
)
from shadowsync.embedding.distinct import SlotGroups, find_distinct
from shadowsync.embedding.memory import fill
from shadowsync.embedding.optimizers import rule_class
from shadowsync.embedding.requests import Bounds, bounds_of, check_range, check_rows, check_shape, check_single
from shadowsync.embedding.storage import RowOptimizer, Storage
from shadowsync.embedding.table import RowNumbers, Rows, RowSet, Shard, slots_of, span_of
from shadowsync.embedding.watching import RowWatches, Watching
from shadowsync.errors import DataError
from shadowsync.memory.pages import zeros
from shadowsync.memory.push_gate import PushGate
from shadowsync.memory.shared import FileGate, Gate, SharedMemory


@dataclass(frozen=True)
class RowSums:
    """What one batch, or several together, brings to the rows of a server.

    Attributes:
        rows: distinct numbers (`RowNumbers`), ascending, int64 `[K]`.
        gradients: each row's, for each width of the server (ascending) float32 `[K_w, D_w]`.
        shards: positions of the shards that were looked up.
    """

    rows: Tensor
    gradients: tuple[Tensor, ...]
    shards: tuple[int, ...]

    @property
    def byte_count(self) -> int:
        """Memory that they take."""
        return self.rows.nbytes + sum(gradient.nbytes for gradient in self.gradients)


@dataclass(frozen=True)
class RowStep:
    """A global step as embedding servers carry it out.

    Attributes:
        step: its number; each is carried out once.
        weights: factor of each batch's gradients, by the batch's number; 0 drops them.
        divisor: of the weighted sum of a row's gradients; None takes, for each row, how many of the batches that are
            not dropped contain it.
        lr: learning rate.
        below: batches with lower numbers will not be named any more, so what is held of them is forgotten.
    """

    step: int
    weights: Mapping[int, float]
    divisor: float | None
    lr: float
    below: int


class HeldGradients:
    """Gradients by batch, of one server; any thread may add, one at a time takes.

    Args:
        numbers: of the server's rows.
    """

    def __init__(self, numbers: RowNumbers) -> None:
        self._numbers = numbers
        self._held: dict[int, list[RowSums]] = {}
        self._below = 0
        self._lock = threading.Lock()

    @property
    def byte_count(self) -> int:
        """Memory that is held."""
        with self._lock:
            return sum(sums.byte_count for parts in self._held.values() for sums in parts)

    def add(self, number: int, sums: RowSums) -> None:
        """Keeps what a batch brings; one that will not be named any more is passed over."""
        with self._lock:
            if number >= self._below:
                self._held.setdefault(number, []).append(sums)

    def take(self, step: RowStep) -> RowSums | None:
        """What a step brings to each row; its batches, and all below, are held no longer.

        Returns:
            None if it brings nothing.
        """
        with self._lock:
            named = {number: self._held.pop(number, []) for number in step.weights}
            self._below = max(self._below, step.below)
            for number in [number for number in self._held if number < self._below]:
                del self._held[number]
        kept = [(self._joined(parts), step.weights[number]) for number, parts in named.items() if parts]
        kept = [(sums, weight) for sums, weight in kept if weight]
        return self._merged(kept, step.divisor) if kept else None

    def clear(self) -> None:
        """Forgets everything; the batches will be trained anew."""
        with self._lock:
            self._held.clear()

    def _joined(self, parts: Sequence[RowSums]) -> RowSums:
        """One batch's, each row once."""
        return parts[0] if len(parts) == 1 else self._merged([(part, 1.0) for part in parts], 1.0)

    def _merged(self, parts: Sequence[tuple[RowSums, float]], divisor: float | None) -> RowSums:
        split = [self._numbers.split(sums.rows) for sums, _ in parts]
        rows, gradients = [], []
        for position, width in enumerate(self._numbers.widths):
            keys = torch.cat([by_width[position] for by_width in split])
            vectors = torch.cat([_scaled(sums.gradients[position], weight) for sums, weight in parts])
            found = find_distinct(keys.numpy(), self._numbers.total)
            total = found.sum(vectors)
            total /= found.starts.diff()[:, None] if divisor is None else divisor
            rows.append(torch.from_numpy(found.keys) + width.start)
            gradients.append(total)
        shards = tuple(sorted({shard for sums, _ in parts for shard in sums.shards}))
        return RowSums(torch.cat(rows), tuple(gradients), shards)


def _scaled(gradient: Tensor, weight: float) -> Tensor:
    return gradient if weight == 1.0 else gradient * weight


@dataclass(frozen=True)
class Lookup:
    """One request to one server.

    Attributes:
        slots: positions among the server's slots (`slots_of` its shards), in the order wanted.
        ids: their ids, local to the shards: as many features as slots.
        number: the client's own for this look-up, by which a server behind a wire finds it again at the push.
    """

    slots: tuple[int, ...]
    ids: Jagged
    number: int = 0


@dataclass(frozen=True)
class RowLookup:
    """One request to one server for rows as they are.

    Attributes:
        shards: positions of the shards that are looked up.
        rows: distinct numbers (`RowNumbers` of the server's shards) of rows of theirs, ascending, int64 `[K]`.
        number: as in `Lookup`.
    """

    shards: tuple[int, ...]
    rows: Tensor
    number: int = 0


class EmbeddingServer:
    """Holds the only copy of its shards; any number of threads may call it at once, without waiting for each other.

    Whoever copies or overwrites rows may do so meanwhile: pushes then wait for a short turn (`PushGate`), pulls never.

    Every id is checked here, so that no request reads or writes memory beyond the rows. In process the client hands
    the same `Lookup` to `pull` and `push`; behind a wire the end that receives requests keeps a pull's `Lookup` under
    its number until the push comes, so that ids cross once.

    Args:
        shards: what to hold.
        storage: how.
        optimizer: of the rows.
        seed: of the initial rows; None leaves them zero, for who loads all of them, or as they are in `memory`.
        watching: which rows are to be saved next; None saves every shard as a whole.
        memory: where the rows are, if other processes of this machine have them, too: each of them has a server of its
            own over the same rows, which outlive them.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        storage: type[Storage],
        optimizer: RowOptimizer,
        seed: int | None,
        watching: Watching | None = None,
        memory: SharedMemory | None = None,
    ) -> None:
        self.shards = tuple(shards)
        self.slots = slots_of(self.shards)
        self.numbers = RowNumbers(self.shards)
        self._rule = rule_class(optimizer.name)
        shard_of_slot = [index for index, shard in enumerate(self.shards) for _ in shard.table.features]
        allocate = zeros if memory is None else memory.take
        self._storage = storage(self.shards, shard_of_slot, optimizer, seed, allocate)
        self._bounds = bounds_of(self.slots)
        self._seed = seed
        tensors = self._storage.state()
        self._rows = tuple(Rows(shard.table, shard.start, tensors[shard.key]) for shard in self.shards)
        self._parts: dict[str, list[int]] = {}  # positions of a table's shards by their rows
        for index in sorted(range(len(self.shards)), key=lambda index: self.shards[index].start):
            self._parts.setdefault(self.shards[index].table.name, []).append(index)
        self._gate: Gate = PushGate() if memory is None else FileGate(memory)
        self._watches = RowWatches(self.state(), self.numbers, watching, allocate, memory is not None)
        self._groups = SlotGroups(self.shards, shard_of_slot, self.numbers)
        self._held = HeldGradients(self.numbers)
        self._stepped = -1
        self._stepping = threading.Lock()

    def inherit(self) -> None:
        """This server takes the place of one that is gone, whose rows are in its memory."""
        self._watches.inherit()

    def pull(self, lookup: Lookup) -> Tensor:
        """Pooled rows, float32 `[B, Σ D of the slots]`.

        Raises:
            DataError: an id is outside its shard, or the tensors of the request do not fit each other.
        """
        self._check(lookup)
        return self._storage.pull(lookup.ids, lookup.slots)

    def push(self, lookup: Lookup, gradient: Tensor, lr: float) -> None:
        """Applies the optimizer once to every row that occurs in the look-up.

        Args:
            lookup: as given to `pull`.
            gradient: of the loss with respect to `pull`'s output, of its shape.
            lr: learning rate of this step.

        Raises:
            DataError: as `pull`, or a gradient of another shape or type.
        """
        self._check_gradient(lookup, gradient)
        with self._gate:
            self._watches.pushed(lookup.slots, lookup.ids)  # first: who is killed in between has told what may differ
            self._storage.push(lookup.ids, lookup.slots, gradient, lr)

    def read_rows(self, lookup: RowLookup) -> tuple[Tensor, ...]:
        """Rows as they are, for each width of the shards (ascending) float32 `[K_w, D_w]`.

        Raises:
            DataError: the numbers are not distinct rows of the shards in ascending order.
        """
        check_rows(lookup.rows, lookup.shards, self.shards, self.numbers)
        return self._storage.read_rows(lookup.rows)

    def step_rows(self, lookup: RowLookup, gradients: Sequence[Tensor], lr: float) -> None:
        """Applies the optimizer once to every row of the look-up.

        Args:
            lookup: as given to `read_rows`.
            gradients: each row's, of the shape of `read_rows`' answer.
            lr: learning rate of this step.

        Raises:
            DataError: as `read_rows`, or gradients of other shapes or types.
        """
        self._check_sums(lookup, gradients)
        self._step(RowSums(lookup.rows, tuple(gradients), lookup.shards), lr)

    # --- gradients that wait for a global step -----------------------------------------------------------------------

    def hold(self, number: int, lookup: Lookup, gradient: Tensor) -> None:
        """As `push`, but nothing is stepped before a `commit` names the batch.

        Args:
            number: of the batch; all its look-ups are held under it.
            lookup: as given to `pull`.
            gradient: as in `push`.

        Raises:
            DataError: as `push`.
        """
        self._check_gradient(lookup, gradient)
        found = {g.dim: self._groups.sum_by_row(lookup.ids, gradient, g) for g in self._groups.plan(lookup.slots)}
        rows, sums = [], []
        for width in self.numbers.widths:
            keys, total = found.get(width.dim, (torch.zeros(0, dtype=torch.int64), torch.zeros(0, width.dim)))
            rows.append(keys + width.start)
            sums.append(total)
        shards = tuple(sorted({self._groups.features[slot] for slot in lookup.slots}))
        self._held.add(number, RowSums(torch.cat(rows), tuple(sums), shards))

    def hold_rows(self, number: int, lookup: RowLookup, gradients: Sequence[Tensor]) -> None:
        """As `step_rows`, but nothing is stepped before a `commit` names the batch; arguments as in `hold`.

        Raises:
            DataError: as `step_rows`.
        """
        self._check_sums(lookup, gradients)
        self._held.add(number, RowSums(lookup.rows, tuple(gradients), lookup.shards))

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
                self._step(sums, step.lr)

    def forget_held(self, stepped: int = -1) -> None:
        """Forgets all gradients that wait; the next step is one beyond `stepped`."""
        with self._stepping:
            self._held.clear()
            self._stepped = stepped

    @property
    def held_bytes(self) -> int:
        """Memory of the gradients that wait."""
        return self._held.byte_count

    def _step(self, sums: RowSums, lr: float) -> None:
        with self._gate:
            self._watches.stepped(sums.rows)  # first, as in `push`
            self._storage.step_rows(sums.rows, sums.gradients, sums.shards, lr)

    def pooled_shape(self, lookup: Lookup) -> tuple[int, int]:
        """Of `pull`'s answer and of its gradient, without a look at the ids.

        Raises:
            DataError: the tensors of the request do not fit each other, or a slot is not one of this server's.
        """
        bounds = self._bounds(lookup.slots)
        check_shape(lookup.ids, len(lookup.slots))
        return lookup.ids.samples, bounds.width

    def row_shapes(self, lookup: RowLookup) -> tuple[tuple[int, int], ...]:
        """Of `read_rows`' answer and of its gradients.

        Raises:
            DataError: as `read_rows`.
        """
        check_rows(lookup.rows, lookup.shards, self.shards, self.numbers)
        return self.numbers.shapes(lookup.rows)

    def _check_gradient(self, lookup: Lookup, gradient: Tensor) -> None:
        width = self._check(lookup).width
        if gradient.shape != (lookup.ids.samples, width) or gradient.dtype != torch.float32:
            raise DataError(
                f"a gradient of {gradient.dtype} {list(gradient.shape)} does not fit a look-up of float32 "
                f"{[lookup.ids.samples, width]}"
            )

    def _check_sums(self, lookup: RowLookup, gradients: Sequence[Tensor]) -> None:
        shapes = self.row_shapes(lookup)
        if tuple(tuple(g.shape) for g in gradients) != shapes or any(g.dtype != torch.float32 for g in gradients):
            raise DataError(
                f"gradients of {', '.join(f'{g.dtype} {list(g.shape)}' for g in gradients) or 'nothing'} do not fit "
                f"rows of float32 {', '.join(str(list(shape)) for shape in shapes) or 'nothing'}"
            )

    def _check(self, lookup: Lookup) -> Bounds:
        bounds = self._bounds(lookup.slots)
        check_shape(lookup.ids, len(lookup.slots))
        check_range(lookup.ids, bounds)
        return bounds

    def state(self) -> tuple[Rows, ...]:
        """Every shard's rows with their optimizer state, as live views."""
        return self._rows

    def load(self, saved: Iterable[Rows | RowSet], partial: bool = False) -> None:
        """Overwrites this server's rows with those of `saved` that it holds, however they were cut.

        Args:
            saved: rows of any tables, later ones over earlier ones; what this server does not hold is passed over.
            partial: leave rows that `saved` lacks as they are, instead of raising.

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
                check_covered(own, found.get(shard, []))
        with self._watches.turn, self._gate.alone():
            for shard, rows in pieces:
                self._put(shard, rows)

    def lose(self, saved: Iterable[Rows | RowSet] | None) -> None:
        """As if this server had failed and a replacement had its place: pushes wait until it is over.

        Args:
            saved: what the replacement loads, read bit by bit; None for initial rows without optimizer state.

        Raises:
            CheckpointError: as `load`, but rows may be missing; those before the one that does not fit are written.
        """
        self._held.clear()
        with self._watches.turn, self._gate.alone():
            if saved is None:
                self._begin_anew()
                return
            for rows in saved:
                for shard in self._fitting(rows):
                    self._put(shard, rows)

    def _fitting(self, saved: Rows | RowSet) -> list[int]:
        """Positions of the shards that share a row with `saved`; parts of a table have one form, so one is compared."""
        same = self._parts.get(saved.table.name, [])
        if not same:
            return []
        check_fits(self._rows[same[0]], saved, self._rule)
        start, stop = span_of(saved)
        first = bisect_right(same, start, key=lambda shard: self.shards[shard].stop)
        return same[first : bisect_left(same, stop, key=lambda shard: self.shards[shard].start)]

    def _put(self, shard: int, rows: Rows | RowSet) -> None:
        own = self._rows[shard]
        overwrite(own, rows, self._rule)
        held = held_rows(own, rows)
        if len(held):
            self._watches.loaded(shard, held)

    def _begin_anew(self) -> None:
        for own in self.state():
            for tensor in own.tensors.values():
                tensor.zero_()
        if self._seed is not None:
            fill([(s, own.tensors["weight"]) for s, own in zip(self.shards, self.state(), strict=True)], self._seed)
        self._watches.reset()

    # --- saves beside training ---------------------------------------------------------------------------------------

    @property
    def compares(self) -> bool:
        """`rows_saved` wants the weights that were written."""
        return self._watches.compares

    def row_bytes(self, shard: int) -> int:
        """Bytes of a row of that shard with its optimizer state."""
        return self._rule.row_bytes(self.shards[shard].table.dim)

    def begin_save(self) -> int:
        """A save begins, for which rows are picked and copied after this; the one before it is over.

        Returns:
            its number, which no other save has, nor one of another server.
        """
        return self._watches.begin()

    def is_under_way(self, save: int) -> bool:
        """Whether the save of that number is the one that began last."""
        return self._watches.is_under_way(save)

    def pick(self, shard: int, end_of_round: bool) -> Tensor | None:
        """The rows of the shard at that position that are to be saved now.

        Args:
            shard: position of the shard.
            end_of_round: small tables are due too.

        Returns:
            numbers in the table, distinct and ascending, int64 `[K]`; None for the whole shard.
        """
        picked = self._watches.pick(self._known(shard), end_of_round)
        return None if picked is None else picked + self.shards[shard].start

    def copy_rows(self, shard: int, rows: Tensor | range) -> dict[str, Tensor]:
        """Copies of rows with their optimizer state, of each row as it is between two pushes.

        Args:
            shard: position of the shard.
            rows: numbers in the table: a run, or distinct and ascending, int64 `[K]`.

        Raises:
            DataError: there is no such shard, or they are not such rows of it.
        """
        check_single(rows, self.shards[self._known(shard)])
        own = self.state()[shard]
        return copy_rows(own, local_rows(rows, own.start), wide_names(self._rule), self._gate)

    def rows_saved(self, save: int, shard: int, rows: Tensor | range, weights: Tensor | None = None) -> bool:
        """Rows are safely written as they were copied for a save.

        Args:
            save: its number.
            shard: position of the shard.
            rows: as in `copy_rows`.
            weights: as written, float32 `[K, D]`; needed where the server `compares`.

        Returns:
            False if the save is not under way here any more: nothing is taken note of.

        Raises:
            DataError: as `copy_rows`, or weights that are not of such rows.
        """
        check_single(rows, self.shards[self._known(shard)])
        form = (len(rows), self.shards[shard].table.dim)
        if (weights is None and self.compares) or (
            weights is not None and (tuple(weights.shape) != form or weights.dtype != torch.float32)
        ):
            found = "nothing" if weights is None else f"{weights.dtype} {list(weights.shape)}"
            raise DataError(f"{found} is not what was saved of rows of float32 {list(form)}")
        return self._watches.saved(save, shard, as_tensor(local_rows(rows, self.shards[shard].start)), weights)

    def _known(self, shard: int) -> int:
        if not 0 <= shard < len(self.shards):
            raise DataError(f"shard {shard} is asked for and this server has {len(self.shards)} shards")
        return shard
