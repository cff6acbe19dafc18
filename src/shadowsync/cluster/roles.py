"""The role table: what each kind of role needs, how its part is made, and what its death and its coming mean.

A new kind of role is a class here and its line in `ROLES`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from shadowsync.assembly import initial_rows
from shadowsync.cluster.context import Addresses, TrainerSpec
from shadowsync.cluster.servers import StepperPart, build_dense, build_embedding, build_reader, build_stepper
from shadowsync.cluster.supervisor import Member, NobodyLeft
from shadowsync.cluster.trainer import build_trainer
from shadowsync.config import ClusterConfig
from shadowsync.data.reader import Reader
from shadowsync.embedding.moving import ArrivingService, Copied
from shadowsync.errors import RunError
from shadowsync.rpc.errors import GONE, PeerLost
from shadowsync.rpc.served import ask
from shadowsync.runtime.runtime import Builder, LaunchRequest
from shadowsync.sync.dense import DenseServer

if TYPE_CHECKING:
    from shadowsync.cluster.manager import ClusterManager, ClusterSpec

LOOK_S = 0.05
ROUNDS = 20
"""How often rows that changed while they moved are copied again before everybody stands still for the last of them."""
SHORT_S = 1.0
"""A round that takes less is about what everybody may stand still for."""


class Role(ABC):
    """One kind of role; by default a server that another one replaces as it was built."""

    kind: ClassVar[str]

    def request(self, spec: "ClusterSpec", role: str) -> LaunchRequest:
        """What the role of that name needs of its machine."""
        return self.of(spec.job.config.cluster, role)

    def of(self, cluster: ClusterConfig, role: str, filled_bytes: int = 0) -> LaunchRequest:
        """As `request`, of a role that will fill so much memory."""
        return LaunchRequest(role, None, cluster.server_cpus, cluster.server_resource, filled_bytes)

    @abstractmethod
    def part(self, manager: "ClusterManager", member: Member, reader: Reader, filled: bool, inherits: bool) -> Builder:
        """Makes a member's part; arguments as `ClusterManager.build`."""

    def on_join(self, manager: "ClusterManager", member: Member, reader: Reader, stopping: Callable[[], bool]) -> None:
        """Puts a process that takes the role's place to work, while the others go on.

        Raises:
            NobodyLeft: everybody has to go back to a checkpoint.
            PeerLost: it died again. For servers that are not there a trainer waits, unless `stopping`.
        """
        self.fill(manager, member, reader)
        member.ready = True
        manager.tell_of(member)

    def fill(self, manager: "ClusterManager", member: Member, reader: Reader) -> None:
        """Gives a server that takes another's place its part, with what that one held; raises as `on_join`."""
        manager.build(member, reader)

    @abstractmethod
    def on_death(self, manager: "ClusterManager", members: Sequence[Member], samples: int, needed: bool) -> str | None:
        """Takes note that members of the kind died at once.

        Args:
            manager: whose.
            members: who died.
            samples: trained so far.
            needed: the weights of a trainer are, for the last image or for one that takes a place.

        Returns:
            why everybody has to go back; None if nobody has to.
        """


class MovableRole(Role):
    """A server that may change its machine while training goes on."""

    @abstractmethod
    def begin_move(self, manager: "ClusterManager", source: Member, target: Member, memory: str | None) -> Copied:
        """Gives a process on another machine a part that is to take the place of the one that is there, with most of
        what that one holds, in that memory; training goes on.

        Raises:
            PeerLost: one of the two died, or more changes than crosses.
        """

    @abstractmethod
    def end_move(self, manager: "ClusterManager", source: Member, target: Member) -> Copied:
        """The rest of `begin_move`, while everybody stands still."""

    def tell_of_move(self, manager: "ClusterManager", server: Member) -> None:
        """Everybody at work, who stands still, goes on with the one that has moved."""
        manager.tell_of_move(server)


