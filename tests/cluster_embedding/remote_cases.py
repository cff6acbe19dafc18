"""Jobs whose embedding servers are served."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from embedding_cases import ADAGRAD, SOURCE, TABLES, client, whole
from helpers import PackedConnection

from shadowsync.compression.channel import Channel
from shadowsync.compression.codec import Codec
from shadowsync.compression.plain import Plain
from shadowsync.compression.wire import WireCounter
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.optimizers import RowOptimizer
from shadowsync.embedding.proxy import ServerProxy
from shadowsync.embedding.routing import NEVER, UniqueRows
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.storage import Storage
from shadowsync.embedding.table import Shard, Table
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.kept import USUAL, KeptLimits
from shadowsync.rpc.served import Served

user, item, day, shop, tag = TABLES
ONE = [whole(TABLES)]
CUT = [[Shard(user, 20, 40), *whole([day, shop, tag])], [Shard(item, 0, 7), Shard(user, 0, 20)], [Shard(item, 7, 30)]]


@dataclass
class Far:
    """A job over connections."""

    servers: list[EmbeddingServer]
    services: list[EmbeddingService]
    connections: list[Connection]
    lines: tuple[Channel, Channel]
    counter: WireCounter
    tables: Sequence[Table] = tuple(TABLES)
    features: Sequence[str] = tuple(SOURCE)

    def client(self, unique: UniqueRows = NEVER, stream: int | None = 0, limits: KeptLimits = USUAL) -> EmbeddingClient:
        pairs = enumerate(zip(self.connections, self.servers, strict=True))
        proxies = [ServerProxy(way, held.shards, at, *self.lines, stream, limits=limits) for at, (way, held) in pairs]
        return EmbeddingClient(self.tables, self.features, proxies, unique)


def far(
    connect: Callable[[EmbeddingService], Connection],
    placed: Sequence[Sequence[Shard]] = ONE,
    optimizer: RowOptimizer = ADAGRAD,
    storage: type[Storage] = TorchStorage,
    *,
    codec: Codec | None = None,
    push: Codec | None = None,
    limits: KeptLimits | None = None,
) -> Far:
    codec = codec or Plain()
    push = push or codec
    servers = [EmbeddingServer(shards, storage, optimizer, seed=3) for shards in placed]
    services = [EmbeddingService(server, codec, push, limits or KeptLimits()) for server in servers]
    counter = WireCounter()
    lines = Channel("pull", codec, counter), Channel("push", push, counter)
    return Far(servers, services, [connect(service) for service in services], lines, counter)


def direct(service: EmbeddingService) -> Connection:
    """A connection whose messages are made, and read in the caller's thread."""
    return PackedConnection(Served(service))


def near(
    placed: Sequence[Sequence[Shard]] = ONE, optimizer: RowOptimizer = ADAGRAD, **how: Any
) -> tuple[Any, Any, Any]:
    """The same job in process."""
    return client(TABLES, SOURCE, placed, optimizer=optimizer, **how)
