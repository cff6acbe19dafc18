"""What every connection does: in process, and over a socket."""

import contextlib
import gc
import threading
import weakref
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
from helpers import PackedConnection
from torch import Tensor
from wire_cases import PATIENCE_S, Balance, Bank, Connect, Deposit, Panic, Serve, deposit, read, until

from shadowsync.errors import DataError, RunError
from shadowsync.rpc.connection import Connection, Payload
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.pending import ended
from shadowsync.rpc.tensors import DTYPES, FRAME_BYTES, Malformed, Spec, tensors_of
from shadowsync.runtime import runtime
from shadowsync.runtime.runtime import waiting_for


@pytest.fixture
def bank() -> Bank:
    return Bank()


@pytest.fixture(params=["direct", "wire", "unix"])
def connection(request: pytest.FixtureRequest, bank: Bank, tmp_path: Path) -> Connection:
    if request.param == "direct":
        return PackedConnection(bank)
    where = {"host": str(tmp_path)} if request.param == "unix" else {}
    server = request.getfixturevalue("serve")(bank, **where)
    connection: Connection = request.getfixturevalue("connect")(server.address)
    return connection


def test_a_call_is_answered(connection: Connection, bank: Bank) -> None:
    for number in range(1, 4):
        answer = connection.call("deposit", deposit(f"d{number}", 5)).result(PATIENCE_S)
        assert read(answer, Balance) == Balance(5 * number)
        assert answer.tensors == ()
    assert set(bank.runs.values()) == {1}


def examples() -> list[Tensor]:
    made = []
    for dtype in DTYPES:
        values = torch.arange(24).remainder(2 if dtype is torch.bool else 100).to(dtype)
        made += [values.view(2, 3, 4), values[:0], values[3], values.view(4, 6).t()]
    return made


def test_tensors_of_every_type_and_shape_come_back_as_they_were(connection: Connection) -> None:
    sent = examples()
    came = connection.call("echo", Payload(tensors=sent)).result(PATIENCE_S).tensors
    assert [(t.dtype, t.shape) for t in came] == [(t.dtype, t.shape) for t in sent]
    assert all(torch.equal(one, other) for one, other in zip(came, sent, strict=True))


def test_tensors_that_came_are_the_callers_own(connection: Connection) -> None:
    sent = torch.ones(50_000)
    (came,) = connection.call("echo", Payload(tensors=(sent,))).result(PATIENCE_S).tensors
    came += 1
    assert sent.sum() == 50_000
    assert came.sum() == 100_000


def test_not_a_number_and_gradients_cross(connection: Connection) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0], requires_grad=True)
    (came,) = connection.call("echo", Payload(tensors=(odd,))).result(PATIENCE_S).tensors
    assert torch.equal(came.detach().view(torch.int32), odd.detach().view(torch.int32))