class EmbeddingRole(MovableRole):
    """Holds rows; memory decides about its place."""

    kind = "embedding"

    def request(self, spec: "ClusterSpec", role: str) -> LaunchRequest:
        return self.of(spec.job.config.cluster, role, spec.row_bytes[int(role.rpartition("-")[2])])

    def part(self, manager: "ClusterManager", member: Member, reader: Reader, filled: bool, inherits: bool) -> Builder:
        return self._part(manager, member, manager.memory_of(member), filled, inherits)

    def _part(
        self,
        manager: "ClusterManager",
        member: Member,
        memory: str | None,
        filled: bool = False,
        inherits: bool = False,
        source: str | None = None,
    ) -> Builder:
        job, shards = manager.spec.job.without_model, manager.spec.shards[member.index]
        initial = initial_rows(manager.spec.job.model, shards, manager.spec.direct) if filled else {}
        return partial(build_embedding, job, shards, manager.generation, filled, memory, inherits, initial, source)

    def begin_move(self, manager: "ClusterManager", source: Member, target: Member, memory: str | None) -> Copied:
        target.build(self._part(manager, target, memory, source=source.endpoint.address))
        copied = ask(target.connection, ArrivingService.take_all)
        for _ in range(ROUNDS):
            began = time.monotonic()
            again = ask(target.connection, ArrivingService.take_changed)
            copied = copied.plus(again)
            if time.monotonic() - began < SHORT_S:
                return copied
        raise PeerLost(f"too many rows change while they cross: {again.rows:,} in the last round")

    def end_move(self, manager: "ClusterManager", source: Member, target: Member) -> Copied:
        return ask(target.connection, ArrivingService.take_over)

    def fill(self, manager: "ClusterManager", member: Member, reader: Reader) -> None:
        """Its rows are as they were, if their memory outlived the one before; else those of the newest checkpoint,
        without one the initial ones. Nobody else goes back, or everybody does (`goes_back`).

        Nobody knows it yet, so rows of a checkpoint that turns out to be damaged are simply overwritten.
        """
        images, outages, began = manager.images, manager.outages, time.monotonic()
        if manager.outlived(member):
            manager.build(member, reader, filled=False, inherits=True)
            outages.dismiss(member.index)
            return
        if manager.goes_back:  # its machine turned out to be gone after the process was
            raise NobodyLeft(f"{member.role} was lost with its rows")
        manager.give_memory(member)
        manager.build(member, reader, filled=False)
        shards = manager.spec.shards[member.index]
        with outages.newest(shards, lambda saved: images.load_server(saved, member)) as saved:
            if saved is None:
                manager.build(member, reader)
            outages.over(member.index, saved, began)  # before anybody saves: it decides what a save holds
        manager.are_filled(member.role)

    def on_death(self, manager: "ClusterManager", members: Sequence[Member], samples: int, needed: bool) -> str | None:
        lost = [member for member in members if not manager.outlived(member)]
        if lost and manager.goes_back:
            return f"{lost[0].role} died"
        manager.outages.begin([member.index for member in members], samples)
        return None


class DenseRole(MovableRole):
    """Holds a part of the central dense copy, or of the one that gradient methods step."""

    kind = "dense"

    def part(self, manager: "ClusterManager", member: Member, reader: Reader, filled: bool, inherits: bool) -> Builder:
        return self._part(manager, member, manager.memory_of(member))

    def _part(self, manager: "ClusterManager", member: Member, memory: str | None) -> Builder:
        spec, index = manager.spec, member.index
        if spec.parts:
            return partial(build_stepper, spec.job, manager.generation, spec.parts[index], index == 0)
        start, stop = spec.spans[index]
        codec = spec.job.choices.codecs["dense"]
        return partial(build_dense, codec, stop - start, manager.generation, memory)

    def begin_move(self, manager: "ClusterManager", source: Member, target: Member, memory: str | None) -> Copied:
        target.build(self._part(manager, target, memory))
        return Copied(0, 0)

    def end_move(self, manager: "ClusterManager", source: Member, target: Member) -> Copied:
        if manager.spec.parts:
            ask(target.connection, StepperPart.take_over, source.endpoint.address, manager.generation)
        else:
            ask(target.connection, DenseServer.write, ask(source.connection, DenseServer.read))
        return Copied(0, 0)

    def fill(self, manager: "ClusterManager", member: Member, reader: Reader) -> None:
        outlived = manager.outlived(member)
        if not outlived:
            manager.give_memory(member)
        manager.build(member, reader)
        if not outlived:
            manager.dense.fill_server(member)
            manager.are_filled(member.role)

    def on_death(self, manager: "ClusterManager", members: Sequence[Member], samples: int, needed: bool) -> str | None:
        return f"{members[0].role} died, and the dense part with it" if manager.dense.is_with_servers else None


