"""Tokens: when synchronous training would have used a batch."""

from cluster_simulator import Cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.aggregation.aggregator import Begun, TokenBook
from shadowsync.aggregation.gba import Gba

QUICK = settings(max_examples=60, deadline=None)


def test_tokens_go_by_global_batches() -> None:
    book = TokenBook(3)
    assert [book.dispatch() for _ in range(7)] == [0, 0, 0, 1, 1, 1, 2]


def test_a_book_goes_on_at_a_step_with_what_is_outstanding() -> None:
    book = TokenBook(3, step=40, outstanding=2)
    assert [book.dispatch() for _ in range(5)] == [40, 41, 41, 41, 42]


def test_a_retired_batchs_place_goes_to_another() -> None:
    book = TokenBook(2)
    assert [book.dispatch() for _ in range(4)] == [0, 0, 1, 1]
    book.retired(3)
    assert [book.dispatch() for _ in range(3)] == [0, 1, 1]


@given(st.integers(1, 9), st.integers(0, 99), st.lists(st.sampled_from([1, 1, 1, 0]), max_size=60))
@QUICK
def test_tokens_are_those_of_the_batches_that_are_left(size: int, step: int, alive: list[int]) -> None:
    """Whatever was retired before: the next token is that of a run in which it was never dispatched."""
    book, left = TokenBook(size, step), 0
    for lives in alive:
        assert book.dispatch() == step + left // size
        left += lives
        book.retired(1 - lives)


@given(
    size=st.integers(1, 6),
    workers=st.integers(1, 9),
    faults=st.lists(st.tuples(st.sampled_from(["die", "join", "lose"]), st.integers(0, 8), st.integers(0, 40))),
    flushes=st.lists(st.integers(0, 60), max_size=6),
)
@QUICK
def test_tokens_keep_up_with_the_steps_and_do_not_run_ahead(
    size: int,
    workers: int,
    faults: list[tuple[str, int, int]],
    flushes: list[int],
) -> None:
    """A token is ahead of k by no more than what is being computed and held, however many batches got lost."""

    def watch(cluster: Cluster, batch: Begun) -> None:
        ahead = batch.token - cluster.aggregator.step
        assert 0 <= ahead <= (len(cluster.aggregator.in_flight) - 1 + len(cluster.aggregator.held)) // size

    cluster = Cluster(Gba(), size, 60, lambda worker, number, now: 1.0 + (number * 7) % 5, step=3, workers=workers)
    cluster.watch = watch
    for kind, worker, at in faults:
        getattr(cluster, kind)(worker, at + 0.5)
    for at in flushes:
        cluster.flush(at + 0.25)
    cluster.run()
