"""Whatever the order in which requests come, come again and end: each runs once, and what is kept is bounded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.rpc.ledger import Ledger, Verdict

WIDE = 1 << 16


def ledger(window: int = WIDE, open_calls: int = WIDE, keep_bytes: int = WIDE) -> Ledger:
    return Ledger(window, open_calls, keep_bytes)


def test_a_request_runs_once_and_is_then_answered_from_what_is_kept() -> None:
    book = ledger()
    assert book.admit(1, 1) is Verdict.RUN
    assert book.admit(1, 1) is Verdict.DROP
    book.finish(1, [b"reply", b"tensor"])
    assert book.admit(1, 1) is Verdict.REPEAT
    assert book.reply(1) == [b"reply", b"tensor"]
    assert book.kept_bytes == 11


def test_what_is_harmless_may_run_again() -> None:
    book = ledger()
    assert book.admit(1, 1) is Verdict.RUN
    book.finish(1, None)
    assert book.admit(1, 1) is Verdict.RUN


def test_numbers_that_the_client_has_done_with_are_dropped_and_freed() -> None:
    book = ledger()
    for number in (1, 2, 3):
        book.admit(number, 1)
    for number in (2, 1):
        book.finish(number, [b"12345"])
    assert book.admit(4, 3) is Verdict.RUN
    assert book.kept_bytes == 0
    assert [book.admit(number, 3) for number in (1, 2, 3)] == [Verdict.DROP] * 3
    book.settle(9)
    book.finish(3, [b"12345"])
    assert book.kept_bytes == 0
    assert book.running == 1


def test_the_oldest_replies_go_first_and_their_requests_still_do_not_run_again() -> None:
    book = ledger(keep_bytes=10)
    for number in (1, 2, 3):
        book.admit(number, 1)
        book.finish(number, [b"12345"])
    verdicts = [book.admit(number, 1) for number in (1, 2, 3)]
    assert verdicts == [Verdict.LOST, Verdict.REPEAT, Verdict.REPEAT]
    assert book.kept_bytes == 10


@pytest.mark.parametrize("book", [ledger(window=3), ledger(open_calls=3)])
def test_open_requests_are_bounded(book: Ledger) -> None:
    assert [book.admit(number, 1) for number in (1, 2, 3, 4)][2:] in (
        [Verdict.RUN, Verdict.FLOOD],
        [Verdict.FLOOD, Verdict.FLOOD],
    )
    for number in (1, 2):
        book.finish(number, [b""])
    assert book.admit(5, 4) is Verdict.RUN


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.data())
def test_against_a_client_and_a_link_that_repeats_and_delays(data: st.DataObject) -> None:
    """A model: calls are sent, sent again and answered in any order; the client drops the lowest ones it has."""
    book = ledger(window=8, keep_bytes=40)
    sent, runs, running, answered = 0, dict[int, int](), set[int](), set[int]()
    for _ in range(data.draw(st.integers(1, 60))):
        waiting = [number for number in range(1, sent + 1) if number not in answered]
        low = min(waiting, default=sent + 1)
        action = data.draw(st.sampled_from(["send", "again", "end", "stale"]))
        if action == "send" and sent + 1 - low < 8:
            sent += 1
            assert book.admit(sent, low) is Verdict.RUN
            runs[sent] = 1
            running.add(sent)
        elif action == "again" and waiting:
            number = data.draw(st.sampled_from(waiting))
            expected = {Verdict.DROP} if number in running else {Verdict.REPEAT, Verdict.LOST}
            assert book.admit(number, low) in expected
        elif action == "stale" and answered:
            number = data.draw(st.sampled_from(sorted(answered)))
            assert book.admit(number, 0) is not Verdict.RUN
        elif action == "end" and running:
            number = data.draw(st.sampled_from(sorted(running)))
            running.remove(number)
            book.finish(number, [bytes(data.draw(st.integers(0, 30)))])
            if data.draw(st.booleans()):
                answered.add(number)
        assert book.running == len(running)
        assert 0 <= book.kept_bytes <= 40
