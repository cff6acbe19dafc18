"""What a server does with each message, without sockets: time is handed in."""

import random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.rpc.clients import Limits
from shadowsync.rpc.ledger import Frames
from shadowsync.rpc.messages import (
    META_BYTES,
    Bye,
    Call,
    Done,
    Failed,
    Hello,
    Ping,
    Pong,
    Unknown,
    Welcome,
    encode,
    from_server,
)
from shadowsync.rpc.packing import Cargo
from shadowsync.rpc.reception import Job, Reception, Step

NAMES = ("a" * 32, "b" * 32)


def call(session: int, number: int, low: int = 1) -> Frames:
    cargo = Cargo.of(None, (torch.arange(5),), 1 << 20)
    return [encode(Call(session, number, low, "work", cargo.meta, cargo.specs)), *cargo.frames]


def reply(number: int) -> Frames:
    return [encode(Done(number, b"", ()))]


def said(step: Step) -> object:
    return from_server(step.answer) if step.answer else None


def greet(desk: Reception, route: bytes, name: str = NAMES[0], now_s: float = 0.0, session: int = 0) -> Welcome:
    welcome = said(desk.take(route, [encode(Hello(name, session))], now_s))
    assert isinstance(welcome, Welcome)
    return welcome


def job_of(step: Step) -> Job:
    assert step.job is not None
    return step.job


def test_a_call_becomes_a_job_with_its_tensors() -> None:
    desk = Reception(Limits())
    session = greet(desk, b"r").session
    job = job_of(desk.take(b"r", call(session, 1), 0))
    assert job.call.method == "work"
    assert torch.equal(job.tensors[0], torch.arange(5))
    assert desk.finish(job, reply(1), keep=True) == (b"r", False)
    assert desk.take(b"r", call(session, 1), 0).answer == reply(1)
    assert (desk.counts.requests, desk.counts.replayed) == (1, 1)


def test_a_reply_goes_where_its_client_is_now() -> None:
    desk = Reception(Limits())
    session = greet(desk, b"old").session
    job = job_of(desk.take(b"old", call(session, 1), 0))
    assert greet(desk, b"new", session=session).session == session
    assert desk.take(b"new", call(session, 1), 0) == Step()
    assert desk.finish(job, reply(1), keep=True)[0] == b"new"
    assert said(desk.take(b"old", call(session, 2), 0)) == Unknown(session)


def test_a_session_of_a_client_that_never_called_can_be_asked_for_again() -> None:
    """Its welcome was lost, so it does not know it."""
    desk = Reception(Limits())
    assert greet(desk, b"old").session == greet(desk, b"new").session


def test_a_client_that_called_is_known_by_its_session_only() -> None:
    desk = Reception(Limits())
    session = greet(desk, b"r").session
    desk.take(b"r", call(session, 1), 0)
    for guess in (0, session + 1):
        assert desk.take(b"thief", [encode(Hello(NAMES[0], guess))], 0) == Step()
    assert desk.take(b"r", call(session, 2), 0).job is not None
    assert desk.counts.strangers == 2


def test_silence_is_forgotten_signs_of_life_are_not() -> None:
    desk = Reception(Limits(forget_client_after_s=10))
    sessions = [greet(desk, name.encode(), name).session for name in NAMES]
    for now_s in range(0, 31, 5):
        assert said(desk.take(NAMES[1].encode(), [encode(Ping(sessions[1], 1))], now_s)) == Pong()
        assert desk.forget_silent(now_s) == ([NAMES[0]] if now_s == 15 else [])
    assert desk.clients == [NAMES[1]]
    assert said(desk.take(NAMES[0].encode(), call(sessions[0], 1), 30)) == Unknown(sessions[0])
    again = greet(desk, NAMES[0].encode(), NAMES[0], 30, sessions[0])
    assert again.session not in sessions


@pytest.mark.parametrize("ends", ["bye", "silence"])
def test_a_client_is_freed_when_its_last_job_has_ended(ends: str) -> None:
    desk = Reception(Limits(forget_client_after_s=10))
    session = greet(desk, b"r").session
    jobs = [job_of(desk.take(b"r", call(session, number), 0)) for number in (1, 2)]
    if ends == "bye":
        assert desk.take(b"r", [encode(Bye(session))], 0).gone is None
    else:
        assert desk.forget_silent(11) == []
    assert desk.finish(jobs[1], reply(2), keep=True)[1] is False
    assert desk.finish(jobs[0], reply(1), keep=True)[1] is True


