"""Saving in the background: one at a time, no error lost."""

import threading

import pytest

from shadowsync.checkpoint.saver import AsyncSaver
from shadowsync.errors import SaveError


class Save:
    """Fails where it is to."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.thread = fails, 0

    def __call__(self) -> None:
        self.thread = threading.get_ident()
        if self.fails:
            raise SaveError("disk full")


def test_a_save_happens_elsewhere_and_submitting_it_does_not_wait() -> None:
    saver, go_on, save = AsyncSaver(), threading.Event(), Save()
    saver.submit(lambda: go_on.wait(120) and save())
    assert saver.busy
    assert not save.thread
    go_on.set()
    saver.wait()
    assert save.thread not in (0, threading.get_ident())
    assert not saver.busy


def test_one_begins_when_the_one_before_has_ended() -> None:
    saver, order = AsyncSaver(), list[int]()
    for number in range(100):
        saver.submit(lambda number=number: order.append(number))
    saver.wait()
    assert order == list(range(100))


def test_an_error_surfaces_in_wait_once_and_saving_goes_on() -> None:
    saver, save = AsyncSaver(), Save()
    saver.submit(Save(fails=True))
    saver.settle()
    with pytest.raises(SaveError, match="disk full"):
        saver.wait()
    saver.wait()
    saver.submit(save)
    saver.wait()
    assert save.thread


def test_an_error_surfaces_in_the_next_submit_which_is_saved_none_the_less() -> None:
    saver, save = AsyncSaver(), Save()
    saver.submit(Save(fails=True))
    with pytest.raises(SaveError, match="disk full"):
        saver.submit(save)
    saver.wait()
    assert save.thread


def test_leaving_the_block_waits_and_raises() -> None:
    with pytest.raises(SaveError, match="disk full"), AsyncSaver() as saver:
        saver.submit(Save(fails=True))


def test_an_error_of_the_block_comes_first_with_that_of_the_save_beside_it() -> None:
    def run() -> None:
        with AsyncSaver() as saver:
            saver.submit(Save(fails=True))
            raise RuntimeError("first")

    with pytest.raises(RuntimeError, match="first") as caught:
        run()
    assert caught.value.__notes__ == ["disk full"]
