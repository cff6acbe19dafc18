"""Who waits for a number of trained rows is woken when they are trained."""

from shadowsync.data.desk import Desk
from shadowsync.data.leases import LeaseBook, Plan


def train(desk: Desk, rows: int) -> None:
    """Two rows at a time."""
    for _ in range(rows // 2):
        lease = desk.lease(0, idle=False)
        assert lease is not None
        assert desk.opened(lease, 2)
        claim = desk.claim(lease, 0, 2)
        assert claim is not None
        assert desk.done(lease, 0, 2)


def test_it_rings_once_when_so_many_rows_are_trained() -> None:
    desk, rung = Desk(LeaseBook(Plan([2] * 6, 1, shuffle=False, seed=0)), 2), list[int]()
    desk.alarm(5, lambda: rung.append(desk.trained))
    train(desk, 4)
    assert rung == []
    train(desk, 8)
    assert rung == [6]


def test_the_last_one_counts_and_one_that_is_late_does_not_ring() -> None:
    desk, rung = Desk(LeaseBook(Plan([2] * 6, 1, shuffle=False, seed=0)), 2), list[str]()
    desk.alarm(2, lambda: rung.append("first"))
    desk.alarm(4, lambda: rung.append("second"))
    train(desk, 8)
    assert rung == ["second"]
    desk.alarm(8, lambda: rung.append("late"))
    train(desk, 4)
    assert rung == ["second"]
