"""Checkpoints that hold some rows and build on others."""

import dataclasses
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoint_helpers import (
    BASE,
    FIRST,
    ITEMS,
    SECOND,
    USERS,
    Counting,
    Model,
    State,
    assert_equal,
    assert_state,
    chain,
    forget_memory,
    memory_root,
    tight_store,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowsync.checkpoint.files import LocalFiles, open_files
from shadowsync.checkpoint.format import MANIFEST
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.embedding.table import Rows, RowSet, Shard
from shadowsync.errors import CheckpointError, SaveError

USER_ROWS = st.lists(st.integers(0, USERS.rows - 1), min_size=1, max_size=8)


def test_each_row_comes_from_the_newest_that_holds_it(tmp_path: Path) -> None:
    store, states = chain(tmp_path)
    assert store.names() == list(states) == [BASE, FIRST, SECOND]
    for name, state in states.items():
        loaded = store.load(name)
        assert_state(loaded, state)
        assert loaded.exact
        assert loaded.skipped == ()
    assert len(list((tmp_path / SECOND).glob("rows-*"))) > 2, "a delta is cut, too"
    formats = [msgspec.json.decode((tmp_path / name / MANIFEST).read_bytes())["format"] for name in (BASE, FIRST)]
    assert formats == [1, 2], "only deltas need the newer one"
    written = sum(path.stat().st_size for path in (tmp_path / SECOND).glob("rows-*"))
    assert written < sum(path.stat().st_size for path in (tmp_path / BASE).glob("rows-*"))


def test_a_delta_without_rows_is_its_parent_with_newer_counts(tmp_path: Path) -> None:
    store, model = tight_store(tmp_path), Model()
    name = store.save(model.whole())
    model.train([])
    store.save(model.delta(name))
    assert_state(store.load(), model.state)


def test_the_state_of_a_whole_table_is_that_of_the_newest_run(tmp_path: Path) -> None:
    """Row 20 did not change, but what its server counts did."""
    store, model = tight_store(tmp_path), Model()
    name = store.save(model.whole())
    model.train([1])
    store.save(model.delta(name))
    assert store.load().rows("user", 20, 21)["step"].tolist() == [1.0]


def test_rows_saved_by_priority_are_told_of(tmp_path: Path) -> None:
    store, model = tight_store(tmp_path, keep=9), Model()
    model.train(range(USERS.rows))
    name = store.save(model.whole())
    older = model.copy()
    model.train([4, 5])
    name = store.save(model.delta(name, [5]))
    loaded = store.load()
    assert not loaded.exact
    older["user"]["step"] = model.state["user"]["step"]
    older["item / wide"] = model.state["item / wide"]
    for tensor in ("weight", "momentum"):
        older["user"][tensor][5] = model.state["user"][tensor][5]
    assert_state(loaded, older)
    assert loaded.skipped == (
        f"{name} holds some rows as of its 2 samples and others as of earlier ones, down to 1, because only part of "
        "them was saved each time: what those learned in between is lost",
    )
    assert store.load(name).skipped == loaded.skipped
    model.changed.clear()
    model.train([7])
    after = store.save(model.delta(name))
    assert (store.load(after).exact, store.load(after).oldest) == (False, 1)
    compacted = store.load(store.compact(after))
    assert (compacted.exact, compacted.oldest, len(compacted.layers)) == (False, 1, 1)
    assert store.save(model.whole())
    assert store.load().exact


def test_given_shards_are_loaded_whatever_happened_to_the_rest(tmp_path: Path) -> None:
    _store, states = chain(tmp_path)
    files, shards = Counting(tmp_path), [Shard(USERS, 14, 23), Shard(ITEMS, 2, 4)]
    loaded = tight_store(tmp_path, files=files).open(None, shards)
    for rows, shard in zip(loaded.rows_of(shards), shards, strict=True):
        wanted = states[SECOND][shard.table.name]
        assert rows.start == shard.start
        assert_equal(rows.tensors, {n: t if n == "step" else t[shard.start : shard.stop] for n, t in wanted.items()})
    assert loaded.name == SECOND
    assert not [path for path in files.paths if "dense" in path or "random" in path]
    for path in tmp_path.glob("*/*.safetensors"):
        if str(path.relative_to(tmp_path)) not in files.paths:
            path.unlink()
    assert len(list(tmp_path.glob("*/rows-*"))) >= 3
    again = tight_store(tmp_path).open(None, shards)
    assert again.name == SECOND
    assert [rows.start for rows in again.rows_of(shards)] == [14, 2]
    with pytest.raises(CheckpointError, match=f"{SECOND} was opened without rows 0 to 14 of table user"):
        again.rows("user", 0, 14)
    with pytest.raises(CheckpointError, match="without the 7 rows of table item"):
        tight_store(tmp_path).open(None, shards[:1]).tensor_names(ITEMS.name)
    with pytest.raises(CheckpointError, match="none of the 3"):
        tight_store(tmp_path).open()


def test_opening_gives_nothing_up(tmp_path: Path) -> None:
    store, _ = chain(tmp_path)
    store.open(BASE)
    store.open(BASE, [Shard(USERS, 0, 4)])
    model = Model(samples=3)
    model.train([0])
    store.save(model.whole())
    assert len(store.names()) == 4


def test_what_is_kept_keeps_what_it_builds_on(tmp_path: Path) -> None:
    store, model = tight_store(tmp_path, keep=2), Model()
    names = [store.save(model.whole())]
    for step in range(4):
        model.train([step])
        names.append(store.save(model.delta(names[-1])))
    assert store.names() == names
    model.train([0])
    names.append(store.save(model.whole()))
    assert store.names() == names, "the one before is a delta on all the others"
    model.train([0])
    names.append(store.save(model.delta(names[-1])))
    assert store.names() == names, "one wrong byte in the newest whole one must not end everything"
    model.train([0])
    names.append(store.save(model.whole()))
    assert store.names() == names[-3:]
    assert_state(store.load(), model.state)


def test_what_cannot_be_loaded_is_not_counted(tmp_path: Path) -> None:
    store, _ = chain(tmp_path, keep=1)
    (tmp_path / FIRST / MANIFEST).unlink()
    model = Model(samples=9)
    tight_store(tmp_path, keep=2).save(model.whole())
    assert store.names() == [BASE, "samples-000000000009"]


def test_compaction_holds_the_same_and_frees_the_rest(tmp_path: Path) -> None:
    store, states = chain(tmp_path, keep=1)
    assert store.compact(SECOND) == f"{SECOND}-whole"
    assert store.names() == [f"{SECOND}-whole"]
    loaded = store.load()
    assert_state(loaded, states[SECOND])
    assert len(loaded.layers) == 1
    assert msgspec.json.decode((tmp_path / loaded.name / MANIFEST).read_bytes())["format"] == 1
    assert store.compact(loaded.name) == store.compact(SECOND) == loaded.name
    assert_state(store.load(SECOND), states[SECOND])


def test_compaction_reads_in_bounded_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, states = chain(tmp_path)
    monkeypatch.setattr("shadowsync.checkpoint.loading.CHUNK_BYTES", 100)
    sizes = []
    real = torch.empty

    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        made = real(*args, **kwargs)  # type: ignore[call-overload]
        sizes.append(0 if made.is_meta else made.nbytes)
        return made  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, "empty", empty)
    big = CheckpointStore(str(tmp_path), 9, piece_bytes=1 << 20)
    big.compact(SECOND)
    monkeypatch.setattr(torch, "empty", real)
    assert max(sizes) <= 100
    assert len(list((tmp_path / f"{SECOND}-whole").glob("rows-*"))) == 1
    assert_state(store.load(), states[SECOND])


