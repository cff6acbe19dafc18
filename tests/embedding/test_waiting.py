"""Keys that wait for a row: who was there is known again, and how often, in bounded memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowsync.embedding.initial import hashes_of, salt_of
from shadowsync.embedding.table import WAYS
from shadowsync.embedding.waiting import DOOR_BITS, Waiting
from shadowsync.serving import Ids, Words

SETS = 3


def waiting() -> Waiting:
    return Waiting(np.zeros((SETS, WAYS), dtype=np.int32), np.zeros((SETS, WAYS), dtype=np.int32))


def places_of(keys: list[int]) -> tuple[Ids, Words]:
    """Sets, and hashes."""
    each = np.array(keys, dtype=np.int64)
    return each % SETS, hashes_of(each, salt_of("t"))


def look_up(found: Waiting, key: int) -> int:
    return count(found, [key])[0]


def count(found: Waiting, keys: list[int]) -> list[int]:
    return found.count(*places_of(keys), found.knows(*places_of(keys))).tolist()


@given(st.lists(st.integers(0, 3 * SETS), max_size=60))
def test_look_ups_of_a_few_keys_are_counted_exactly(keys: list[int]) -> None:
    found, times = waiting(), dict.fromkeys(keys, 0)
    for key in keys:
        assert bool(found.knows(*places_of([key]))[0]) == (times[key] > 0)
        times[key] += 1
        assert look_up(found, key) == times[key]


def test_keys_of_other_sets_are_counted_at_once() -> None:
    found = waiting()
    keys = [3, 4, 5]
    for time in range(1, 5):
        assert count(found, keys) == [time] * 3


def test_who_has_a_row_begins_anew_and_is_known() -> None:
    found = waiting()
    assert [look_up(found, 3) for _ in range(5)] == [1, 2, 3, 4, 5]
    found.remove(*places_of([3]))
    assert found.knows(*places_of([3])).all()
    assert look_up(found, 3) == 2


def test_keys_that_come_often_are_told_from_those_that_come_once() -> None:
    """However many of those there are."""
    found, draw = waiting(), np.random.default_rng(0)
    often = [SETS * number for number in range(8)]
    strangers = SETS * np.arange(1000, 6000)
    for stranger in strangers.tolist():
        look_up(found, stranger)
        look_up(found, often[int(draw.integers(8))])
    assert min(max(look_up(found, key), look_up(found, key)) for key in often) > 100  # the filter may have lost it once
    assert max(look_up(found, key) for key in SETS * np.arange(7000, 7100)) < 20


def test_what_is_not_looked_up_any_more_is_forgotten() -> None:
    found = waiting()
    before = [SETS * number for number in range(12)]
    for _ in range(50):
        for key in before:
            look_up(found, key)
    for number in range(2000):
        for _ in range(3):
            look_up(found, SETS * (100 + number))
    assert max(look_up(found, key) for key in before) < 40


@pytest.mark.parametrize("keys", [50, 100, 5_000])
def test_strangers_are_strangers_for_the_most_part(keys: int) -> None:
    found = waiting()
    for key in range(keys):
        look_up(found, SETS * key)
    asked = SETS * np.arange(10_000, 12_000)
    share = found.knows(*places_of(asked.tolist())).mean()
    assert share < ((1 - np.exp(-2 * keys / DOOR_BITS)) ** 2 + 0.02 if keys <= 100 else 0.6), (
        "the filter is three quarters full"
    )
    lately = SETS * np.arange(keys - 20, keys)
    assert found.knows(*places_of(lately.tolist())).mean() > (0.4 if keys > 100 else 0.99)


def test_a_count_stops_where_it_is_full() -> None:
    counters = np.zeros((SETS, WAYS), dtype=np.int32)
    found = Waiting(counters, np.zeros((SETS, WAYS), dtype=np.int32))
    look_up(found, 3)
    look_up(found, 3)
    counters[0, counters[0].argmax()] |= 0x7FFF
    assert look_up(found, 3) == 0x8000
    assert look_up(found, 3) == 0x8000
    assert counters.min() >= 0
