"""Marked methods: what they are annotated with crosses, over a wire as in process, and nothing else does."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from helpers import PackedConnection
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shadowsync.errors import DataError, RunError
from shadowsync.rpc.client import WireClient
from shadowsync.rpc.connection import Connection, JobKeys, Payload
from shadowsync.rpc.pending import Pending, Promise
from shadowsync.rpc.served import Client, Served, ask, later, served
from shadowsync.rpc.server import WireServer

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Parcel:
    """A little of everything."""

    number: int
    spans: tuple[tuple[int, int], ...]
    content: Tensor
    lid: Tensor | None = None


class Shop:
    """A role."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.closed = False
        self.waiting: list[Promise[int]] = []

    @served(once=False)
    def wrap(self, number: int, tensors: tuple[Tensor, ...], label: str = "plain") -> Mapping[str, Parcel]:
        return {label: Parcel(number, ((0, number),), torch.cat(tensors))}

    @served()
    def open(self, parcel: Parcel) -> tuple[Tensor, bool]:
        return parcel.content * 2, parcel.lid is not None

    @served(quick=True)
    def who(self, client: Client, number: int) -> tuple[str, int]:
        return client, number

    @served(quick=True)
    def wait(self) -> Pending[int]:
        self.waiting.append(Promise())
        return self.waiting[-1]

    @served()
    def nothing(self) -> None:
        """Only that it was done comes back."""

    @served()
    def refuse(self, why: str) -> int:
        raise DataError(why)

    def secret(self) -> int:
        return 7

    def client_gone(self, client: str) -> None:
        self.gone.append(client)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture(params=["direct", "wire"])
def connection(request: pytest.FixtureRequest, shop: Shop) -> Iterator[Connection]:
    if request.param == "direct":
        yield PackedConnection(Served(shop))
        return
    keys = JobKeys.make()
    server, connector = WireServer(Served(shop), keys), WireClient(keys)
    server.start()
    yield connector.connect(server.address)
    connector.close()
    server.close()


def test_arguments_and_results_cross_with_the_tensors_in_them(connection: Connection) -> None:
    wrapped = ask(connection, Shop.wrap, 3, (torch.ones(2), torch.zeros(1)), label="red")
    assert list(wrapped) == ["red"]
    assert (wrapped["red"].number, wrapped["red"].spans, wrapped["red"].lid) == (3, ((0, 3),), None)
    assert wrapped["red"].content.tolist() == [1, 1, 0]
    doubled, lidded = ask(connection, Shop.open, Parcel(1, (), torch.arange(6).view(2, 3).t(), torch.zeros(1)))
    assert lidded
    assert torch.equal(doubled, torch.arange(6).view(2, 3).t() * 2)


def test_what_has_a_default_may_be_left_out(connection: Connection) -> None:
    assert list(ask(connection, Shop.wrap, 3, (torch.ones(2),))) == ["plain"]
    assert ask(connection, Shop.nothing) is None


def test_the_service_says_who_asks(connection: Connection) -> None:
    first, second = (ask(connection, Shop.who, Client("somebody else"), number) for number in (4, 5))
    assert first[0] == second[0] != "somebody else"
    assert (first[1], second[1]) == (4, 5)


@pytest.mark.parametrize("error", [None, DataError("row 7"), ZeroDivisionError("by nothing")])
def test_a_result_that_comes_later_holds_nobody_up(connection: Connection, shop: Shop, error: Exception | None) -> None:
    asked = later(connection, Shop.wait)
    ask(connection, Shop.nothing)
    while not shop.waiting:
        threading.Event().wait(0.001)
    assert not asked.done()
    if error is None:
        shop.waiting[0].keep(11)
        assert asked.result() == 11
        return
    shop.waiting[0].fail(error)
    with pytest.raises(DataError if isinstance(error, DataError) else RunError, match=str(error)):
        asked.result()


def test_what_a_method_raises_comes_back(connection: Connection) -> None:
    with pytest.raises(DataError, match="row 7 has no colour"):
        ask(connection, Shop.refuse, "row 7 has no colour")


def test_only_what_is_marked_is_served(connection: Connection) -> None:
    with pytest.raises(RunError, match="there is no method 'secret' here"):
        connection.call("secret").result(PATIENCE_S)
    assert sorted(Served(Shop()).methods) == ["nothing", "open", "refuse", "wait", "who", "wrap"]


def test_marks_say_how_a_method_is_run() -> None:
    methods = Served(Shop()).methods
    assert (methods["wrap"].once, methods["wrap"].quick) == (False, False)
    assert (methods["who"].once, methods["who"].quick) == (True, True)


def test_what_cannot_cross_is_refused_before_it_is_sent(connection: Connection) -> None:
    with pytest.raises(DataError, match="a Shop cannot cross to another role"):
        ask(connection, Shop.refuse, Shop())  # type: ignore[arg-type]


def test_the_role_hears_of_its_clients_and_of_its_end(shop: Shop) -> None:
    service = Served(shop)
    service.client_gone("a")
    service.close()
    assert (shop.gone, shop.closed) == (["a"], True)
    bare = Served(object())
    bare.client_gone("a")
    bare.close()


@pytest.mark.parametrize(
    "value",
    [[], [3], [3, [0]], [3, [0], "red", 4], ["3", [0], "red"], [3, [1], "red"], [3, [-1], "red"], [3, ["0"], "red"], 3],
    ids=str,
)
def test_arguments_of_another_kind_never_reach_the_method(connection: Connection, value: Any) -> None:
    payload = Payload(msgspec.msgpack.encode(value), (torch.ones(1),))
    with pytest.raises(DataError, match="a call of wrap is not what it should be"):
        connection.call("wrap", payload).result(PATIENCE_S)


@given(st.binary(max_size=64))
def test_any_bytes_are_refused_in_one_sentence_or_are_arguments(data: bytes) -> None:
    connection = PackedConnection(Served(Shop()))
    called = connection.call("open", Payload(data or b"\xc0", (torch.ones(1),)))
    with contextlib.suppress(DataError):
        called.result(PATIENCE_S)
