"""The small parts: tensors in frames, errors by name, keys that do not show, the loop."""

import logging
import threading

import msgspec
import pytest
import torch
from helpers import PackedConnection
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_cases import PATIENCE_S, Bank, Connect, Panic, Serve, deposit

from shadowsync import errors
from shadowsync.errors import MissingExtra, NonFiniteLoss, RunError, SaveError, ShadowSyncError
from shadowsync.rpc import messages
from shadowsync.rpc.connection import EMPTY, JobKeys, Payload
from shadowsync.rpc.errors import CallTimeout, Fault, PeerLost
from shadowsync.rpc.messages import MAX_TENSORS, META_BYTES, pack
from shadowsync.rpc.sockets import Loop
from shadowsync.rpc.tensors import DTYPES, Malformed, Spec, bytes_of, spec_of, tensor_of

KINDS = [PeerLost, CallTimeout, NonFiniteLoss, SaveError, errors.DataError, errors.ConfigError, ShadowSyncError]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_crosses_by_its_name(kind: type[ShadowSyncError]) -> None:
    fault = msgspec.msgpack.decode(msgspec.msgpack.encode(Fault.of(kind("so it is"))), type=Fault)
    assert type(fault.error()) is kind
    assert str(fault.error()) == "so it is"


def test_an_error_that_builds_its_own_sentence_crosses_with_it() -> None:
    error = Fault.of(MissingExtra("zmq", "ray")).error()
    assert type(error) is MissingExtra
    assert str(error) == "zmq is not installed: pip install 'shadowsync[ray]'"


def test_an_error_that_this_process_does_not_know_is_of_its_nearest_base() -> None:
    assert type(Fault(("Meltdown", "SaveError", "RunError"), "hot").error()) is SaveError
    assert type(Fault(("Meltdown",), "hot").error()) is ShadowSyncError


def test_secrets_do_not_show() -> None:
    keys, other = JobKeys.make(), JobKeys.make()
    assert keys != other
    shown = f"{keys!r} {keys}"
    assert keys.server_public in shown
    assert keys.server_secret not in shown
    assert keys.client_secret not in shown
    assert msgspec.json.decode(msgspec.json.encode(keys), type=JobKeys) == keys


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=5), st.integers(0, 15))
def test_a_tensor_comes_out_as_it_went_in(dtype: torch.dtype, shape: list[int], shift: int) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    frame = bytearray(shift) + bytes_of(tensor)
    came = tensor_of(memoryview(frame)[shift:], spec_of(tensor))  # also where the memory is not aligned
    assert came.dtype == dtype
    assert torch.equal(came, tensor)


def test_nothing_is_copied_where_memory_is_contiguous() -> None:
    tensor = torch.zeros(100)
    frame = bytes_of(tensor)
    tensor += 1
    assert tensor_of(frame, spec_of(tensor)).sum() == 100
    assert tensor_of(frame, spec_of(tensor)).data_ptr() == tensor.data_ptr()


SPECS = [Spec(0, (3,)), Spec(0, (5,)), Spec(99, (4,)), Spec(-1, (4,)), Spec(0, (-4,)), Spec(0, (-2, -2))]
SPECS += [Spec(0, (1,) * 17), Spec(0, (0, 1 << 62, 1 << 62)), Spec(0, (1 << 62, 4)), Spec(1, (4,))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_frame_that_is_not_what_was_announced_is_refused(spec: Spec) -> None:
    with pytest.raises(Malformed):
        tensor_of(bytearray(16), spec)


@pytest.mark.parametrize(
    ("meta", "tensors", "words"),
    [
        (EMPTY.meta, [torch.zeros(2, dtype=torch.complex64)], "complex64 with 1 dimensions cannot cross"),
        (EMPTY.meta, [torch.zeros((1,) * 17)], "with 17 dimensions cannot cross"),
        (EMPTY.meta, [torch.zeros(0)] * (MAX_TENSORS + 1), "has 1025 tensors, and at most 1024"),
        (EMPTY.meta, [torch.zeros(300)], "has 1200 bytes, and at most 1000"),
        (bytes(META_BYTES + 1), [], "typed part has 1048"),
    ],
)
def test_what_cannot_cross_is_refused_by_its_sender(
    meta: bytes, tensors: list[torch.Tensor], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_TENSOR_BYTES", 1000)
    with pytest.raises(RunError, match=words):
        pack(Payload(meta, tuple(tensors)))


def test_an_address_that_is_taken_is_refused_in_a_sentence(serve: Serve) -> None:
    server = serve(Bank())
    port = server.address.rpartition(":")[2]
    with pytest.raises(RunError, match=f"nothing can be served at 127.0.0.1:{port}: Address already in use"):
        serve(Bank(), port=int(port))


def test_an_address_that_is_none_fails_its_calls(connect: Connect) -> None:
    connection = connect("nowhere")
    with pytest.raises(PeerLost, match="there can be no peer at nowhere"):
        connection.call("echo").result(PATIENCE_S)


def test_a_server_frees_its_clients_when_it_is_closed(serve: Serve, connect: Connect) -> None:
    server = serve(bank := Bank())
    connection = connect(server.address)
    connection.call("deposit", deposit("a", 1)).result(PATIENCE_S)
    server.close()
    server.close()
    assert bank.gone == [connection.client]


def test_a_reply_that_cannot_cross_is_an_error_of_its_call(serve: Serve, connect: Connect) -> None:
    connection = connect(serve(Bank()).address)
    with pytest.raises(RunError, match="complex64 with 1 dimensions cannot cross the wire"):
        connection.call("unspeakable").result(PATIENCE_S)
    connection.call("deposit", deposit("a", 1)).result(PATIENCE_S)


@pytest.mark.parametrize("error", [ZeroDivisionError(), Panic("in the loop")], ids=repr)
def test_a_loop_outlives_an_action_that_fails(caplog: pytest.LogCaptureFixture, error: BaseException) -> None:
    def fail() -> None:
        raise error

    ticked, done = threading.Event(), threading.Event()
    loop = Loop("test", ticked.set, 0.01)
    loop.post(fail)
    loop.post(done.set)
    with caplog.at_level(logging.ERROR):
        loop.start()
        assert done.wait(PATIENCE_S)
        assert ticked.wait(PATIENCE_S)
        loop.close()
    assert "an action of the wire failed" in caplog.text


def test_in_process_no_tensor_is_copied() -> None:
    sent = torch.ones(10)
    seen = []
    bank = Bank()
    bank.methods["keep"] = type(bank.methods["echo"])(
        lambda request: (seen.append(request.tensors[0]), bank.echo(request))[1]
    )
    PackedConnection(bank).call("keep", Payload(tensors=(sent,))).result(PATIENCE_S)
    assert seen[0] is sent


def test_a_loop_misses_no_post() -> None:
    """Its tick is far away, so that an action whose bell was not heard would wait for ever."""
    loop = Loop("test", lambda: None, tick_s=1000)
    loop.start()
    posts, turns = 4, 500
    ran = [threading.Semaphore(0) for _ in range(posts)]

    def post(index: int) -> None:
        for _ in range(turns):
            loop.post(ran[index].release)
            heard.append(ran[index].acquire(timeout=PATIENCE_S))

    heard: list[bool] = []
    threads = [threading.Thread(target=post, args=(index,)) for index in range(posts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loop.close()
    assert heard == [True] * (posts * turns)
