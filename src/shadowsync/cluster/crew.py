"""Everybody's part: who serves what, in which generation, and who is told where."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

from shadowsync.cluster.blueprint import Blueprint
from shadowsync.cluster.dense_side import DenseSide
from shadowsync.cluster.front import Doors
from shadowsync.cluster.parts import build_embedding, build_nothing, build_reader
from shadowsync.cluster.places import Map, Need, Placed
from shadowsync.cluster.staff import Member, Staff, first_error
from shadowsync.cluster.statuses import Statuses
from shadowsync.cluster.trainer_part import TrainerPart, build_trainer
from shadowsync.cluster.trainer_spec import Addresses, ServerAddress
from shadowsync.data.reader import Reader
from shadowsync.errors import RunError
from shadowsync.memory.shared import SharedMemory
from shadowsync.rpc.errors import GONE, PeerLost
from shadowsync.rpc.served import later
from shadowsync.runtime.runtime import Order, Runtime

RESERVE_S = 120.0


class Crew:
    """The members of a job with their parts.

    Args:
        blueprint: of all parts.
        runtime: says which machines there are.
        staff: the processes.
        doors: the driver's.
        statuses: of the trainers at work.
        pool: in which what takes long is done for several members at once.

    Attributes:
        generation: of the parts; 0 before the first.
        reader_count: readers that there should be.
        memory: what servers hold, as far as trainers reach it without them; anew in each generation, and as it is for
            a server that takes another's place.
    """

    def __init__(
        self, blueprint: Blueprint, runtime: Runtime, staff: Staff, doors: Doors, statuses: Statuses, pool: Executor
    ) -> None:
        self.blueprint, self.staff, self.doors, self.statuses = blueprint, staff, doors, statuses
        self.generation = 0
        self.reader_count = 0
        self.memory: dict[str, SharedMemory] = {}
        self._runtime, self._pool = runtime, pool

    # --- places ------------------------------------------------------------------------------------------------------

    def hire_all(self) -> None:
        """Reserves and starts everybody.

        Raises:
            RunError: somebody finds no room.
            PeerLost: somebody ended at once.
        """
        places = Map(self.blueprint.config.cluster, self._runtime.machines())
        needs = [*self.blueprint.servers(), *(Need(f"trainer-{rank}") for rank in range(self._first_trainers))]
        orders = [self._placed(places, need) for need in needs]
        self.reader_count = self.blueprint.config.cluster.readers or places.trainer_machines()
        orders += [self._placed(places, Need(f"reader-{index}")) for index in range(self.reader_count)]
        self._runtime.reserve(orders, RESERVE_S)
        self.hire(orders)

    @property
    def _first_trainers(self) -> int:
        return self.blueprint.config.train.trainers

    def _placed(self, places: Map, need: Need) -> Order:
        order = self.order(places, need)
        if order is None:
            raise RunError(places.why_not(need))
        return order

    def order(self, places: Map, need: Need) -> Order | None:
        """The order for a role at its best place, which it takes; None if there is none."""
        order = places.put(need)
        if order is None:
            return None
        return replace(order, threads=self.blueprint.threads, forget_s=self.blueprint.forget_s)

    def hire(self, orders: Sequence[Order]) -> None:
        """Starts these processes at once."""
        self.all_at_once([partial(self.staff.hire, order) for order in orders])

    def map(self) -> Map:
        """The machines with who is on them now."""
        living = [member for member in list(self.staff.members.values()) if member.living]
        placed = [Placed(self.blueprint.need(member.role), member.place.machine) for member in living]
        return Map(self.blueprint.config.cluster, self._runtime.machines(), placed)

    def vacant_servers(self) -> list[Need]:
        """Servers and readers that nobody is."""
        occupied = self.staff.occupied()
        readers = [Need(f"reader-{index}") for index in range(self.reader_count)]
        return [need for need in [*self.blueprint.servers(), *readers] if need.role not in occupied]

    def vacant_trainers(self) -> list[str]:
        """Trainers that nobody is: those of the start, and as many more as may join."""
        occupied = self.staff.occupied()
        return [role for rank in range(self.blueprint.trainers) if (role := f"trainer-{rank}") not in occupied]

    # --- who is there ------------------------------------------------------------------------------------------------

    def trainers(self) -> list[Member]:
        """All living ones, with a part or without, by rank."""
        return self.staff.of_kind("trainer")

    def serving(self, kind: str) -> list[Member]:
        """The living servers of a kind whose part is in place, by index."""
        return [member for member in self.staff.of_kind(kind) if member.ready]

    def row_servers(self) -> list[Member]:
        """All embedding servers.

        Raises:
            PeerLost: one of them is not there.
        """
        return self._complete("embedding", len(self.blueprint.shards))

    def dense_servers(self) -> list[Member]:
        """All dense servers; raises as `row_servers`."""
        return self._complete("dense", self.blueprint.dense_servers)

    def vacant_row_servers(self) -> tuple[int, ...]:
        """Embedding servers that are not there."""
        return tuple(sorted({*range(len(self.blueprint.shards))} - {m.index for m in self.serving("embedding")}))

    def everybody_serves(self) -> bool:
        """All servers are there, and a reader: all that a trainer needs."""
        servers = len(self.serving("embedding")) + len(self.serving("dense"))
        return servers == len(self.blueprint.servers()) and bool(self.serving("reader"))

    def _complete(self, kind: str, count: int) -> list[Member]:
        servers = self.serving(kind)
        missing = set(range(count)) - {member.index for member in servers}
        if missing:
            raise PeerLost(f"{kind}-{min(missing)} is not there")
        return servers

    def reader_of(self, trainer: Member) -> Member:
        """One on the same machine, if there is one.

        Raises:
            PeerLost: there is no reader.
        """
        readers = self.serving("reader")
        if not readers:
            raise PeerLost("no reader is there")
        near = [reader for reader in readers if reader.place.machine == trainer.place.machine] or readers
        return near[trainer.index % len(near)]

    # --- parts -------------------------------------------------------------------------------------------------------

    def end_trainers(self) -> None:
        """Ends the parts of all trainers; who cannot be reached for that is given up."""
        self.all_at_once([partial(self._end_part, member) for member in self.trainers()])
        for member in self.statuses.at_work():
            self.statuses.forget(member)

    def _end_part(self, member: Member) -> None:
        try:
            member.build(build_nothing, None)
        except GONE as error:
            self.staff.give_up(member, str(error))

    def build_servers(self, reader: Reader, dense: DenseSide, filled: bool = True) -> None:
        """A new generation: the doors are opened to it, and every server and reader gets a fresh part.

        Args:
            reader: of the generation.
            dense: the dense part, which is opened to it too.
            filled: rows have their initial values; else all of them are to be loaded.
        """
        self.generation += 1
        self._renew_memory()
        ranks = [member.index for member in self.trainers()]
        conducting = dense.open(reader, self.generation)
        self.doors.open(reader, self.blueprint.material.train, ranks, self.generation, conducting)
        self.statuses.begin()
        members = [member for kind in ("embedding", "dense", "reader") for member in self.staff.of_kind(kind)]
        self.all_at_once([partial(self.build_server, member, reader, filled) for member in members])
        for member in members:
            member.ready = True

    def _renew_memory(self) -> None:
        for before in self.memory.values():
            before.close()
        sizes = self.blueprint.shared_bytes if self._runtime.shares_memory else {}
        self.memory = {role: SharedMemory.create(size, f"what {role} holds") for role, size in sizes.items()}

    def close_memory(self) -> None:
        """Lets go of it."""
        for memory in self.memory.values():
            memory.close()

    def _memory_of(self, role: str) -> str | None:
        return self.memory[role].path if role in self.memory else None

    def build_server(self, member: Member, reader: Reader, filled: bool = True, inherits: bool = False) -> None:
        """Gives a server or reader a fresh part of this generation.

        Args:
            member: which.
            reader: of the generation.
            filled: as in `build_servers`.
            inherits: the memory of an embedding server is that of one that is gone.
        """
        memory = self._memory_of(member.role)
        if member.kind == "embedding":
            spec = self.blueprint.embedding(member.index, self.generation, filled, memory, inherits)
            member.build(build_embedding, spec)
        elif member.kind == "dense":
            member.build(*self.blueprint.dense(member.index, self.generation, memory))
        else:
            member.build(build_reader, self.blueprint.reader(reader.options))

    def build_trainers(self) -> None:
        """Every trainer gets a fresh part and counts as at work."""
        trainers = self.trainers()
        self.all_at_once([partial(self.build_trainer, member) for member in trainers])
        for member in trainers:
            self.statuses.add(member)

    def build_trainer(self, member: Member) -> None:
        """Gives a trainer a fresh part, which knows all servers."""
        desk, averaging = self.doors.addresses
        shards = self.blueprint.shards
        embedding = tuple((self._address(server), shards[server.index]) for server in self.row_servers())
        dense = tuple(self._address(server) for server in self.dense_servers())
        addresses = Addresses(desk, averaging, self.reader_of(member).place.address, embedding, dense)
        member.build(build_trainer, self.blueprint.trainer(member.index, self.generation, addresses))

    def _address(self, server: Member) -> ServerAddress:
        return ServerAddress(server.place.address, self._memory_of(server.role))

    # --- news for trainers -------------------------------------------------------------------------------------------

    def tell_of_readers(self) -> None:
        """Every trainer hears which reader is its own now."""
        for trainer in self.trainers():
            self._tell(trainer, self.reader_of(trainer))

    def tell_of_server(self, server: Member) -> None:
        """Every trainer hears where an embedding or dense server is now."""
        for trainer in self.trainers():
            self._tell(trainer, server)

    def tell_newcomer(self, trainer: Member) -> None:
        """A trainer hears of servers that were replaced while its part was built."""
        for server in [*self.serving("embedding"), *self.serving("dense")]:
            self._tell(trainer, server)
        self._tell(trainer, self.reader_of(trainer))

    def _tell(self, trainer: Member, server: Member) -> None:
        index = 0 if server.kind == "reader" else server.index
        # one that has no part yet is told when it has one
        later(trainer.connection, TrainerPart.moved, server.kind, index, server.place.address)

    def ask_to_start(self, trainer: Member) -> None:
        """One that cannot start is given up; who is gone is found by the staff."""

        def asked(error: BaseException | None) -> None:
            if error is not None and not isinstance(error, GONE):
                self.staff.give_up(trainer, str(error))

        later(trainer.connection, TrainerPart.start).then(asked)

    def ask_to_stop(self) -> None:
        """Asks every trainer to end at its next step."""
        for member in self.statuses.at_work():
            later(member.connection, TrainerPart.stop)

    def all_at_once(self, actions: Sequence[Callable[[], Any]]) -> None:
        """Does all of them, each in a thread; raises what went wrong in one of them, when all have ended."""
        started = [self._pool.submit(action) for action in actions]
        error = first_error([done.exception() for done in started])
        if error is not None:
            raise error
