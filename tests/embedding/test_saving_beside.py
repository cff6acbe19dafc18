"""What a server is told of changes, what it gives to be saved, and that each row is copied as of one moment."""

import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from embedding_cases import ADAGRAD, ADAM, BY_NAME, EACH, KINDS, ROWS, SOURCE, TABLES, copied, random_ids, train
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding import server as serving
from shadowsync.embedding import watching
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.requests import Lookup, RowLookup
from shadowsync.embedding.routing import UniqueRows
from shadowsync.embedding.server import EmbeddingServer, RowStep
from shadowsync.embedding.table import Rows, RowSet, Shard, Table, shares_of
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.embedding.watching import RowTracking
from shadowsync.errors import CheckpointError, DataError
from shadowsync.recovery.priority import MostFrequentlyUsed

CUTS = [Shard(TABLES[0], 0, 17), Shard(TABLES[0], 17, 40), *(Shard(table, 0, table.rows) for table in TABLES[1:])]
BIG = 20


class Watch:
    """Writes down what it is told."""

    sees, counts, compares = True, False, True

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        self.seen_rows: list[int] = []
        self.saved_rows: list[tuple[list[int], Tensor | None]] = []
        self.loaded_rows: list[tuple[list[int], Tensor]] = []
        self.begun = 0
        self.asked: list[int] = []

    def seen(self, rows: Tensor) -> None:
        self.seen_rows += rows.tolist()

    def begin(self) -> None:
        self.begun += 1

    def pick(self, count: int, weights: Tensor) -> Tensor:
        self.asked.append(count)
        return torch.tensor(sorted(set(self.seen_rows)), dtype=torch.int64)

    def saved(self, rows: Tensor, weights: Tensor | None) -> None:
        self.saved_rows.append((rows.tolist(), weights))

    def loaded(self, rows: Tensor, weights: Tensor) -> None:
        self.loaded_rows.append((rows.tolist(), weights.clone()))


class Watches:
    """Watches the shards of tables of at least `BIG` rows; half of their rows go into a save."""

    def __init__(self, exact: bool = False) -> None:
        self.made: dict[str, Watch] = {}
        self._exact = exact

    def watch(self, own: Rows, allocate: object = None) -> Watch | None:
        if own.table.rows < BIG:
            return None
        return self.made.setdefault(f"{own.table.name} {own.start}", Watch(self._exact))

    def count(self, rows: int) -> int:
        return rows // 2


def watched(storage: Any = TorchStorage, optimizer: Any = ADAGRAD) -> tuple[EmbeddingServer, dict[str, Watch]]:
    watches = Watches()
    return EmbeddingServer(CUTS, storage, optimizer, 0, watches), watches.made


def changed(server: EmbeddingServer, before: Sequence[Rows]) -> dict[str, set[int]]:
    """Rows of each shard whose weights are not what they were."""
    return {
        f"{now.table.name} {now.start}": set(
            (now.tensors["weight"] != then.tensors["weight"]).any(1).nonzero().flatten().tolist()
        )
        for now, then in zip(copied(server), before, strict=True)
    }


@EACH
@pytest.mark.parametrize("unique", ["never", "always"])
@pytest.mark.parametrize(("queued", "kind"), list(zip([1, 40, 1 << 20], KINDS, strict=True)))
def test_watches_hear_of_every_row_that_changed(
    storage: Any, kind: str, unique: Any, queued: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "QUEUED_IDS", queued)
    server, watches = watched(storage)
    before = copied(server)
    train(EmbeddingClient(TABLES, SOURCE, [server], UniqueRows(unique, every=2)), 4, kind)
    server.watches.begin()
    wanted = {name: rows for name, rows in changed(server, before).items() if name in watches}
    assert len(wanted) == 4
    assert {name: set(watch.seen_rows) for name, watch in watches.items()} == wanted
    assert sum(map(len, wanted.values())) > 20


