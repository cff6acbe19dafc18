"""What each process of a synchronous trainer gets of the batches that shadowsync reads."""

import contextlib
from collections.abc import Iterator

from shadowsync.config import Config
from shadowsync.data.batch import Batch
from shadowsync.data.reader import Reader, ReaderOptions
from shadowsync.data.source import OpenSource


def read_all(config: Config, source: OpenSource) -> Iterator[Batch]:
    """The batches that shadowsync's reader hands to a single trainer, in their order."""
    data = config.data
    options = ReaderOptions(
        config.train.batch_size,
        data.slice_rows,
        data.epochs,
        data.shuffle is not False,
        config.train.seed,
        data.readers,
        window=data.window,
    )
    reader = Reader(source, options)
    feed = reader.feed(0)
    with contextlib.closing(reader):
        while (leased := feed.next()) is not None:
            yield leased.batch
            feed.done(leased)


def share_of(config: Config, source: OpenSource, rank: int, world: int) -> list[Batch]:
    """This process's half, third … of each step's samples; all in memory, so that reading costs the yardstick nothing.

    A last step that would leave a process without samples is joined to the one before.
    """
    steps: list[list[Batch]] = [[]]
    for batch in read_all(config, source):
        if len(steps[-1]) == world:
            steps.append([])
        steps[-1].append(batch)
    if len(steps) > 1 and sum(map(len, steps[-1])) < world:
        steps[-2] += steps.pop()
    return [share(Batch.join(step), rank, world) for step in steps]


def share(whole: Batch, rank: int, world: int) -> Batch:
    """One process's samples of a step; shares differ by at most one."""
    edges = [len(whole) * part // world for part in (rank, rank + 1)]
    return whole.narrow(*edges)
