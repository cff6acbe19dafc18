"""The roles of a job: how many, who serves what in which generation, and who is told where."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from shadowsync.aggregation.stepping import DenseShare, divide
from shadowsync.assembly import place_tables, row_optimizer, shares_averages, shares_center, shares_rows
from shadowsync.choices import server_count
from shadowsync.cluster.context import JobContext, Near, ServerAddress
from shadowsync.cluster.endpoints import Endpoints
from shadowsync.cluster.roles import ROLES, Role
from shadowsync.cluster.scheduler import Scheduler
from shadowsync.cluster.servers import build_nothing
from shadowsync.cluster.statuses import Statuses
from shadowsync.cluster.supervisor import Member, Supervisor, first_error
from shadowsync.cluster.trainer import TrainerPart
from shadowsync.config import Config
from shadowsync.data.leases import DoneLog
from shadowsync.data.reader import Reader
from shadowsync.data.source import OpenSource
from shadowsync.embedding.keys import parts_of as parts_of_keys
from shadowsync.embedding.placement import row_bytes
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Shard
from shadowsync.errors import ConfigError, RunError, ShadowSyncError
from shadowsync.memory.shared import FileBeside, bytes_of
from shadowsync.recovery.settings import moving_rows, row_tracking
from shadowsync.rpc.connection import Direct
from shadowsync.rpc.errors import GONE, PeerLost
from shadowsync.rpc.pending import Pending
from shadowsync.rpc.served import later
from shadowsync.runtime.runtime import HeldMemory, LaunchRequest, Runtime
from shadowsync.sync.dense import split_evenly
from shadowsync.sync.machine import ReplicaMemory
from shadowsync.training.replica import Replica

if TYPE_CHECKING:
    from shadowsync.cluster.dense_side import DenseSide
    from shadowsync.cluster.images import Images
    from shadowsync.cluster.outages import Outages

RESERVE_S = 120.0
TOLD_S = 20.0
"""How long everybody stands still for a trainer that is told where a server is."""
STARTS = 3
"""How often a role is started before its end at the start is the end of the job."""
THREADS = 4
FORGET_S = 120.0


@dataclass(frozen=True)
class ClusterSpec:
    """How many roles there are, and what each holds.

    Attributes:
        job: what every role is made from.
        template: the dense part with its initial values.
        direct: all roles are in one process.
        shards: what each embedding server holds.
        spans: what each dense server holds of the central copy; empty where the method keeps none.
        parts: what each dense server steps under a gradient method; empty where replicas are merged.
    """

    job: JobContext
    template: Replica
    direct: bool
    shards: tuple[tuple[Shard, ...], ...]
    spans: tuple[tuple[int, int], ...]
    parts: tuple[DenseShare, ...]

    @classmethod
    def of(cls, job: JobContext, source: OpenSource, template: Replica, direct: bool) -> "ClusterSpec":
        """Places the tables.

        Raises:
            ConfigError: they do not fit the servers.
        """
        config, choices = job.config, job.choices
        shards = place_tables(config, choices, job.schema, job.tables, source, job.model)
        servers = config.cluster.dense_servers
        spans = split_evenly(len(template.flat), servers) if choices.method.centralised else []
        # in one process nothing is gained by several steppers
        parts = divide(template.slots, 1 if direct else servers) if choices.aggregation is not None else ()
        return cls(job, template, direct, shards, tuple(spans), parts)

    @property
    def dense_servers(self) -> int:
        return len(self.spans) or len(self.parts)

    @property
    def trainers(self) -> int:
        """Most trainers at a time."""
        return self.job.config.cluster.max_trainers or self.job.config.train.trainers

    @property
    def threads(self) -> int:
        """That answer requests in a role's process."""
        return max(THREADS, self.job.config.data.readers)

    @property
    def forget_s(self) -> float:
        """Silence after which a server forgets a client: later than the driver gives up a role."""
        return max(FORGET_S, 2 * self.job.config.cluster.lost_after_s)

    @cached_property
    def row_bytes(self) -> list[int]:
        """Memory that the rows of each embedding server take."""
        optimizer, disk = row_optimizer(self.job.config.embedding), self.job.disk
        if disk is not None:
            return [disk.memory_bytes + bytes_of(parts_of_keys(shards)) for shards in self.shards]
        return [sum(shard.rows * row_bytes(shard.table, optimizer) for shard in shards) for shards in self.shards]

    @cached_property
    def shared_bytes(self) -> Mapping[str, int]:
        """By role, the memory of what trainers of its machine reach without it, should that be possible."""
        optimizer = row_optimizer(self.job.config.embedding)
        found: dict[str, int] = {}
        if shares_rows(self.job.config, self.job.choices):
            seed = self.job.config.train.seed
            ways = (row_tracking(self.job.choices.recovery, seed), moving_rows(self.job.config.cluster, seed))
            for index, shards in enumerate(self.shards):
                followed = [part for way in ways if way is not None for shard in shards for part in way.parts(shard)]
                held = self.job.choices.storage.memory_parts(shards, optimizer, self.job.disk)
                found[f"embedding-{index}"] = bytes_of([*held, *parts_of_keys(shards), *followed])
        if shares_center(self.job.config, self.job.choices):
            lengths = enumerate(stop - start for start, stop in self.spans)
            found |= {f"dense-{index}": bytes_of([(length, torch.float32)]) for index, length in lengths}
        return found

    @cached_property
    def shared_files(self) -> Mapping[str, FileBeside]:
        """By role, the file of a disk that belongs to that memory."""
        optimizer, disk = row_optimizer(self.job.config.embedding), self.job.disk
        if disk is None:
            return {}
        parts = (self.job.choices.storage.file_parts(shards, optimizer) for shards in self.shards)
        return {f"embedding-{index}": FileBeside(disk.folder, bytes_of(part)) for index, part in enumerate(parts)}


