"""What a trainer measures of its link, and how lines follow what is chosen."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from codec_cases import numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.assembly import codec_choice
from shadowsync.choices import choose_all
from shadowsync.compression.auto import Auto
from shadowsync.compression.choice import CodecChoice, Crossing, Link, MeasuredConnection, busy_s
from shadowsync.compression.low_bit import Draws, Int8
from shadowsync.compression.plain import Plain
from shadowsync.compression.wire import WireCounter
from shadowsync.config import load
from shadowsync.errors import RunError
from shadowsync.rpc.connection import EMPTY, Connection, Payload
from shadowsync.rpc.pending import Promise

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=30)


@settings(derandomize=True, deadline=None)
@given(spans=spans)
def test_time_counts_once_however_many_messages_are_on_their_way(spans):
    crossings = [Crossing(since, since + long, 1, 2) for since, long in spans]
    seconds = {second for since, until, *_ in crossings for second in range(since, until)}
    random.Random(1).shuffle(crossings)
    assert busy_s(crossings)[0] == len(seconds)
    later = {second for second in seconds if second >= 30}
    assert busy_s(crossings, 30)[0] == len(later)


@dataclass
class Clock:
    """Goes when it is told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Station(Connection):
    """Answers when it is told to."""

    waiting: list[Promise[Payload]] = field(default_factory=list)

    def call(self, method, payload=EMPTY, timeout_s=None):
        self.waiting.append(Promise())
        return self.waiting[-1]

    def answer(self, floats, served_s=0.0):
        self.waiting.pop(0).keep(Payload(b"", (torch.zeros(floats),), served_s=served_s))

    def close(self):
        pass


def test_pulls_that_are_ahead_share_the_time_of_the_link():
    clock, station = Clock(), Station()
    link = Link(clock)
    connection = MeasuredConnection(station, link)
    for _ in range(3):
        connection.call("pull", Payload(tensors=(torch.zeros(10, dtype=torch.int32),)))
    for clock.now in (2.0, 4.0, 6.0):
        station.answer(100, served_s=1.0)
    assert link.take("pull") == (5.0, 3 * 40, 3 * 400)
    assert link.take("pull") == (0.0, 0, 0)
    connection.call("push", Payload(tensors=(torch.zeros(10),)))
    clock.now = 7.0
    station.answer(0, served_s=100.0)
    assert link.take("push") == (0.0, 0, 40), "a server cannot have had it for longer than it took"


def test_kinds_are_apart_and_the_rest_is_not_measured():
    clock, station = Clock(), Station()
    link = Link(clock)
    connection = MeasuredConnection(station, link)
    for method in ("pull", "hold_gradients", "elastic", "newer", "receive", "shards", "write"):
        connection.call(method, Payload(tensors=(torch.zeros(1),)))
    clock.now = 1.0
    for _ in range(7):
        station.answer(1)
    assert [link.take(kind)[1:] for kind in ("pull", "push", "dense")] == [(4, 4), (0, 8), (0, 24)]


def test_what_began_with_another_codec_and_what_failed_do_not_count():
    clock, station = Clock(), Station()
    link = Link(clock)
    connection = MeasuredConnection(station, link)
    connection.call("pull")
    clock.now = 1.0
    link.forget("pull")
    station.answer(5)
    connection.call("pull")
    station.waiting.pop(0).fail(RunError("gone"))
    assert link.take("pull") == (0.0, 0, 0)


def choice(clock=None, **codecs):
    given = {"pull": Plain(), "push": Plain(), "dense": Plain()} | codecs
    return CodecChoice(given, clock=clock or Clock())


def test_without_anything_to_choose_nothing_is_in_the_way():
    chosen, station = choice(pull=Int8()), Station()
    assert chosen.measured(station) is station
    assert (now := chosen.channel("pull", WireCounter())).now is now
    assert chosen.channel("pull", WireCounter()).codec == Int8()
    assert (chosen.names, chosen.decisions) == ({}, ())


@pytest.fixture
def slow_push():
    """A trainer whose pushes need int8, after that was decided."""
    clock, station = Clock(), Station()
    chosen = choice(clock, push=Auto(rounding="stochastic", stay_s=2.0))
    line, connection = chosen.channel("push", WireCounter()), chosen.measured(station)
    plain = line.now
    while line.now is plain and clock.now < 20:
        for _ in range(10):
            connection.call("push", Payload(tensors=(torch.zeros(1000),)))
            clock.now += 0.15
            station.answer(0)
            chosen.stepped(0.06, 0.09)
    return chosen, line, plain


def test_lines_follow_the_choice_and_keep_their_streams_apart(slow_push):
    chosen, line, plain = slow_push
    assert (plain.codec, line.now.codec) == (Plain(), Int8(rounding="stochastic"))
    assert chosen.names == {"push": "int8"}
    (told,) = chosen.decisions
    assert told.startswith("compression.push: int8 instead of plain, because the link carries 0.0267 MB/s")
    assert line.now is line.now
    assert line.now.stream("a") is not plain.stream("a")
    assert line.now.stream("a") is not line.now.stream("b")


def test_draws_belong_to_the_stream_and_the_codec(slow_push):
    _, line, plain = slow_push
    tensor, codec = numbers((40, 16)), Int8(rounding="stochastic")
    plain.stream("a").encode(tensor)
    sent = [line.now.stream("a").encode(tensor).frames[0] for _ in range(2)]
    line.now.stream("b").encode(tensor)
    for count, frame in enumerate(sent):
        assert torch.equal(frame, codec.encode(tensor, Draws(count)).frames[0])


def test_no_trainer_of_an_average_can_choose():
    config = load(None, ["sync.method=ma", "compression.dense=auto", "compression.dense.weakest=bf16"])
    choices = choose_all(config, own_model=True)
    chosen = codec_choice(config, choices, choices.codecs)
    assert chosen.names == {}
    assert chosen.channel("dense", WireCounter()).codec.name == "bf16"
