"""The dense part of a trainer in a process of its own: a replica that is merged with others, or copies that follow."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from shadowsync.aggregation.conductor_remote import ConductorRemote
from shadowsync.aggregation.dense_shares import DenseShare, divide
from shadowsync.aggregation.divided_steppers import DividedSteppers
from shadowsync.aggregation.stepper_remote import StepperRemote
from shadowsync.aggregation.update import GradientUpdate
from shadowsync.assembly import TrainerKit, WorkerKit, hogwild_workers, make_replica, make_trainer
from shadowsync.cluster.parts import dense_server
from shadowsync.cluster.trainer_spec import TrainerSpec
from shadowsync.compression.channel import Line, restore_all
from shadowsync.data.feed import Feed
from shadowsync.dense_state import TrainerImage, below, check_image, dense_tensors
from shadowsync.embedding.catalog import widths
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.metrics.wire import WireCounter
from shadowsync.rpc.connection import Connection
from shadowsync.sync.averaging_remote import RemoteAveraging
from shadowsync.sync.dense_remote import DenseRemote
from shadowsync.sync.gloo import GlooOptions, GlooRing
from shadowsync.sync.group import DenseServers, split_evenly
from shadowsync.sync.main_memory import for_replica
from shadowsync.sync.method import Group
from shadowsync.sync.remote_group import RemoteGroup
from shadowsync.sync.schedule import Synchronisation, Unsynchronised
from shadowsync.training.gate import Gate
from shadowsync.training.pieces import by_parameter
from shadowsync.training.replica import Replica
from shadowsync.training.trainer import Trainer
from shadowsync.training.worker import Hooks


@dataclass(frozen=True)
class TrainerMaterial:
    """What a trainer's dense part is made of.

    Attributes:
        spec: of the trainer.
        module: with the initial values.
        kit: what trainers have in common.
        host: address of this machine as the others see it.
        connect: to a role of a kind, by its index and address.
        line: of the dense part.
        counter: of bytes.
        gate: of the trainer's threads.
        clients: of the embedding servers, one for each worker.
        feed: the trainer's.
        hooks: of a trainer.
    """

    spec: TrainerSpec
    module: nn.Module
    kit: TrainerKit
    host: str
    connect: Callable[[str, int, str], Connection]
    line: Line
    counter: WireCounter
    gate: Gate
    clients: Sequence[EmbeddingClient]
    feed: Feed
    hooks: Callable[[Trainer], Hooks]

    def replicas(self) -> Callable[[], Replica]:
        """Makes replicas with the initial values."""
        spec, choices = self.spec, self.kit.choices
        return lambda: make_replica(spec.config, choices, self.module, widths(spec.tables))


class TrainerDense(ABC):
    """A trainer with the dense part of a family of methods.

    Attributes:
        trainer: stands ready.
    """

    trainer: Trainer

    @property
    @abstractmethod
    def syncs(self) -> int:
        """Synchronisations so far."""

    def settle(self) -> None:  # noqa: B027 (matters only where a part of the replica has not crossed)
        """Called when all workers stand still, before an image is taken."""

    @abstractmethod
    def image(self) -> TrainerImage:
        """A copy of what an image of the job holds of this trainer."""

    @abstractmethod
    def restore(self, image: TrainerImage) -> None:
        """Puts a copy back.

        Raises:
            DataError: it does not fit.
        """


class MergedReplica(TrainerDense):
    """A replica that all workers share, merged by a `SyncMethod`."""

    def __init__(self, material: TrainerMaterial) -> None:
        config, choices = material.spec.config, material.kit.choices
        replica = material.replicas()()
        self._synchronisation = Synchronisation(
            choices.method,
            replica.flat,
            _group(material, replica),
            config.train.workers,
            material.gate,
            choices.method.init(replica.flat),
        )
        driver = choices.schedule.drive(self._synchronisation)
        trainer = Trainer(material.spec.rank, replica, driver, material.gate)
        workers = hogwild_workers(material.kit, replica, material.clients, material.feed)
        self.trainer = make_trainer(material.kit, trainer, driver, workers, material.feed, material.hooks(trainer))

    @property
    def syncs(self) -> int:
        return self._synchronisation.count

    def settle(self) -> None:
        self._synchronisation.catch_up()

    def image(self) -> TrainerImage:
        return TrainerImage.of(self.trainer.replica, self._synchronisation.state)

    def restore(self, image: TrainerImage) -> None:
        state, replica = self._synchronisation.state, self.trainer.replica
        check_image(image.replica, dense_tensors(replica))
        check_image(image.method, state)
        image.put_into(replica)
        self._synchronisation.state = {
            name: image.method[name].view_as(tensor).to(tensor.device) for name, tensor in state.items()
        }


class GradientWorkers(TrainerDense):
    """Workers that send gradients, each with a copy of its own of the dense part, which follows the servers'."""

    def __init__(self, material: TrainerMaterial) -> None:
        spec, make_replica, driver = material.spec, material.replicas(), Unsynchronised()
        replicas = [make_replica() for _ in material.clients]
        self._conductor = ConductorRemote(material.connect("driver", 0, spec.addresses.driver), spec.generation)
        # refuses a model that is too much for one server: what a job may do does not depend on how many there are
        by_parameter(material.line.codec, replicas[0].slots, len(replicas[0].flat))
        places = enumerate(spec.addresses.dense)
        self._servers = [material.connect("dense", index, place.wire) for index, place in places]
        self._parts = divide(replicas[0].slots, len(self._servers))
        self._lines = [_line_of(material.line, part) for part in self._parts]
        self._steppers: list[DividedSteppers] = []
        pairs = zip(material.clients, replicas, strict=True)
        workers = [self._worker(material, index, client, replica) for index, (client, replica) in enumerate(pairs)]
        trainer = Trainer(spec.rank, workers[0].replica, driver, material.gate)
        self.trainer = make_trainer(material.kit, trainer, driver, workers, material.feed, material.hooks(trainer))

    def _worker(self, material: TrainerMaterial, index: int, client: EmbeddingClient, replica: Replica) -> WorkerKit:
        spec = material.spec
        ways = enumerate(zip(self._servers, self._lines, self._parts, strict=True))
        remotes = [
            StepperRemote(connection, line, part.length, index, spec.generation, spec.rank, part.own, server)
            for server, (connection, line, part) in ways
        ]
        dense = DividedSteppers(self._parts, remotes, len(replica.flat))
        self._steppers.append(dense)
        update = GradientUpdate(
            (spec.rank, index),
            self._conductor,
            dense,
            client,
            material.feed,
            replica,
            ahead=material.kit.settings().prefetch > 0,
        )
        return WorkerKit(client, replica, update)

    @property
    def syncs(self) -> int:
        return 0

    def image(self) -> TrainerImage:
        """What its workers have not sent of their gradients."""
        unsent = enumerate(stepper.unsent for stepper in self._steppers)
        return TrainerImage({}, {f"{index}.{name}": t for index, tensors in unsent for name, t in tensors.items()})

    def restore(self, image: TrainerImage) -> None:
        """The parameters are the servers': workers pull them before their first batch."""
        restore_all((stepper, below(image.method, str(index))) for index, stepper in enumerate(self._steppers))


