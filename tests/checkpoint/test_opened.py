"""Checkpoints that were given up, deltas on them, and checkpoints that are open while others are removed."""

import threading
from pathlib import Path

import pytest
from checkpoint_helpers import USERS, make_snapshot, small_store
from delta_helpers import EDGES, Model, State, assert_state, chain, tight_store

from shadowsync.checkpoint.files import LocalFiles
from shadowsync.checkpoint.format import MANIFEST
from shadowsync.checkpoint.store import CheckpointStore, ParentLost
from shadowsync.embedding.table import Shard
from shadowsync.errors import CheckpointError, SaveError

BASE, FIRST, SECOND = "samples-000000000001", "samples-000000000002", "samples-000000000003"
SHARDS = [Shard(USERS, 0, EDGES[1])]


def model_of(store: CheckpointStore, states: dict[str, State], name: str) -> Model:
    loaded = store.load(name)
    model = Model(samples=loaded.samples, state={t: dict(s) for t, s in states[name].items()})
    model.state = model.copy()
    return model


def test_rows_do_not_come_from_what_was_given_up(tmp_path: Path) -> None:
    """The newest has lost its dense part, so that the job went on from the one before; a server dies at once."""
    store, states = chain(tmp_path)
    (tmp_path / SECOND / "dense.safetensors").unlink()
    assert store.load().name == FIRST
    with store.opened(None, SHARDS) as loaded:
        assert loaded.name == FIRST
        assert loaded.skipped == ()
        assert loaded.rows("user", 3, 4)["weight"].tolist() == states[FIRST]["user"]["weight"][3:4].tolist()
    assert store.load().name == FIRST
    assert store.open().name == FIRST
    assert tight_store(tmp_path).open(None, SHARDS).name == SECOND, "who gave nothing up takes the newest"


def test_what_is_chosen_by_name_is_not_given_up_any_more(tmp_path: Path) -> None:
    store, _ = chain(tmp_path)
    store.load(BASE)
    assert store.open().name == BASE
    store.load(SECOND)
    assert store.open().name == SECOND
    model = Model(samples=3)
    model.train([1])
    name = store.save(model.delta(SECOND))
    assert store.names() == [BASE, FIRST, SECOND, name]


def test_a_name_that_was_given_up_may_be_that_of_a_new_one(tmp_path: Path) -> None:
    store = small_store(tmp_path, keep=2)
    for samples in (10, 20, 30):
        store.save(make_snapshot(samples))
    store.load("samples-000000000020")
    for samples in (25, 30):
        store.save(make_snapshot(samples))
    assert store.names() == ["samples-000000000025", "samples-000000000030"]
    assert store.open().name == "samples-000000000030"


def test_what_is_rewritten_stays_given_up(tmp_path: Path) -> None:
    store, _ = chain(tmp_path)
    store.load(FIRST)
    with store.opened(SECOND):
        store.compact(SECOND)
        assert store.open().name == FIRST


def test_a_delta_on_what_was_given_up_is_refused(tmp_path: Path) -> None:
    store, states = chain(tmp_path)
    model = model_of(store, states, FIRST)
    before = store.names()
    model.samples = 6
    with pytest.raises(
        ParentLost,
        match=f"{SECOND}, on which the new checkpoint builds, belongs to a course that was given up: save a whole",
    ):
        store.save(model.delta(SECOND))
    assert store.names() == before
    assert not list(tmp_path.glob(".*"))
    assert store.save(model.whole()) == "samples-000000000006"
    with pytest.raises(ParentLost, match="cannot be loaded any more: save a whole"):
        store.save(model.delta(SECOND))
    assert_state(store.load(), model.state)


def test_a_delta_on_another_runs_is_refused(tmp_path: Path) -> None:
    chain(tmp_path)
    store, model = tight_store(tmp_path), Model(samples=2)
    with pytest.raises(SaveError, match="another run's") as caught:
        store.save(model.delta(SECOND))
    assert not isinstance(caught.value, ParentLost), "a whole one could not be saved either"


class Prunes(LocalFiles):
    """Between choosing a checkpoint and reading it, another thread of this process saves, and removes old ones."""

    writer: CheckpointStore | None = None

    def read(self, path: str, start: int, stop: int) -> bytes:
        writer, self.writer = self.writer, None
        if writer is not None and not path.endswith(MANIFEST):
            saver = threading.Thread(target=writer.save, args=(Model(samples=9).whole(),))
            saver.start()
            saver.join()
        elif writer is not None:
            self.writer = writer
        return super().read(path, start, stop)


@pytest.mark.parametrize("name", [None, SECOND])
def test_nothing_is_removed_between_choosing_and_reading(tmp_path: Path, name: str | None) -> None:
    _, states = chain(tmp_path)
    files = Prunes(str(tmp_path), tmp_path)
    store = tight_store(tmp_path, keep=1, files=files)
    files.writer = store
    with store.opened(name) as loaded:
        assert loaded.name == SECOND
        assert_state(loaded, states[SECOND])
        assert store.names() == [BASE, FIRST, SECOND, "samples-000000000009"]
    store.save(Model(samples=10).whole())
    assert store.names() == ["samples-000000000010"], "what nobody reads any more may go"


def test_what_is_open_may_be_rewritten_meanwhile(tmp_path: Path) -> None:
    store, states = chain(tmp_path, keep=1)
    with store.opened(None, SHARDS) as loaded:
        store.compact(SECOND)
        store.save(Model(samples=7).whole())
        for rows in loaded.rows_of(SHARDS):
            wanted = states[SECOND]["user"]["weight"][: EDGES[1]]
            assert rows.tensors["weight"].tolist() == wanted.tolist()


def test_an_error_within_the_block_is_not_taken_for_damage(tmp_path: Path) -> None:
    store, _ = chain(tmp_path)
    with pytest.raises(CheckpointError, match="mine"), store.opened():
        raise CheckpointError("mine")
    store.save(Model(samples=9).whole())
    with (
        pytest.raises(CheckpointError, match="samples-000000000099 is not a checkpoint"),
        store.opened("samples-000000000099"),
    ):
        raise AssertionError
