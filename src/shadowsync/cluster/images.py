"""Rows and dense parts of a job: taken while everybody stands still, and put back."""

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from shadowsync.checkpoint.job_state import DenseImage, TrainerImage, match_optimizer, match_tables
from shadowsync.checkpoint.loading import LoadedCheckpoint, Written
from shadowsync.checkpoint.remote_save import RemoteSave
from shadowsync.cluster.manager import ClusterManager
from shadowsync.cluster.servers import IMAGE_S, Imaged
from shadowsync.cluster.supervisor import Member
from shadowsync.cluster.trainer import TrainerPart
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.keys import OF_SETS, PARTS, Clock
from shadowsync.embedding.proxy import UNCOUNTED, ServerProxy
from shadowsync.embedding.saves import SaveMethods, read_rows, write_rows
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.table import Rows, RowSet, Shard
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.pending import ended
from shadowsync.rpc.served import ask, later
from shadowsync.sync.dense import DenseServer

T = TypeVar("T", bound=Rows | RowSet)

PATIENCE_S = 0.5


class Moved(NamedTuple):
    """Rows of a checkpoint that another table has elsewhere.

    Attributes:
        rows: where each of the checkpoint's `R` rows goes, int64 `[R]`; −1 nowhere.
        keys: what is kept of each beside its weights (`keys.PARTS`), by name, `[R]`, where the checkpoint has not.
    """

    rows: Tensor
    keys: Mapping[str, Tensor]


