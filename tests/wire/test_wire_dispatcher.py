"""What a server does with each message, without sockets: time is handed in."""

import random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.rpc.connection import Payload
from shadowsync.rpc.messages import (
    FROM_SERVER,
    META_BYTES,
    Answer,
    Answers,
    Bye,
    Call,
    Calls,
    Frames,
    Hello,
    Unknown,
    Welcome,
    encode,
    header_of,
    pack,
)
from shadowsync.rpc.server import Dispatcher, Ready, Taken, Task

NAMES = ("a" * 32, "b" * 32)
WORK = Payload(tensors=(torch.arange(5),))


def call(session: int, number: int, low: int = 1) -> Frames:
    specs, frames = pack(WORK)
    return [encode(Calls(session, low, (Call(number, "work", WORK.meta, specs),))), *frames]


def reply(number: int) -> Ready:
    return Answer(number), []


def sent(*numbers: int) -> Frames:
    """The answers to these."""
    return [encode(Answers(tuple(reply(number)[0] for number in numbers)))]


def said(step: Taken) -> object:
    return header_of(step.answer, FROM_SERVER) if step.answer else None


def greet(dispatcher: Dispatcher, route: bytes, name: str = NAMES[0], now_s: float = 0.0) -> Welcome:
    welcome = said(dispatcher.take(route, [encode(Hello(name))], now_s))
    assert isinstance(welcome, Welcome)
    return welcome


def task_of(step: Taken) -> Task:
    (task,) = step.tasks
    return task


def test_a_call_becomes_a_job_with_its_tensors() -> None:
    dispatcher = Dispatcher(120.0)
    session = greet(dispatcher, b"r").session
    task = task_of(dispatcher.take(b"r", call(session, 1), 0))
    assert task.method == "work"
    assert torch.equal(task.request.tensors[0], torch.arange(5))
    assert dispatcher.finish(task, reply(1), keep=True) == (b"r", False)
    assert dispatcher.take(b"r", call(session, 1), 0).answer == sent(1)
    assert dispatcher.take(b"r", call(session, 2, low=2), 0).tasks
    assert dispatcher.take(b"r", call(session, 1), 0) == Taken(), "its sender has the answer"


def test_what_may_run_again_is_not_kept() -> None:
    dispatcher = Dispatcher(120.0)
    session = greet(dispatcher, b"r").session
    first = task_of(dispatcher.take(b"r", call(session, 1), 0))
    assert dispatcher.take(b"r", call(session, 1), 0) == Taken(), "it runs"
    dispatcher.finish(first, reply(1), keep=False)
    assert dispatcher.take(b"r", call(session, 1), 0).tasks


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4), st.booleans()), max_size=40))
def test_each_call_runs_once_however_often_it_comes(script: list[tuple[int, int, bool]]) -> None:
    """Calls come in any order and again, `low` rises, and tasks end at any time."""
    dispatcher = Dispatcher(120.0)
    session, low, running, ran = greet(dispatcher, b"r").session, 1, {}, []
    for number, rise, ends in script:
        low = max(low, number - rise)
        step = dispatcher.take(b"r", call(session, number, low), 0)
        if step.tasks:
            ran.append(number)
            (running[number],) = step.tasks
        elif step.answer is not None:
            assert step.answer == sent(number)
            assert number not in running
        if ends and running:
            over, task = running.popitem()
            dispatcher.finish(task, reply(over), keep=True)
    assert len(ran) == len(set(ran))


def test_a_reply_goes_where_its_client_is_now() -> None:
    dispatcher = Dispatcher(120.0)
    session = greet(dispatcher, b"old").session
    task = task_of(dispatcher.take(b"old", call(session, 1), 0))
    assert greet(dispatcher, b"new").session == session
    assert dispatcher.take(b"new", call(session, 1), 0) == Taken()
    assert dispatcher.finish(task, reply(1), keep=True)[0] == b"new"
    assert said(dispatcher.take(b"old", call(session, 2), 0)) == Unknown(session)


def test_a_session_can_be_asked_for_again() -> None:
    """Its welcome was lost, or the client was at another server meanwhile."""
    dispatcher = Dispatcher(120.0)
    session = greet(dispatcher, b"old").session
    dispatcher.take(b"old", call(session, 1), 0)
    assert greet(dispatcher, b"new").session == session
    assert dispatcher.take(b"new", call(session, 1), 0) == Taken(), "it runs already"


def test_silence_is_forgotten_signs_of_life_are_not() -> None:
    dispatcher = Dispatcher(10.0)
    sessions = [greet(dispatcher, name.encode(), name).session for name in NAMES]
    for now_s in range(0, 31, 5):
        assert said(dispatcher.take(NAMES[1].encode(), [encode(Calls(sessions[1], 1))], now_s)) == Answers()
        assert dispatcher.forget_silent(now_s) == ([NAMES[0]] if now_s == 15 else [])
    assert dispatcher.clients == [NAMES[1]]
    assert said(dispatcher.take(NAMES[0].encode(), call(sessions[0], 1), 30)) == Unknown(sessions[0])
    again = greet(dispatcher, NAMES[0].encode(), NAMES[0], 30)
    assert again.session not in sessions


