"""Bytes between roles."""

import threading

from shadowsync.compression.wire import WireCounter


def test_counts_by_kind_from_many_threads():
    counter = WireCounter()
    works = [threading.Thread(target=lambda: [counter.add("pull", 3, 5) for _ in range(2000)]) for _ in range(4)]
    for work in works:
        work.start()
    for work in works:
        work.join()
    counter.add("push", 0, 7)
    totals = counter.totals()
    assert totals.bytes == {"pull": 24_000, "push": 0}
    assert totals.raw_bytes == {"pull": 40_000, "push": 7}


def test_totals_are_a_copy():
    counter = WireCounter()
    before = counter.totals()
    counter.add("dense", 1, 1)
    assert before.bytes == {}
