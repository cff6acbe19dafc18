"""What the servers and readers of a job serve, each built on its machine from what travels there."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shadowsync.aggregation.stepping import DenseGradient, DenseShare, DenseStepper
from shadowsync.assembly import key_rules, make_module, row_optimizer
from shadowsync.checkpoint.job_state import TrainerImage, check_image, dense_tensors
from shadowsync.cluster.context import JobContext
from shadowsync.compression.codec import Codec
from shadowsync.data.reader import Parser, ReaderOptions
from shadowsync.data.splits import open_parts
from shadowsync.embedding.moving import ArrivingService
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.table import Shard
from shadowsync.errors import DataError
from shadowsync.memory.shared import FileGate, SharedMemory
from shadowsync.recovery.settings import moving_rows, row_tracking
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.served import Served, ask, each, served
from shadowsync.runtime.runtime import ProcessContext
from shadowsync.sync.dense import DenseServer
from shadowsync.training.pieces import by_parameter

IMAGE_S = 20.0
"""Deadline of a pause and of each message of an image: rather no checkpoint than one for which all wait so long."""


def build_nothing(_: ProcessContext) -> Served:
    """A part without methods, for a process that is to do nothing until it gets its next one."""
    return Served(None)


def build_embedding(
    job: JobContext,
    shards: Sequence[Shard],
    generation: int,
    filled: bool,
    memory: str | None,
    inherits: bool,
    initial: Mapping[str, Tensor],
    source: str | None,
    process: ProcessContext,
) -> Served:
    """An embedding server.

    Args:
        filled: its rows have their initial values; else they are zero, and all of them are to be loaded, or as they
            stand in its memory.
        memory: path of the memory that its rows are in, where trainers reach them without it.
        inherits: the rows there are those of a server that is gone.
        initial: as `EmbeddingServer` has it.
        source: address of the server whose place it is to take once it has its rows; None for none.
    """
    choices, train = job.choices, job.config.train
    server = EmbeddingServer(
        shards,
        choices.storage,
        row_optimizer(job.config.embedding),
        train.seed if filled else None,
        row_tracking(choices.recovery, train.seed, train.save_values),
        None if memory is None else SharedMemory.open(memory),
        initial,
        key_rules(job.config, choices),
        job.disk,
        moving_rows(job.config.cluster, train.seed),
    )
    if inherits:
        server.inherit()
    pull, push = choices.codecs["pull"], choices.codecs["push"]
    if source is None:
        return Served(EmbeddingService(server, pull, push, generation=generation))
    return Served(ArrivingService(server, process.connector.connect(source), pull, push, generation))


def build_dense(codec: Codec, length: int, generation: int, memory: str | None, _: ProcessContext) -> Served:
    """As `dense_server`, served."""
    return Served(dense_server(codec, length, generation, memory))


def dense_server(codec: Codec, length: int, generation: int, memory: str | None) -> DenseServer:
    """A dense server of so many parameters, zero until they are written; `memory` as in `build_embedding`."""
    if memory is None:
        return DenseServer(torch.zeros(length), codec, generation)
    opened = SharedMemory.open(memory)
    return DenseServer(opened.take(length, torch.float32), codec, generation, FileGate(opened).alone)


def build_stepper(job: JobContext, generation: int, part: DenseShare, first: bool, process: ProcessContext) -> Served:
    """A dense server of gradient methods with the initial values of its part; the first has the module's buffers."""
    module = make_module(job.config, job.choices, job.schema, job.tables, job.model)
    replica = job.replica(part.module(module, buffers=first))
    codec = by_parameter(job.choices.codecs["dense"], replica.slots, len(replica.flat))
    clip_norm = job.config.train.clip_norm
    stepper = StepperPart(replica, clip_norm, codec=codec, generation=generation)
    stepper.connect = process.connector.connect
    return Served(stepper)


def build_reader(job: JobContext, options: ReaderOptions, process: ProcessContext) -> Served:
    """A reader of the training rows, with the driver's options.

    Raises:
        DataError: this machine sees other rows than the driver.
    """
    source = open_parts(job.choices.source, job.config.data, "train").get("train")
    if source is None or source.rows != job.rows:
        found = 0 if source is None else source.rows
        raise DataError(
            f"{process.role} finds {found} training rows on its machine, the driver {job.rows}: data.path must mean "
            "the same on every machine"
        )
    return Served(Parser(source, options))


# --- images of dense parts -------------------------------------------------------------------------------------------


class Imaged(ABC):
    """A role with a dense part, of which images are taken and put back."""

    @served(once=False, timeout_s=IMAGE_S)
    def snapshot(self) -> TrainerImage:
        """A copy, which may cross."""
        return self._image().in_main_memory()

    @served()
    def restore(self, image: TrainerImage) -> None:
        """Puts a copy back.

        Raises:
            DataError: it does not fit.
        """
        self._put_back(image)

    @abstractmethod
    def _image(self) -> TrainerImage: ...

    @abstractmethod
    def _put_back(self, image: TrainerImage) -> None: ...


class StepperPart(DenseStepper, Imaged):
    """A `DenseStepper` of which images are taken and put back, and that may take another one's place."""

    connect: Callable[[str], Connection]
    """The way to another one, of its process."""

    def _image(self) -> TrainerImage:
        return TrainerImage.of(self.replica, {})

    @served()
    def take_over(self, source: str, generation: int) -> None:
        """This part becomes what the one at that address is, which nobody changes any more."""
        before = self.connect(source)
        self._put_back(ask(before, Imaged.snapshot))
        self.restart(ask(before, DenseStepper.version), generation)
        for number, used, flat in each(before, DenseStepper.held_gradient):
            self.hold(number, DenseGradient(flat.to(self.replica.flat.device), used))
        before.close()

    def _put_back(self, image: TrainerImage) -> None:
        check_image(image.replica, dense_tensors(self.replica))
        image.put_into(self.replica)
        self.restart(self.newest.number, self._generation)
