"""The rule that chooses codecs: from what was measured to decisions, in worlds that are made up."""

import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.aggregation.stepping import DenseStepper
from shadowsync.choices import choose_all
from shadowsync.compression.auto import Auto
from shadowsync.compression.choice import EVEN, FUTILE_STAYS, KINDS, LEAST_STEPS, STEADY, Chooser, Measured
from shadowsync.compression.cut import CompressedCut
from shadowsync.config import load
from shadowsync.embedding.service import EmbeddingService
from shadowsync.errors import ConfigError, DataError
from shadowsync.sync.dense import DenseServer

NAMES, SIZES = ("plain", "bf16", "int8", "int4"), (4.0, 2.0, 1.125, 0.625)
SHARE, STAY_S = 0.8, 5.0
STEPS, FLOATS, IDS = 100, 1_000_000, 200_000
"""Of a stretch of one second: steps, floats that cross, and bytes of ids."""


@dataclass(frozen=True)
class World:
    """A link and a machine.

    Attributes:
        speed: bytes of the link per second of computing.
        delay: seconds of each second of computing that messages take whatever their size.
        waits: workers wait for what the network takes beyond the time that they compute.
    """

    speed: float
    delay: float = 0.0
    waits: bool = True

    def seen(self, codec: str) -> Measured:
        floats = round(FLOATS * SIZES[NAMES.index(codec)])
        busy_s = self.delay + (IDS + floats) / self.speed
        waited_s = max(0.0, busy_s - 0.5) if self.waits else 0.0
        return Measured(STEPS, 1.0, waited_s, busy_s, IDS, floats)

    @property
    def best(self) -> str:
        """The weakest codec whose bytes fit."""
        return next((name for name in NAMES if self.seen(name).load <= SHARE), NAMES[-1])


def a_chooser(elastic=False):
    return Chooser(NAMES, SIZES, SHARE, STAY_S, elastic)


def changes(chooser, worlds, start=0.0):
    """When what was chosen, one stretch a second."""
    found = []
    for now, world in enumerate(worlds):
        before = chooser.codec
        why = chooser.judge(world.seen(before), start + now)
        assert (why is not None) == (chooser.codec != before)
        if why is not None:
            found.append((start + now, chooser.codec, why))
    return found


speeds = st.floats(1e5, 1e8)
loose = st.builds(
    Measured,
    steps=st.integers(0, 50),
    computed_s=st.floats(0, 10),
    waited_s=st.floats(0, 100),
    busy_s=st.floats(0, 100),
    fixed_bytes=st.integers(0, 10**9),
    float_bytes=st.integers(0, 10**9),
)


@settings(derandomize=True, deadline=None)
@given(speed=speeds)
def test_a_steady_world_gets_the_weakest_codec_that_fits_in_one_change_and_keeps_it(speed):
    world, chooser = World(speed), a_chooser()
    found = changes(chooser, [world] * 400)
    assert chooser.codec == world.best
    assert [codec for _, codec, _ in found] == ([] if world.best == "plain" else [world.best])
    assert all(now >= STAY_S for now, *_ in found)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seen=st.lists(loose, max_size=200), gaps=st.lists(st.floats(0, 7), min_size=200, max_size=200))
def test_whatever_is_seen_a_codec_stays_as_long_as_it_should(seen, gaps):
    chooser, now, last = a_chooser(), 0.0, 0.0
    for stretch, gap in zip(seen, gaps, strict=False):
        now += gap
        before = chooser.codec
        if chooser.judge(stretch, now) is not None:
            assert chooser.codec in NAMES
            assert chooser.codec != before
            assert now - last >= STAY_S
            assert stretch.says_something
            last = now


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seen=st.lists(loose, max_size=300))
def test_nothing_becomes_stronger_while_nobody_waits(seen):
    chooser = a_chooser()
    for now, stretch in enumerate(seen):
        chooser.judge(replace(stretch, waited_s=0.0), float(now))
    assert chooser.codec == "plain"


@pytest.mark.parametrize("thin", [{"steps": LEAST_STEPS - 1}, {"computed_s": 0.0}, {"busy_s": 0.0}, {"float_bytes": 0}])
def test_stretches_that_say_nothing_count_for_nothing(thin):
    chooser, slow = a_chooser(), World(1e6).seen("plain")
    for now in range(100):
        assert chooser.judge(replace(slow, **thin), float(now)) is None


@settings(derandomize=True, deadline=None)
@given(slow=st.floats(3e5, 2e6), calls=st.integers(1, STEADY - 1))
def test_a_hiccup_changes_nothing(slow, calls):
    quick, chooser = World(1e8), a_chooser()
    hiccups = itertools.cycle([World(slow)] * calls + [quick])
    assert changes(chooser, itertools.islice(hiccups, 300)) == []


@settings(derandomize=True, deadline=None)
@given(slow=st.floats(3e5, 4e6))
def test_it_follows_a_link_that_gets_slower_and_quicker(slow):
    chooser = a_chooser()
    changes(chooser, [World(1e8)] * 20)
    assert chooser.codec == "plain"
    (change,) = changes(chooser, [World(slow)] * 20, 20)
    assert change[1] == World(slow).best
    (back,) = changes(chooser, [World(1e8)] * 60, 40)
    assert back[1] == "plain"


@settings(derandomize=True, deadline=None)
@given(load=st.floats(EVEN * SHARE + 0.001, SHARE - 0.001))
def test_between_the_bounds_everybody_stays_where_he_is(load):
    """What is not quite below the share of the time sends nobody up and brings nobody back."""
    world = World(World(1.0).seen("plain").load / load)
    plain, bf16 = a_chooser(), a_chooser()
    changes(bf16, [World(3e6)] * 20)
    assert bf16.codec == "bf16"
    assert changes(plain, [world] * 200) == []
    assert changes(bf16, [world] * 200, 20) == []


