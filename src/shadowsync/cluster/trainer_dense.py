"""The dense part of a trainer: a replica that is merged with others, or copies that follow the one that steps move."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from shadowsync.aggregation.stepping import DenseShare, divide
from shadowsync.aggregation.update import DenseClient, GradientUpdate, restore_all
from shadowsync.checkpoint.job_state import TrainerImage, below, buffers, check_image, dense_tensors
from shadowsync.cluster.context import Addresses, Merging, Stepping, TrainerSpec
from shadowsync.cluster.servers import dense_server
from shadowsync.compression.channel import Channel
from shadowsync.compression.codec import Codec, Rate
from shadowsync.compression.plain import Plain
from shadowsync.compression.wire import WireCounter
from shadowsync.data.reader import Feed
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.served import direct
from shadowsync.sync.all_reduce import RemoteAveraging
from shadowsync.sync.dense import CentralCopy, split_evenly
from shadowsync.sync.machine import Neighbours
from shadowsync.sync.method import Group, group_of
from shadowsync.sync.schedule import Synchronisation
from shadowsync.training.gate import Gate
from shadowsync.training.kernels import Computing
from shadowsync.training.pieces import by_parameter
from shadowsync.training.replica import Replica
from shadowsync.training.worker import Driver, LocalUpdate, Trainer, TrainerContext, Update, Worker


@dataclass(frozen=True)
class WorkerContext:
    """What the workers of a trainer have in common.

    Attributes:
        module: with the initial values.
        host: address of this machine as the others see it.
        connect: to a role of a kind, by its index and address.
        line: of the dense part.
        counter: of bytes.
        gate: where threads stand still for a checkpoint.
        clients: of the embedding servers, one for each worker.
        rate: of learning, now.
    """

    spec: TrainerSpec
    module: nn.Module
    computing: Computing
    host: str
    connect: Callable[[str, int, str], Connection]
    line: Channel
    counter: WireCounter
    gate: Gate
    clients: Sequence[EmbeddingClient]
    feed: Feed
    stepping: Callable[[Trainer, Driver], TrainerContext]
    rate: Rate

    def replica(self, memory: Tensor | None = None) -> Replica:
        """One more with the initial values; `memory` as `Replica` has it."""
        return self.spec.job.replica(self.module, memory)

    def trainer(self, driver: Driver, workers: Sequence[tuple[Replica, Update]]) -> Trainer:
        """A trainer with these workers: whose parameters each computes with, and what becomes of its gradients."""
        job, rank = self.spec.job, self.spec.rank
        trainer = Trainer(rank, workers[0][0], driver, self.gate)
        context, train = self.stepping(trainer, driver), job.config.train
        for index, (replica, update) in enumerate(workers):
            number = rank * train.workers + index
            module = replica.worker_module(self.computing, train.clip_norm, (train.seed, number))
            trainer.add(Worker(context, index, number, module, self.clients[index], update))
        return trainer


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

    def __init__(self, context: WorkerContext) -> None:
        job, shared = context.spec.job, context.spec.replica
        neighbours = None if shared is None else Neighbours(*shared)
        replica = context.replica(None if neighbours is None else neighbours.own.replica)
        train, rows, method = job.config.train, job.config.embedding, job.choices.method
        group = _group(context, replica, neighbours)
        state, workers = method.init(replica.flat), train.workers
        self._synchronisation = Synchronisation(method, replica.flat, group, workers, context.gate, state)
        driver = job.choices.schedule.drive(self._synchronisation)
        updates = [LocalUpdate(client, context.feed, train.lr, rows.lr) for client in context.clients]
        self.trainer = context.trainer(driver, [(replica, update) for update in updates])

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
    """Workers that send gradients, each with a copy of its own of the dense part, which follows the one that steps."""

    def __init__(self, context: WorkerContext) -> None:
        spec = context.spec
        replicas = [context.replica() for _ in context.clients]
        slots, length = replicas[0].slots, len(replicas[0].flat)
        # refuses a model that is too much for one server: what a job may do does not depend on how many there are
        by_parameter(context.line.codec, slots, length)
        if isinstance(spec.others, Addresses):
            coordinator = context.connect("driver", 0, spec.others.driver)
            servers = [context.connect("dense", index, place.wire) for index, place in enumerate(spec.others.dense)]
        else:
            near = spec.others.dense
            assert isinstance(near, Stepping)
            coordinator, servers = direct(near.coordinator), [direct(near.stepper)]
        parts = divide(slots, len(servers))
        lines = [_line_of(context.line, part) for part in parts]
        ahead = spec.job.prefetch > 0
        self._replicas, self._dense = replicas, list[DenseClient]()
        workers: list[tuple[Replica, Update]] = []
        for index, (replica, client) in enumerate(zip(replicas, context.clients, strict=True)):
            worker = spec.rank, index
            dense = DenseClient(worker, parts, servers, lines, length, spec.generation)
            self._dense.append(dense)
            update = GradientUpdate(worker, coordinator, dense, client, replica, spec.generation, ahead)
            workers.append((replica, update))
        self.trainer = context.trainer(Driver(), workers)

    @property
    def syncs(self) -> int:
        return 0

    def image(self) -> TrainerImage:
        """The buffers of the first worker's module, and what all workers have not sent of their gradients."""
        unsent = enumerate(dense.unsent for dense in self._dense)
        return TrainerImage(
            {name: tensor.clone() for name, tensor in buffers(self._replicas[0]).items()},
            {f"{index}.{name}": t for index, tensors in unsent for name, t in tensors.items()},
        )

    def restore(self, image: TrainerImage) -> None:
        """The parameters are not here: workers pull them before their first batch."""
        check_image(image.replica, buffers(self._replicas[0]))
        for replica in self._replicas:
            for name, tensor in buffers(replica).items():
                tensor.copy_(image.replica[name].view_as(tensor))
        restore_all((dense, below(image.method, str(index))) for index, dense in enumerate(self._dense))


