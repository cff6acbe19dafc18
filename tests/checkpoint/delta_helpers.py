"""A model of a job's rows in plain tensors, and snapshots of it: whole, and with single rows."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from checkpoint_helpers import ITEMS, USERS, assert_equal
from torch import Tensor

from shadowsync.checkpoint.files import Files
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.snapshot import DeltaOf, Snapshot
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.embedding.table import Rows, RowSet, Table

EDGES = (0, 9, USERS.rows)
"""Users lie on two servers, items on one."""
State = dict[str, dict[str, Tensor]]


def run_of(table: Table, tensors: dict[str, Tensor], start: int, stop: int) -> Rows:
    return Rows(table, start, {n: t.clone() if n == "step" else t[start:stop].clone() for n, t in tensors.items()})


@dataclass
class Model:
    """Rows of two tables; every change is one no other made.

    Attributes:
        state: what is trained.
        changed: rows of the users that changed since `snapshot` last gave a delta or everything.
    """

    samples: int = 0
    state: State = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for table in (USERS, ITEMS) if not self.state else ():
            self.state[table.name] = {
                "weight": torch.zeros(table.rows, table.dim),
                "momentum": torch.zeros(table.rows),
                "step": torch.zeros(1),
            }

    def train(self, rows: Iterable[int]) -> None:
        """One step in which these users occur, and item 1."""
        self.samples += 1
        for name, touched in ((USERS.name, sorted(set(rows))), (ITEMS.name, [1])):
            tensors = self.state[name]
            tensors["weight"][touched] += self.samples
            tensors["momentum"][touched] = float(self.samples)
            tensors["step"] = tensors["step"] + 1
        self.changed |= set(rows)

    def whole(self) -> Snapshot:
        users, items = (self.state[table.name] for table in (USERS, ITEMS))
        runs = [run_of(USERS, users, *edges) for edges in itertools.pairwise(EDGES)]
        return self.snapshot((*runs, run_of(ITEMS, items, 0, ITEMS.rows)))

    def delta(self, parent: str, rows: Iterable[int] | None = None) -> Snapshot:
        """Users `rows` (None: all that changed) and the items as a whole."""
        chosen = self.changed if rows is None else rows
        users = self.state[USERS.name]
        sets = [set_of(users, chosen, *edges) for edges in itertools.pairwise(EDGES)]
        items = run_of(ITEMS, self.state[ITEMS.name], 0, ITEMS.rows)
        return self.snapshot((*sets, items), DeltaOf(parent, self.changed <= set(chosen)))

    def snapshot(self, tables: tuple[Rows | RowSet, ...], delta: DeltaOf | None = None) -> Snapshot:
        return Snapshot(
            config={"a": 1},
            samples=self.samples,
            tables=tables,
            dense={"center": torch.full((3,), float(self.samples))},
            position={"at": self.samples},
            random={"torch": torch.arange(5, dtype=torch.uint8)},
            extra={},
            delta=delta,
        )

    def copy(self) -> State:
        return {table: {n: t.clone() for n, t in tensors.items()} for table, tensors in self.state.items()}


def set_of(users: dict[str, Tensor], chosen: Iterable[int], start: int, stop: int) -> RowSet:
    numbers = torch.tensor(sorted(row for row in set(chosen) if start <= row < stop), dtype=torch.int64)
    tensors = {name: tensor.clone() if name == "step" else tensor[numbers] for name, tensor in users.items()}
    return RowSet(USERS, start, stop, numbers, tensors)


def assert_state(loaded: LoadedCheckpoint, state: State) -> None:
    """Every row, whichever way it is asked for, is that of `state`."""
    for table in (USERS, ITEMS):
        wanted = state[table.name]
        for start, stop in ((0, table.rows), (1, 5), (table.rows - 1, table.rows)):
            found = loaded.rows(table.name, start, stop)
            assert_equal(found, {n: t if n == "step" else t[start:stop] for n, t in wanted.items()})
    assert loaded.dense["center"].tolist() == [loaded.samples] * 3
    assert loaded.position == {"at": loaded.samples}


def tight_store(root: Path | str, keep: int = 2, files: Files | None = None) -> CheckpointStore:
    """A store that cuts 23 users into several files."""
    return CheckpointStore(str(root), keep, files=files, piece_bytes=160)


def chain(root: Path | str, keep: int = 5) -> tuple[CheckpointStore, dict[str, State]]:
    """A whole checkpoint of 1 sample, a delta of 2 on it and one of 3 on that; the state that each holds by name."""
    store, model = tight_store(root, keep), Model()
    model.train(range(USERS.rows))
    name = store.save(model.whole())
    states = {name: model.copy()}
    for rows in ([0, 3, 8, 9, 22], [3, 10, 11, 12, 13, 14, 15]):
        model.changed.clear()
        model.train(rows)
        name = store.save(model.delta(name))
        states[name] = model.copy()
    return store, states