class Images:
    """Takes and puts back images of a manager.

    Attributes:
        turn: held during a pause; whoever puts a new trainer to work holds it too.
    """

    def __init__(self, manager: ClusterManager) -> None:
        self.turn = threading.Lock()
        self._manager = manager
        self._saves: dict[int, RemoteSave] = {}  # the newest, of each embedding server
        self._first: weakref.ref[Rows | RowSet] | None = None  # of the copies that were made for it
        self._pauses = itertools.count(1)

    @contextmanager
    def standing_still(self, disturbed: Callable[[], bool]) -> Iterator[None]:
        """Inside, no trainer at work changes anything.

        Raises:
            PeerLost: somebody died or cannot be reached, as `disturbed` says, or it took too long.
        """
        if not self.turn.acquire(timeout=IMAGE_S):
            raise PeerLost("somebody is being put to work")
        number, trainers = next(self._pauses), self._manager.statuses.at_work()
        try:
            self._hold(number, trainers, disturbed)
            yield
        finally:
            for member in trainers:
                later(member.connection, TrainerPart.release, number)
            self.turn.release()

    def _hold(self, number: int, trainers: Sequence[Member], disturbed: Callable[[], bool]) -> None:
        moving, until = list(trainers), time.monotonic() + IMAGE_S
        while moving:
            asked = [later(member.connection, TrainerPart.hold, number, PATIENCE_S) for member in moving]
            waiting = True
            while waiting:
                waiting = not ended(asked, PATIENCE_S)
                if disturbed() or time.monotonic() > until:
                    raise PeerLost("somebody died or cannot be reached, so the job cannot stand still")
            moving = [member for member, still in zip(moving, asked, strict=True) if not still.result()]

    # --- rows --------------------------------------------------------------------------------------------------------

    def rows(self) -> tuple[Rows, ...]:
        found: dict[int, list[Rows]] = {}

        def read(member: Member) -> None:
            found[member.index] = list(read_rows(member.connection, self._manager.spec.shards[member.index]))

        self._manager.all_at_once([partial(read, member) for member in self._manager.row_servers()])
        return tuple(rows for index in sorted(found) for rows in found[index])

    def changed_rows(self, end_of_round: bool) -> tuple[Rows | RowSet, ...]:
        return self._copied(lambda save, shards: save.changed(shards, end_of_round))

    def rows_beside(self) -> tuple[Rows, ...]:
        return self._copied(lambda save, shards: save.everything(shards))

    def _copied(self, copy: Callable[[RemoteSave, Sequence[Shard]], Iterator[T]]) -> tuple[T, ...]:
        """What `copy` gives of a new save of every embedding server."""
        saves: dict[int, RemoteSave] = {}
        found: dict[int, list[T]] = {}

        def read(member: Member) -> None:
            save = RemoteSave.begin(member.connection, early=not self._manager.spec.direct)
            saves[member.index] = save
            found[member.index] = list(copy(save, self._manager.spec.shards[member.index]))

        self._manager.all_at_once([partial(read, member) for member in self._manager.row_servers()])
        copies = tuple(rows for index in sorted(found) for rows in found[index])
        self._saves, self._first = saves, weakref.ref(copies[0]) if copies else None
        return copies

    def rows_saved(self, copies: Sequence[Rows | RowSet], written: Written) -> float:
        """As `Session.rows_saved`. Servers are copied one after the other, so what each is held up adds up.

        Servers know what changed since the newest save began, so only its rows can be reported as saved: what is known
        of an older copy is out of date.
        """
        if not copies or self._first is None or self._first() is not copies[0]:
            return 0.0
        costs_s: dict[int, float] = {}

        def tell(index: int, save: RemoteSave) -> None:
            shards = self._manager.spec.shards[index]
            for rows in copies:
                for position, shard in enumerate(shards):
                    if shard.table == rows.table and shard.start <= rows.start and rows.stop <= shard.stop:
                        save.saved(position, shard, rows, written)
            costs_s[index] = save.cost_s()

        self._manager.all_at_once([partial(tell, index, save) for index, save in self._saves.items()])
        return 0.0 if self._manager.spec.direct else sum(costs_s.values())  # of this thread the saver knows

    @property
    def is_read(self) -> bool:
        """Somebody has copies of `changed_rows` or `rows_beside`, which may not have been made yet."""
        return self._first is not None and self._first() is not None

    def load_rows(self, saved: LoadedCheckpoint) -> None:
        """Fills all rows, as `Session.load_rows`."""
        match_tables(saved.tables, self._manager.spec.job.tables)
        there = {table.name: saved.tensor_names(table.name) for table in saved.tables}
        servers = self._manager.row_servers()
        here = {k: v for member in servers for k, v in ask(member.connection, SaveMethods.tensor_names).items()}
        match_optimizer(there, here)
        self._manager.all_at_once([partial(self.load_server, saved, member) for member in servers])
        now, keyed = Clock(), any(table.ids is not None for table in saved.tables)
        for member in [*servers, *servers] if keyed else ():  # each knows when its own rows were looked up last
            now = ask(member.connection, EmbeddingService.catch_up, now)

    def load_server(self, saved: LoadedCheckpoint, member: Member) -> None:
        write_rows(member.connection, saved.rows_of(self._manager.spec.shards[member.index]))

    def take_rows(self, saved: LoadedCheckpoint, taken: Mapping[str, int | Moved], with_state: bool) -> None:
        """Fills rows of tables, as `Session.begin_with`."""
        firsts = {name: count for name, count in taken.items() if isinstance(count, int)}

        def fill(member: Member) -> None:
            shards = self._manager.spec.shards[member.index]
            if any(shard.start < firsts.get(shard.table.name, 0) for shard in shards):
                own = read_rows(member.connection, shards)
                some = (rows for rows in own if rows.start < firsts.get(rows.table.name, 0))
                write_rows(member.connection, (_with_first(rows, saved, firsts, with_state) for rows in some))
            for shard in shards:
                moved = taken.get(shard.table.name)
                if isinstance(moved, Moved):
                    own = read_rows(member.connection, shards, only=shard)
                    write_rows(member.connection, _with_moved(own, shard, saved, moved, with_state))

        self._manager.all_at_once([partial(fill, member) for member in self._manager.row_servers()])

    def predicting_client(self) -> EmbeddingClient:
        job, shards = self._manager.spec.job, self._manager.spec.shards
        if self._manager.spec.direct:
            return EmbeddingClient(job.tables, job.features, self._manager.near_rows())
        proxies = [
            ServerProxy(member.connection, shards[member.index], member.index, UNCOUNTED, UNCOUNTED, stream=None)
            for member in self._manager.row_servers()
        ]
        return EmbeddingClient(job.tables, job.features, proxies)

    # --- dense part --------------------------------------------------------------------------------------------------

    def dense(self) -> DenseImage:
        """Copies of the dense part of every living trainer (where none lives, of the fallen), and the central one.

        Raises:
            PeerLost: no trainer is left, or a dense server is not there.
        """
        images = self.of(self._manager.statuses.at_work() or self._manager.fallen_trainers())
        if not images:
            raise PeerLost("no trainer is left")
        return DenseImage(tuple(images), self.read_center() if self._manager.spec.spans else None)

    def of(self, members: Sequence[Member]) -> list[TrainerImage]:
        """Copies of the dense parts of these trainers or dense servers."""
        asked = [later(member.connection, Imaged.snapshot) for member in members]
        return [answered.result() for answered in asked]

    def load_dense(self, image: DenseImage) -> None:
        """Fills the dense part of every trainer and the dense servers.

        Raises:
            PeerLost: there are fewer trainers than the image has.
        """
        trainers = self._manager.statuses.at_work()
        if len(trainers) != len(image.trainers):
            raise PeerLost("a trainer is not there")
        for member, own in zip(trainers, image.trainers, strict=True):
            self.restore(member, own)
        if image.center is not None:
            self.write_center(image.center)

    def restore(self, member: Member, image: TrainerImage) -> None:
        ask(member.connection, Imaged.restore, image.in_main_memory())

    def read_center(self) -> Tensor:
        """The central copy, `[P]`."""
        asked = [later(member.connection, DenseServer.read) for member in self._manager.dense_servers()]
        return torch.cat([answered.result() for answered in asked])

    def write_center(self, center: Tensor) -> None:
        """Replaces it; nothing where no copy is kept."""
        for member in self._manager.dense_servers():
            self.write_part(member, center)

    def write_part(self, server: Member, center: Tensor) -> None:
        """Fills one dense server with its part of `[P]`."""
        start, stop = self._manager.spec.spans[server.index]
        ask(server.connection, DenseServer.write, center[start:stop])


