"""Snapshots whose rows are read when they are written."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import LONE, USERS, assert_equal, make_snapshot, small_store
from safetensors import safe_open
from torch import Tensor

from shadowsync.checkpoint.loading import Written, written_rows
from shadowsync.checkpoint.snapshot import GivenUp, Snapshot
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.embedding.table import Rows, RowSet
from shadowsync.errors import CheckpointError
from shadowsync.rpc.errors import CallTimeout, PeerLost


class Source:
    """Gives rows in chunks of two and notes what was asked; `fails` in place of row `at` of the state."""

    def __init__(self, rows: Rows | RowSet, at: int | None = None, fails: Exception | None = None) -> None:
        self.asked: list[str] = []
        self._rows, self._at, self._fails = rows, at, fails

    def __call__(self, first: int, last: int, name: str) -> Iterator[Tensor]:
        self.asked.append(name)
        tensor = self._rows.tensors[name]
        if len(tensor) != len(self._rows.tensors["weight"]):
            yield tensor
            return
        for start in range(first, last, 2):
            if name != "weight" and self._at is not None and start >= self._at:
                if self._fails is None:
                    return
                raise self._fails
            yield tensor[start : min(start + 2, last)]


def streamed(rows: Rows | RowSet, source: Source) -> Rows | RowSet:
    return replace(rows, tensors={name: tensor.to("meta") for name, tensor in rows.tensors.items()}, source=source)


def parts() -> tuple[Snapshot, list[Rows | RowSet], list[Rows | RowSet]]:
    """A snapshot, the runs of its users, of which each has a count of its own, and its other tables."""
    snapshot, count = make_snapshot(10), {"step": torch.tensor([7])}
    users = [replace(rows, tensors=count | dict(rows.tensors)) for rows in snapshot.tables if rows.table == USERS]
    return snapshot, list(users), [rows for rows in snapshot.tables if rows.table != USERS]


def delta() -> RowSet:
    numbers = torch.tensor([0, 3, 4, 5, 9, 22])
    tensors = {"weight": torch.randn(6, USERS.dim), "momentum": torch.rand(6), "step": torch.tensor([8])}
    return RowSet(USERS, 0, USERS.rows, numbers, tensors)


def two(root: str) -> tuple[CheckpointStore, list[str], RowSet, dict[str, Tensor]]:
    """A whole checkpoint of 10 samples and a delta of 20, both streamed."""
    store = small_store(root)
    snapshot, users, others = parts()
    tables = [streamed(rows, Source(rows)) for rows in (*users, *others)]
    names = [store.save(replace(snapshot, tables=tuple(tables)))]
    changed = delta()
    rows = (streamed(changed, Source(changed)), *others)
    names.append(store.save(replace(snapshot, samples=20, tables=rows, parent=names[0])))
    whole = {name: torch.cat([part.tensors[name] for part in users]) for name in ("weight", "momentum")}
    return store, names, changed, whole


def test_they_are_those_that_the_source_gives(root: str) -> None:
    store, names, changed, whole = two(root)
    assert_equal(store.open(names[0]).rows("user", 0, USERS.rows), {**whole, "step": torch.tensor([7])})
    for name in ("weight", "momentum"):
        whole[name][changed.numbers] = changed.tensors[name]
    whole["step"] = torch.tensor([8])
    assert_equal(store.open(names[1]).rows("user", 0, USERS.rows), whole)
    assert_equal(store.open(store.compact(names[1])).rows("user", 0, USERS.rows), whole)


def test_what_belongs_to_the_table_as_a_whole_is_read_last_and_all_is_aligned(tmp_path: Path) -> None:
    store, (snapshot, users, others) = CheckpointStore(str(tmp_path)), parts()
    parent = store.save(replace(snapshot, tables=(*users, *others)))
    changed = delta()
    odd = replace(changed, numbers=changed.numbers[:5], tensors={n: t[:5] for n, t in changed.tensors.items()})
    odd = replace(odd, tensors={"step": torch.tensor([9]), **{n: odd.tensors[n] for n in ("weight", "momentum")}})
    source = Source(odd)
    tables = (streamed(odd, source), *others)
    name = store.save(replace(snapshot, samples=20, tables=tables, parent=parent))
    assert source.asked == ["weight", "momentum", "step"]
    with safe_open(tmp_path / name / "rows-00000.safetensors", "pt") as opened:
        found = {key: opened.get_tensor(f"user[0:{USERS.rows}].{key}") for key in (*odd.tensors, "numbers")}
    assert_equal(found, {**odd.tensors, "numbers": odd.numbers})


@pytest.mark.parametrize("error", [PeerLost("gone"), CallTimeout("late"), CheckpointError("unreadable"), None])
def test_a_source_that_fails_in_the_middle_leaves_nothing(root: str, error: Exception | None) -> None:
    store = small_store(root)
    store.save(make_snapshot(10))
    snapshot = make_snapshot(20)
    tables = tuple(streamed(rows, Source(rows, 4, error)) for rows in snapshot.tables)
    wanted = ValueError if error is None else Exception if isinstance(error, CheckpointError) else type(error)
    with pytest.raises(wanted, match=r"gone|late|unreadable|came as 16 bytes in place of"):
        store.save(replace(snapshot, tables=tables))
    assert store.names() == ["samples-000000000010"]
    store.save(make_snapshot(20))
    assert small_store(root).load().samples == 20


def test_written_weights_are_read_back(root: str) -> None:
    store, names, changed, whole = two(root)
    opened: list[str] = []

    def written(name: str) -> AbstractContextManager[Written]:
        return written_rows(lambda: opened.append(name) or store.opened(name))  # type: ignore[func-returns-value]

    with written(names[0]) as weights:
        assert not opened
        assert weights(USERS, torch.zeros(0, dtype=torch.int64)).shape == (0, USERS.dim)
        assert not opened
        assert torch.equal(weights(USERS, range(3, 12)), whole["weight"][3:12])
        assert torch.equal(weights(USERS, range(1)), whole["weight"][:1])
    with written(names[1]) as weights:
        for part in (slice(0, 6), slice(2, 4), slice(5, 6)):
            assert torch.equal(weights(USERS, changed.numbers[part]), changed.tensors["weight"][part])
        assert torch.equal(weights(LONE, range(1)), torch.full((1, 3), 10.0))
        with pytest.raises(CheckpointError, match="does not hold the rows of table user that were saved"):
            weights(USERS, torch.tensor([0, 4]))
    assert opened == names


class Impatient(Source):
    """Somebody cannot wait any longer while it is read."""

    def __init__(self, rows: Rows | RowSet, store: CheckpointStore) -> None:
        super().__init__(rows)
        self._store = store

    def __call__(self, first: int, last: int, name: str) -> Iterator[Tensor]:
        with self._store.given_up():
            yield from super().__call__(first, last, name)


def test_what_is_being_written_ends_when_somebody_cannot_wait(root: str) -> None:
    store, names, changed, _ = two(root)
    again = (streamed(changed, Impatient(changed, store)), *parts()[2])
    with pytest.raises(GivenUp):
        store.save(replace(make_snapshot(30), tables=again, parent=names[1]))
    assert store.names() == names
    with store.given_up(), pytest.raises(GivenUp):
        store.compact(names[1])
    assert store.names() == names
    whole = store.compact(names[1])
    assert store.save(make_snapshot(30)) != whole