def _line_of(line: Channel, part: DenseShare) -> Channel:
    """The way to the server of a part."""
    codec = by_parameter(line.codec, part.own, part.length)
    return line if codec is line.codec else replace(line, codec=codec)


def averaged_codec(context_codec: Codec, collective: bool, replica: Replica) -> Codec:
    """In which whole replicas are averaged."""
    return by_parameter(context_codec, replica.slots, len(replica.flat)) if collective else context_codec


def _group(context: WorkerContext, replica: Replica, neighbours: Neighbours | None) -> Group:
    spec, others = context.spec, context.spec.others
    if not isinstance(others, Addresses):
        assert isinstance(others.dense, Merging)
        servers, length = [direct(server) for server in others.dense.servers], len(replica.flat)
        spans = split_evenly(length, len(servers))
        center = CentralCopy(spec.rank, servers, spans, context.line, spec.generation)
        return group_of(replica.flat, others.dense.averages.of[spec.rank], center, context.rate)
    from shadowsync.sync.gloo import GlooRing  # noqa: PLC0415 only processes of their own need it

    choices = spec.job.choices
    averaging = RemoteAveraging(
        spec.rank,
        context.connect("averaging", 0, others.averaging),
        lambda seat: GlooRing(seat, context.host),
        averaged_codec(choices.codecs["dense"], choices.method.collective, replica),
        context.counter,
        context.gate.resting,
        neighbours=neighbours,
        apart=spec.job.config.cluster.address is None,
    )
    spans = split_evenly(len(replica.flat), len(others.dense))
    if others.dense and all(place.memory is not None for place in others.dense):  # in this machine's memory
        codec, counter = choices.codecs["dense"].levels[0], context.counter  # nothing can be measured
        if spec.job.config.cluster.address is not None:  # what does not cross the network needs no codec
            codec, counter = Plain(), WireCounter()
        connections: Sequence[Connection] = [
            direct(dense_server(codec, stop - start, spec.generation, place.memory))
            for place, (start, stop) in zip(others.dense, spans, strict=True)
        ]
        line = Channel("dense", codec, counter)
    else:
        connections = [context.connect("dense", index, place.wire) for index, place in enumerate(others.dense)]
        line = context.line
    center = CentralCopy(spec.rank, connections, spans, line, spec.generation)
    return group_of(replica.flat, averaging, center, context.rate)