def cpus_needed(config: Config) -> float:
    """CPUs that a cluster of one machine has to offer for everybody to have room."""
    cluster = config.cluster
    trainers = cluster.max_trainers or config.train.trainers
    servers = server_count(config) + cluster.dense_servers
    return math.ceil(trainers * cluster.trainer_cpus + servers * cluster.server_cpus)


def resources_needed(config: Config) -> Mapping[str, float]:
    """Custom resources that it has to offer."""
    named = (config.cluster.trainer_resource, config.cluster.server_resource)
    return {name: 1.0 for name in named if name is not None}


class ClusterManager:
    """The members of a job with their parts.

    Args:
        pool: in which what takes long is done for several members at once.

    Attributes:
        generation: of the parts; 0 before the first.
        reader_count: readers that there should be.
        memory: what servers hold, by role, as far as trainers of their machines reach it without them; anew in each
            generation, and as it is for a server that takes another's place.
        filled: roles whose memory has held what it should, so that it outlives them.
        goes_back: as `Session.goes_back`.
        near: what trainers of this process have in common; None where they are elsewhere.
        moved: how often a server has changed its machine.
        leaving: machines that are to be shut down, by id: nobody is put there any more.
        dense, images, outages: of the session, which sets them.
    """

    dense: "DenseSide"
    images: "Images"
    outages: "Outages"

    def __init__(
        self,
        spec: ClusterSpec,
        runtime: Runtime,
        supervisor: Supervisor,
        endpoints: Endpoints,
        statuses: Statuses,
        pool: Executor,
    ) -> None:
        self.spec, self.supervisor, self.endpoints, self.statuses = spec, supervisor, endpoints, statuses
        self.generation = 0
        self.reader_count = 0
        self.memory: dict[str, HeldMemory] = {}
        self.filled: set[str] = set()
        self.goes_back = False
        self.near: Near | None = None
        self.moved = 0
        self.leaving: frozenset[str] = frozenset()
        self._runtime, self._pool = runtime, pool
        self._logs: dict[str, HeldMemory] = {}
        self._replicas: dict[str, HeldMemory] = {}

    # --- places ------------------------------------------------------------------------------------------------------

    def request(self, role: str) -> LaunchRequest:
        needs = role_of(role).request(self.spec, role)
        return replace(needs, threads=self.spec.threads, forget_s=self.spec.forget_s)

    def servers(self) -> list[LaunchRequest]:
        """The servers of rows, the largest first, and of the dense part."""
        rows = [self.request(f"embedding-{index}") for index in range(len(self.spec.shards))]
        dense = [self.request(f"dense-{index}") for index in range(self.spec.dense_servers)]
        return sorted(rows, key=lambda request: -request.bytes) + dense

    def launch_all(self) -> None:
        """Reserves and starts everybody.

        Raises:
            RunError: somebody finds no room.
            PeerLost: somebody ended at once.
        """
        trainers = [self.request(f"trainer-{rank}") for rank in range(self.spec.job.config.train.trainers)]
        if self.spec.direct:
            self.launch([*self.servers(), *trainers])
            return
        scheduler = self._scheduler()
        requests = [self._placed(scheduler, request) for request in [*self.servers(), *trainers]]
        machines, fewest = scheduler.machines_of("embedding"), self.spec.job.config.cluster.min_servers
        if machines < fewest:
            raise RunError(
                f"cluster.min_servers={fewest} and there is room for embedding servers on {machines} machine(s) only"
            )
        self.reader_count = self.spec.job.config.cluster.readers or scheduler.machines_of("trainer")
        readers = [self.request(f"reader-{index}") for index in range(self.reader_count)]
        requests += [self._placed(scheduler, request) for request in readers]
        if self.spec.job.config.cluster.max_servers is None:  # else a machine that is emptied has to be given back
            self._runtime.reserve(requests, RESERVE_S)
        self.launch(requests)

    def _placed(self, scheduler: Scheduler, request: LaunchRequest) -> LaunchRequest:
        placed = self.place(scheduler, request)
        if placed is None:
            raise RunError(scheduler.why_not(request))
        return placed

    def place(self, scheduler: Scheduler, request: LaunchRequest, anew: bool = False) -> LaunchRequest | None:
        """A role at its best place, which it takes, or, unless everything begins anew, where the memory is of the one
        before; None if there is none."""
        held = None if anew or request.role not in self.filled else self.memory[request.role]
        return scheduler.put(request if held is None or not held.is_there() else replace(request, machine=held.machine))

    def launch(self, requests: Sequence[LaunchRequest]) -> None:
        """Starts these processes at once; one that ends while it starts, a few times.

        Raises:
            PeerLost: somebody ended each time.
        """

        def start(request: LaunchRequest) -> None:
            for _ in range(STARTS - 1):
                with suppress(PeerLost):
                    self.supervisor.launch(request)
                    return
            self.supervisor.launch(request)

        self.all_at_once([partial(start, request) for request in requests])

    def scheduler(self, avoided: Collection[str] = ()) -> Scheduler:
        everybody = [*self.supervisor.members.copy().values(), *self.supervisor.coming.copy().values()]
        return self._scheduler([self.placed(member) for member in everybody if member.living], avoided)

    def _scheduler(self, placed: Sequence[LaunchRequest] = (), avoided: Collection[str] = ()) -> Scheduler:
        most = self.spec.job.config.cluster.max_servers
        return Scheduler(self._runtime.machines(), placed, self.leaving, most, avoided)

    def leave(self, names: Collection[str]) -> frozenset[str]:
        """Machines of these names or ids are to be shut down, and no others; the names of which there is none."""
        machines = self._runtime.machines() if names else ()
        self.leaving = frozenset(machine.id for machine in machines if {machine.id, machine.name} & set(names))
        return frozenset(names) - {name for machine in machines for name in (machine.id, machine.name)}

    def name_of(self, machine: str) -> str:
        return next((found.name for found in self._runtime.machines() if found.id == machine), machine)

    def placed(self, member: Member) -> LaunchRequest:
        """What it needs, where it is."""
        return replace(self.request(member.role), machine=member.endpoint.machine)

    def vacant_servers(self) -> list[LaunchRequest]:
        """Servers and readers that nobody is."""
        occupied = self.supervisor.occupied()
        readers = [self.request(f"reader-{index}") for index in range(self.reader_count)]
        return [request for request in [*self.servers(), *readers] if request.role not in occupied]

    def vacant_trainers(self) -> list[str]:
        """Trainers that nobody is: those of the start, and as many more as may join."""
        occupied = self.supervisor.occupied()
        return [role for rank in range(self.spec.trainers) if (role := f"trainer-{rank}") not in occupied]

    # --- who is there ------------------------------------------------------------------------------------------------

    def trainers(self) -> list[Member]:
        """All living ones, with a part or without, by rank."""
        return self.supervisor.of_kind("trainer")

    def serving(self, kind: str) -> list[Member]:
        """The living servers of a kind whose part is in place, by index."""
        return [member for member in self.supervisor.of_kind(kind) if member.ready]

    def row_servers(self) -> list[Member]:
        """All embedding servers.

        Raises:
            PeerLost: one of them is not there.
        """
        return self._complete("embedding", len(self.spec.shards))

    def dense_servers(self) -> list[Member]:
        """All dense servers; raises as `row_servers`."""
        return self._complete("dense", self.spec.dense_servers)

    def _complete(self, kind: str, count: int) -> list[Member]:
        servers = self.serving(kind)
        missing = set(range(count)) - {member.index for member in servers}
        if missing:
            raise PeerLost(f"{kind}-{min(missing)} is not there")
        return servers

    def vacant_row_servers(self) -> tuple[int, ...]:
        return tuple(sorted({*range(len(self.spec.shards))} - {member.index for member in self.serving("embedding")}))

    def all_servers_serve(self) -> bool:
        """All that hold something are there."""
        serving = len(self.serving("embedding")) + len(self.serving("dense"))
        return serving == len(self.spec.shards) + self.spec.dense_servers

    def near_rows(self) -> tuple[EmbeddingServer, ...]:
        """The embedding servers, where they are in this process."""
        return tuple(_served_by(member).role.server for member in self.row_servers())

    def near_dense(self) -> list[Any]:
        """What the dense servers serve, where they are in this process."""
        return [_served_by(member).role for member in self.dense_servers()]

    def fallen_trainers(self) -> list[Member]:
        """Those that have died by script in this process: what they had is still there."""
        if not self.spec.direct:
            return []
        members = self.supervisor.members.values()
        fallen = [member for member in members if member.kind == "trainer" and not member.living]
        return sorted(fallen, key=lambda member: member.index)

    def reader_of(self, trainer: Member) -> Member:
        """One on the same machine, if there is one.

        Raises:
            PeerLost: there is no reader.
        """
        readers = self.serving("reader")
        if not readers:
            raise PeerLost("no reader is there")
        machine = trainer.endpoint.machine
        near = [reader for reader in readers if reader.endpoint.machine == machine] or readers
        return near[trainer.index % len(near)]

    # --- parts -------------------------------------------------------------------------------------------------------

    def end_trainers(self) -> None:
        """Ends the parts of all trainers; who cannot be reached for that is given up."""

        def end(member: Member) -> None:
            try:
                member.build(build_nothing)
            except GONE as error:
                self.supervisor.give_up(member, str(error))

        self.all_at_once([partial(end, member) for member in self.trainers()])
        for member in self.statuses.at_work():
            self.statuses.forget(member)

    def build_servers(self, reader: Reader, filled: bool = True) -> None:
        """A new generation: the endpoints are opened to it, and every server and reader gets a fresh part.

        Args:
            reader: of the generation.
            filled: rows have their initial values; else all of them are to be loaded.
        """
        self.generation += 1
        self.filled.clear()  # first: whoever looks for a place meanwhile trusts it
        before, self.memory = self.memory, {}
        for held in before.values():
            held.close()
        servers = [member for kind in ("embedding", "dense") for member in self.supervisor.of_kind(kind)]
        if before:  # whoever still maps what was there lets go of it before as much is taken again
            self.all_at_once([partial(member.build, build_nothing) for member in servers])
        for member in servers:
            self.give_memory(member)
        ranks = [member.index for member in self.trainers()]
        conducting = self.dense.open(reader, self.generation)
        meeting = self.spec.job.choices.method.meeting()
        self.endpoints.open(reader, reader.source, ranks, self.generation, conducting, meeting)
        self.statuses.begin()
        members = [*servers, *self.supervisor.of_kind("reader")]
        self.all_at_once([partial(self.build, member, reader, filled) for member in members])
        for member in members:
            member.ready = True

    def build(self, member: Member, reader: Reader, filled: bool = True, inherits: bool = False) -> None:
        """Gives a member a fresh part of this generation, which knows all that it needs.

        Args:
            member: which.
            reader: of the generation.
            filled: as in `build_servers`.
            inherits: the memory of an embedding server is that of one that is gone.
        """
        member.build(ROLES[member.kind].part(self, member, reader, filled, inherits))

    def build_trainers(self, reader: Reader) -> None:
        """Every trainer gets a fresh part and counts as at work."""
        trainers = self.trainers()
        self.all_at_once([partial(self.build, member, reader) for member in trainers])
        for member in trainers:
            self.statuses.add(member)

    def close_memory(self) -> None:
        for held in [*self.memory.values(), *self._logs.values(), *self._replicas.values()]:
            held.close()

    def give_memory(self, server: Member) -> None:
        """New memory on a server's machine for what it will hold, if trainers can reach that there."""
        self.filled.discard(server.role)
        if (size := self._shared_bytes(server)) is not None:
            self._give(server, self.memory, size, f"what {server.role} holds")

    def make_memory(self, coming: Member) -> HeldMemory | None:
        """As `give_memory`, beside that of the server whose place this one is to take (`take_place`)."""
        size = self._shared_bytes(coming)
        return None if size is None else self._made(coming, size, f"what {coming.role} holds")

    def take_place(self, coming: Member, held: HeldMemory | None) -> tuple[Member, HeldMemory | None]:
        """A server that was launched beside the one of its role, and has all that that one has, takes its place with
        its memory; what is to be ended when everybody knows. Raises `PeerLost` if one of the two is gone."""
        before, coming.ready = self.supervisor.take_place(coming), True
        let_go = self.memory.pop(coming.role, None)
        if held is not None:
            self.memory[coming.role] = held
        self.moved += 1
        return before, let_go

    def _shared_bytes(self, server: Member) -> int | None:
        return self.spec.shared_bytes.get(server.role) if self._runtime.shares_memory else None

    def give_log(self, trainer: Member) -> str | None:
        """New memory in which a trainer logs what it has done; its path. None under gradient methods, where what is
        done is decided by others, and where no memory is shared."""
        if self.spec.job.choices.aggregation is not None or not self._runtime.shares_memory:
            return None
        with suppress(PeerLost, ConfigError):  # it trains without one, too
            return self._give(trainer, self._logs, bytes_of(DoneLog.PARTS), f"what {trainer.role} has done")
        return None

    def give_replica(self, trainer: Member) -> tuple[str, int] | None:
        """New memory for a trainer's replica, which those of its machine average with; its path and length. None where
        they meet in another way; raises as `Runtime.create_memory`."""
        path, length = None, len(self.spec.template.flat)
        if shares_averages(self.spec.job.config, self.spec.job.choices) and self._runtime.shares_memory:
            size = bytes_of(ReplicaMemory.parts(length))
            path = self._give(trainer, self._replicas, size, f"the replica of {trainer.role}")
        if self.endpoints.averaging is not None:
            self.endpoints.averaging.place(trainer.index, trainer.endpoint.machine, path)
        return None if path is None else (path, length)

    def _give(self, member: Member, among: dict[str, HeldMemory], size: int, what: str) -> str:
        """New memory on a member's machine in place of what it had, which is let go of; its path."""
        before = among.pop(member.role, None)
        try:
            held = among[member.role] = self._made(member, size, what)
            return held.path
        finally:
            if before is not None:
                before.close()

    def _made(self, member: Member, size: int, what: str) -> HeldMemory:
        return self._runtime.create_memory(member.endpoint.machine, size, what, self.spec.shared_files.get(member.role))

    def take_log(self, trainer: Member) -> DoneLog | None:
        """What a trainer that is gone has done; None if that is not known, since its machine cannot be asked."""
        found = None
        held = self._logs.get(trainer.role)
        with suppress(PeerLost):
            if held is not None and held.is_there():
                found = DoneLog.of(held.read())
        for memory in (self._logs, self._replicas):
            if (held := memory.pop(trainer.role, None)) is not None:
                held.close()
        return found

    def memory_of(self, server: Member) -> str | None:
        """Path of the memory in which what a server holds lies, if it does, and is still there."""
        held = self.memory.get(server.role)
        there = held is not None and held.machine == server.endpoint.machine and held.is_there()
        return held.path if held is not None and there else None

    def outlived(self, server: Member) -> bool:
        """What the one before a server held is still there, whole, on its machine."""
        return server.role in self.filled and self.memory_of(server) is not None

    def are_filled(self, *roles: str) -> None:
        """Servers (all of them, where none is named) hold what they should, and their memory does from now on."""
        self.filled |= self.memory.keys() & (roles or self.memory.keys())

    def address(self, server: Member, trainer: Member) -> ServerAddress:
        """Where a trainer finds a server."""
        near = server.endpoint.machine == trainer.endpoint.machine
        return ServerAddress(server.endpoint.address, self.memory_of(server) if near else None)

    # --- news for trainers -------------------------------------------------------------------------------------------

    def tell_of(self, server: Member) -> None:
        """Every trainer hears where a server is that took a dead one's place; of a reader, which one is its own."""
        for trainer in self.trainers():
            self._redirect(trainer, self.reader_of(trainer) if server.kind == "reader" else server)

    def tell_replacement(self, trainer: Member) -> None:
        """A trainer has heard of servers that were replaced while its part was built when this returns.

        Raises:
            PeerLost: it does not.
        """
        servers = [*self.serving("embedding"), *self.serving("dense"), self.reader_of(trainer)]
        for answer in [self._tell(trainer, server) for server in servers]:
            try:
                answer.result(TOLD_S)
            except (ShadowSyncError, TimeoutError) as error:
                raise PeerLost(f"{trainer.role} does not reach the servers: {error}") from error

    def tell_of_move(self, server: Member) -> None:
        """Every trainer at work, all of which stand still, reaches a server at its new place when this returns; who
        does not hear of it is given up."""
        trainers = self.statuses.at_work()
        told = [self._tell(trainer, server) for trainer in trainers]
        for trainer, answer in zip(trainers, told, strict=True):
            try:
                answer.result(TOLD_S)
            except (ShadowSyncError, TimeoutError) as error:
                self.supervisor.give_up(trainer, f"it did not hear that {server.role} is on another machine: {error}")

    def _tell(self, trainer: Member, server: Member) -> Pending[None]:
        """One that has no part yet is told when it has one."""
        if server.kind == "embedding":
            return later(trainer.connection, TrainerPart.reach, server.index, self.address(server, trainer))
        return self._redirect(trainer, server)

    def _redirect(self, trainer: Member, server: Member) -> Pending[None]:
        index = 0 if server.kind == "reader" else server.index
        return later(trainer.connection, TrainerPart.moved, server.kind, index, server.endpoint.address)

    def ask_to_start(self, trainer: Member) -> None:
        """One that cannot start is given up; who is gone is found by the supervisor."""

        def asked(error: BaseException | None) -> None:
            if error is not None and not isinstance(error, GONE):
                self.supervisor.give_up(trainer, str(error))

        later(trainer.connection, TrainerPart.start).then(asked)

    def ask_to_stop(self) -> None:
        """Asks every trainer to end at its next step."""
        for member in self.statuses.at_work():
            later(member.connection, TrainerPart.stop)

    def all_at_once(self, actions: Sequence[Callable[[], Any]]) -> None:
        """Does all of them, each in a thread; raises what went wrong in one of them, when all have ended."""
        if self.spec.direct:  # they would take turns
            for action in actions:
                action()
            return
        started = [self._pool.submit(action) for action in actions]
        error = first_error([done.exception() for done in started])
        if error is not None:
            raise error


def role_of(name: str) -> Role:
    """The entry of the role table for a role's name."""
    return ROLES[name.rpartition("-")[0]]


def _served_by(member: Member) -> Any:
    assert isinstance(member.connection, Direct)
    return member.connection.part()
