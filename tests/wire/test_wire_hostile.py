"""Ten thousand messages that nobody honest sends: none changes anything, and the server goes on answering."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from wire_cases import PATIENCE_S, Balance, Bank, deposit, read, until

from shadowsync.rpc import sockets
from shadowsync.rpc.client import WireClient, WireConnection
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.messages import (
    FROM_SERVER,
    Answers,
    Call,
    Calls,
    Hello,
    Welcome,
    encode,
    header_of,
    pack,
)
from shadowsync.rpc.server import WireServer
from shadowsync.rpc.tensors import Spec

EACH = 2500


class Raw:
    """A bare DEALER that says what it likes; with the keys of a job, others, or none."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: JobKeys | None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm = 0
        self.socket.rcvtimeo = int(PATIENCE_S * 1000)
        if keys is not None:
            self.socket.curve_serverkey = keys.server_public.encode()
            self.socket.curve_publickey = keys.client_public.encode()
            self.socket.curve_secretkey = keys.client_secret.encode()
        self.socket.connect(address)
        self.session = 0

    def greet(self, client: str) -> None:
        self.socket.send(encode(Hello(client)))
        welcome = header_of([self.socket.recv()], FROM_SERVER)
        assert isinstance(welcome, Welcome)
        self.session = welcome.session

    def sync(self) -> None:
        """Until everything sent before was taken; the answers to it are passed over."""
        self.socket.send(encode(Calls(self.session, 0)))
        while header_of(self.socket.recv_multipart(), FROM_SERVER) != Answers():
            pass

    def deposit(self, number: int) -> list[bytes]:
        """An honest message."""
        payload = deposit(f"raw {number}", 1, torch.ones(1000))
        specs, frames = pack(payload)
        return [encode(Calls(self.session, 1, (Call(number, "deposit", payload.meta, specs),))), *map(bytes, frames)]


@pytest.fixture
def raw(stack: ExitStack, keys: JobKeys) -> Callable[..., Raw]:
    context = stack.enter_context(zmq.Context())

    def make(address: str, keys: JobKeys | None = keys) -> Raw:
        made = Raw(context, address, keys)
        stack.callback(made.socket.close, 0)
        return made

    return make


def noise(randomness: random.Random) -> list[bytes]:
    return [randomness.randbytes(randomness.choice((0, 1, 7, 60, 2000))) for _ in range(randomness.randrange(1, 5))]


def bent(session: int, randomness: random.Random) -> list[bytes]:
    """Well-formed headers whose tensors are not what they announce."""
    shapes = ((1000,), (-4, 250), (1 << 62, 1 << 62), (0, 1 << 62), (251,), (2,) * 20, (10**6, 10**6))
    specs = tuple(Spec(randomness.choice((0, 1, 9, 10, -1, 1 << 40)), randomness.choice(shapes)) for _ in range(2))
    calls = Calls(session, 0, (Call(randomness.randrange(1 << 62), "deposit", b"", specs),))
    return [encode(calls), *(bytes(randomness.choice((0, 1, 999, 3996))) for _ in range(randomness.randrange(3)))]


def broken(message: list[bytes], randomness: random.Random) -> list[bytes]:
    """An honest message, cut short or with a frame too many or too few."""
    head, body = message
    cut = randomness.randrange(len(head))
    return randomness.choice(
        ([head[:cut], body], [head, body[: randomness.randrange(len(body))]], [head], [head, body, body], [head[cut:]])
    )


def malformed(honest: list[bytes], session: int) -> Iterator[list[bytes]]:
    randomness = random.Random(3)
    for _ in range(EACH):
        yield noise(randomness)
        yield bent(session, randomness)
        yield broken(honest, randomness)


