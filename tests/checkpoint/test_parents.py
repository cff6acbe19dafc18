"""What is kept: checkpoints that share no file, and all that they need."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.checkpoint.format import new_name, order, whole_name
from shadowsync.checkpoint.store import Parents

PARENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.booleans()), min_size=1, max_size=12)


def named(parents: dict[int, int | None]) -> Parents:
    """Checkpoints by their samples; a negative number is one rewritten as a whole."""
    return Parents({name(child): None if parent is None else name(parent) for child, parent in parents.items()})


def name(samples: int) -> str:
    return new_name(samples, 0) if samples >= 0 else whole_name(new_name(-samples, 0))


def kept(parents_of: Parents, keep: int, given_up: tuple[int, ...] = (), in_use: tuple[int, ...] = ()) -> set[int]:
    found = parents_of.kept(keep, set(map(name, given_up)), [name(samples) for samples in in_use])
    return {-order(one)[0] if order(one)[2] else order(one)[0] for one in found}


TWO = named({1: None, 2: 1, 3: 2, 4: None, 5: 4, 6: 5})


def test_each_of_those_kept_builds_on_another_whole_one() -> None:
    assert kept(TWO, 1) == {4, 5, 6}
    assert kept(TWO, 2) == kept(TWO, 9) == {1, 2, 3, 4, 5, 6}
    branched = named({1: None, 2: 1, 3: 1, 4: 3})
    assert kept(branched, 2) == {1, 3, 4}, "another on the same whole one is no second one"


def test_whole_ones_are_counted_one_by_one() -> None:
    assert kept(named({1: None, 2: None, 3: None}), 2) == {2, 3}


def test_what_was_rewritten_counts_once_and_the_deltas_before_it_are_the_second() -> None:
    rewritten = named({1: None, 2: 1, 3: 2, -3: None, 4: 3})
    assert kept(rewritten, 1) == {-3, 4}
    assert kept(rewritten, 2) == {1, 2, -3, 4}


def test_what_was_given_up_is_not_counted() -> None:
    assert kept(TWO, 1, given_up=(6,)) == {4, 5}
    assert kept(TWO, 1, given_up=(4, 5, 6)) == {1, 2, 3}


def test_of_what_is_open_either_way_to_read_it_stays() -> None:
    twice = named({1: None, 2: 1, -2: None, 3: 2, 9: None})
    assert kept(twice, 1) == {9}
    assert kept(twice, 1, in_use=(3,)) == {1, 2, -2, 3, 9}
    assert kept(named({-2: None, 9: None}), 1, in_use=(2,)) == {-2, 9}, "opened by the name it had"
    assert kept(named({3: 2, 9: None}), 1, in_use=(3,)) == {3, 9}


@given(PARENTS, st.integers(1, 4))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_without_any_one_whole_checkpoint_all_but_one_of_those_kept_load(
    drawn: list[tuple[bool, int, bool]], keep: int
) -> None:
    parents: dict[str, str | None] = {}
    for samples, (whole, back, rewritten) in enumerate(drawn):
        parents[name(samples)] = None if whole or not samples else name(max(0, samples - 1 - back))
        if rewritten:
            parents[name(-samples - 20)] = None
    parents_of = Parents(parents)
    left = {one: parents[one] for one in parents_of.kept(keep, (), ())}
    bases = [one for one, parent in left.items() if parent is None]
    families = {chain[0] for one in parents_of.restorable() if (chain := parents_of.chain(one)) is not None}
    assert len(bases) == min(keep, len(families))
    assert (Parents(left).restorable() or [None])[-1] == parents_of.restorable()[-1]
    for base in bases:
        without = Parents({one: parent for one, parent in left.items() if one != base})
        ends = {chain[0] for one in without.restorable() if (chain := without.chain(one)) is not None}
        assert len(ends) == len(bases) - 1
