"""What the other roles' processes serve, each from a specification that travels to its machine."""

from dataclasses import dataclass

import torch

from shadowsync.assembly import row_optimizer
from shadowsync.choices import choose_all
from shadowsync.compression.codec import Codec
from shadowsync.config import Config
from shadowsync.data.parsing import Parser, ReaderOptions
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.table import Shard
from shadowsync.errors import DataError
from shadowsync.memory.shared import Exclusive, SharedMemory
from shadowsync.recovery.tracking import row_tracking
from shadowsync.rpc.generation import Generation
from shadowsync.rpc.served import Served
from shadowsync.rpc.service import Method
from shadowsync.runtime.runtime import Home
from shadowsync.sync.dense import DenseServer
from shadowsync.sync.dense_service import DenseService


class Nothing:
    """A part without methods, for a process that is to do nothing until it gets its next one."""

    def __init__(self) -> None:
        self.methods: dict[str, Method] = {}

    def client_gone(self, client: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to end."""


def build_nothing(_: None, __: Home) -> Nothing:
    """Ends what was there."""
    return Nothing()


@dataclass(frozen=True)
class EmbeddingSpec:
    """An embedding server.

    Attributes:
        filled: its rows have their initial values; else they are zero, and all of them are to be loaded, or as they
            stand in its memory.
        memory: path of the memory that its rows are in, where trainers reach them without it.
        inherits: the rows there are those of a server that is gone.
    """

    config: Config
    own_model: bool
    shards: tuple[Shard, ...]
    generation: int
    filled: bool = True
    memory: str | None = None
    inherits: bool = False


def build_embedding(spec: EmbeddingSpec, _: Home) -> EmbeddingService:
    """Makes one."""
    choices = choose_all(spec.config, spec.own_model)
    optimizer, seed = row_optimizer(spec.config.embedding), spec.config.train.seed
    watching = row_tracking(choices.recovery, seed)
    memory = None if spec.memory is None else SharedMemory.open(spec.memory)
    server = EmbeddingServer(spec.shards, choices.storage, optimizer, seed if spec.filled else None, watching, memory)
    if spec.inherits:
        server.inherit()
    codecs, generation = choices.codecs, Generation(spec.generation)
    workers = spec.config.train.workers
    return EmbeddingService(server, codecs["pull"], codecs["push"], generation=generation, streams=workers)


@dataclass(frozen=True)
class DenseSpec:
    """A dense server of so many parameters, zero until they are written; `memory` as in `EmbeddingSpec`."""

    codec: Codec
    length: int
    generation: int
    memory: str | None = None


def build_dense(spec: DenseSpec, _: Home) -> Served:
    """Makes one."""
    return Served(DenseService(dense_server(spec.length, spec.memory), spec.codec, Generation(spec.generation)))


def dense_server(length: int, memory: str | None) -> DenseServer:
    """Of so many parameters, zero or as they stand in that memory."""
    if memory is None:
        return DenseServer(torch.zeros(length))
    opened = SharedMemory.open(memory)
    return DenseServer(opened.take(length, torch.float32), Exclusive(opened))


@dataclass(frozen=True)
class ReaderSpec:
    """A reader of the training rows, with the driver's options and as many rows as the driver has found."""

    config: Config
    own_model: bool
    options: ReaderOptions
    rows: int


def build_reader(spec: ReaderSpec, home: Home) -> Served:
    """Makes one.

    Raises:
        DataError: this machine sees other rows than the driver.
    """
    source = choose_all(spec.config, spec.own_model).source.open("train", spec.config.data.on_bad_row)
    if source is None or source.rows != spec.rows:
        found = 0 if source is None else source.rows
        raise DataError(
            f"{home.role} finds {found} training rows on its machine, the driver {spec.rows}: data.path must mean the "
            "same on every machine"
        )
    return Served(Parser(source, spec.options))