class ReaderRole(Role):
    """Parses rows for the trainers of its machine."""

    kind = "reader"

    def of(self, cluster: ClusterConfig, role: str, filled_bytes: int = 0) -> LaunchRequest:
        return LaunchRequest(role, None, 0.0, cluster.trainer_resource, seeks="trainer")

    def part(self, manager: "ClusterManager", member: Member, reader: Reader, filled: bool, inherits: bool) -> Builder:
        return partial(build_reader, manager.spec.job.without_model, reader.options)

    def on_death(self, manager: "ClusterManager", members: Sequence[Member], samples: int, needed: bool) -> str | None:
        if manager.serving("reader"):
            manager.tell_of(members[0])  # another takes over at once
        return None


class TrainerRole(Role):
    """Trains, and merges its replica or sends gradients."""

    kind = "trainer"

    def of(self, cluster: ClusterConfig, role: str, filled_bytes: int = 0) -> LaunchRequest:
        keeps_off = "embedding" if cluster.placement == "apart" else ""
        return LaunchRequest(role, None, cluster.trainer_cpus, cluster.trainer_resource, keeps_off=keeps_off)

    def part(self, manager: "ClusterManager", member: Member, reader: Reader, filled: bool, inherits: bool) -> Builder:
        others = manager.near or self._addresses(manager, member)
        own = manager.give_log(member), manager.give_replica(member)
        return partial(build_trainer, TrainerSpec(manager.spec.job, member.index, manager.generation, others, *own))

    def _addresses(self, manager: "ClusterManager", member: Member) -> Addresses:
        driver, averaging = manager.endpoints.addresses
        shards = manager.spec.shards
        return Addresses(
            driver,
            averaging,
            manager.reader_of(member).endpoint.address,
            tuple((manager.address(server, member), shards[server.index]) for server in manager.row_servers()),
            tuple(manager.address(server, member) for server in manager.dense_servers()),
        )

    def on_join(self, manager: "ClusterManager", member: Member, reader: Reader, stopping: Callable[[], bool]) -> None:
        while not stopping():
            moved = manager.moved
            try:
                manager.build(member, reader)
                break
            except (*GONE, RunError):  # a server may not be there yet, or have gone to another machine meanwhile
                there = manager.moved == moved and manager.all_servers_serve() and manager.serving("reader")
                if not member.living or there:
                    raise
                time.sleep(LOOK_S)
        else:
            return
        with manager.images.turn:
            manager.dense.fill_trainer(member)
            manager.endpoints.expect(member.index)
            manager.statuses.add(member)
            manager.tell_replacement(member)
            manager.ask_to_start(member)
            if stopping():
                manager.ask_to_stop()

    def on_death(self, manager: "ClusterManager", members: Sequence[Member], samples: int, needed: bool) -> str | None:
        for member in members:
            manager.endpoints.give_up(member.index, partial(manager.take_log, member))
            manager.statuses.forget(member)
        if needed and manager.dense.is_with_trainers and not manager.statuses.at_work():
            return "no trainer is left whose weights the others could go on from"
        return None


ROLES: dict[str, Role] = {role.kind: role for role in (EmbeddingRole(), DenseRole(), ReaderRole(), TrainerRole())}
