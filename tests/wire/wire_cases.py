"""A service to talk to, and a network between the two ends that does what tests want."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import torch

from shadowsync.errors import DataError
from shadowsync.rpc.client import WireConnection
from shadowsync.rpc.connection import Meta, Method, Payload
from shadowsync.rpc.pending import Promise
from shadowsync.rpc.server import WireServer

PATIENCE_S = 120.0
Serve: TypeAlias = Callable[..., WireServer]
Connect: TypeAlias = Callable[..., WireConnection]
T = TypeVar("T")
Pair: TypeAlias = tuple[asyncio.StreamWriter, asyncio.StreamWriter]


class Deposit(Meta, frozen=True):
    """A deposit, named so that a second run of the same one shows."""

    name: str
    amount: int


def deposit(name: str, amount: int = 1, *tensors: torch.Tensor) -> Payload:
    """The request of one."""
    return Payload(msgspec.msgpack.encode(Deposit(name, amount)), tensors)


class Balance(Meta, frozen=True):
    """What an account holds."""

    total: int


def read(payload: Payload, kind: type[T]) -> T:
    """What it holds beside tensors; raises `DataError` where that is not of that kind."""
    try:
        return msgspec.msgpack.decode(payload.meta, type=kind)
    except msgspec.DecodeError as error:
        raise DataError(f"a message does not hold a {kind.__name__}: {error}") from error


class Panic(BaseException):
    """As libraries written in Rust raise it."""


class Bank:
    """Adds up deposits; every method that runs is written down."""

    def __init__(self) -> None:
        self.methods = {
            "deposit": Method(self.deposit),
            "slow_deposit": Method(self.slow_deposit),
            "echo": Method(self.echo, once=False),
            "refuse": Method(self.refuse),
            "crash": Method(self.crash),
            "panic": Method(self.panic),
            "exit": Method(self.exit),
            "unspeakable": Method(self.unspeakable),
            "statement": Method(self.statement, once=False),
            "deposit_later": Method(self.deposit_later, quick=True),
        }
        self.later: list[tuple[Promise[Payload], Payload]] = []
        self.total = 0
        self.vault = torch.zeros(1000)
        self.runs: Counter[str] = Counter()
        self.clients: set[str] = set()
        self.gone: list[str] = []
        self.entered = threading.Event()
        self.open = threading.Event()
        self._lock = threading.Lock()

    def client_gone(self, client: str) -> None:
        self.gone.append(client)

    def deposit(self, request: Payload) -> Payload:
        deposit = read(request, Deposit)
        with self._lock:
            self.clients.add(request.client)
            self.runs[deposit.name] += 1
            self.total += deposit.amount
            for tensor in request.tensors:
                self.vault += tensor
            return Payload(msgspec.msgpack.encode(Balance(self.total)))

    def slow_deposit(self, request: Payload) -> Payload:
        self.entered.set()
        assert self.open.wait(PATIENCE_S)
        return self.deposit(request)

    def deposit_later(self, request: Payload) -> Promise[Payload]:
        reply: Promise[Payload] = Promise()
        self.later.append((reply, request))
        return reply

    def end_later(self, error: BaseException | None = None) -> None:
        """Replies to the request that has waited longest."""
        reply, request = self.later.pop(0)
        if error is None:
            reply.keep(self.deposit(request))
        else:
            reply.fail(error)

    def echo(self, request: Payload) -> Payload:
        return Payload(tensors=tuple(tensor.clone() for tensor in request.tensors))

    def refuse(self, request: Payload) -> Payload:
        raise DataError("row 7 of the request has no colour")

    def crash(self, request: Payload) -> Payload:
        raise ZeroDivisionError("divided\nby nothing")

    def panic(self, request: Payload) -> Payload:
        raise Panic("index out of bounds\nnote: run with a backtrace")

    def exit(self, request: Payload) -> Payload:
        raise SystemExit(3)

    def statement(self, request: Payload) -> Payload:
        """A megabyte."""
        with self._lock:
            self.runs["statement"] += 1
        return Payload(tensors=(torch.ones(1 << 18),))

    def unspeakable(self, request: Payload) -> Payload:
        return Payload(tensors=(torch.zeros(2, dtype=torch.complex64),))


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that another thread brings about."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.002)):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError(f"{what} has not come about")


class Link:
    """A TCP connection's way through a machine that can lose it: listens on a port and forwards to another."""

    def __init__(self, target: str) -> None:
        self._target = int(target.rpartition(":")[2])
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._pairs: set[Pair] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._up = True
        self._left: dict[str, int] = {}
        self.made = 0
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._do(self._listen())
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.release()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if not self._up:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self.made += 1
        self._writers.append(far_writer)
        pair = (writer, far_writer)
        self._pairs.add(pair)
        await asyncio.gather(
            self._pump("there", reader, far_writer, pair), self._pump("back", far_reader, writer, pair)
        )

    async def _pump(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pair: Pair) -> None:
        try:
            while data := await reader.read(4096):
                await self._flowing.wait()
                if way in self._left:
                    data, self._left[way] = data[: self._left[way]], self._left[way] - len(data)
                writer.write(data)
                await writer.drain()
                if self._left.get(way, 1) <= 0:
                    del self._left[way]
                    break
        except OSError:
            pass
        self._drop(pair)

    def _drop(self, pair: Pair) -> None:
        self._pairs.discard(pair)
        for writer in pair:
            writer.close()

    async def _set(self, up: bool) -> None:
        self._up = up
        if not up:
            for writer, far_writer in list(self._pairs):
                writer.transport.abort()
                far_writer.transport.abort()

    def cut(self) -> None:
        """Loses all connections; new ones are refused."""
        self._do(self._set(False))

    def mend(self) -> None:
        """Lets connections through again."""
        self._do(self._set(True))

    def hold(self) -> None:
        """Lets nothing through, while connections stand."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def release(self) -> None:
        """Lets everything through that was held."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    def break_after(self, way: str, byte_count: int) -> None:
        """Loses the connection, once, after so many more bytes `there` or `back`."""
        self._left[way] = byte_count

    async def _end(self) -> None:
        await self._set(False)
        self._flowing.set()
        until = self._loop.time() + PATIENCE_S
        while (others := asyncio.all_tasks() - {asyncio.current_task()}) and (left := until - self._loop.time()) > 0:
            await asyncio.wait(others, timeout=left)  # one that was just accepted starts another
        self._server.close()  # not before: asyncio forgets the socket of a connection that it has half accepted
        for writer in self._writers:  # one that was closed with something to write would wait for its reader
            writer.transport.abort()
        turn = self._loop.create_future()
        self._loop.call_soon(turn.set_result, None)  # behind the ends of transports that were aborted
        await turn

    def close(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Setup(NamedTuple):
    """Both ends and what lies between them."""

    bank: Bank
    server: WireServer
    way: Link
    connection: WireConnection
