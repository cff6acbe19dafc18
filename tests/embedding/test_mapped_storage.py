"""Rows on disk, those in use in memory: as if all were in memory, whoever is killed, and none read that is there."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from embedding_cases import ADAGRAD, ADAM, CLOSE, SGD, FewSlots, dense_gradient, random_ids, table, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.embedding.mapped_storage import FEWEST, MappedStorage
from shadowsync.embedding.optimizers import RowOptimizer
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import RowNumbers, Rows, Shard
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import ConfigError, DataError
from shadowsync.memory import pages, shared
from shadowsync.memory.room import Disk, Room
from shadowsync.memory.shared import FileBeside, SharedMemory, bytes_of

pytestmark = pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs files without a name, as Linux has them")
TABLES = [table("a", 300, 4), table("b", 7, 6), table("c", 200, 4)]
STEPS = st.lists(
    st.tuples(st.sampled_from(["train", "rows", "expect", "copy", "load", "settle"]), st.integers(0, 1000)), max_size=20
)


def on(folder: Path, slots: int, rows: int) -> Disk:
    """With memory for so many of these rows of 4 floats, stepped by SGD."""
    return Disk(folder, 4 * rows + slots * (16 + 5) + 1)


@pytest.mark.parametrize("optimizer", [ADAGRAD, ADAM, SGD], ids=lambda optimizer: optimizer.name)
@settings(deadline=None, max_examples=40, derandomize=True)
@given(steps=STEPS)
def test_whatever_is_done_rows_are_as_if_all_were_in_memory(
    optimizer: RowOptimizer, steps: list[tuple[str, int]]
) -> None:
    both = [EmbeddingServer(whole(TABLES), storage, optimizer, 0) for storage in (FewSlots, TorchStorage)]
    storages = [server._storage for server in both]
    numbers = RowNumbers(whole(TABLES))
    for step, seed in steps:
        ids = random_ids([t.rows for t in TABLES], 20, seed, "multi")
        rows = torch.randperm(numbers.total, generator=torch.Generator().manual_seed(seed))[:60].sort().values
        first = seed % 200
        if step == "train":
            pooled = [storage.pull(ids, range(3)) for storage in storages]
            torch.testing.assert_close(*pooled, **CLOSE)
            for storage in storages:
                storage.push(ids, range(3), dense_gradient(*pooled[0].shape, seed), 0.1)
        elif step == "rows":
            read = [storage.read_rows(rows) for storage in storages]
            torch.testing.assert_close(*read, **CLOSE)
            for storage in storages:
                storage.step_rows(rows, [part.sign() for part in read[1]], [0, 1, 2], 0.1)
        elif step == "expect":
            storages[0].expect(ids, range(3))
            storages[0].expect_rows(rows)
        elif step == "copy":
            for chosen in (range(first, first + 90), rows[rows < 300]):
                torch.testing.assert_close(*(server.copy_rows(0, chosen) for server in both), **CLOSE)
        elif step == "load":
            piece = both[1].copy_rows(0, range(first, first + 50))
            saved = Rows(TABLES[0], first, {n: t.add(1) if n == "weight" else t for n, t in piece.items()})
            for server in both:
                server.load([saved], partial=True)
        else:
            storages[0].settle(0)
            views = (server.state()[0].tensors["weight"] for server in both)
            torch.testing.assert_close(*views, **CLOSE)
    for shard in range(3):
        copies = (server.copy_rows(shard, range(TABLES[shard].rows)) for server in both)
        torch.testing.assert_close(*copies, **CLOSE)


def test_it_begins_with_the_same_rows_and_misses_each_once(tmp_path: Path) -> None:
    shards = whole([table("t", 1000, 4)])
    made = MappedStorage(shards, [0], SGD, 3, Room(disk=on(tmp_path, 1000, 1000)))
    plain = TorchStorage(shards, [0], SGD, 3)
    ids = random_ids([1000], 600, 0)
    distinct = len(ids.values.unique())
    for _ in range(3):
        assert torch.equal(made.pull(ids, [0]), plain.pull(ids, [0]))
    assert made.counts is not None
    assert (made.counts.slots, made.counts.missed, made.counts.looked_up) == (1000, distinct, 3 * len(ids.values))
    assert (made.counts.read_bytes, made.counts.written_bytes) == (0, 0), "rows that nobody changed are made"
    for _ in range(4):  # a quarter of the memory at a time
        made.expect_rows(torch.arange(1000))
    missed = made.counts.missed
    made.read_rows(torch.arange(1000))
    assert made.counts.missed == missed == 1000
    assert list(tmp_path.iterdir()) == []


def test_rows_go_to_the_file_and_come_back(tmp_path: Path) -> None:
    shards = whole([table("t", 1000, 4)])
    made = MappedStorage(shards, [0], SGD, 0, Room(disk=on(tmp_path, 100, 1000)))
    first, second = torch.arange(100), torch.arange(500, 600)
    expected = made.read_rows(first)[0] - 1
    made.step_rows(first, [torch.ones(100, 4)], [0], 1.0)
    made.read_rows(second)
    assert made.counts is not None
    assert (made.counts.read_bytes, made.counts.written_bytes) == (0, 1600)
    assert torch.equal(made.state()["t[0:1000]"]["weight"][:100], expected)
    assert torch.equal(made.read_rows(first)[0], expected)
    assert (made.counts.read_bytes, made.counts.written_bytes) == (1600, 3200)


def test_what_is_used_often_stays(tmp_path: Path) -> None:
    made = MappedStorage(whole([table("t", 1000, 4)]), [0], SGD, 0, Room(disk=on(tmp_path, 100, 1000)))
    often = torch.arange(40)
    for first in range(40, 900, 20):
        made.read_rows(often)
        made.read_rows(torch.arange(first, first + 20))
    assert made.counts is not None
    before = made.counts.missed
    made.read_rows(often)
    assert made.counts.missed == before


def test_more_rows_than_fit_are_looked_up_in_parts(tmp_path: Path) -> None:
    shards = whole([table("t", 1000, 4)])
    made = MappedStorage(shards, [0], SGD, 0, Room(disk=on(tmp_path, 100, 1000)))
    plain = TorchStorage(shards, [0], SGD, 0)
    ids = random_ids([1000], 800, 0)
    assert torch.equal(made.pull(ids, [0]), plain.pull(ids, [0]))
    for storage in (made, plain):
        storage.push(ids, [0], torch.ones(800, 4), 0.1)
    everything = torch.arange(1000)
    torch.testing.assert_close(made.read_rows(everything), plain.read_rows(everything))
    wide = random_ids([1000], 1, 0, "multi")
    many = type(wide)(everything, torch.tensor([0, 1000]), None, 1, 1)
    with pytest.raises(
        DataError, match=r"the ids of one sample are more rows than embedding\.memory_gib keeps in memory"
    ):
        made.pull(many, [0])


def test_few_slots_and_many_threads(tmp_path: Path) -> None:
    """Who needs other rows than all others do gets its own, and no step is lost."""
    server = EmbeddingServer(whole([table("t", 640, 4)]), MappedStorage, SGD, None, disk=on(tmp_path, FEWEST, 640))

    def work(first: int) -> None:
        rows = torch.arange(first, 640, 8)
        for start in range(40):
            part = rows[start % 72 : start % 72 + 8]
            server._storage.read_rows(part)
            with server._gate:
                server._storage.step_rows(part, [torch.ones(len(part), 4)], [0], 1.0)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    steps = torch.zeros(640)
    for first in range(8):
        for start in range(40):
            steps[torch.arange(first, 640, 8)[start % 72 : start % 72 + 8]] += 1
    assert torch.equal(server.copy_rows(0, range(640))["weight"], -steps[:, None].expand(640, 4))


PROGRAM = """if True:
    import os, sys, torch
    sys.path[:0] = {path!r}
    from pathlib import Path
    from test_mapped_storage import shared_server, step_some
    from shadowsync.memory.shared import SharedMemory
    mother = os.getpid()
    for _ in sys.stdin:  # a line for each process that is to step, until it is killed
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        server = shared_server(SharedMemory.open({memory!r}), Path({folder!r}))
        draw = torch.Generator().manual_seed(1)
        print(os.getpid(), flush=True)
        while os.getppid() == mother:
            step_some(server, 1, draw)
