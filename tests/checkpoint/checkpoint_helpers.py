"""Snapshots, file systems that fail, and comparisons, shared by the tests of checkpoints."""

import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import fsspec
import torch
from torch import Tensor

from shadowsync.checkpoint.files import Chunk, Files, LocalFiles, RemoteFiles
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.snapshot import Snapshot
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.embedding.table import Rows, Table

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
    bounds = [0, *sorted(set(edges)), table.rows]
    return tuple(
        Rows(table, a, {name: tensor[a:b] for name, tensor in tensors.items()}) for a, b in pairwise(bounds) if a < b
    )


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


class ScriptedLocal(LocalFiles):
    """A local folder in which every write of a chunk, rename and removal is a step of the script."""

    def __init__(self, root: Path, steps: Steps) -> None:
        super().__init__(str(root), root)
        self.steps = steps

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        super().write(path, self.steps.counted(chunks))
        self.steps.step()

    def publish(self, folder: str, last: str, content: bytes) -> None:
        super().publish(folder, last, content)
        self.steps.step()

    def remove(self, folder: str, first: str) -> None:
        self.steps.step()
        super().remove(folder, first)


class ScriptedRemote(RemoteFiles):
    """The same for a file system that cannot rename folders."""

    def __init__(self, root: str, steps: Steps) -> None:
        filesystem, path = fsspec.core.url_to_fs(root)
        super().__init__(root, filesystem, path)
        self.steps = steps

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        super().write(path, self.steps.counted(chunks))

    def publish(self, folder: str, last: str, content: bytes) -> None:
        self.steps.step()
        super().publish(folder, last, content)

    def remove(self, folder: str, first: str) -> None:
        self.steps.step()
        super().remove(folder, first)
