"""The reader: every row once, a fixed order for one worker, no one hangs, errors arrive."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing

import pytest
import torch
from data_samples import CountedRows
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.reader import Reader, ReaderOptions, batches
from shadowsync.errors import CheckpointError, DataError

OPTIONS = ReaderOptions(batch_size=4, slice_rows=8, epochs=2, seed=3)


def numbers(batch: Batch) -> list[int]:
    return batch.ids.values.tolist()


def flat(lists: Iterable[list[int]]) -> list[int]:
    return [number for part in lists for number in part]


def drain(reader: Reader, trainer: int = 0) -> list[list[int]]:
    feed, seen = reader.feed(trainer), []
    while (leased := feed.next()) is not None:
        seen.append(numbers(leased.batch))
        assert feed.done(leased)
    return seen


def run_trainers(reader: Reader, trainers: int, workers: int = 1) -> list[int]:
    """Every worker in its own thread; the numbers of all rows trained."""
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda t=trainer: seen.extend(flat(drain(reader, t))), daemon=True)
        for trainer in range(trainers)
        for _ in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return seen


@pytest.fixture
def make_reader() -> Iterator[Callable[..., Reader]]:
    """Makes readers that are closed at the end."""
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(closing(Reader(*arguments)))


def test_one_worker_sees_the_same_batches_in_the_same_order_again(make_reader):
    def order(readers: int) -> list[list[int]]:
        return drain(make_reader(CountedRows(50), ReaderOptions(4, 8, 2, seed=3, readers=readers)))

    first = order(1)
    assert first == order(1) == order(3)
    halves = sorted(flat(first[:13])), sorted(flat(first[13:]))
    assert halves == (list(range(50)), list(range(50)))
    assert first[:13] != first[13:]


def test_without_shuffling_rows_keep_their_order(make_reader):
    reader = make_reader(CountedRows(21), ReaderOptions(4, 8, 1, shuffle=False))
    assert drain(reader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19], [20]]


def test_a_sequential_source_keeps_its_slices_in_order_but_rows_inside_are_permuted(make_reader):
    source = CountedRows(64)
    source.sequential = True
    reader = make_reader(source, ReaderOptions(8, 8, 1, seed=1))
    seen = drain(reader)
    assert [sorted(rows) for rows in seen] == [list(range(start, start + 8)) for start in range(0, 64, 8)]
    assert seen[0] != sorted(seen[0])


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    rows=st.integers(1, 90),
    bad=st.integers(0, 4),
    trainers=st.integers(1, 4),
    workers=st.integers(1, 3),
    batch_size=st.integers(1, 9),
    prefetch=st.integers(0, 3),
)
def test_every_good_row_is_trained_once_per_epoch(rows, bad, trainers, workers, batch_size, prefetch):
    source = CountedRows(rows, bad)
    with closing(Reader(source, ReaderOptions(batch_size, 16, 2, seed=rows, readers=2, prefetch=prefetch))) as reader:
        seen = run_trainers(reader, trainers, workers)
    assert Counter(seen) == dict.fromkeys(source.good(), 2)
    assert reader.finished
    assert (reader.trained, reader.skipped) == (2 * len(source.good()), 2 * (rows - len(source.good())))


def test_idle_trainers_take_over_what_others_have_not_begun(make_reader):
    reader = make_reader(CountedRows(32), ReaderOptions(4, 32, 1))
    first, second = reader.feed(0), reader.feed(1)
    mine = first.next()
    theirs = second.next()
    assert theirs is not None, "the only slice was leased by trainer 0, but it has batches to spare"
    assert theirs.lease.trainer == 1
    assert second.done(theirs)
    assert first.done(mine)
    drain(reader, 0)
    assert reader.finished


def test_batches_are_numbered_in_the_order_in_which_they_are_handed_out(make_reader):
    """Slices of 8 in batches of 3; trainer 1 takes over what was parsed for trainer 0."""
    reader = make_reader(CountedRows(40), ReaderOptions(3, 8, 2, prefetch=3))
    feeds, seen, turn = [reader.feed(0), reader.feed(1)], [], 0
    while (leased := feeds[turn % 2].next()) is not None:
        seen.append(leased.number)
        feeds[turn % 2].done(leased)
        turn += 1 if turn < 10 else 2
    assert reader.finished
    assert seen == list(range(len(seen)))


def test_rows_of_a_dead_trainer_wake_those_who_wait(make_reader):
    reader = make_reader(CountedRows(8), ReaderOptions(8, 8, 1))
    held = reader.feed(0).next()
    assert reader.feed(1).next(wait=False) is None
    seen: list[list[int]] = []
    waiting = threading.Thread(target=lambda: seen.extend(drain(reader, 1)), daemon=True)
    waiting.start()
    reader.leases.abandon(0)
    waiting.join(120)
    assert [sorted(rows) for rows in seen] == [list(range(8))]
    assert not reader.feed(0).done(held), "others have trained these rows"
    assert reader.finished


def test_a_closed_feed_gives_nothing_and_a_new_one_goes_on(make_reader):
    reader = make_reader(CountedRows(16), ReaderOptions(4, 8, 1))
    feed = reader.feed(0)
    leased = feed.next()
    feed.done(leased)
    feed.close()
    assert feed.next() is None
    assert sorted([*numbers(leased.batch), *flat(drain(reader, 0))]) == list(range(16))


def test_a_closed_reader_gives_nothing_and_lets_waiters_go():
    reader = Reader(CountedRows(8), ReaderOptions(8, 8, 1))
    reader.feed(0).next()
    waiting = threading.Thread(target=reader.feed(1).next, daemon=True)
    waiting.start()
    reader.close()
    waiting.join(120)
    assert not waiting.is_alive()
    assert reader.feed(0).next() is None


@pytest.mark.parametrize("trained", [0, 1, 5, 12])
def test_a_restored_reader_trains_the_rest_with_another_batch_size_and_more_trainers(make_reader, trained):
    source = CountedRows(50, bad=7)
    reader = make_reader(source, OPTIONS)
    feed, seen = reader.feed(0), []
    for _ in range(trained):
        leased = feed.next()
        seen += numbers(leased.batch)
        feed.done(leased)
    lost = feed.next()
    assert lost is not None
    state = reader.state()
    resumed = make_reader(source, ReaderOptions(batch_size=3, slice_rows=999, epochs=2, seed=99), state)
    seen += run_trainers(resumed, 3)
    assert Counter(seen) == dict.fromkeys(source.good(), 2)


OF_BOOK = ({"slices": None}, {"rows": "3"}, {"epoch": -1}, {"position": 1.5}, {"trained": None}, {"trained": [-1]})


@pytest.mark.parametrize(
    "change",
    [
        *({"seed": -1}, {"slice_rows": 0}, {"shuffle": "no"}, {"book": None}, {"book": {}}),
        *({"book": change} for change in (*OF_BOOK, {"skipped": ["../x"]}, {"parts": {}}, {"position": 4})),
    ],
)
def test_a_state_that_no_reader_gives_is_refused(make_reader, change):
    state = make_reader(CountedRows(24), OPTIONS).state()
    if change.get("book"):
        change = {"book": state["book"] | change["book"]}
    with pytest.raises(CheckpointError, match="position in the data"):
        Reader(CountedRows(24), OPTIONS, state | change)


def test_one_trainer_goes_on_in_the_order_it_would_have_had(make_reader):
    def order(pause: int) -> list[list[int]]:
        reader = make_reader(CountedRows(24), ReaderOptions(4, 8, 2, seed=1, prefetch=0))
        feed, seen = reader.feed(0), []
        for _ in range(pause):
            leased = feed.next()
            seen.append(numbers(leased.batch))
            feed.done(leased)
        return seen + drain(make_reader(CountedRows(24), ReaderOptions(4, 8, 2, seed=1, prefetch=0), reader.state()))

    assert order(0) == order(3) == order(6) == order(9)


def test_closing_lets_go_of_those_who_wait_for_a_slice_that_nobody_will_parse():
    """One thread parses, held up in the first slice; the second trainer's slice never gets its turn."""
    source = Held(32)
    reader = Reader(source, ReaderOptions(4, 8, 1, prefetch=0))
    waiting = [threading.Thread(target=reader.feed(trainer).next, daemon=True) for trainer in (0, 1)]
    for thread in waiting:
        thread.start()
    assert source.reading.wait(120)
    closing = threading.Thread(target=reader.close, daemon=True)
    closing.start()
    source.go_on.set()
    for thread in (*waiting, closing):
        thread.join(120)
        assert not thread.is_alive()


