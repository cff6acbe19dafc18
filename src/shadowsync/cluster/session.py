"""The session whose roles are processes of their own, on any number of machines."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shadowsync.assembly import LOADED_ROWS, place_tables, row_optimizer
from shadowsync.cluster.front import Doors
from shadowsync.cluster.parts import (
    DenseSpec,
    EmbeddingSpec,
    ReaderSpec,
    build_dense,
    build_embedding,
    build_nothing,
    build_reader,
)
from shadowsync.cluster.places import Map, Need, Placed
from shadowsync.cluster.records import RecordTaker
from shadowsync.cluster.staff import Member, Staff, first_error
from shadowsync.cluster.trainer_messages import Held, HoldAsked, ImageNames, Moved, TrainerStatus
from shadowsync.cluster.trainer_part import Addresses, TrainerSpec, build_trainer, image_reply, read_image
from shadowsync.compression.plain import Plain
from shadowsync.data.reader import Reader
from shadowsync.dense_state import DenseImage, TrainerImage, restored_dense
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.optimizers import rule_class
from shadowsync.embedding.table import Rows
from shadowsync.errors import RunError
from shadowsync.job_state import job_state
from shadowsync.metrics.roles import RoleState
from shadowsync.metrics.wire import WireCounter
from shadowsync.recovery.loading import LoadedCheckpoint
from shadowsync.recovery.matching import match_optimizer, match_tables
from shadowsync.runtime.embedding_remote import EmbeddingRemote, Remote
from shadowsync.runtime.embedding_rows import RemoteRows
from shadowsync.runtime.group import split_evenly
from shadowsync.runtime.lines import Line
from shadowsync.runtime.runtime import Order, Runtime
from shadowsync.runtime.wire.client import Courier, CourierOptions
from shadowsync.runtime.wire.connection import Answer
from shadowsync.runtime.wire.errors import CallTimeout, PeerLost
from shadowsync.session import Material, Newest, Recovered, RolePlace, Session, added, distance, reader_options

RESERVE_S = 120.0
CALL_S = 3600.0
"""Deadline of the driver's calls; that a member died ends them at once."""
IMAGE_S = 20.0
"""Deadline of each message of an image, during which everybody stands still: rather no checkpoint than a long wait."""
STATUS_S = 1.0
QUICK_STATUS_S = 0.1
PATIENCE_S = 0.5
FINISH_S = 60.0
ATTEMPTS = 20
POOL = 64

NOTHING_YET = TrainerStatus(0, False, False, None, {}, {}, 0)
_GONE = (PeerLost, CallTimeout)


@dataclass
class _Seen:
    """What a trainer said last."""

    asked_at: float = 0.0
    asked: Future[Answer] | None = None
    status: TrainerStatus = NOTHING_YET
    sketch: Tensor | None = None


@dataclass
class _Gone:
    """Counts of trainers that are no more."""

    syncs: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    raw: dict[str, int] = field(default_factory=dict)

    def add(self, status: TrainerStatus) -> None:
        self.syncs += status.syncs
        self.sent, self.raw = added(self.sent, status.sent), added(self.raw, status.raw)