@pytest.mark.parametrize("ends", ["bye", "silence"])
def test_a_client_is_freed_when_its_last_job_has_ended(ends: str) -> None:
    dispatcher = Dispatcher(10.0)
    session = greet(dispatcher, b"r").session
    tasks = [task_of(dispatcher.take(b"r", call(session, number), 0)) for number in (1, 2)]
    if ends == "bye":
        assert dispatcher.take(b"r", [encode(Bye(session))], 0).gone is None
    else:
        assert dispatcher.forget_silent(11) == []
    assert dispatcher.finish(tasks[1], reply(2), keep=True)[1] is False
    assert dispatcher.finish(tasks[0], reply(1), keep=True)[1] is True


def test_a_farewell_frees_at_once_where_nothing_runs_and_what_was_caught_before_is_worth_nothing() -> None:
    dispatcher = Dispatcher(120.0)
    session = greet(dispatcher, b"r").session
    task = task_of(dispatcher.take(b"r", call(session, 1), 0))
    dispatcher.finish(task, reply(1), keep=True)
    assert dispatcher.take(b"r", [encode(Bye(session))], 0).gone == NAMES[0]
    assert dispatcher.clients == []
    for _ in range(3):
        assert greet(dispatcher, b"thief").session != session
        assert said(dispatcher.take(b"thief", call(session, 1), 0)) == Unknown(session)


def test_calls_that_travel_together_run_in_order_and_repeat_together() -> None:
    dispatcher = Dispatcher(120.0)
    session = greet(dispatcher, b"r").session
    frames = [call(session, number) for number in (1, 2)]
    specs, _ = pack(WORK)
    header = encode(Calls(session, 1, tuple(Call(number, "work", WORK.meta, specs) for number in (1, 2))))
    together = [header, *frames[0][1:], *frames[1][1:]]
    tasks = dispatcher.take(b"r", together, 0).tasks
    assert [task.number for task in tasks] == [1, 2]
    assert all(torch.equal(task.request.tensors[0], torch.arange(5)) for task in tasks)
    dispatcher.finish(tasks[1], reply(2), keep=True)
    assert dispatcher.take(b"r", together, 0) == Taken(sent(2)), "the other one runs"
    dispatcher.finish(tasks[0], reply(1), keep=True)
    assert dispatcher.take(b"r", together, 0) == Taken(sent(1, 2))
    assert dispatcher.take(b"r", together[:-1], 0) == Taken(), "a frame is missing"


MANY = [b""] * 1030
WRONG: dict[str, list[bytes]] = {
    "nothing": [],
    "an empty header": [b""],
    "no msgpack": [b"\xc1"],
    "a header that is too long": [encode(Calls(1, 1, (Call(1, "m", bytes(2 * META_BYTES), ()),)))],
    "too many frames": [encode(Calls(1, 1)), *MANY],
    "frames behind a sign of life": [encode(Calls(1, 1)), b"x"],
    "a name that is no client's": [encode(Hello("z" * 32))],
    "a name that is too short": [encode(Hello("abc"))],
    "another tag": [msgspec.msgpack.encode([9, 1, 1])],
    "a negative number": [msgspec.msgpack.encode([2, 1, 1, [[-1, "m", b"", []]]])],
    "a number too large": [msgspec.msgpack.encode([2, 1, 1, [[1 << 63, "m", b"", []]]])],
    "a session that is text": [msgspec.msgpack.encode([2, "1", 1])],
    "nesting without end": [b"\x91" * 100_000],
    "text that is none": [msgspec.msgpack.encode([2, 1, 1, [[1]]])[:-2] + b"\x94\x01\xa4\xff\xff\xff\xff\xc4\x00\x90"],
}


@pytest.mark.parametrize("frames", WRONG.values(), ids=WRONG)
def test_what_is_malformed_is_dropped(frames: list[bytes]) -> None:
    dispatcher = Dispatcher(120.0)
    assert dispatcher.take(b"r", frames, 0) == Taken()
    assert dispatcher.clients == []


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.binary(max_size=40), max_size=4), st.integers(0, 5), st.randoms(use_true_random=False))
def test_no_bytes_get_through(frames: list[bytes], bits: int, randomness: random.Random) -> None:
    """Noise, and honest messages with some bits turned: the only task they may lead to is a call that still reads."""
    dispatcher = Dispatcher(120.0)
    session = greet(dispatcher, b"r").session
    assert dispatcher.take(b"r", frames, 0).tasks == ()
    bent = [bytearray(frame) for frame in call(session, 1)]
    for _ in range(bits):
        frame = randomness.choice(bent)
        frame[randomness.randrange(len(frame))] ^= 1 << randomness.randrange(8)
    for task in dispatcher.take(b"r", [bytearray(frame) for frame in bent], 0).tasks:
        assert sum(tensor.nbytes for tensor in task.request.tensors) == 40
