"""Roles in the driver's process: their methods are called at once, with the objects as they are."""

from functools import partial

import pytest
import torch
from role_parts import CLOSED, Greeter, greeter, refuses
from torch import Tensor

from shadowsync.errors import ConfigError
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.pending import Done, Pending, Promise
from shadowsync.rpc.served import Client, Served, ask, later, served
from shadowsync.runtime.inprocess import InProcess
from shadowsync.runtime.runtime import LaunchRequest


class Bench:
    """A role."""

    def __init__(self) -> None:
        self.waiting: Promise[int] = Promise()

    @served()
    def same(self, tensor: Tensor, client: Client, label: str = "plain") -> tuple[Tensor, str, str]:
        return tensor, client, label

    @served()
    def breaks(self) -> int:
        raise ZeroDivisionError("by nothing")

    @served()
    def wait(self) -> Pending[int]:
        return self.waiting


def started(runtime: InProcess, bench: Bench) -> None:
    runtime.start(LaunchRequest("trainer-0")).build(lambda _: Served(bench)).result()


def test_what_is_given_and_returned_is_the_object_itself() -> None:
    runtime, tensor = InProcess(), torch.ones(2)
    started(runtime, Bench())
    first, other = runtime.connect("trainer-0"), runtime.connect("trainer-0")
    found, who, label = ask(first, Bench.same, tensor, Client("somebody else"), label="red")
    assert found is tensor
    assert label == "red"
    assert who not in ("somebody else", ask(other, Bench.same, tensor, Client(""))[1])
    assert isinstance(later(first, Bench.same, tensor, Client("")), Done)


def test_an_error_is_raised_as_it_is_by_who_asks_for_the_result() -> None:
    runtime = InProcess()
    started(runtime, Bench())
    asked = later(runtime.connect("trainer-0"), Bench.breaks)
    assert asked.done()
    with pytest.raises(ZeroDivisionError, match="by nothing"):
        asked.result()


def test_a_result_may_come_later_or_never() -> None:
    runtime, bench = InProcess(), Bench()
    started(runtime, bench)
    first, second = (later(runtime.connect("trainer-0"), Bench.wait) for _ in range(2))
    assert not first.done()
    bench.waiting.fail(ConfigError("nobody comes"))
    for asked in (first, second):
        with pytest.raises(ConfigError, match="nobody comes"):
            asked.result()


def test_a_part_takes_the_place_of_the_one_before_and_who_has_ended_is_a_lost_peer() -> None:
    CLOSED.clear()
    runtime = InProcess()
    role, connection = runtime.start(LaunchRequest("reader-0")), runtime.connect("reader-0")
    with pytest.raises(PeerLost):
        ask(connection, Bench.breaks)
    for spec in ("first", "second"):
        role.build(greeter(spec)).result()
        assert ask(connection, Greeter.greet) == f"{spec} from reader-0"
    assert CLOSED == ["first from reader-0"]
    with pytest.raises(ConfigError, match="reader-0 cannot be built from sand"):
        role.build(partial(refuses, "sand")).result()
    role.build(greeter("third")).result()
    runtime.close()
    assert CLOSED == ["first from reader-0", "second from reader-0", "third from reader-0"]
    assert role.ended() == "it was killed"
    with pytest.raises(PeerLost, match="reader-0 ended: it was killed"):
        ask(connection, Bench.breaks)
