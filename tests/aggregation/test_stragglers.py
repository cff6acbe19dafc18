"""The language of scripted stragglers."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.aggregation.stragglers import Slowness, Stragglers, parse_stragglers
from shadowsync.errors import ConfigError

QUICK = settings(max_examples=40, deadline=None)
TEXT = "share=0.25,slow=3-10,for_s=60,seed=1"


def test_a_script_says_all_it_has_to() -> None:
    expected = Slowness(share=0.25, slow=(3.0, 10.0), for_s=60.0, seed=1, from_s=5.0, until_s=90.0)
    assert parse_stragglers(f" {TEXT}, from_s = 5,until_s=90") == Stragglers((expected,))
    assert parse_stragglers("index=0+3,slow=5;share=1").parts == (
        Slowness(index=(0, 3), slow=(5, 5)),
        Slowness(share=1),
    )


def test_a_share_of_the_workers_is_slow_at_any_time_from_the_start_on() -> None:
    script = parse_stragglers(TEXT)
    for seconds in (0.0, 45.0, 1000.0):
        slow = sum(script.factor(worker, seconds) > 1 for worker in range(2000))
        assert slow / 2000 == pytest.approx(0.25, abs=0.03)


def test_slow_spells_last_as_long_as_they_should_and_have_one_factor_each() -> None:
    spells = Slowness(share=0.25, slow=(3, 10), for_s=60, seed=3).spells(0)
    found = [next(spells) for _ in range(8000)]
    lengths = {True: [], False: []}  # type: dict[bool, list[float]]
    for (begin, _), (end, factor) in itertools.pairwise(found):
        lengths[factor > 1].append(end - begin)
    assert sum(lengths[True]) / len(lengths[True]) == pytest.approx(60, rel=0.06)
    assert sum(lengths[False]) / len(lengths[False]) == pytest.approx(180, rel=0.06)
    factors = [factor for _, factor in found if factor > 1]
    assert 3 <= min(factors) < 3.1
    assert 9.9 < max(factors) <= 10
    assert sum(factors) / len(factors) == pytest.approx(6.5, abs=0.15)


@QUICK
@given(st.integers(0, 99), st.lists(st.tuples(st.integers(0, 5), st.floats(0, 2000)), min_size=2, max_size=30))
def test_the_order_of_the_questions_does_not_matter(seed: int, questions: list[tuple[int, float]]) -> None:
    text = f"share=0.4,for_s=20,seed={seed};index=1,slow=2"
    once, again = parse_stragglers(text), parse_stragglers(text)
    answers = {question: once.factor(*question) for question in questions}
    shuffled = random.Random(seed).sample(questions, len(questions))
    assert all(again.factor(*question) == answers[question] for question in shuffled)
    assert all(factor >= 1 for factor in answers.values())


def test_workers_and_seeds_differ() -> None:
    def course(text: str, worker: int) -> list[float]:
        script = parse_stragglers(text)
        return [script.factor(worker, 30.0 * i) for i in range(100)]

    assert course(TEXT, 0) == course(TEXT, 0)
    assert course(TEXT, 0) != course(TEXT, 1)
    assert course(TEXT, 0) != course("share=0.25,slow=3-10,for_s=60,seed=2", 0)


def test_even_then_busy_then_even_again() -> None:
    script = parse_stragglers("share=1,slow=4,from_s=100,until_s=200")
    assert [script.factor(0, seconds) for seconds in (0, 99.9, 100, 150, 199.9, 200, 1e6)] == [1, 1, 4, 4, 4, 1, 1]


def test_of_several_the_slowest_counts() -> None:
    script = parse_stragglers("index=0+1,slow=2;index=1+2,slow=5,from_s=10")
    assert [script.factor(worker, 0) for worker in range(4)] == [2, 2, 1, 1]
    assert [script.factor(worker, 10) for worker in range(4)] == [2, 5, 5, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "train.stragglers=: nothing is given"),
        ("share=0.1;", "nothing before or after a semicolon"),
        ("share", "'share' is not an option: write option=value, joined by commas"),
        ("shar=1", "train.stragglers.shar is not an option of train.stragglers, did you mean share?; it has share,"),
        ("share=2", "train.stragglers.share=2: input should be less than or equal to 1"),
        ("share=0", "train.stragglers.share=0: input should be greater than 0"),
        ("share=0.1,share=0.2", "share is given twice"),
        ("slow=3", "train.stragglers: give share or index, for instance share=0.25,slow=3-10"),
        ("share=0.1,index=1", "give share or index"),
        ("index=1,for_s=5", "for_s goes with share"),
        ("index=1+x", "train.stragglers.index.1=x: input should be a valid integer"),
        ("share=0.1,slow=10-3", "slow=10-3: give the smaller factor first"),
        ("share=0.1,slow=0.5", "train.stragglers.slow.0=0.5: input should be greater than or equal to 1"),
        ("index=0,slow=1e6", "train.stragglers: slow=1e+06 is more than 100 times, which looks like a job"),
        ("share=0.1,slow=3-101", "slow=101 is more than 100 times"),
        ("share=0.1,for_s=0", "train.stragglers.for_s=0: input should be greater than or equal to 0.1"),
        ("until_s=3,share=0.1,from_s=4", "train.stragglers: from_s=4 has to be before until_s=3"),
        ("share=0.1,seed=-1", "train.stragglers.seed=-1"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_stragglers(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
