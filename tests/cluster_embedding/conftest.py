"""Ways to a served embedding server: the twin in process, and the wire."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from helpers import PackedConnection

from shadowsync.embedding.service import EmbeddingService
from shadowsync.rpc.connection import Connection, JobKeys
from shadowsync.rpc.served import Served

sys.path.append(str(Path(__file__).parents[1] / "embedding"))  # `embedding_cases`

Connect = Callable[[EmbeddingService], Connection]


@pytest.fixture(scope="session")
def keys() -> JobKeys:
    pytest.importorskip("zmq", reason="needs ZeroMQ: pip install 'shadowsync[ray]'")
    return JobKeys.make()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["direct", "wire"])
def connect(request: pytest.FixtureRequest, stack: ExitStack) -> Connect:
    """Serves what it is given and connects to it; all connections of a test are closed after it."""
    if request.param == "direct":
        return lambda service: stack.enter_context(closing(PackedConnection(Served(service))))
    wire = request.getfixturevalue("wire")
    return lambda service: wire.connect(wire.serve(Served(service)).address)


@pytest.fixture
def wire(keys: JobKeys, stack: ExitStack) -> "Wire":
    return Wire(keys, stack)


class Wire:
    """Servers and one connector on this machine."""

    def __init__(self, keys: JobKeys, stack: ExitStack) -> None:
        from shadowsync.rpc.client import WireClient  # noqa: PLC0415 (needs ZeroMQ)

        self._keys, self._stack = keys, stack
        self._connector = stack.enter_context(closing(WireClient(keys)))

    def serve(self, service):
        from shadowsync.rpc.server import WireServer  # noqa: PLC0415 (needs ZeroMQ)

        server = WireServer(service, self._keys)
        server.start()
        self._stack.callback(server.close)
        return server

    def connect(self, address):
        return self._stack.enter_context(closing(self._connector.connect(address)))