class Held(CountedRows):
    """Reads when it is told to."""

    def __init__(self, rows):
        super().__init__(rows)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read(self, part):
        self.reading.set()
        assert self.go_on.wait(120)
        return super().read(part)


class Broken(CountedRows):
    def read(self, part):
        raise OSError("the disk is gone")


def test_an_exception_reaches_every_trainer_unchanged(make_reader):
    reader = make_reader(Broken(20), OPTIONS)
    for trainer in (0, 1):
        with pytest.raises(OSError, match=r"^the disk is gone$"):
            reader.feed(trainer).next()
    with pytest.raises(OSError, match="the disk is gone"):
        list(batches(Broken(20), 4))


class Outside(CountedRows):
    """The id of row 13 (from 1) is too high, or negative."""

    def __init__(self, value: int, multi_hot: bool) -> None:
        super().__init__(20)
        self.value, self.multi_hot = value, multi_hot

    def read(self, part):
        batch = super().read(part)
        values = torch.where(batch.ids.values == 12, self.value, batch.ids.values)
        offsets = torch.arange(len(values) + 1) if self.multi_hot else None
        return Batch(batch.labels, batch.dense, Jagged(values, offsets, None, 1, len(values)))


@pytest.mark.parametrize("multi_hot", [False, True])
@pytest.mark.parametrize("value", [20, -1])
def test_an_id_out_of_rows_is_named_with_its_place(make_reader, value, multi_hot):
    reader = make_reader(Outside(value, multi_hot), OPTIONS)
    expected = f"counted, row 13: feature id has id {value}, outside of 0 … 19; raise the feature's rows, or hash it"
    with pytest.raises(DataError, match=expected):
        drain(reader)
    with pytest.raises(DataError, match="counted, row 13"):
        list(batches(Outside(value, multi_hot), 4))


@pytest.mark.parametrize(("rows", "bad"), [(1, 0), (40_000, 0), (40_000, 3)])
def test_evaluation_reads_all_rows_in_order(rows, bad):
    source = CountedRows(rows, bad)
    read = list(batches(source, 1000))
    assert flat(map(numbers, read)) == source.good()
    assert max(len(batch) for batch in read) <= 1000