def _line_of(line: Line, part: DenseShare) -> Line:
    """The way to the server of a part."""
    codec = by_parameter(line.codec, part.own, part.length)
    return line if codec is line.codec else replace(line, codec=codec)


def _group(material: TrainerMaterial, replica: Replica) -> Group:
    spec, length = material.spec, len(replica.flat)
    codec = material.kit.choices.codecs["dense"]
    if material.kit.choices.method.collective:
        codec = by_parameter(codec, replica.slots, length)
    options = GlooOptions(material.host)
    averaging = RemoteAveraging(
        spec.rank,
        material.connect("averaging", 0, spec.addresses.averaging),
        lambda seat: GlooRing(seat, options),
        codec,
        material.counter,
    )
    return for_replica(replica.flat, RemoteGroup(spec.rank, averaging, _servers(material, length), material.gate))


def _servers(material: TrainerMaterial, length: int) -> DenseServers | DenseRemote:
    """The central copy of so many parameters, in this machine's memory if it is there."""
    spec, places = material.spec, material.spec.addresses.dense
    spans = split_evenly(length, max(1, len(places)))[: len(places)]
    shared = [place.memory for place in places if place.memory is not None]
    if places and len(shared) == len(places):
        servers = [dense_server(stop - start, path) for path, (start, stop) in zip(shared, spans, strict=True)]
        return DenseServers(servers, Line("dense", material.kit.choices.codecs["dense"], material.counter))
    connections = [material.connect("dense", index, place.wire) for index, place in enumerate(places)]
    return DenseRemote(connections, spans, material.line, spec.generation)