@pytest.mark.parametrize("queued", [1, 1 << 20])
def test_a_row_counts_once_in_each_step_however_it_crosses(queued: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pooled, as distinct rows, or held for a global step; batches hold rows several times, in two features as well."""
    monkeypatch.setattr(watching, "QUEUED_IDS", queued)

    def counted(unique: Any, held: bool) -> dict[str, list[int]]:
        server = EmbeddingServer(CUTS, TorchStorage, ADAGRAD, 0, RowTracking(MostFrequentlyUsed, 0.5, BIG, 0))
        job = EmbeddingClient(TABLES, SOURCE, [server], UniqueRows(unique, every=2))
        for step in range(4):
            pulled = job.pull(random_ids(ROWS, 20, step))
            gradient = torch.ones_like(pulled.pooled)
            if held:
                job.hold(pulled, gradient, step).result()
                server.commit(RowStep(step, {step: 1.0}, 1.0, 0.1, 0))
            else:
                job.push(pulled, gradient, 0.1).result()
        server.watches._tell()
        watches = zip(server.shards, server.watches._watches, strict=True)
        return {shard.key: watch._counts.tolist() for shard, watch in watches if isinstance(watch, MostFrequentlyUsed)}

    pooled = counted("never", held=False)
    assert len(pooled) == 4
    assert max(map(max, pooled.values())) == 4, "the steps, and not the look-ups"
    assert pooled == counted("always", held=False) == counted("never", held=True) == counted("always", held=True)


def test_the_word_comes_before_the_change_so_that_who_dies_in_between_has_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made between pushes, so that it has the change."""
    monkeypatch.setattr(watching, "QUEUED_IDS", 1)
    server, watches = watched()
    weights = server.state()[0].tensors["weight"]
    before, met = weights.clone(), []
    watches["user 0"].seen = lambda rows: met.append(bool((weights[rows] == before[rows]).all()))  # type: ignore[method-assign]
    server.push(Lookup((0,), Jagged(torch.tensor([3, 4]), None, None, 1, 2)), [torch.ones(2, 8)], 0.1)
    server.push(
        RowLookup((0,), torch.tensor([server.numbers.starts[0] + 5])),
        [torch.ones(int(d == 8), d) for d in (4, 6, 8)],
        0.1,
    )
    assert met == [True, True]


def test_rows_are_marked_before_their_push_though_another_push_empties_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching.RowWatches, "_queued", property(lambda _: 0, lambda *_: None), raising=False)
    (server, _), exact = watched(), Watches(exact=True)
    shared = watching.RowWatches(server.state(), server.numbers, exact, shared=True)
    shared.pushed((0,), Jagged(torch.tensor([3, 4]), None, None, 1, 2))
    assert exact.made["user 0"].seen_rows == [3, 4]


def test_a_push_that_fails_half_way_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    server, watches = watched()

    def push(*_: Any) -> None:
        server.state()[0].tensors["weight"][3] += 1
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server._storage, "push", push)
    with pytest.raises(RuntimeError, match="out of memory"):
        server.push(Lookup((0,), Jagged(torch.tensor([3, 4]), None, None, 1, 2)), [torch.ones(2, 8)], 0.1)
    server.watches.begin()
    assert watches["user 0"].seen_rows == [3, 4]


def test_an_empty_push_is_nothing() -> None:
    server, watches = watched()
    server.push(Lookup((0, 1), random_ids([17, 23], 0, 0)), [torch.zeros(0, 16)], 0.1)
    server.push(RowLookup((), torch.zeros(0, dtype=torch.int64)), [torch.zeros(0, d) for d in (4, 6, 8)], 0.1)
    server.watches.begin()
    assert not any(watch.seen_rows for watch in watches.values())


def test_big_shards_give_what_their_watch_picks_and_small_ones_all_or_nothing() -> None:
    server, watches = watched()
    train(EmbeddingClient(TABLES, SOURCE, [server]), 2, "single")
    picks = {}
    for index, shard in enumerate(server.shards):
        for end_of_round in (False, True):
            picks[shard.key, end_of_round] = server.pick(index, end_of_round)
    second = picks["user[17:40]", True]
    assert second is not None
    assert second.tolist() == [17 + row for row in sorted(set(watches["user 17"].seen_rows))]
    assert watches["user 17"].asked == [11, 11]
    empty = picks["day[0:3]", False]
    assert empty is not None
    assert empty.tolist() == []
    assert picks["day[0:3]", True] is None


