"""Connections to a service over the real wire."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from shadowsync.rpc.client import WireClient
from shadowsync.rpc.connection import Connection, JobKeys, Service
from shadowsync.rpc.server import WireServer

sys.path.append(str(Path(__file__).parents[1] / "aggregation"))  # `step_models`

Connect = Callable[[Service, int], list[Connection]]


@pytest.fixture
def wire() -> Iterator[Connect]:
    """Makes so many connections to a service behind a socket."""
    keys = JobKeys.make()

    def connect(service: Service, clients: int) -> list[Connection]:
        server = WireServer(service, keys, threads=6)
        server.start()
        stack.callback(server.close)
        connector = stack.enter_context(closing(WireClient(keys)))
        return [connector.connect(server.address) for _ in range(clients)]

    with ExitStack() as stack:
        yield connect