class ClusterSession(Session):
    """All roles of a run as processes that a `Runtime` starts, connected by the wire.

    Everybody gets a *part*: what its process serves. A *generation* of parts starts from one checkpoint; a dead
    embedding server ends it, and the next one starts from the newest checkpoint, in the same processes but the dead
    one's. Whoever else dies is replaced while the others go on.

    Args:
        material: what it is made of.
        runtime: starts processes; ended with this session.
        newest: loads the checkpoint to go back to.
    """

    def __init__(self, material: Material, runtime: Runtime, newest: Newest) -> None:
        super().__init__(material)
        self._material, self._runtime, self._newest = material, runtime, newest
        self._beginning = self.recorder.state()
        chosen = self.config.embedding.model_copy(update={"storage": self.choices.storage.name})
        self._config = self.config.model_copy(update={"embedding": chosen})
        self._most = self.config.cluster.max_trainers or self.config.train.trainers
        self._generation = 0
        self._failures = 0
        self._seen: dict[Member, _Seen] = {}
        self._gone = _Gone()
        self._vacant: dict[str, float] = {}
        self._scripted: set[str] = set()
        self._installs: dict[str, Future[None]] = {}
        self._must_go_back: str | None = None
        self._going_back: Future[None] | None = None
        self._went_back = Recovered("full", 0.0, 0.0)
        self._few_since: float | None = None
        self._error: BaseException | None = None
        self._started = self._stopping = self._closed = False
        self._turn = threading.Lock()
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(POOL, thread_name_prefix="session")
        self._courier = Courier(runtime.keys, CourierOptions(timeout_s=CALL_S))
        lost_after_s = self.config.cluster.lost_after_s
        self._staff = Staff(runtime, self._courier, lost_after_s, self.happenings, self.ended.set)
        self._doors = Doors(runtime.keys, runtime.host(), RecordTaker(self.recorder), self._most)
        self.reader = Reader(self.train_source, reader_options(self.config), material.position)
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    # --- who is needed -----------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        self._shards = place_tables(self.config, self.choices, self.schema, self.tables, self.train_source)
        rule = rule_class(row_optimizer(self.config.embedding).name)
        self._bytes = [sum(shard.rows * rule.row_bytes(shard.table.dim) for shard in shards) for shards in self._shards]
        servers = self.config.cluster.dense_servers if self.choices.method.centralised else 0
        self._spans = split_evenly(len(self.template.flat), servers) if servers else []
        orders = self._first_orders()
        self._runtime.reserve(orders, RESERVE_S)
        self._all_at_once([partial(self._staff.hire, order) for order in orders])
        self._build_parts()

    def _first_orders(self) -> list[Order]:
        """Where everybody starts.

        Raises:
            RunError: somebody finds no room.
        """
        places = Map(self.config.cluster, self._runtime.machines())
        orders = [self._order(places, need) for need in self._servers()]
        orders += [self._order(places, Need(f"trainer-{rank}")) for rank in range(self.config.train.trainers)]
        self._reader_count = self.config.cluster.readers or places.trainer_machines()
        return orders + [self._order(places, Need(f"reader-{index}")) for index in range(self._reader_count)]

    def _servers(self) -> list[Need]:
        """The servers of rows, the largest first, and of the dense part."""
        rows = [Need(f"embedding-{index}", size) for index, size in enumerate(self._bytes)]
        return sorted(rows, key=lambda need: -need.bytes) + [Need(f"dense-{i}") for i in range(len(self._spans))]

    def _order(self, places: Map, need: Need) -> Order:
        order = places.put(need, max(4, self.config.data.readers))
        if order is None:
            raise RunError(places.why_not(need))
        return order

    def _need(self, role: str) -> Need:
        kind, _, index = role.rpartition("-")
        return Need(role, self._bytes[int(index)] if kind == "embedding" else 0)

    def _map_now(self) -> Map:
        living = [member for member in self._staff.members.values() if member.living]
        placed = [Placed(self._need(member.role), member.place.machine) for member in living]
        return Map(self.config.cluster, self._runtime.machines(), placed)

    # --- parts -------------------------------------------------------------------------------------------------------

    def _build_parts(self) -> None:
        """A new generation: everybody gets a part with its initial values."""
        self._generation += 1
        trainers = self._staff.of_kind("trainer")
        self._doors.open(self.reader, self.train_source, [member.index for member in trainers], self._generation)
        own = self._material.own.model is not None
        builds: list[Callable[[], None]] = [
            partial(member.build, build_embedding, EmbeddingSpec(self._config, own, self._shards[member.index]))
            for member in self._staff.of_kind("embedding")
        ]
        builds += [
            partial(member.build, build_dense, self._dense_spec(member.index))
            for member in self._staff.of_kind("dense")
        ]
        builds += [partial(member.build, build_reader, self._reader_spec()) for member in self._staff.of_kind("reader")]
        self._all_at_once(builds)
        for member in self._staff.members.values():
            member.ready = member.living and member.kind != "trainer"
        self._write_center(self.template.flat.detach().cpu())
        self._all_at_once([partial(self._build_trainer, member) for member in trainers])

    def _build_trainer(self, member: Member) -> None:
        member.build(build_trainer, self._trainer_spec(member))
        self._seen[member] = _Seen()

    def _dense_spec(self, index: int) -> DenseSpec:
        start, stop = self._spans[index]
        return DenseSpec(self.choices.codecs["dense"], stop - start)

    def _reader_spec(self) -> ReaderSpec:
        own = self._material.own.model is not None
        return ReaderSpec(self._config, own, self.reader.options, self.train_source.rows)

    def _trainer_spec(self, member: Member) -> TrainerSpec:
        desk, averaging = self._doors.addresses
        embedding = tuple((m.place.address, self._shards[m.index]) for m in self._serving("embedding"))
        dense = tuple(m.place.address for m in self._serving("dense"))
        if len(embedding) < len(self._shards) or len(dense) < len(self._spans):
            raise PeerLost("a server is not there")
        return TrainerSpec(
            member.index,
            self._generation,
            self._config,
            self.schema,
            self.tables,
            self.warmup_samples,
            self.total_samples,
            Addresses(desk, averaging, self._reader_of(member).place.address, embedding, dense),
            self._material.own.model,
            self._material.own.failures,
        )

    def _serving(self, kind: str) -> list[Member]:
        """The living servers of a kind whose part is in place, by index."""
        return [member for member in self._staff.of_kind(kind) if member.ready]

    def _reader_of(self, trainer: Member) -> Member:
        """One on the same machine, if there is one."""
        readers = self._serving("reader")
        if not readers:
            raise PeerLost("no reader is there")
        near = [reader for reader in readers if reader.place.machine == trainer.place.machine] or readers
        return near[trainer.index % len(near)]

    def _all_at_once(self, actions: Sequence[Callable[[], Any]]) -> None:
        """Does all of them, each in a thread; raises what went wrong in one of them, when all have ended."""
        started = [self._pool.submit(action) for action in actions]
        error = first_error([done.exception() for done in started])
        if error is not None:
            raise error

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._started = True
        for member in self._staff.of_kind("trainer"):
            self._start_trainer(member)

    def _start_trainer(self, member: Member) -> None:
        member.connection.call("start")  # who is gone is found by the staff

    def alive(self) -> bool:
        if self._going_back is not None:
            return True
        if self.given_up is not None:
            return False
        if self._must_go_back is not None or self._staff.anybody_died:
            return True
        trainers = self._staff.of_kind("trainer")
        if self.reader.finished or self._stopping:
            return any(not self._status(member).ended for member in trainers)
        if not trainers and not self._installs and not self._missing_trainers():
            self.given_up = "every trainer died"
            return False
        return True

    def _status(self, member: Member) -> TrainerStatus:
        seen = self._seen.get(member)
        return NOTHING_YET if seen is None else seen.status

    def reap(self) -> None:
        if self._going_back is not None:
            if not self._going_back.done():
                return  # who dies meanwhile is seen to there
            going, self._going_back = self._going_back, None
            going.result()
        for member in self._staff.take_dead():
            self._mourn(member)
        self._collect_installs()
        self._ask_statuses()
        if self._must_go_back is not None and self.given_up is None:
            self._going_back = self._pool.submit(self._go_back)
            self._going_back.add_done_callback(lambda _: self.ended.set())
        elif not self._stopping:
            self._recruit()

    def _mourn(self, member: Member) -> None:
        """Takes note that somebody died."""
        self._failures += 1
        if member.kind == "embedding":
            self._must_go_back = f"{member.role} died"
        elif member.kind == "trainer":
            self._doors.desk.ban(member.index)
            self._doors.averaging.dead(member.index)
            self._forget(member)
            if self.reader.finished and not self._staff.of_kind("trainer"):
                self._must_go_back = "the last trainer died before its weights were saved"
        else:
            self._vacant.setdefault(member.role, time.monotonic())

    def _forget(self, member: Member) -> None:
        seen = self._seen.pop(member, None)
        if seen is not None:
            self._gone.add(seen.status)

    def _ask_statuses(self) -> None:
        now = time.monotonic()
        every_s = QUICK_STATUS_S if self.reader.finished or self._stopping else STATUS_S
        for member, seen in list(self._seen.items()):
            if seen.asked is not None and seen.asked.done():
                self._hear(member, seen)
            if seen.asked is None and member.living and now - seen.asked_at >= every_s:
                seen.asked_at, seen.asked = now, member.connection.call("status")
                seen.asked.add_done_callback(lambda _: self.ended.set())

    def _hear(self, member: Member, seen: _Seen) -> None:
        assert seen.asked is not None
        answered, seen.asked = seen.asked, None
        if answered.exception() is not None:
            return  # the staff finds out why
        seen.status, seen.sketch = answered.result().read(TrainerStatus), answered.result().tensors[0]
        if seen.status.lost:
            self._scripted.add(member.role)
            self._staff.give_up(member, "it died by script")
        elif seen.status.fault is not None:
            error = seen.status.fault.error()
            if isinstance(error, _GONE):
                self._staff.give_up(member, str(error))
            else:
                self._error = self._error or error
                self.stop()

    def stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._ask_to_stop()
        self.reader.close()

    def _ask_to_stop(self) -> None:
        for member in self._staff.of_kind("trainer"):
            member.connection.call("stop")

    def finish(self) -> None:
        until = time.monotonic() + FINISH_S
        if self._going_back is not None:
            self._going_back.exception(FINISH_S)
        while self._started and time.monotonic() < until and self._error is None:
            if all(self._status(member).ended for member in self._at_work()):
                break
            if not (self._stopping or self.reader.finished):
                self.stop()
            self._ask_statuses()
            self.ended.wait(QUICK_STATUS_S)
            self.ended.clear()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._staff.close()
        self._runtime.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._doors.close()
        self._courier.close()
        self.reader.close()

    # --- those who come in place of others ---------------------------------------------------------------------------

    def _missing_trainers(self) -> list[str]:
        """Trainers that are not there and could be: those of the start, and more where they may join."""
        wanted = [f"trainer-{rank}" for rank in range(self._most)]
        there = {member.role for member in self._staff.of_kind("trainer")}
        return [role for role in wanted if role not in there | self._scripted and role not in self._installs]

    def _recruit(self) -> None:
        """Has vacant places filled where there is room."""
        now, cluster = time.monotonic(), self.config.cluster
        vacant = [role for role in self._vacant if role not in self._installs]
        settled = self._started and not self._vacant  # a newcomer needs all servers
        missing = self._missing_trainers() if settled and not self.reader.finished else []
        if vacant or missing:
            places = self._map_now()
            for role in vacant + missing:
                order = places.put(self._need(role), max(4, self.config.data.readers))
                if order is not None:
                    self._installs[role] = self._pool.submit(self._install, order)
                elif role in self._vacant and now - self._vacant[role] > cluster.lost_after_s:
                    self.given_up = places.why_not(self._need(role))
        few = len(self._staff.of_kind("trainer")) < min(cluster.min_trainers, self._most - len(self._scripted))
        self._few_since = (self._few_since or now) if few and not self.reader.finished else None
        if self._few_since is not None and now - self._few_since > cluster.lost_after_s:
            self.given_up = f"fewer than cluster.min_trainers={cluster.min_trainers} trainers are left"
        if self.given_up is not None:
            self.stop()

    def _collect_installs(self) -> None:
        for role, install in list(self._installs.items()):
            if install.done():
                del self._installs[role]
                error = install.exception()
                if error is None:
                    self._vacant.pop(role, None)
                elif not isinstance(error, _GONE):
                    self._error = self._error or error
                    self.stop()

    def _install(self, order: Order) -> None:
        """Starts a process for a role and puts it to work, while the others go on."""
        member = self._staff.hire(order)
        install = {"trainer": self._install_trainer, "dense": self._install_dense, "reader": self._install_reader}
        try:
            install[member.kind](member)
        except BaseException as error:
            self._staff.give_up(member, f"it could not be put to work: {error}")
            raise
        self.happenings.add(member.role, "restored" if member.incarnation else "alive")

    def _install_reader(self, member: Member) -> None:
        member.build(build_reader, self._reader_spec())
        member.ready = True
        self._tell_trainers(lambda trainer: Moved("reader", 0, self._reader_of(trainer).place.address))

    def _install_dense(self, member: Member) -> None:
        """Its part of the central copy is the mean of the replicas."""
        member.build(build_dense, self._dense_spec(member.index))
        weights = [image.replica["weight"] for image in self._images()]
        if not weights:
            self._must_go_back = f"no trainer is left from which {member.role} could go on"
            raise PeerLost("no trainer is left whose replica could fill a dense server")
        start, stop = self._spans[member.index]
        part = torch.stack(weights).mean(0)[start:stop].contiguous()
        member.connection.call("write", None, (part,)).result()
        member.ready = True
        self._tell_trainers(lambda _: Moved("dense", member.index, member.place.address))

    def _tell_trainers(self, moved: Callable[[Member], Moved]) -> None:
        for trainer in self._staff.of_kind("trainer"):
            trainer.connection.call("moved", moved(trainer))

    def _install_trainer(self, member: Member) -> None:
        """It goes on from a peer, under a centralised method from the central copy; its optimizer is the peer's."""
        member.build(build_trainer, self._trainer_spec(member))
        with self._turn:
            image = self._newcomers_image()
            if image is None:
                self._must_go_back = f"no trainer is left from which {member.role} could go on"
                return
            self._restore_trainer(member, image)
            self._doors.averaging.expect(member.index)
            self._seen[member] = _Seen()
            self._tell_where_servers_are(member)
            self._start_trainer(member)

    def _tell_where_servers_are(self, member: Member) -> None:
        """Those that were replaced while it was built."""
        for server in self._serving("dense"):
            member.connection.call("moved", Moved("dense", server.index, server.place.address))
        member.connection.call("moved", Moved("reader", 0, self._reader_of(member).place.address))

    def _newcomers_image(self) -> TrainerImage | None:
        peer = next(iter(self._images(running=True)), None)
        if peer is None or not self.choices.method.centralised:
            return peer
        center = self._read_center()
        return TrainerImage({**peer.replica, "weight": center}, self.choices.method.init(center))

    # --- back to a checkpoint ----------------------------------------------------------------------------------------

    def _go_back(self) -> None:
        """Ends this generation and starts the next one from the newest checkpoint, however often somebody dies."""
        began, trained = time.monotonic(), self.reader.trained
        for install in list(self._installs.values()):
            install.exception()
        self._collect_installs()
        for _ in range(ATTEMPTS):
            for member in self._staff.take_dead():
                self._mourn(member)
            try:
                self._next_generation()
            except _GONE:
                continue
            self._count_going_back(trained - self.reader.trained, time.monotonic() - began)
            return
        why = f"too many roles died while the job went back to a checkpoint ({self._must_go_back})"
        self.given_up = self.given_up or why

    def _count_going_back(self, samples: int, seconds: float) -> None:
        eps, before = self.recorder.speed().eps, self._went_back
        lost_s = samples / eps if eps else 0.0
        self._went_back = Recovered("full", before.lost_s + lost_s, before.wait_s + seconds)

    def _next_generation(self) -> None:
        self._all_at_once([partial(self._end_part, member) for member in self._staff.of_kind("trainer")])
        for member in list(self._seen):
            self._forget(member)
        replaced = self._fill_places()
        if self.given_up is not None:
            return
        saved = self._newest()
        position = self._material.position if saved is None else saved.position
        before, self.reader = (
            self.reader,
            Reader(self.train_source, reader_options(self.config), position, first_number=(self._generation + 1) << 32),
        )
        before.close()
        self._build_parts()
        self._load(saved)
        self._must_go_back = None
        self._vacant.clear()
        trainers = [member.role for member in self._staff.of_kind("trainer")]
        for role in dict.fromkeys([*replaced, *trainers]):
            self.happenings.add(role, "restored")
        if self._started and not self.reader.finished:
            self.start()
            if self._stopping:
                self._ask_to_stop()

    def _load(self, saved: LoadedCheckpoint | None) -> None:
        """Rows, dense part and counts of a checkpoint into fresh parts; they are the initial ones without it."""
        wire = self.wire_totals()
        self._gone = _Gone()
        if saved is None:
            self.recorder.rewind(self._beginning)
            self.go_on(0, wire)
            return
        state = job_state(saved)
        self.load_rows(saved)
        trainers = len(self._at_work())
        self.load_dense(restored_dense(saved, self.choices.method, self.template, trainers))
        self.recorder.rewind(state.recorder)
        self.go_on(state.syncs, wire)

    def _end_part(self, member: Member) -> None:
        try:
            member.build(build_nothing, None)
        except _GONE as error:
            self._staff.give_up(member, str(error))

    def _fill_places(self) -> list[str]:
        """Hires for every place that is vacant, trainers only where there is room; the roles that were filled."""
        until = time.monotonic() + self.config.cluster.lost_after_s
        while True:
            places = self._map_now()
            there = {member.role for member in self._staff.members.values() if member.living}
            needs = [need for need in self._servers() if need.role not in there]
            readers = (Need(f"reader-{index}") for index in range(self._reader_count))
            needs += [need for need in readers if need.role not in there]
            orders = [(need, places.put(need, max(4, self.config.data.readers))) for need in needs]
            homeless = [need for need, order in orders if order is None]
            if not homeless:
                break
            if time.monotonic() > until:
                self.given_up = places.why_not(homeless[0])
                return []
            self._closing.wait(1.0)
        found = [order for _, order in orders if order is not None]
        trainers = self._missing_trainers()
        found += [order for role in trainers if (order := places.put(Need(role))) is not None]
        self._all_at_once([partial(self._staff.hire, order) for order in found])
        if not self._staff.of_kind("trainer"):
            raise PeerLost("no trainer is there")
        return [order.role for order in found]

    # --- images ------------------------------------------------------------------------------------------------------

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        with self._turn:
            if (
                self._must_go_back is not None
                or self._going_back is not None
                or any(role.startswith("dense") for role in self._vacant)
            ):
                raise PeerLost("a server is not there")
            trainers = self._at_work()
            try:
                self._hold(trainers)
                yield
            finally:
                for member in trainers:
                    member.connection.call("release")

    def _hold(self, trainers: Sequence[Member]) -> None:
        moving = list(trainers)
        while moving:
            if self._staff.anybody_died:
                raise PeerLost("somebody died while the job was to stand still")
            asked = [member.connection.call("hold", HoldAsked(PATIENCE_S)) for member in moving]
            while wait(asked, PATIENCE_S).not_done:
                if any(member.state != "alive" for member in moving):
                    raise PeerLost("a trainer cannot be reached, so the job cannot stand still")
            moving = [m for m, answered in zip(moving, asked, strict=True) if not answered.result().read(Held).still]

    def rows(self) -> tuple[Rows, ...]:
        read = [self._pool.submit(_read_all, member) for member in self._row_servers()]
        return tuple(rows for server in read for rows in server.result())

    def _row_servers(self) -> list[Member]:
        servers = self._serving("embedding")
        if len(servers) < len(self._shards):
            raise PeerLost("an embedding server is not there")
        return servers

    def load_rows(self, saved: LoadedCheckpoint) -> None:
        match_tables(saved.tables, self.tables)
        there = {table.name: saved.tensor_names(table.name) for table in saved.tables}
        servers = [(member, RemoteRows(member.connection)) for member in self._row_servers()]
        here = {name: names for _, rows in servers for name, names in rows.tensor_names().items()}
        match_optimizer(there, here)
        self._all_at_once([partial(self._load_server, saved, *server) for server in servers])

    def _load_server(self, saved: LoadedCheckpoint, member: Member, rows: RemoteRows) -> None:
        for shard in self._shards[member.index]:
            for start in range(shard.start, shard.stop, LOADED_ROWS):
                stop = min(start + LOADED_ROWS, shard.stop)
                rows.write(Rows(shard.table, start, saved.rows(shard.table.name, start, stop)))

    def dense_image(self) -> DenseImage:
        images = self._images()
        if not images:
            raise PeerLost("no trainer is left")
        return DenseImage(tuple(images), self._read_center() if self._spans else None)

    def _images(self, running: bool = False) -> list[TrainerImage]:
        """Of all trainers at work, by rank; with `running` of the first of them only."""
        trainers = self._at_work()[:1] if running else self._at_work()
        asked = [member.connection.call("snapshot", timeout_s=IMAGE_S) for member in trainers]
        return [read_image(answered.result().read(ImageNames), answered.result().tensors) for answered in asked]

    def _at_work(self) -> list[Member]:
        """The living trainers but for those that are still being put to work, by rank."""
        return [member for member in self._staff.of_kind("trainer") if member in self._seen]

    def load_dense(self, image: DenseImage) -> None:
        trainers = self._at_work()
        if len(trainers) != len(image.trainers):
            raise PeerLost("a trainer is not there")
        for member, own in zip(trainers, image.trainers, strict=True):
            self._restore_trainer(member, own)
        if image.center is not None:
            self._write_center(image.center)

    def _restore_trainer(self, member: Member, image: TrainerImage) -> None:
        crossing = image_reply(image)
        member.connection.call("restore", crossing.meta, crossing.tensors).result()

    def _read_center(self) -> Tensor:
        asked = [member.connection.call("read", timeout_s=IMAGE_S) for member in self._dense_servers()]
        return torch.cat([answered.result().tensors[0] for answered in asked])

    def _write_center(self, center: Tensor) -> None:
        asked = [
            member.connection.call("write", None, (center[start:stop].contiguous(),))
            for member, (start, stop) in zip(self._dense_servers(), self._spans, strict=True)
        ]
        for answered in asked:
            answered.result()

    def _dense_servers(self) -> list[Member]:
        servers = self._serving("dense")
        if len(servers) < len(self._spans):
            raise PeerLost("a dense server is not there")
        return servers

    def predicting_client(self) -> EmbeddingClient:
        pulls, pushes = (Line(kind, Plain(), WireCounter()) for kind in ("pull", "push"))
        remotes = [
            EmbeddingRemote(Remote(m.connection, self._shards[m.index], m.index, learns=False), pulls, pushes)
            for m in self._row_servers()
        ]
        return EmbeddingClient(self.tables, [feature.name for feature in self.schema.features], remotes)

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def failures(self) -> int:
        return self._failures

    @property
    def recovered(self) -> Recovered:
        return self._went_back

    def _syncs_now(self) -> int:
        return self._gone.syncs + sum(seen.status.syncs for seen in self._seen.values())

    def _wire_now(self) -> dict[str, dict[str, int]]:
        sent, raw = self._gone.sent, self._gone.raw
        for seen in list(self._seen.values()):
            sent, raw = added(sent, seen.status.sent), added(raw, seen.status.raw)
        return {"bytes": dict(sent), "raw_bytes": dict(raw)}

    def _replica_distance(self) -> float | None:
        return distance([seen.sketch for seen in list(self._seen.values()) if seen.sketch is not None])

    def role_states(self) -> dict[str, RoleState]:
        states = {role: member.state for role, member in self._staff.members.items()}
        return states | dict.fromkeys(self._installs, "restarting")

    def _queue_depths(self) -> dict[str, int]:
        return {member.role: seen.status.waiting for member, seen in list(self._seen.items())}

    def places(self) -> dict[str, RolePlace]:
        return self._staff.places()


def _read_all(member: Member) -> list[Rows]:
    return list(RemoteRows(member.connection, IMAGE_S).read())


def cpus_needed(material: Material) -> float:
    """CPUs that a cluster of one machine has to offer for everybody to have room."""
    cluster, train = material.config.cluster, material.config.train
    trainers = cluster.max_trainers or train.trainers
    servers = material.config.embedding.servers + cluster.dense_servers
    return math.ceil(trainers * cluster.trainer_cpus + servers * cluster.server_cpus)


def resources_needed(material: Material) -> Mapping[str, float]:
    """Custom resources that it has to offer."""
    cluster = material.config.cluster
    return {name: 1.0 for name in (cluster.trainer_resource, cluster.server_resource) if name is not None}