def test_deltas_saved_during_and_after_a_compaction_stand_on_it(tmp_path: Path) -> None:
    """The compaction stops in the middle, and two deltas and a pruning come in between."""
    _, states = chain(tmp_path)
    reached, go_on = threading.Event(), threading.Event()

    class Gated(LocalFiles):
        def publish(self, folder: str, last: str, content: bytes) -> None:
            if folder.endswith("-whole"):
                reached.set()
                assert go_on.wait(120)
            super().publish(folder, last, content)

    store = tight_store(tmp_path, keep=1, files=Gated(str(tmp_path), tmp_path))
    compaction = threading.Thread(target=store.compact, args=(SECOND,))
    compaction.start()
    assert reached.wait(120)
    model = Model(samples=3, state=states[SECOND])
    model.train([2, 17])
    name = store.save(model.delta(SECOND))
    assert name == "samples-000000000004"
    with pytest.raises(SaveError, match=f"{SECOND}-whole is being written already"):
        store.compact(SECOND)
    go_on.set()
    compaction.join()
    assert store.names() == [f"{SECOND}-whole", name]
    assert_state(store.load(), model.state)
    model.changed.clear()
    model.train([2])
    last = store.save(model.delta(SECOND, [2, 17]))
    assert_state(store.load(last), model.state)


def test_a_delta_on_what_is_gone_is_refused(tmp_path: Path) -> None:
    store, states = chain(tmp_path)
    model = Model(samples=3, state=states[SECOND])
    model.train([1])
    (tmp_path / BASE / MANIFEST).unlink()
    with pytest.raises(SaveError, match=f"{SECOND}, on which the new checkpoint builds, cannot be loaded"):
        store.save(model.delta(SECOND))
    with pytest.raises(SaveError, match="samples-000000000099, on which the new"):
        store.save(model.delta("samples-000000000099"))
    assert not list(tmp_path.glob(".*"))


UNFIT = {
    "single rows in a whole one": (lambda m: m.snapshot(m.delta(BASE).tables), "where every row is wanted"),
    "a run left out": (lambda m: m.snapshot(m.delta(BASE).tables[1:], BASE), "row 0 of table user"),
    "half and half": (
        lambda m: m.snapshot((m.delta(BASE).tables[0], *m.whole().tables[1:]), BASE),
        "single rows of table user where",
    ),
    "other tensors": (
        lambda m: m.snapshot(tuple(_without_momentum(rows) for rows in m.delta(BASE).tables), BASE),
        "has other tensors in table user than the delta",
    ),
}


