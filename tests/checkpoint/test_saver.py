"""Saving in the background: one under way, one waiting, no error lost."""

import threading
from collections.abc import Callable

import pytest
from checkpoint_helpers import make_snapshot

from shadowsync.checkpoint.saver import AsyncSaver
from shadowsync.checkpoint.snapshot import Snapshot
from shadowsync.errors import SaveError


class GatedStore:
    """A store whose saves take as long as the test wants, and fail where `fails` says so."""

    def __init__(self, fails: Callable[[int], bool] = lambda samples: False) -> None:
        self.saved: list[int] = []
        self.started = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.threads: set[int] = set()
        self.fails = fails

    def save(self, snapshot: Snapshot) -> str:
        self.threads.add(threading.get_ident())
        self.started.release()
        assert self.go_on.acquire(timeout=120)
        if self.fails(snapshot.samples):
            raise SaveError(f"disk full at {snapshot.samples}")
        self.saved.append(snapshot.samples)
        return str(snapshot.samples)


def failing_store() -> GatedStore:
    """Fails for odd sample counts; nothing takes long."""
    store = GatedStore(lambda samples: samples % 2 == 1)
    store.go_on.release(1000)
    return store


def test_saves_happen_elsewhere_and_in_order() -> None:
    store = GatedStore()
    saver = AsyncSaver(store.save)
    store.go_on.release(2)
    for samples in (1, 2):
        saver.submit(make_snapshot(samples))
        saver.wait()
    assert store.saved == [1, 2]
    assert threading.get_ident() not in store.threads
    assert (saver.saves, saver.busy) == (2, False)


def test_one_waits_and_gives_way_to_a_newer_one() -> None:
    store = GatedStore()
    saver = AsyncSaver(store.save)
    saver.submit(make_snapshot(1))
    assert store.started.acquire(timeout=120)
    for samples in (2, 3, 4):
        saver.submit(make_snapshot(samples))
    assert saver.busy
    store.go_on.release(2)
    saver.wait()
    assert store.saved == [1, 4]
    assert saver.saves == 2


def test_an_error_surfaces_in_wait_and_saving_goes_on() -> None:
    store = failing_store()
    saver = AsyncSaver(store.save)
    saver.submit(make_snapshot(1))
    with pytest.raises(SaveError, match="disk full at 1"):
        saver.wait()
    saver.wait()
    saver.submit(make_snapshot(2))
    saver.wait()
    assert store.saved == [2]
    assert saver.saves == 1


def test_an_error_surfaces_in_the_next_submit_which_is_saved_none_the_less() -> None:
    store = failing_store()
    saver = AsyncSaver(store.save)
    saver.submit(make_snapshot(1))
    while saver.busy:
        pass
    with pytest.raises(SaveError, match="disk full at 1"):
        saver.submit(make_snapshot(2))
    saver.wait()
    assert store.saved == [2]


def test_of_several_errors_none_is_lost() -> None:
    store = GatedStore(lambda samples: True)
    saver = AsyncSaver(store.save)
    saver.submit(make_snapshot(1))
    assert store.started.acquire(timeout=120)
    saver.submit(make_snapshot(3))
    store.go_on.release(2)
    for samples in (1, 3):
        with pytest.raises(SaveError, match=f"disk full at {samples}"):
            saver.wait()
    saver.wait()


def test_leaving_the_block_waits_and_raises() -> None:
    with pytest.raises(SaveError, match="disk full at 5"), AsyncSaver(failing_store().save) as saver:
        saver.submit(make_snapshot(5))


def test_an_error_of_the_block_comes_first_with_that_of_the_save_beside_it() -> None:
    def run() -> None:
        with AsyncSaver(failing_store().save) as saver:
            saver.submit(make_snapshot(5))
            raise RuntimeError("first")

    with pytest.raises(RuntimeError, match="first") as caught:
        run()
    assert caught.value.__notes__ == ["disk full at 5"]


def test_many_submits_end_with_the_newest() -> None:
    store = failing_store()
    saver = AsyncSaver(store.save)
    for samples in range(0, 400, 2):
        saver.submit(make_snapshot(samples))
    saver.wait()
    assert store.saved[-1] == 398
    assert store.saved == sorted(store.saved)
    assert saver.saves == len(store.saved)
