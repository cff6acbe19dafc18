"""Both ends of the wire for a test, closed after it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing

import pytest
from wire_cases import Bank, Link, Setup

from shadowsync.rpc.client import WireClient, WireConnection
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.server import WireServer


@pytest.fixture(scope="session")
def keys() -> JobKeys:
    return JobKeys.make()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(keys: JobKeys, stack: ExitStack) -> Callable[..., WireServer]:
    def make(bank: Bank, **options: object) -> WireServer:
        server = WireServer(bank, keys, **options)  # type: ignore[arg-type]
        server.start()
        stack.callback(server.close)
        stack.callback(bank.open.set)
        return server

    return make


@pytest.fixture
def connect(keys: JobKeys, stack: ExitStack) -> Callable[..., WireConnection]:
    def make(address: str, **options: object) -> WireConnection:
        connector = stack.enter_context(closing(WireClient(keys, **options)))  # type: ignore[arg-type]
        return connector.connect(address)

    return make


@pytest.fixture
def link(stack: ExitStack) -> Callable[[WireServer], Link]:
    def make(server: WireServer) -> Link:
        return stack.enter_context(closing(Link(server.address)))

    return make


@pytest.fixture
def linked(
    serve: Callable[..., WireServer],
    connect: Callable[..., WireConnection],
    link: Callable[[WireServer], Link],
) -> Callable[..., Setup]:
    """A bank, its server, a link to it, and a connection over that; options are the connection's."""

    def make(server: Mapping[str, object] = {}, **options: object) -> Setup:
        bank = Bank()
        serving = serve(bank, **server)
        way = link(serving)
        return Setup(bank, serving, way, connect(way.address, **options))

    return make
