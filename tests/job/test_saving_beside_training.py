"""Rows of a session in one process that are saved while it trains, and lost."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from saving_sessions import (
    Pause,
    assert_same,
    by_table,
    in_memory,
    loaded_rows,
    local,
    lose,
    never_asked,
    save,
    save_delta,
    save_while_training,
    save_whole,
    servers_of,
    snapshot,
    tell,
)

from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.checkpoint.values import row_values
from shadowsync.cluster.session import Session
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Rows, RowSet
from shadowsync.errors import CheckpointError


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def store_in(folder: Path) -> CheckpointStore:
    return CheckpointStore(str(folder / "checkpoints"), keep=1000)


def copied(server: EmbeddingServer) -> list[dict[str, torch.Tensor]]:
    return [{name: tensor.clone() for name, tensor in part.tensors.items()} for part in server.state()]


def trained(session: Session) -> None:
    """To the end."""
    session.start()
    session.finish()


@pytest.mark.parametrize(("optimizer", "unique"), [("rowwise_adagrad", "never"), ("adam", "always")])
def test_a_whole_one_and_deltas_taken_beside_training_are_its_last_state(
    tmp_path: Path, optimizer: str, unique: str
) -> None:
    with local(tmp_path, embedding={"optimizer": optimizer, "unique_rows": unique}) as session:
        store = store_in(tmp_path)
        session.start()
        name, count = save_while_training(session, store)
        assert count > 0
        last = by_table(session.rows())
        loaded = store.open(name)
        assert loaded.exact
        assert len(loaded.layers) == count + 2
        assert_same(loaded_rows(loaded), last)
        assert_same(loaded_rows(store.open(store.compact(name))), last)


@pytest.mark.parametrize("priority", ["scar", "mfu", "ssu"])
def test_by_priority_big_tables_give_a_share_and_small_ones_wait_for_the_end_of_a_round(
    tmp_path: Path, priority: str
) -> None:
    recovery = {"priority": priority, "min_rows": 50, "share": 0.3}
    with local(tmp_path, recovery=recovery) as session:
        store = store_in(tmp_path)
        name = save_whole(session, store)
        before = by_table(session.rows())
        trained(session)
        rows = session.changed_rows(end_of_round=False)
        kinds = {(r.table.name, type(r)) for r in rows}
        assert kinds == {("c0", RowSet), ("c1", RowSet), ("many", RowSet)}
        sizes = {(r.table.name, r.start): len(r.tensors["weight"]) for r in rows}
        big = [size for (table, _), size in sizes.items() if table == "many"]
        assert 0 < sum(big) == sum(sizes.values()), sizes
        assert all(size <= 8 for size in big), "3 in 10 of 25 rows at most"
        assert {r.table.name for r in session.changed_rows(end_of_round=True) if isinstance(r, Rows)} == {"c0", "c1"}
        name = save_delta(session, store, name, end_of_round=False)
        loaded, last = store.open(name), by_table(session.rows())
        assert not loaded.exact
        found = loaded_rows(loaded)
        assert_same({t: found[t] for t in ("c0", "c1")}, {t: before[t] for t in ("c0", "c1")})
        new = (found["many"]["weight"] == last["many"]["weight"]).all(1)
        old = (found["many"]["weight"] == before["many"]["weight"]).all(1)
        assert bool((new | old).all())
        assert 0 < int((~old).sum()) <= sum(big)
        name = save_delta(session, store, name)
        found = loaded_rows(store.open(name))
        assert_same({t: found[t] for t in ("c0", "c1")}, {t: last[t] for t in ("c0", "c1")})


def test_what_was_not_reported_as_saved_comes_again(tmp_path: Path) -> None:
    with local(tmp_path) as session:
        first = session.changed_rows(end_of_round=True)
        assert all(isinstance(r, RowSet) and not len(r.numbers) for r in first), "nothing was trained"
        trained(session)
        lost = session.changed_rows(end_of_round=True)
        again = session.changed_rows(end_of_round=False)
        changed = sum(len(r.tensors["weight"]) for r in again)
        assert changed == sum(len(r.tensors["weight"]) for r in lost) > 100
        session.rows_saved(lost, never_asked)
        assert sum(len(r.tensors["weight"]) for r in session.changed_rows(True)) == changed, "it was not the newest"
        session.rows_saved(session.rows(), never_asked)
        newest = session.changed_rows(end_of_round=True)
        assert sum(len(r.tensors["weight"]) for r in newest) == changed, "nobody knows when these were copied"
        session.rows_saved(newest, never_asked)
        assert sum(len(r.tensors["weight"]) for r in session.changed_rows(True)) == 0


def test_what_changes_after_all_rows_were_copied_is_in_the_next_delta(tmp_path: Path) -> None:
    pause = Pause(iteration=20)
    with local(tmp_path, failures=pause) as session:
        store = store_in(tmp_path)
        session.start()
        pause.reached()
        rows = session.rows_beside()
        name = store.save(snapshot(session, rows))
        pause.go()
        session.finish()
        tell(session, store, name, rows)
        name = save_delta(session, store, name)
        assert_same(loaded_rows(store.open(name)), by_table(session.rows()))


def test_after_a_whole_save_and_after_a_resume_nothing_has_changed(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    with local(tmp_path) as session:
        trained(session)
        name = save_whole(session, store)
        assert not any(len(r.tensors["weight"]) for r in session.changed_rows(end_of_round=True))
        rows = by_table(session.rows())
    with local(tmp_path) as session:
        session.load_rows(store.load(name))
        assert all(isinstance(r, RowSet) and not len(r.numbers) for r in session.changed_rows(end_of_round=True))
        assert_same(by_table(session.rows()), rows)


@pytest.mark.parametrize("priority", ["all", "scar"])
@pytest.mark.parametrize("values", ["bf16", "int8", "int4"])
def test_in_fewer_bytes_nothing_has_changed_after_a_save_and_a_resume(
    tmp_path: Path, priority: str, values: str
) -> None:
    """Nor does a rewritten chain, or a second save of what came back, change a row."""
    recovery = {"priority": priority} | ({"min_rows": 1, "share": 1.0} if priority == "scar" else {})
    given = {"recovery": recovery, "train": {"save_values": values}, "embedding": {"optimizer": "adam"}}
    store = CheckpointStore(str(tmp_path / "checkpoints"), 1000, row_values(values))

    def assert_nothing_changed(session: Session) -> None:
        assert not any(len(r.tensors["weight"]) for r in session.changed_rows(end_of_round=True))

    with local(tmp_path, **given) as session:
        base = save_whole(session, store)
        assert_nothing_changed(session)
        trained(session)
        name = save_delta(session, store, base)
        assert_nothing_changed(session)
    loaded = store.open(name)
    assert [layer.name for layer in loaded.layers] == [base, name]
    rows = loaded_rows(loaded)
    assert_same(loaded_rows(store.open(store.compact(name))), rows)
    with local(tmp_path, **given) as session:
        session.load_rows(store.load(name))
        assert_nothing_changed(session)
        assert_same(by_table(session.rows()), rows)
        again = CheckpointStore(str(tmp_path / "again"), 2, row_values(values))
        assert_same(loaded_rows(again.open(save_whole(session, again))), rows)


def test_rows_are_copied_when_they_are_read_and_their_state_with_them(tmp_path: Path) -> None:
    """Weights are read before the workers begin; what is read of their state at the end is of that moment."""
    with local(tmp_path, embedding={"optimizer": "adam"}) as session:
        rows = max(session.rows_beside(), key=lambda part: len(part.tensors["weight"]))
        assert all(tensor.is_meta for tensor in rows.tensors.values())
        then = by_table(session.rows())[rows.table.name]
        early = {"weight": torch.cat(list(rows.source(2, 12, "weight")))}
        trained(session)
        early |= {name: torch.cat(list(rows.source(2, 12, name))) for name in rows.tensors if name != "weight"}
        first = slice(rows.start + 2, rows.start + 12)
        for name, tensor in then.items():
            assert torch.equal(early[name], tensor if name == "step" else tensor[first]), name
        now, late = by_table(session.rows())[rows.table.name], in_memory(rows)
        own = slice(rows.start, rows.start + len(late["weight"]))
        assert not torch.equal(now["weight"][first], early["weight"])
        for name, tensor in late.items():
            assert name == "step" or torch.equal(tensor, now[name][own]), name


def test_without_recovery_nothing_is_tracked(tmp_path: Path) -> None:
    with local(tmp_path, recovery={"mode": "none"}) as session:
        trained(session)
        assert all(isinstance(r, RowSet) and not len(r.numbers) for r in session.changed_rows(end_of_round=False))
        found = [replace(r, tensors=in_memory(r)) for r in session.changed_rows(True) if isinstance(r, Rows)]
        assert_same(by_table(found), by_table(session.rows()))


def test_shares_are_of_rows(tmp_path: Path) -> None:
    with local(tmp_path) as session:
        held = [sum(shard.rows for shard in server.shards) for server in servers_of(session)]
        assert len(held) == 2
        assert session.row_shares() == tuple(count / 145 for count in held)


def test_lost_servers_take_what_is_saved_while_the_others_keep_theirs(tmp_path: Path) -> None:
    store, pause = store_in(tmp_path), Pause(iteration=20)
    with local(tmp_path, failures=pause, train={"trainers": 1, "workers": 1}) as session:
        session.start()
        pause.reached()
        name = save_whole(session, store)
        before = [copied(server) for server in servers_of(session)]
        pause.go()
        session.finish()
        after = [copied(server) for server in servers_of(session)]
        lose(session, [1], store.open(name, servers_of(session)[1].shards))
        now = [copied(server) for server in servers_of(session)]
        for found, wanted in ((now[0], after[0]), (now[1], before[1])):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        for late, early in zip(after, before, strict=True):
            assert any(not torch.equal(a["weight"], b["weight"]) for a, b in zip(late, early, strict=True))
        changed = session.changed_rows(end_of_round=True)
        survivor = {(shard.table.name, shard.start) for shard in servers_of(session)[0].shards}
        assert {(r.table.name, r.start) for r in changed if len(r.tensors["weight"])} <= survivor


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam", "sgd"])
def test_lost_servers_begin_anew_where_nothing_is_saved(tmp_path: Path, optimizer: str) -> None:
    with local(tmp_path, embedding={"optimizer": optimizer}) as session:
        fresh = by_table(session.rows())
        trained(session)
        lose(session, [0, 1], None)
        assert_same(by_table(session.rows()), fresh)


def test_servers_are_lost_while_workers_train_and_rows_are_saved(tmp_path: Path) -> None:
    """Whatever comes in between, base and deltas are the last state."""
    with local(tmp_path, rows=600) as session:
        store = store_in(tmp_path)
        session.start()
        name = save_whole(session, store)
        losses = 0
        while session.alive() and losses < 6:
            session.reap()
            session.inject_failure("embedding", [losses % 2]) if losses % 3 else lose(
                session, [losses % 2], store.open(name)
            )
            losses += 1
            rows = session.changed_rows(end_of_round=True)
            lose(session, [1], store.open(name))
            name = save(session, store, rows, name)
        session.finish()
        name = save_delta(session, store, name)
        assert losses > 0
        assert session.failures == len([n for n in range(losses) if n % 3])
        assert_same(loaded_rows(store.open(name)), by_table(session.rows()))


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    with local(tmp_path, embedding={"optimizer": "sgd"}) as session:
        name = save_whole(session, store)
    with local(tmp_path) as session, pytest.raises(CheckpointError, match="resume with the optimizer"):
        lose(session, [0], store.open(name))