def test_a_server_without_watches_gives_all_at_the_end_of_a_round() -> None:
    server = EmbeddingServer(CUTS, TorchStorage, ADAGRAD, 0)
    assert not server.watches.compares
    assert [server.pick(index, True) for index in range(len(CUTS))] == [None] * len(CUTS)
    nothing = [server.pick(index, False) for index in range(len(CUTS))]
    assert all(numbers is not None and len(numbers) == 0 for numbers in nothing)


def test_only_the_save_that_began_last_is_told() -> None:
    server, watches = watched()
    first, second = server.watches.begin(), server.watches.begin()
    assert [server.watches.is_under_way(save) for save in (first, second)] == [False, True]
    rows, weights = torch.tensor([20, 39]), torch.ones(2, 8)
    assert not server.rows_saved(first, 1, rows, weights)
    assert watches["user 17"].saved_rows == []
    assert server.rows_saved(second, 1, rows, weights)
    ((numbers, written),) = watches["user 17"].saved_rows
    assert numbers == [3, 22]
    assert written is weights
    other = EmbeddingServer(CUTS, TorchStorage, ADAGRAD, 0)
    assert not other.watches.is_under_way(first)
    assert not other.watches.is_under_way(second)


@BY_NAME
@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_copies_are_the_rows_in_any_chunks(optimizer: Any, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CHUNK_BYTES", chunk_bytes)
    server, _ = watched(optimizer=optimizer)
    train(EmbeddingClient(TABLES, SOURCE, [server]), 3, "multi")
    own = server.state()[1]
    singles = torch.tensor([17, 18, 30, 39])
    for rows, places in ((range(20, 31), slice(3, 14)), (singles, singles - 17), (singles[:0], slice(0, 0))):
        found = server.copy_rows(1, rows)
        assert list(found) == list(own.tensors)
        for name, tensor in own.tensors.items():
            assert torch.equal(found[name], tensor if name == "step" else tensor[places])
    before = server.copy_rows(1, range(17, 40))
    own.tensors["weight"].zero_()
    assert before["weight"].any()


@pytest.mark.parametrize(
    "rows",
    [
        range(16, 20),
        range(30, 41),
        range(30, 20),
        range(17, 30, 2),
        torch.tensor([16, 17]),
        torch.tensor([39, 40]),
        torch.tensor([20, 20]),
        torch.tensor([21, 20]),
        torch.tensor([20.0]),
        torch.tensor([[20]]),
        torch.tensor([20], dtype=torch.int32),
    ],
    ids=str,
)
def test_rows_that_are_none_are_neither_copied_nor_told(rows: Any) -> None:
    server, watches = watched()
    save = server.watches.begin()
    for call in (lambda: server.copy_rows(1, rows), lambda: server.rows_saved(save, 1, rows, torch.ones(len(rows), 8))):
        with pytest.raises(DataError, match=r"row numbers are int64|are not distinct rows of table user from 17 to 39"):
            call()
    assert watches["user 17"].saved_rows == []


def test_shards_and_weights_that_do_not_fit_are_refused() -> None:
    server, _ = watched()
    save = server.watches.begin()
    for shard in (-1, len(CUTS)):
        for call in (
            lambda shard=shard: server.pick(shard, True),
            lambda shard=shard: server.copy_rows(shard, range(1)),
            lambda shard=shard: server.rows_saved(save, shard, range(1), torch.ones(1, 8)),
        ):
            with pytest.raises(DataError, match=f"shard {shard} is asked for and this server has 6 shards"):
                call()
    for weights in (None, torch.ones(2, 8), torch.ones(1, 7), torch.ones(1, 8).double()):
        with pytest.raises(DataError, match=r"is not what was saved of rows of float32 \[1, 8\]"):
            server.rows_saved(save, 0, range(1), weights)


def test_loaded_rows_are_told_as_saved_with_their_new_weights() -> None:
    server, watches = watched()
    new = {"weight": torch.full((6, 8), 2.0), "momentum": torch.ones(6)}
    server.load([Rows(TABLES[0], 14, new)], partial=True)
    assert [rows for rows, _ in watches["user 0"].loaded_rows] == [[14, 15, 16]]
    assert [rows for rows, _ in watches["user 17"].loaded_rows] == [[0, 1, 2]]
    numbers = torch.tensor([1, 16, 39])
    server.load([RowSet(TABLES[0], 0, 40, numbers, {n: t[:3] for n, t in new.items()})], partial=True)
    assert [rows for rows, _ in watches["user 0"].loaded_rows] == [[14, 15, 16], [1, 16]]
    assert all(bool((weights == 2).all()) for _, weights in watches["user 0"].loaded_rows)
    assert not any(watch.loaded_rows for name, watch in watches.items() if "user" not in name)


@EACH
@pytest.mark.parametrize("optimizer", [ADAGRAD, ADAM], ids=lambda optimizer: optimizer.name)
def test_a_server_that_is_lost_begins_anew(storage: Any, optimizer: Any) -> None:
    server, watches = watched(storage, optimizer)
    fresh = copied(server)
    train(EmbeddingClient(TABLES, SOURCE, [server]), 3, "multi")
    server.lose(None)
    for now, then in zip(server.state(), fresh, strict=True):
        assert all(torch.equal(now.tensors[name], then.tensors[name]) for name in then.tensors)
    assert set(watches["user 17"].seen_rows) == set(range(23)), "nobody has saved them so"


def test_a_server_that_is_lost_takes_what_is_saved_and_keeps_the_rest() -> None:
    server, watches = watched()
    client = EmbeddingClient(TABLES, SOURCE, [server])
    train(client, 2, "multi")
    saved = copied(server)
    train(client, 2, "single")
    later = copied(server)
    server.lose(iter(saved[:2]))
    for index, own in enumerate(server.state()):
        assert torch.equal(own.tensors["weight"], (saved if index < 2 else later)[index].tensors["weight"])
    assert [rows for rows, _ in watches["user 17"].loaded_rows] == [list(range(23))]
    with pytest.raises(CheckpointError, match="table user was saved with weight, and"):
        server.lose([Rows(TABLES[0], 0, {"weight": torch.ones(40, 8)})])
    train(client, 1, "single")


PUSHERS, OWN = 3, 40
RELATED = Table("related", PUSHERS * OWN, 4, ("related",))


def relation(steps: int) -> Tensor:
    """What row-wise Adagrad has subtracted from each weight after 0 … `steps` gradients of ones at a rate of 1."""
    return torch.tensor([0.0, *accumulate(1 / (count**0.5 + ADAGRAD.eps) for count in range(1, steps + 1))])


def pushing(server: EmbeddingServer, stop: threading.Event) -> Iterator[threading.Thread]:
    """Threads that each push to rows of their own, so that no step is lost to another thread."""

    def work(first: int) -> None:
        lookup = Lookup((0,), Jagged(torch.arange(first, PUSHERS * OWN, PUSHERS), None, None, 1, OWN))
        while not stop.is_set():
            server.push(lookup, [torch.ones(OWN, 4)], 1.0)

    return (threading.Thread(target=work, args=(first,)) for first in range(PUSHERS))


@EACH
@pytest.mark.parametrize("singles", [False, True])
def test_weight_and_momentum_of_a_row_belong_together_while_many_push(
    storage: Any, singles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After n gradients of ones the momentum is n, which tells what the weight must be."""
    monkeypatch.setattr(serving, "CHUNK_BYTES", 20 * 50)
    server = EmbeddingServer([Shard(RELATED, 0, RELATED.rows)], storage, ADAGRAD, 0)
    first = server.copy_rows(0, range(RELATED.rows))["weight"]
    rows = torch.arange(RELATED.rows) if singles else range(RELATED.rows)
    stop = threading.Event()
    threads = list(pushing(server, stop))
    for thread in threads:
        thread.start()
    copies = []
    while len(copies) < 150 or copies[-1]["momentum"].min() < 20:
        copies.append(server.copy_rows(0, rows))
    stop.set()
    for thread in threads:
        thread.join()
    steps = relation(int(max(copy["momentum"].max() for copy in copies)))
    assert len({int(count) for copy in copies for count in copy["momentum"]}) > 20, "somebody pushed meanwhile"
    for copy in copies:
        wanted = first - steps[copy["momentum"].long()][:, None]
        torch.testing.assert_close(copy["weight"], wanted, rtol=1e-4, atol=1e-3)


def test_shares_of_rows_add_up() -> None:
    assert shares_of([CUTS[:1], CUTS[1:]]) == (17 / 110, 93 / 110)