def _without_momentum(rows: Rows | RowSet) -> Rows | RowSet:
    tensors = {name: tensor for name, tensor in rows.tensors.items() if name != "momentum"}
    return dataclasses.replace(rows, tensors=tensors)


@pytest.mark.parametrize("case", UNFIT)
def test_a_delta_that_does_not_fit_is_not_saved(tmp_path: Path, case: str) -> None:
    store, model = tight_store(tmp_path), Model()
    model.train([1, 2])
    store.save(model.whole())
    make, message = UNFIT[case]
    with pytest.raises(ValueError, match=message):
        store.save(make(model))
    assert [path.name for path in tmp_path.iterdir()] == [BASE]


@pytest.mark.parametrize("numbers", [[3, 3], [4, 3], [-1, 3], [3, 9], [3.0, 4.0], [[3, 4]], [3], [3, 4, 5]], ids=str)
def test_numbers_that_are_no_rows_are_not_saved(tmp_path: Path, numbers: list[int]) -> None:
    store, model = tight_store(tmp_path), Model()
    store.save(model.whole())
    first, *others = model.delta("samples-000000000000", [3, 4]).tables
    assert isinstance(first, RowSet)
    wrong = RowSet(USERS, 0, 9, torch.tensor(numbers), first.tensors)
    with pytest.raises(ValueError, match="row numbers of table user must be"):
        store.save(model.snapshot((wrong, *others), "samples-000000000000"))


def test_a_delta_cannot_be_older_than_its_parent(tmp_path: Path) -> None:
    store, model = tight_store(tmp_path), Model(samples=5)
    name = store.save(model.whole())
    store.load(name)
    model.samples = 4
    with pytest.raises((ValueError, SaveError)):
        store.save(model.delta(name))
    assert store.names() == [name]


STEPS = st.one_of(
    st.tuples(st.just("train"), USER_ROWS),
    st.tuples(st.sampled_from(["whole", "delta", "some", "compact", "load"]), USER_ROWS),
)


@given(steps=st.lists(STEPS, min_size=1, max_size=14), keep=st.integers(1, 3))
@settings(deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_any_course_equals_plain_rows(steps: list[tuple[str, list[int]]], keep: int) -> None:
    """Whole ones, deltas, priority saves, compactions and returns to an older one, against copies in memory."""
    forget_memory()
    root = memory_root()
    store, model = tight_store(root, keep), Model()
    kept: dict[str, State] = {}
    at = store.save(model.whole())
    kept[at] = model.copy()
    for kind, rows in steps:
        match kind:
            case "train":
                model.train(rows)
                continue
            case "whole":
                at = store.save(model.whole())
                kept[at] = model.copy()
                model.changed.clear()
            case "delta" | "some":
                chosen = None if kind == "delta" else rows
                model.state, delta = _laid_over(kept[at], model, chosen), model.delta(at, chosen)
                at = store.save(delta)
                kept[at] = model.copy()
                model.changed.clear()
            case "compact":
                whole = store.compact(at)
                kept[whole] = kept[at]
            case _:
                names = store.names()
                at = names[rows[0] % len(names)]
                model.samples, model.state = store.load(at).samples, kept[at]
                model.state = model.copy()
                model.changed.clear()
                continue
        for name in store.names():
            assert_state(tight_store(root).open(name), kept[name])
    assert_state(tight_store(root).open(), kept[store.names()[-1]])
    assert {name.removesuffix(".part") for name in open_files(root).names()} == set(store.names())


def _laid_over(parent: State, model: Model, chosen: list[int] | None) -> State:
    """The parent's rows with the chosen ones of the model."""
    rows = sorted(model.changed if chosen is None else set(chosen))
    state = model.copy()
    users = {name: tensor.clone() for name, tensor in parent["user"].items()}
    for name in ("weight", "momentum"):
        users[name][rows] = state["user"][name][rows]
    users["step"] = state["user"]["step"]
    return {"user": users, ITEMS.name: state[ITEMS.name]}


def test_each_server_keeps_its_own_count_through_a_compaction(tmp_path: Path) -> None:
    """The base is one run, the delta two: a server was split in between."""
    store, model = CheckpointStore(str(tmp_path)), Model()
    whole = model.whole()
    run = Rows(USERS, 0, {name: tensor.clone() for name, tensor in model.state["user"].items()})
    name = store.save(dataclasses.replace(whole, tables=(run, whole.tables[-1])))
    model.train([1])
    delta = model.delta(name)
    delta.tables[1].tensors["step"][0] = 8.0
    name = store.save(delta)
    for rewrite in (lambda name: name, store.compact):
        loaded = store.open(rewrite(name))
        found = [loaded.rows("user", *edges)["step"].item() for edges in ((0, 9), (9, 23), (8, 10))]
        assert found == [1.0, 8.0, 8.0]
