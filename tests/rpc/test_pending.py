"""Answers that come later: once, in any order, with callbacks before waiters."""

import itertools
import threading

import pytest

from shadowsync.rpc.pending import DONE, Done, Promise, all_of, ended


def test_an_answer_that_is_there_calls_back_at_once():
    told, answer = [], Done(5)
    answer.then(told.append)
    assert (answer.result(), answer.done(), told) == (5, True, [None])


def test_a_promise_tells_everybody_once_whenever_they_ask():
    promise, told = Promise(), []
    promise.then(lambda error: told.append(("before", error)))
    assert not promise.done()
    promise.keep(7)
    promise.keep(8)
    promise.fail(ValueError("too late"))
    promise.then(lambda error: told.append(("after", error)))
    assert (promise.result(), promise.done()) == (7, True)
    assert told == [("before", None), ("after", None)]


def test_an_error_is_told_and_raised():
    promise, told = Promise(), []
    promise.then(told.append)
    error = ValueError("lost")
    promise.fail(error)
    with pytest.raises(ValueError, match="lost"):
        promise.result()
    assert told == [error]


def test_whoever_waits_goes_on_when_the_callbacks_are_through():
    promise, inside, go_on, order = Promise(), threading.Event(), threading.Event(), []

    def slow(_):
        inside.set()
        assert go_on.wait(120)
        order.append("callback")

    promise.then(slow)
    waiter = threading.Thread(target=lambda: order.append(f"result {promise.result()}"))
    keeper = threading.Thread(target=promise.keep, args=(1,))
    waiter.start()
    keeper.start()
    assert inside.wait(120)
    promise.then(lambda _: order.append("one more"))  # while the others run
    assert not promise.done()
    go_on.set()
    for thread in (waiter, keeper):
        thread.join(120)
    assert order == ["callback", "one more", "result 1"]


def test_what_a_callback_raises_is_the_waiters():
    promise, told = Promise(), []

    def refuse(_):
        raise ValueError("not mine")

    promise.then(refuse)
    promise.then(told.append)
    promise.keep(None)
    with pytest.raises(ValueError, match="not mine"):
        promise.result()
    assert isinstance(told[0], ValueError)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_parts_may_end_in_any_order(order):
    parts, told = [Promise() for _ in range(3)], []
    whole = all_of([parts[0], DONE, *parts[1:]])
    whole.then(told.append)
    for index in order:
        assert not whole.done()
        assert told == []
        parts[index].keep(None)
    assert whole.result() is None
    assert told == [None]


def test_the_first_error_is_that_of_all_but_all_are_waited_for():
    parts = [Promise() for _ in range(3)]
    whole = all_of(parts)
    parts[2].fail(ValueError("first"))
    parts[0].fail(ValueError("second"))
    assert not whole.done()
    parts[1].keep(None)
    with pytest.raises(ValueError, match="first"):
        whole.result()


def test_nothing_to_wait_for_costs_nothing():
    promise = Promise()
    assert all_of([]) is all_of([DONE, DONE]) is DONE
    assert all_of([DONE, promise]) is promise


def test_whoever_waits_for_some_time_learns_whether_all_have_ended() -> None:
    well, badly = Promise[int](), Promise[int]()
    assert ended([], 0)
    assert ended([DONE], 0)
    well.keep(1)
    assert ended([DONE, well], 0)
    assert not ended([well, badly], 0.01)
    threading.Timer(0.05, badly.fail, (ValueError("late"),)).start()
    assert ended([well, badly], 120)