"""
KILLS = 6


def shared_server(memory: SharedMemory, folder: Path) -> EmbeddingServer:
    shards = whole([table("t", 1000, 4)])
    return EmbeddingServer(shards, MappedStorage, SGD, None, memory=memory, disk=on(folder, 120, 1000))


def step_some(server: EmbeddingServer, first: int, draw: torch.Generator) -> torch.Tensor:
    """Of every second row from that one on; returns which."""
    rows = (torch.randperm(500, generator=draw)[:30] * 2 + first).sort().values
    server._storage.read_rows(rows)
    with server._gate:
        server._storage.step_rows(rows, [torch.ones(30, 4)], [0], 1.0)
    return rows


def test_who_is_killed_while_rows_move_takes_nothing_of_others_along(tmp_path: Path) -> None:
    """Another process steps the odd rows and is killed again and again; the even ones are as stepped here, and of the
    odd ones all elements of a row have had as many steps, but those of the rows that it was at."""
    shards, disk = whole([table("t", 1000, 4)]), on(tmp_path, 120, 1000)
    size = bytes_of(MappedStorage.memory_parts(shards, SGD, disk))
    file = FileBeside(tmp_path, bytes_of(MappedStorage.file_parts(shards, SGD)))
    memory = SharedMemory.create(size, "rows", file)
    server, steps = shared_server(memory, tmp_path), torch.zeros(1000)
    draw = torch.Generator().manual_seed(5)
    program = PROGRAM.format(path=[str(Path(__file__).parent), *sys.path], memory=memory.path, folder=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as others:
        assert others.stdin is not None
        assert others.stdout is not None
        try:
            for _ in range(KILLS):
                others.stdin.write("another\n")
                other = int(others.stdout.readline())
                for _ in range(60):
                    steps[step_some(server, 0, draw)] += 1
                os.kill(other, signal.SIGKILL)
            others.stdin.close()
            others.wait(60)  # it has waited for who was killed last
        finally:
            others.kill()
    found = server.copy_rows(0, range(1000))["weight"]
    assert torch.equal(found[::2], -steps[::2, None].expand(500, 4))
    odd = found[1::2]
    assert bool((odd == odd.round()).all() and (odd <= 0).all())
    assert int((odd != odd[:, :1]).any(1).sum()) <= KILLS * 30
    assert float(-odd.sum()) > 0
    server._storage.read_rows(torch.arange(0, 1000, 11))  # slots that it had taken are found again
    assert int((server._storage._used == 255).sum()) == 0  # type: ignore[attr-defined]


def test_what_cannot_be_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = whole([table("t", 10**6, 4)])
    with pytest.raises(ConfigError, match=r"index of its 1,000,000 rows takes 0.00373: raise it to 0.00745 or more"):
        MappedStorage(shards, [0], SGD, 0, Room(disk=Disk(tmp_path, 3 << 20)))
    with pytest.raises(
        ConfigError, match=r"in a file without a name in .*missing, which cannot be made: .*No such file"
    ):
        MappedStorage(shards, [0], SGD, 0, Room(disk=Disk(tmp_path / "missing", 8 << 20)))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared.os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"the disk of .* does not give 0.0 GiB for the rows .*No space left"):
        MappedStorage(shards, [0], SGD, 0, Room(disk=Disk(tmp_path, 8 << 20)))


def test_a_huge_table_takes_only_its_share_of_memory(tmp_path: Path) -> None:
    shards = [Shard(table("t", 10**7, 16), 0, 10**7)]
    parts = MappedStorage.memory_parts(shards, ADAGRAD, Disk(tmp_path, 80 << 20))
    assert sum(count * dtype.itemsize for count, dtype in parts) == pytest.approx(80 << 20, rel=0.001)
    assert np.prod([count for count, _ in MappedStorage.file_parts(shards, ADAGRAD)]) == 17 * 10**7


def test_a_slot_over_which_others_have_counted_is_not_given_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up of another process may write what it has read before over the mark of a slot that is taken."""
    shard = Shard(table("t", 400, 4), 0, 400)
    server = EmbeddingServer([shard], MappedStorage, SGD, 0, disk=on(tmp_path, 200, 400))
    storage = server._storage
    assert isinstance(storage, MappedStorage)
    (held,) = storage._widths.values()
    storage.read_rows(torch.arange(len(held.owner)))
    used, union = held.used.numpy(), np.union1d
    used[:] = 3
    used[:40] = 1

    def counted_over(chosen: np.ndarray, more: np.ndarray) -> np.ndarray:
        used[more] = 1
        return union(chosen, more)

    monkeypatch.setattr(np, "union1d", counted_over)
    chosen = held.choose(60)
    assert chosen is not None
    assert len(np.unique(chosen)) == len(chosen) == 60


@pytest.mark.parametrize("known", ["nothing", "no process of its own", "half of it"])
def test_pages_are_read_ahead_where_the_system_knows_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    """Old systems, sandboxes, and users who may not advise many pages with one call."""
    asked: list[int] = []

    class Library:
        @staticmethod
        def syscall(*_: object) -> int:
            return -1 if known == "nothing" else 4096

        @staticmethod
        def madvise(address: object, size: object, advice: int) -> int:
            asked.append(advice)
            return 0

    def refused(pid: int) -> int:
        raise OSError("no such call")

    monkeypatch.setattr(pages.ctypes, "CDLL", lambda *_, **__: Library)
    if known == "no process of its own":
        monkeypatch.setattr(os, "pidfd_open", refused)
    file = shared.unnamed_file(tmp_path, 40 * 4096, "a test")
    records = file.take(40 * 1024, torch.float32).view(40, 1024)
    pages.read_ahead(records, torch.arange(0, 40, 4))
    assert len(asked) == 10