@pytest.mark.parametrize(
    ("method", "kind", "words"),
    [
        ("refuse", DataError, "row 7 of the request has no colour"),
        ("crash", RunError, "crash failed with ZeroDivisionError: divided$"),
        ("panic", RunError, "^panic failed with Panic: index out of bounds$"),
        ("undress", RunError, "no method 'undress' here; those that are: crash, deposit"),
        ("deposit", DataError, "does not hold a Deposit"),
    ],
)
def test_errors_keep_their_class_and_sentence(
    connection: Connection, method: str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        connection.call(method).result(PATIENCE_S)
    assert type(caught.value) is kind
    assert connection.call("echo").result(PATIENCE_S).tensors == ()


def test_an_answer_of_another_kind_is_refused(connection: Connection) -> None:
    answer = connection.call("deposit", deposit("a", 1)).result(PATIENCE_S)
    with pytest.raises(DataError, match="does not hold a Deposit"):
        read(answer, Deposit)


def test_many_threads_with_many_calls(connection: Connection, bank: Bank) -> None:
    def work(worker: int) -> None:
        futures = [connection.call("deposit", deposit(f"{worker}/{i}", i, torch.ones(1000))) for i in range(50)]
        assert ended(futures, PATIENCE_S)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bank.total == 4 * sum(range(50))
    assert torch.equal(bank.vault, torch.full((1000,), 200.0))
    assert len(bank.runs) == 200
    assert set(bank.runs.values()) == {1}
    assert len(bank.clients) == 1


def test_a_callback_may_call_again(connection: Connection) -> None:
    done = threading.Event()

    def again(_: object) -> None:
        connection.call("deposit", deposit("second", 1)).then(lambda _: done.set())

    connection.call("deposit", deposit("first", 1)).then(again)
    assert done.wait(PATIENCE_S)


def test_a_closed_connection_fails_and_its_service_hears_of_it_once(connection: Connection, bank: Bank) -> None:
    connection.call("deposit", deposit("a", 1)).result(PATIENCE_S)
    connection.close()
    connection.close()
    with pytest.raises(PeerLost, match="closed"):
        connection.call("deposit", deposit("b", 1)).result(PATIENCE_S)
    until(lambda: bank.gone == list(bank.clients), "the farewell")
    assert bank.total == 1


def test_nothing_of_an_answered_call_is_held(connection: Connection) -> None:
    sent = torch.ones(100_000)
    trace = weakref.ref(sent)
    connection.call("echo", Payload(tensors=(sent,))).result(PATIENCE_S)
    del sent
    connection.call("echo").result(PATIENCE_S)

    def is_free() -> bool:
        gc.collect()
        return trace() is None

    until(is_free, "the memory's release")


def test_any_number_of_replies_may_come_later_and_hold_no_thread(connection: Connection, bank: Bank) -> None:
    waiting = [connection.call("deposit_later", deposit(f"d{number}", 1)) for number in range(40)]
    until(lambda: len(bank.later) == 40, "the last request")
    assert read(connection.call("deposit", deposit("now", 5)).result(PATIENCE_S), Balance).total == 5
    assert not any(answer.done() for answer in waiting)
    for _ in waiting:
        bank.end_later()
    assert [read(answer.result(PATIENCE_S), Balance).total for answer in waiting] == list(range(6, 46))


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (DataError("no such row"), DataError, "no such row"),
        (ZeroDivisionError("by nothing"), RunError, "by nothing"),
        (Panic("too late"), RunError, "deposit_later failed with Panic: too late"),
        (CancelledError(), RunError, "deposit_later failed with CancelledError"),
    ],
    ids=repr,
)
def test_what_goes_wrong_later_is_raised_by_the_answer(
    connection: Connection, bank: Bank, error: BaseException, kind: type[Exception], said: str
) -> None:
    answer = connection.call("deposit_later", deposit("d", 1))
    until(lambda: bool(bank.later), "the request")
    bank.end_later(error)
    with pytest.raises(kind, match=said):
        answer.result(PATIENCE_S)


def test_nobody_is_hurt_by_a_reply_after_the_end(connection: Connection, bank: Bank) -> None:
    answer = connection.call("deposit_later", deposit("d", 1))
    until(lambda: bool(bank.later), "the request")
    connection.close()
    bank.end_later()
    assert bank.total == 1
    with contextlib.suppress(PeerLost):
        answer.result(PATIENCE_S)


def test_a_tensor_longer_than_a_frame_crosses_in_several(connection: Connection) -> None:
    sizes = (FRAME_BYTES, 0, 2 * FRAME_BYTES, FRAME_BYTES + 1, 1)
    tensors = [torch.arange(251, dtype=torch.uint8).repeat(size // 251 + 1)[:size] for size in sizes]
    answer = connection.call("echo", Payload(tensors=tensors)).result(PATIENCE_S)
    assert all(torch.equal(came, sent) for came, sent in zip(answer.tensors, tensors, strict=True))


def test_parts_of_a_tensor_that_do_not_make_it_are_refused() -> None:
    spec = Spec(5, (2 * FRAME_BYTES,))
    whole, half, nothing = bytearray(2 * FRAME_BYTES), bytearray(FRAME_BYTES), bytearray(0)
    assert tensors_of([half, half], [spec])[0][0].numel() == 2 * FRAME_BYTES
    for frames in ([whole, half], [half, half[1:]], [whole, nothing], [half, half, half]):
        with pytest.raises(Malformed):
            tensors_of(frames, [spec])


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_panics_and_exits_come_back_and_the_threads_go_on(serve: Serve, connect: Connect) -> None:
    connection = connect(serve(bank := Bank(), threads=1).address)
    for _ in range(3):
        with pytest.raises(RunError, match="index out of bounds"):
            connection.call("panic").result(PATIENCE_S)
        with pytest.raises(RunError, match="exit failed with SystemExit: 3"):
            connection.call("exit").result(PATIENCE_S)
    assert read(connection.call("deposit", deposit("after", 5)).result(PATIENCE_S), Balance) == Balance(5)
    assert bank.total == 5


def test_in_process_an_exit_ends_who_called() -> None:
    with pytest.raises(SystemExit):
        PackedConnection(Bank()).call("exit")


def test_a_callback_that_panics_does_not_end_the_thread_that_receives(serve: Serve, connect: Connect) -> None:
    connection = connect(serve(Bank()).address)

    def panic(_: object) -> None:
        raise Panic("in a callback")

    panicking = connection.call("echo")
    panicking.then(panic)
    connection.call("echo").result(PATIENCE_S)


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
