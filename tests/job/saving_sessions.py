"""Sessions that train while their rows are saved, for the tests in process and on a cluster."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from job_helpers import Ledger, Witness, beside_own_model, settings, write_rows
from torch import Tensor

from shadowsync.checkpoint.loading import LoadedCheckpoint, written_rows
from shadowsync.checkpoint.snapshot import Snapshot
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.choices import choose_all
from shadowsync.cluster.context import Own
from shadowsync.cluster.session import Session
from shadowsync.config import parse
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Rows, RowSet, Table
from shadowsync.runtime.inprocess import InProcess

DEADLINE_S = 120.0
MOST_DELTAS = 6
TABLES = (Table("c0", 40, 4, ("c0",)), Table("c1", 45, 4, ("c1",)), Table("many", 60, 4, ("many",)))


class Pause:
    """Holds every worker before an iteration until it is let go."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self._reached, self._go = threading.Event(), threading.Event()

    def __call__(self, rank: int, iteration: int) -> None:
        if iteration >= self.iteration:
            self._reached.set()
            assert self._go.wait(DEADLINE_S), "nobody let the workers go"

    def reached(self) -> None:
        """Waits until the first of them stands there."""
        assert self._reached.wait(DEADLINE_S), "no worker came that far"

    def go(self) -> None:
        self._go.set()


def material(
    folder: Path, rows: int = 400, failures: Callable[[int, int], None] | None = None, **sections: Any
) -> tuple[Any, ...]:
    """The first arguments of a session that trains so many rows on three tables, the third of which is the largest."""
    path = write_rows(folder / "rows.parquet", rows)
    recovery = {"mode": "partial"} | sections.pop("recovery", {})
    train = {"trainers": 2, "workers": 2} | sections.pop("train", {})
    embedding = {"servers": 2, "split_rows": 25} | sections.pop("embedding", {})
    values = settings(path, recovery=recovery, train=train, embedding=embedding, **sections)
    config = parse(beside_own_model(values))
    choices = choose_all(config, own_model=True)
    source = choices.source.open("train", "error")
    own = Own(Witness(Ledger()), TABLES) if failures is None else Own(Witness(Ledger()), TABLES, failures)
    return config, choices, own, source, None, None


@contextmanager
def local(folder: Path, **given: Any) -> Iterator[Session]:
    """A session in this process, of `material`."""
    with closing(Session(*material(folder, **given), InProcess, lambda _: nullcontext())) as session, session.recorder:
        yield session


def snapshot(
    session: Session, tables: Sequence[Rows | RowSet], parent: str | None = None, complete: bool = True
) -> Snapshot:
    """The rows, and nothing else that matters."""
    return Snapshot({}, session.reader.trained, tuple(tables), {}, {}, {}, {}, parent, complete)


def save(
    session: Session,
    store: CheckpointStore,
    rows: Sequence[Rows | RowSet],
    parent: str | None = None,
    complete: bool = True,
) -> str:
    """Writes rows and tells the servers."""
    name = store.save(snapshot(session, rows, parent, complete))
    tell(session, store, name, rows)
    return name


def tell(session: Session, store: CheckpointStore, name: str, rows: Sequence[Rows | RowSet]) -> None:
    """The servers hear that the checkpoint is written."""
    with written_rows(lambda: store.opened(name)) as written:
        session.rows_saved(rows, written)


def servers_of(session: Session) -> Sequence[EmbeddingServer]:
    """Those of a session in this process."""
    return session._manager.near_rows()


def lose(session: Session, indices: Sequence[int], saved: LoadedCheckpoint | None) -> None:
    """As when failures are injected: their rows become what is saved, without that the initial ones."""
    for index in indices:
        server = servers_of(session)[index]
        server.lose(None if saved is None else saved.rows_of(server.shards))


def never_asked(table: Table, rows: Tensor | range) -> Tensor:
    """`Written` for priorities that compare nothing."""
    raise AssertionError("nobody compares")


def in_memory(rows: Rows | RowSet) -> dict[str, Tensor]:
    """Copies all that a source gives."""
    count = len(rows.tensors["weight"])
    return {name: torch.cat(list(rows.source(0, count, name))) for name in rows.tensors}


def save_whole(session: Session, store: CheckpointStore) -> str:
    return save(session, store, session.rows_beside())


def save_delta(session: Session, store: CheckpointStore, parent: str, end_of_round: bool = True) -> str:
    """As a job does in the thread that saves."""
    rows = session.changed_rows(end_of_round)
    complete = session.choices.recovery.priority == "all"
    return save(session, store, rows, parent, complete)


def save_while_training(session: Session, store: CheckpointStore) -> tuple[str, int]:
    """A whole checkpoint, deltas while training goes on, and a last one; its name and how many there were meanwhile."""
    name, count = save_whole(session, store), 0
    while session.alive() and count < MOST_DELTAS:
        session.reap()
        name = save_delta(session, store, name)
        count += 1
    session.finish()
    return save_delta(session, store, name), count


def by_table(rows: Sequence[Rows]) -> dict[str, dict[str, Tensor]]:
    """Every row of every table, in the order of its number."""
    found: dict[str, dict[str, Tensor]] = {}
    for table in TABLES:
        parts = sorted((part for part in rows if part.table.name == table.name), key=lambda part: part.start)
        assert sum(len(part.tensors["weight"]) for part in parts) == table.rows
        found[table.name] = {
            name: torch.stack([part.tensors[name] for part in parts]).amax(0)
            if name == "step"
            else torch.cat([part.tensors[name] for part in parts])
            for name in parts[0].tensors
        }
    return found


def loaded_rows(loaded: LoadedCheckpoint) -> dict[str, dict[str, Tensor]]:
    """As `by_table`, from a checkpoint."""
    return {table.name: loaded.rows(table.name, 0, table.rows) for table in TABLES}


def assert_same(found: dict[str, dict[str, Tensor]], wanted: dict[str, dict[str, Tensor]]) -> None:
    assert found.keys() == wanted.keys()
    for table, tensors in wanted.items():
        assert found[table].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[table][name], tensor), f"{table} {name}"