def test_a_farewell_frees_at_once_where_nothing_runs() -> None:
    desk = Reception(Limits())
    session = greet(desk, b"r").session
    assert desk.take(b"r", [encode(Bye(session))], 0).gone == NAMES[0]
    assert desk.clients == []


def test_names_that_call_nothing_keep_nobody_out() -> None:
    desk = Reception(Limits())
    worker = greet(desk, b"worker")
    job = job_of(desk.take(b"worker", call(worker.session, 1), 0))
    for number in range(6000):
        greet(desk, b"flood", f"{number:032x}", 1.0)
    assert len(desk.clients) == Limits().clients
    newcomer = greet(desk, b"newcomer", NAMES[1], 1.0)
    job_of(desk.take(b"newcomer", call(newcomer.session, 1), 1.0))
    assert desk.finish(job, reply(1), keep=True) == (b"worker", False)
    assert {NAMES[0], NAMES[1]} <= set(desk.clients)


def test_who_is_silent_yields_its_place_and_is_freed() -> None:
    desk = Reception(Limits(clients=2, yield_after_s=10.0))
    for number, name in enumerate(NAMES):
        job = job_of(desk.take(name.encode(), call(greet(desk, name.encode(), name).session, 1), float(number)))
        desk.finish(job, reply(1), keep=True)
    hello = [encode(Hello("c" * 32, 0))]
    assert desk.take(b"c", hello, 9.0) == Step()
    step = desk.take(b"c", hello, 10.5)
    assert step.gone == NAMES[0]
    assert isinstance(said(step), Welcome)
    assert sorted(desk.clients) == [NAMES[1], "c" * 32]
    assert desk.counts.forgotten == 1


def test_clients_are_bounded() -> None:
    desk = Reception(Limits(clients=1))
    job_of(desk.take(b"1", call(greet(desk, b"1").session, 1), 0))
    assert desk.take(b"2", [encode(Hello(NAMES[1], 0))], 0) == Step()


def test_too_many_calls_are_refused_in_a_sentence() -> None:
    desk = Reception(Limits(open_calls=2))
    session = greet(desk, b"r").session
    steps = [desk.take(b"r", call(session, number), 0) for number in (1, 2, 3)]
    refusal = said(steps[2])
    assert isinstance(refusal, Failed)
    assert "too many calls of this client are open" in refusal.fault.message
    assert [step.job is not None for step in steps] == [True, True, False]


MANY = [b""] * 1030
WRONG: dict[str, list[bytes]] = {
    "nothing": [],
    "an empty header": [b""],
    "no msgpack": [b"\xc1"],
    "a header that is too long": [encode(Call(1, 1, 1, "m", bytes(2 * META_BYTES), ()))],
    "too many frames": [encode(Ping(1, 1)), *MANY],
    "frames behind a sign of life": [encode(Ping(1, 1)), b"x"],
    "a name that is no client's": [encode(Hello("z" * 32, 0))],
    "a name that is too short": [encode(Hello("abc", 0))],
    "another tag": [msgspec.msgpack.encode([9, 1, 1])],
    "a negative number": [msgspec.msgpack.encode([2, 1, -1, 1, "m", b"", []])],
    "a number too large": [msgspec.msgpack.encode([2, 1, 1 << 63, 1, "m", b"", []])],
    "a session that is text": [msgspec.msgpack.encode([1, "1", 1])],
    "nesting without end": [b"\x91" * 100_000],
    "text that is none": [msgspec.msgpack.encode([2, 1, 1, 1]) + b"\xa4\xff\xff\xff\xff"],
}


@pytest.mark.parametrize("frames", WRONG.values(), ids=WRONG)
def test_what_is_malformed_is_counted_and_dropped(frames: list[bytes]) -> None:
    desk = Reception(Limits())
    assert desk.take(b"r", frames, 0) == Step()
    assert desk.counts.malformed == 1


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.binary(max_size=40), max_size=4), st.integers(0, 5), st.randoms(use_true_random=False))
def test_no_bytes_get_through(frames: list[bytes], bits: int, randomness: random.Random) -> None:
    """Noise, and honest messages with some bits turned: the only job they may lead to is a call that still reads."""
    desk = Reception(Limits())
    session = greet(desk, b"r").session
    assert desk.take(b"r", frames, 0).job is None
    bent = [bytearray(frame) for frame in call(session, 1)]
    for _ in range(bits):
        frame = randomness.choice(bent)
        frame[randomness.randrange(len(frame))] ^= 1 << randomness.randrange(8)
    job = desk.take(b"r", [bytearray(frame) for frame in bent], 0).job
    if job is not None:
        assert job.call.session == session
        assert sum(tensor.nbytes for tensor in job.tensors) == 40