def thrown(sender: zmq.Socket[bytes], message: Sequence[Any]) -> bool:
    """Sends without waiting; False if the socket was refused for good, after which it would wait for ever."""
    try:
        sender.send_multipart(message, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def test_ten_thousand_hostile_messages_change_nothing(
    keys: JobKeys,
    raw: Callable[..., Raw],
    serve: Callable[..., WireServer],
    connect: Callable[..., WireConnection],
) -> None:
    bank = Bank()
    server = serve(bank)
    honest = connect(server.address)
    honest.call("deposit", deposit("honest", 7, torch.ones(1000))).result(PATIENCE_S)

    victim, thief = raw(server.address), raw(server.address)
    victim.greet("a" * 32)
    thief.greet("b" * 32)
    caught = [victim.deposit(number) for number in range(1, 6)]
    for message in caught:
        victim.socket.send_multipart(message)
    until(lambda: bank.total == 12 and bool((bank.vault == 6).all()), "the honest deposits")
    before = (bank.total, bank.vault.clone(), dict(bank.runs))

    strange_keys = (None, JobKeys.make(), wrong_client(keys))
    outsiders = [raw(server.address, strange) for strange in strange_keys]
    for index in range(EACH):
        while not thrown(outsiders[index % 3].socket, caught[index % 5]):
            outsiders[index % 3] = raw(server.address, strange_keys[index % 3])
        victim.socket.send_multipart(caught[index % 5])
        thief.socket.send_multipart(caught[index % 5])
    for message in malformed(caught[0], thief.session):
        thief.socket.send_multipart(message)
    thief.sync()
    victim.sync()

    assert (bank.total, dict(bank.runs)) == (before[0], before[2])
    assert torch.equal(bank.vault, before[1])
    assert sorted(server.dispatcher.clients) == sorted([honest.client, "a" * 32, "b" * 32])
    answer = honest.call("deposit", deposit("after", 1)).result(PATIENCE_S)
    assert read(answer, Balance).total == before[0] + 1


def wrong_client(keys: JobKeys) -> JobKeys:
    """Somebody who knows the server's public key, and no client key."""
    other = JobKeys.make()
    return JobKeys(keys.server_public, other.server_secret, other.client_public, other.client_secret)


def heard(
    listener: socket.socket, target: tuple[str, int], said: bytearray, stack: ExitStack
) -> Iterator[threading.Thread]:
    """Stands between two ends of a connection, and writes down what the first one says."""
    near = stack.enter_context(listener.accept()[0])
    far = stack.enter_context(socket.create_connection(target, PATIENCE_S))

    def forward(source: socket.socket, sink: socket.socket, heard: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                heard += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    for way in ((near, far, said), (far, near, bytearray())):
        yield threading.Thread(target=forward, args=way)


def test_what_was_heard_on_the_network_is_worth_nothing_when_it_is_said_again(
    serve: Callable[..., WireServer], connect: Callable[..., WireConnection], stack: ExitStack
) -> None:
    server = serve(bank := Bank())
    target = ("127.0.0.1", int(server.address.rpartition(":")[2]))
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    connection = connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    call, said = connection.call("deposit", deposit("honest", 5)), bytearray()
    with ExitStack() as ends:
        threads = list(heard(listener, target, said, ends))
        for thread in threads:
            thread.start()
        assert read(call.result(PATIENCE_S), Balance) == Balance(5)
        connection.close()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    with socket.create_connection(target, PATIENCE_S) as thief:
        thief.sendall(said)
        thief.shutdown(socket.SHUT_WR)
        while thief.recv(1 << 16):
            pass
    assert bank.runs == {"honest": 1}


def test_what_is_no_protocol_at_all_is_refused(
    serve: Callable[..., WireServer], connect: Callable[..., WireConnection]
) -> None:
    bank = Bank()
    server = serve(bank)
    port = int(server.address.rpartition(":")[2])
    randomness = random.Random(1)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(randomness.randbytes(500))
    connect(server.address).call("deposit", deposit("honest", 1)).result(PATIENCE_S)
    assert bank.total == 1


def test_a_frame_that_is_too_long_ends_its_connection_before_it_is_read(
    raw: Callable[..., Raw],
    serve: Callable[..., WireServer],
    connect: Callable[..., WireConnection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "FRAME_BYTES", 10_000)
    bank = Bank()
    server = serve(bank)
    thief = raw(server.address)
    thief.greet("b" * 32)
    thief.socket.send(bytes(20_000))
    thief.socket.rcvtimeo = 200
    thief.socket.send(encode(Calls(thief.session, 0)))
    connection = connect(server.address)
    connection.call("deposit", deposit("honest", 1, torch.ones(1000))).result(PATIENCE_S)
    assert bank.runs == {"honest": 1}


def test_a_client_learns_that_its_keys_are_refused(keys: JobKeys, serve: Callable[..., WireServer]) -> None:
    server = serve(Bank())
    with closing(WireClient(wrong_client(keys))) as connector:
        call = connector.connect(server.address).call("echo")
        with pytest.raises(PeerLost, match="does not accept the keys of this job"):
            call.result(PATIENCE_S)


def test_a_unix_socket_asks_for_the_keys_too(
    serve: Callable[..., WireServer], connect: Callable[..., WireConnection], tmp_path: Path
) -> None:
    server = serve(bank := Bank(), host=str(tmp_path))
    with closing(WireClient(JobKeys.make())) as stranger, zmq.Context() as context:
        with pytest.raises(PeerLost, match="does not accept the keys"):
            stranger.connect(server.address).call("deposit", deposit("d", 1)).result(PATIENCE_S)
        with context.socket(zmq.DEALER) as nobody:
            nobody.linger = 0
            nobody.connect(server.address)
            thrown(nobody, [encode(Hello("0" * 32))])
            assert not nobody.poll(200)
        assert read(connect(server.address).call("deposit", deposit("d", 5)).result(PATIENCE_S), Balance) == Balance(5)
    assert set(bank.runs) == {"d"}


def test_who_has_not_proved_its_keys_sends_little(serve: Callable[..., WireServer]) -> None:
    """A command of a gigabyte, where the handshake should come."""
    port = int(serve(Bank()).address.rpartition(":")[2])
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as stranger:
        stranger.sendall(greeting)
        assert stranger.recv(64)
        command = b"\x06" + (1 << 29).to_bytes(8, "big")
        with pytest.raises(ConnectionError):
            stranger.sendall(command + bytes(1 << 26))


CROWDED = """
import os, resource, sys
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.server import WireServer
from wire_cases import Bank
import msgspec
server = WireServer(Bank(), msgspec.json.decode(sys.stdin.readline(), type=JobKeys))
server.start()
left = len(os.listdir("/proc/self/fd")) + 10
resource.setrlimit(resource.RLIMIT_NOFILE, (left, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(server.address, flush=True)
sys.stdin.readline()
server.close()
"""


def test_a_server_without_descriptors_rests_and_opens_again(
    keys: JobKeys, connect: Callable[..., WireConnection], stack: ExitStack
) -> None:
    """ZeroMQ would try to accept the next connection without a pause, for as long as one waits."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    program = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", CROWDED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
    )
    stack.callback(program.kill)
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(msgspec.json.encode(keys).decode() + "\n")
    program.stdin.flush()
    address = program.stdout.readline().strip()
    place = ("127.0.0.1", int(address.rpartition(":")[2]))
    idle: list[socket.socket] = []

    def refuses() -> bool:
        try:
            idle.append(stack.enter_context(socket.create_connection(place, PATIENCE_S)))
        except (ConnectionRefusedError, ConnectionResetError):  # the latter if it waited to be let in
            return True
        return False

    until(refuses, "the pause")
    for each in idle:
        each.close()
    answer = connect(address).call("deposit", deposit("honest", 1)).result(PATIENCE_S)
    assert read(answer, Balance) == Balance(1)
    program.stdin.write("\n")
    program.stdin.flush()
    assert program.wait(PATIENCE_S) == 0