@settings(derandomize=True, deadline=None, max_examples=30)
@given(delay=st.floats(0.9, 20))
def test_where_delay_takes_the_time_nothing_is_lost_for_nothing(delay):
    """A stronger codec is tried, brings nothing, and is left alone for a while."""
    chooser = a_chooser()
    found = changes(chooser, [World(1e9, delay)] * 1000)
    assert chooser.codec in {"plain", "int4"}
    assert {codec for _, codec, _ in found[1::2]} == {"plain"}
    assert all("not bytes" in why for *_, why in found[1::2])
    assert len(found) <= 2 * (1 + 1000 / (FUTILE_STAYS * STAY_S))
    in_use = sum(back[0] - there[0] for there, back in zip(found[::2], found[1::2], strict=False))
    assert in_use < 0.1 * 1000


def test_what_brought_nothing_is_left_alone_though_the_link_gets_better_for_a_while():
    chooser, delayed = a_chooser(), World(1e9, 5.0)
    assert [codec for _, codec, _ in changes(chooser, [World(3e6)] * 20)] == ["bf16"]
    ((_, tried, _), (futile, back, _)) = changes(chooser, [delayed] * 40, 20.0)
    assert (tried, back) == ("int4", "bf16")
    assert [codec for _, codec, _ in changes(chooser, [World(1e9)] * 20, 60.0)] == ["plain"]
    (again, _, _), *_ = changes(chooser, [delayed] * 200, 80.0)
    assert again >= futile + FUTILE_STAYS * STAY_S


def test_who_comes_back_from_a_weaker_codec_waits_longer_each_time():
    """A link that is quick only for those who send little: each try of a weaker codec fails."""
    chooser, times = a_chooser(), []
    for now in range(3000):
        world = World(1e6) if chooser.codec == "plain" else World(1e8)
        if chooser.judge(world.seen(chooser.codec), float(now)) is not None and chooser.codec == "plain":
            times.append(now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) > 4
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(gaps[:4]))
    assert len(times) < 30


def test_what_takes_the_rest_of_the_link_goes_by_what_it_is_in_the_way_of():
    chooser = a_chooser(elastic=True)
    busy = [World(1e6).seen("plain")] * 40
    found = [chooser.codec for now, seen in enumerate(busy) if chooser.judge(seen, float(now))]
    assert found == ["bf16", "int8", "int4"]
    idle = [World(1e9).seen("plain")] * 100
    found = [chooser.codec for now, seen in enumerate(idle, 40) if chooser.judge(seen, float(now))]
    assert found == ["int8", "bf16", "plain"]


def test_a_decision_says_how_fast_and_how_long():
    ((_, codec, why),) = changes(a_chooser(), [World(2e6)] * 20)
    assert codec == "int8"
    assert why == (
        "the link carries 2 MB/s and is busy for 21 ms in each step that computes for 10 ms, above share=0.8, and "
        "workers wait"
    )


def codec_of(*overrides, kind="push"):
    return choose_all(load(None, [f"compression.{kind}=auto", *overrides]), own_model=False).codecs[kind]


def test_the_levels_are_what_the_options_say():
    assert [codec.name for codec in codec_of().levels] == list(NAMES)
    given = {"weakest": "bf16", "strongest": "threshold", "keep": 0.1}
    some = codec_of(*(f"compression.push.{key}={value}" for key, value in given.items()))
    assert [codec.name for codec in some.levels] == ["bf16", "int8", "int4", "threshold"]
    assert some.levels[-1].keep == 0.1
    assert codec_of("compression.push.rounding=stochastic").levels[2].rounding == "stochastic"
    assert codec_of("compression.push.strongest=bf16").levels == Auto(strongest="bf16").levels


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weakest": "int4"}, "has to come before strongest=int4"),
        ({"weakest": "int8", "strongest": "bf16"}, "has to come before"),
        ({"strongest": "int2"}, "strongest"),
        ({"strongest": "plain"}, "strongest"),
        ({"weakest": "threshold"}, "weakest"),
        ({"share": 0}, "greater than 0"),
        ({"stay_s": -1}, "greater than or equal to 0"),
    ],
)
def test_levels_that_make_no_sense_are_an_error(options, said):
    with pytest.raises(ConfigError, match=said):
        codec_of(*(f"compression.push.{key}={value}" for key, value in options.items()))


def test_the_dense_part_crosses_as_parameters():
    assert codec_of(kind="dense").levels[-1].name == "int4"
    with pytest.raises(ConfigError, match=r"compression\.dense\.strongest=threshold cannot be chosen by auto"):
        codec_of("compression.dense.strongest=threshold", kind="dense")


def test_where_nothing_crosses_there_is_nothing_to_choose():
    with pytest.raises(
        ConfigError, match=r"codec=auto has nothing to measure there; allowed: plain, bf16, .*threshold$"
    ):
        CompressedCut("auto")


def test_a_name_that_is_not_among_the_levels_is_one_clear_error():
    assert Auto().level("") == Auto().level("plain")
    with pytest.raises(DataError, match=r"'threshold' is not one .*; allowed: plain, bf16, int8, int4$"):
        Auto().level("threshold")


def test_what_is_measured_is_what_those_servers_serve() -> None:
    roles = (EmbeddingService, DenseServer, DenseStepper)
    assert all(any(hasattr(getattr(role, name, None), "_served") for role in roles) for name in KINDS)
