"""Snapshots, a model of a job's rows in plain tensors, and file systems that fail, for the tests of checkpoints."""

import errno
import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor

from shadowsync.checkpoint.files import Chunk, Files, LocalFiles, RemoteFiles
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.snapshot import Snapshot
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.embedding.table import Rows, RowSet, Table

BASE, FIRST, SECOND = (f"samples-{samples:012d}" for samples in (1, 2, 3))
"""What `chain` saves."""
USERS = Table("user", 23, 4, ("user_id",))
ITEMS = Table("item / wide", 7, 2, ("seen", "bought"), "mean")
LONE = Table("lone", 1, 3, ("flag",))


def full_table(table: Table, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(table.rows, table.dim, generator=generator),
        "momentum": torch.rand(table.rows, generator=generator),
    }


def cut(table: Table, tensors: dict[str, Tensor], edges: Iterable[int]) -> tuple[Rows, ...]:
    """Rows of a whole table cut at `edges`."""
    bounds = sorted({0, *edges, table.rows})
    runs = itertools.pairwise(bounds)
    return tuple(Rows(table, a, {name: tensor[a:b] for name, tensor in tensors.items()}) for a, b in runs)


def make_snapshot(samples: int) -> Snapshot:
    """Everything in it depends on `samples`, so that mixed-up checkpoints show."""
    lone = {
        "weight": torch.full((1, 3), float(samples)),
        "exp_avg": torch.ones(1, 3),
        "exp_avg_sq": torch.ones(1, 3),
        "step": torch.tensor([float(samples)]),
    }
    return Snapshot(
        config={"train": {"lr": 0.1}, "nothing": None},
        samples=samples,
        tables=(
            *cut(USERS, full_table(USERS, samples), [9]),
            *cut(ITEMS, full_table(ITEMS, samples + 1), []),
            Rows(LONE, 0, lone),
        ),
        dense={
            "center": torch.full((5,), float(samples)),
            "scalar": torch.tensor(float(samples)),
            "empty": torch.empty(0),
        },
        position={"slice": samples, "order": [3, 1, 2], "state": 2**100},
        random={"torch": torch.arange(17, dtype=torch.uint8)},
        extra={"syncs": samples},
    )


def assert_holds(loaded: LoadedCheckpoint, samples: int) -> None:
    """Every value of the checkpoint is that of `make_snapshot(samples)`."""
    wanted = make_snapshot(samples)
    assert loaded.samples == samples
    assert (loaded.config, loaded.position, loaded.extra) == (wanted.config, wanted.position, wanted.extra)
    for got, expected in ((loaded.dense, wanted.dense), (loaded.random, wanted.random)):
        assert_equal(got, expected)
    assert loaded.tables == (USERS, ITEMS, LONE)
    for rows in wanted.tables:
        stop = rows.start + len(rows.tensors["weight"])
        assert_equal(loaded.rows(rows.table.name, rows.start, stop), rows.tensors)


def assert_equal(got: "dict[str, Tensor] | object", expected: object) -> None:
    assert isinstance(got, dict)
    assert isinstance(expected, dict)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def small_store(root: Path | str, keep: int = 2, files: Files | None = None) -> CheckpointStore:
    """A store that spreads even small tables over several files."""
    return CheckpointStore(str(root), keep, files=files, piece_bytes=200)


def memory_root() -> str:
    return f"memory://{uuid.uuid4().hex}/checkpoints"


def forget_memory() -> None:
    """Empties the memory of fsspec, which looks through all that is there for each file."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class Steps:
    """Counts what a file system does and runs `action` in place of step number `at`."""

    def __init__(self, at: int, action: Callable[[], None]) -> None:
        self.at = at
        self.action = action
        self.done = 0

    def step(self) -> None:
        self.done += 1
        if self.done == self.at:
            self.action()

    def counted(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """A step before each chunk and one behind the last."""
        for chunk in chunks:
            self.step()
            yield chunk
        self.step()


class _Scripted(Files):
    """Every write of a chunk, rename and removal is a step of the script."""

    steps: Steps

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        super().write(path, self.steps.counted(chunks))  # type: ignore[safe-super]
        self.steps.step()

    def publish(self, folder: str, last: str, content: bytes) -> None:
        self.steps.step()
        super().publish(folder, last, content)  # type: ignore[safe-super]
        self.steps.step()

    def remove(self, folder: str, first: str) -> None:
        self.steps.step()
        super().remove(folder, first)  # type: ignore[safe-super]


class ScriptedLocal(_Scripted, LocalFiles):
    def __init__(self, root: Path, steps: Steps) -> None:
        super().__init__(str(root), root)
        self.steps = steps


class ScriptedRemote(_Scripted, RemoteFiles):
    """A file system that cannot rename folders."""

    def __init__(self, root: str, steps: Steps) -> None:
        filesystem, path = fsspec.core.url_to_fs(root)
        super().__init__(root, filesystem, path)
        self.steps = steps


class Counting(LocalFiles):
    """Counts how often each byte range of a file is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), root)
        self.ranges: Counter[tuple[str, int, int]] = Counter()

    def read(self, path: str, start: int, stop: int) -> bytes:
        self.ranges[path, start, stop] += 1
        return super().read(path, start, stop)

    @property
    def paths(self) -> set[str]:
        return {path for path, _, _ in self.ranges}


def disk_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def flip(path: Path) -> None:
    """Harms the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# --- chains of deltas ------------------------------------------------------------------------------------------------


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
        return self.snapshot((*sets, items), parent, self.changed <= set(chosen))

    def snapshot(self, tables: tuple[Rows | RowSet, ...], parent: str | None = None, complete: bool = True) -> Snapshot:
        return Snapshot(
            config={"a": 1},
            samples=self.samples,
            tables=tables,
            dense={"center": torch.full((3,), float(self.samples))},
            position={"at": self.samples},
            random={"torch": torch.arange(5, dtype=torch.uint8)},
            extra={},
            parent=parent,
            complete=complete,
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


def model_on(states: dict[str, State]) -> Model:
    """Trained on from the newest of a `chain`."""
    model = Model(samples=3, state=states[SECOND])
    model.state = model.copy()
    model.train([2, 9, 20])
    return model
