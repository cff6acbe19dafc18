"""The first signal asks, the second one interrupts, and afterwards everything is as before."""

import os
import signal
import threading

import pytest

from shadowsync.recovery.signals import STOPPING, stop_on_signals


def raise_signal(number: int) -> None:
    os.kill(os.getpid(), number)
    for _ in range(100):  # a handler runs between two instructions of the main thread
        pass


@pytest.mark.parametrize("number", STOPPING)
def test_the_first_signal_is_a_request(number: signal.Signals) -> None:
    with stop_on_signals() as request:
        assert not request.requested
        assert request.name == "the program"
        raise_signal(number)
        assert request.requested
        assert request.signal is number
        assert request.name == number.name


@pytest.mark.parametrize("second", STOPPING)
def test_the_second_signal_interrupts_at_once(second: signal.Signals) -> None:
    with stop_on_signals() as request:
        raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            raise_signal(second)
        assert request.signal is signal.SIGTERM


def test_a_request_of_the_program_does_not_count_as_a_signal() -> None:
    with stop_on_signals() as request:
        request.requested = True
        raise_signal(signal.SIGINT)
        assert request.name == "SIGINT"


def test_handlers_are_put_back_whatever_happens() -> None:
    before = [signal.getsignal(number) for number in STOPPING]

    def fail() -> None:
        with stop_on_signals():
            assert [signal.getsignal(number) for number in STOPPING] != before
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_outside_the_main_thread_nothing_is_changed() -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    seen: list[object] = []

    def run() -> None:
        with stop_on_signals() as request:
            seen.append(request.requested)
            seen.append([signal.getsignal(number) for number in STOPPING] == before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False, True]