def _with_moved(
    own: Iterable[Rows], shard: Shard, saved: LoadedCheckpoint, moved: Moved, with_state: bool
) -> Iterator[Rows]:
    """A shard's rows with those of a checkpoint that go there; holds all of the shard, as they come from anywhere."""
    pieces = list(own)
    by_row = [name for name, tensor in pieces[0].tensors.items() if len(tensor) == pieces[0].stop - pieces[0].start]
    whole = {name: torch.cat([piece.tensors[name] for piece in pieces]) for name in by_row}
    wide = {name: tensor for name, tensor in pieces[0].tensors.items() if name not in whole}
    table = saved.table(shard.table.name)
    for start, stop in saved.chunks(table.name, 0, table.rows):
        rows = moved.rows[start:stop]
        mine = ((rows >= shard.start) & (rows < shard.stop)).nonzero().squeeze(1)
        if len(mine):
            found = saved.rows(table.name, start, stop, None if with_state else {"weight", *PARTS})
            wide |= {name: found[name] for name in wide if name in found}
            found |= {name: tensor[start:stop] for name, tensor in moved.keys.items()}
            for name in whole.keys() & found.keys() - OF_SETS:
                whole[name][rows[mine] - shard.start] = found[name][mine].to(whole[name].dtype)
    for piece in pieces:
        span = slice(piece.start - shard.start, piece.stop - shard.start)
        yield Rows(piece.table, piece.start, wide | {name: tensor[span] for name, tensor in whole.items()})


def _with_first(rows: Rows, saved: LoadedCheckpoint, taken: Mapping[str, int], with_state: bool) -> Rows:
    """Rows in which those of a table's first, as many as are `taken`, are a checkpoint's."""
    stop = min(rows.stop, taken[rows.table.name])
    found = saved.rows(rows.table.name, rows.start, stop, None if with_state else {"weight", *PARTS})
    own = rows.tensors
    filled = {name: torch.cat([first.to(own[name]), own[name][len(first) :]]) for name, first in found.items()}
    return Rows(rows.table, rows.start, {**own, **filled})
