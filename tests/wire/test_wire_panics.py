"""Whatever a method raises comes back to who called, and no thread of the server is lost by it."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest
from wire_cases import PATIENCE_S, Balance, Bank, Panic, deposit, until

from shadowsync.errors import RunError
from shadowsync.rpc.client import WireConnection
from shadowsync.rpc.connection import DirectConnection
from shadowsync.rpc.server import WireServer
from shadowsync.rpc.sockets import Loop
from shadowsync.runtime import runtime
from shadowsync.runtime.runtime import waiting_for

Serve = Callable[..., WireServer]
Connect = Callable[..., WireConnection]
SENTENCE = r"^panic failed with Panic: index out of bounds$"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_panics_and_exits_come_back_and_the_threads_go_on(serve: Serve, connect: Connect) -> None:
    connection = connect(serve(bank := Bank(), threads=1).address)
    for _ in range(3):
        with pytest.raises(RunError, match=SENTENCE):
            connection.call("panic").result(PATIENCE_S)
        with pytest.raises(RunError, match="exit failed with SystemExit: 3"):
            connection.call("exit").result(PATIENCE_S)
    assert connection.call("deposit", deposit("after", 5)).result(PATIENCE_S).read(Balance) == Balance(5)
    assert bank.total == 5


def test_a_panic_in_process_comes_back_and_an_exit_ends_who_called() -> None:
    connection = DirectConnection(Bank())
    with pytest.raises(RunError, match=SENTENCE):
        connection.call("panic").result(PATIENCE_S)
    with pytest.raises(SystemExit):
        connection.call("exit")


@pytest.mark.parametrize("direct", [False, True])
def test_a_reply_that_panics_later_or_is_cancelled_comes_back(serve: Serve, connect: Connect, direct: bool) -> None:
    bank = Bank()
    connection = DirectConnection(bank) if direct else connect(serve(bank).address)
    answers = [connection.call("deposit_later", deposit(f"{number}", 1)) for number in range(2)]
    until(lambda: len(bank.later) == 2, "both calls")
    bank.later.sort(key=lambda later: later[1].meta)  # they may overtake each other
    bank.end_later(Panic("too late"))
    with pytest.raises(RunError, match="deposit_later failed with Panic: too late"):
        answers[0].result(PATIENCE_S)
    bank.end_later(CancelledError())
    with pytest.raises(RunError, match="deposit_later failed with CancelledError"):
        answers[1].result(PATIENCE_S)


def test_a_callback_that_panics_does_not_end_the_thread_that_receives(serve: Serve, connect: Connect) -> None:
    connection = connect(serve(Bank()).address)

    def panic(_: object) -> None:
        raise Panic("in a callback")

    panicking = connection.call("echo")
    panicking.then(panic)
    connection.call("echo").result(PATIENCE_S)


def test_a_loop_goes_on_after_a_panic() -> None:
    ran = threading.Event()

    def panic() -> None:
        raise Panic("in the loop")

    loop = Loop("tested", lambda: None, 0.01)
    loop.start()
    loop.post(panic)
    loop.post(ran.set)
    assert ran.wait(PATIENCE_S)
    loop.close()


def test_a_call_that_a_living_peer_does_not_answer_is_told_of(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = Bank()
    connection = connect(serve(bank).address)
    slow = connection.call("slow_deposit", deposit("slow", 1))
    assert bank.entered.wait(PATIENCE_S)
    assert waiting_for([("bank-0", connection)]) == ""
    monkeypatch.setattr(runtime, "LONG_S", 0.0)
    assert waiting_for([("bank-0", connection)]) == "waits for slow_deposit of bank-0 for more than 0 s"
    bank.open.set()
    slow.result(PATIENCE_S)
    until(lambda: waiting_for([("bank-0", connection)]) == "", "the end of it")
