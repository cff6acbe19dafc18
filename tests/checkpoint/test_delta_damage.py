"""Chains of checkpoints with files gone, cut or lying, and saves cut off by a full disk: never wrong rows."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoint_helpers import BASE, FIRST, SECOND, Model, State, assert_state, chain, flip, model_on, tight_store

from shadowsync.checkpoint.format import MANIFEST, DamagedCheckpoint, Manifest, Piece, Scattered, decode, encode
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.errors import CheckpointError, SaveError

OLD = "samples-000000000000"
WHOLE = f"{SECOND}-whole"


@pytest.fixture
def states(tmp_path: Path) -> dict[str, State]:
    """An old whole checkpoint, then a whole one with two deltas on it."""
    model = Model()
    tight_store(tmp_path).save(model.whole())
    _, states = chain(tmp_path, keep=9)
    return {OLD: model.copy(), **states}


def files_of(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.glob("*/*"))


def survivor(root: Path, file: str) -> str:
    """The newest state that is left without a file: all that builds on it needs its users, and nothing else of it."""
    folder, _, name = file.partition("/")
    manifest = decode((root / folder / MANIFEST).read_bytes(), "here")
    needed = {MANIFEST, *(piece.file for piece in manifest.pieces if piece.table == "user")}
    if folder == OLD or (folder != SECOND and name not in needed):
        return SECOND
    return {BASE: OLD, FIRST: BASE, SECOND: FIRST}[folder]


HARMS: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": flip,
}


@pytest.mark.parametrize("harm", HARMS)
def test_with_any_file_harmed_the_newest_whole_state_loads(tmp_path: Path, states: dict[str, State], harm: str) -> None:
    files = files_of(tmp_path)
    assert len(files) > 15
    for file in files:
        path = tmp_path / file
        content, left = path.read_bytes(), survivor(tmp_path, file)
        HARMS[harm](path)
        loaded = tight_store(tmp_path).load()
        assert loaded.name == left, file
        assert_state(loaded, states[loaded.name])
        gone = harm == "removed" and file.endswith(MANIFEST)  # a folder without its manifest is no checkpoint
        told = [name for name in states if name > loaded.name and not (gone and name == file.partition("/")[0])]
        assert len(loaded.skipped) == bool(told), file
        for sentence in loaded.skipped:
            like = f", like {len(told) - 1} before it," if len(told) > 1 else ""
            assert sentence.startswith(f"{told[-1]}{like} cannot be loaded"), file
            lost = 3 - loaded.samples
            assert f"the {lost} samples trained after {loaded.name} are lost: {tmp_path}/{file}" in sentence, file
            assert "\n" not in sentence
        path.write_bytes(content)
    assert tight_store(tmp_path).load().skipped == ()


def test_each_defect_is_told_of_once(tmp_path: Path, states: dict[str, State]) -> None:
    """The newest is damaged itself, and what it and another build on as well."""
    model = model_on(states)
    tight_store(tmp_path, keep=9).save(model.delta(SECOND))
    flip(next((tmp_path / FIRST).glob("rows-*")))
    (tmp_path / "samples-000000000004" / "dense.safetensors").unlink()
    loaded = tight_store(tmp_path).load()
    assert loaded.name == BASE
    assert [sentence.partition(" cannot")[0] for sentence in loaded.skipped] == [
        f"samples-{model.samples:012d}",
        f"{SECOND}, like 1 before it,",
    ]


@pytest.mark.parametrize("missing", [BASE, FIRST])
def test_without_a_link_the_chain_behind_it_is_lost(tmp_path: Path, states: dict[str, State], missing: str) -> None:
    shutil.rmtree(tmp_path / missing)
    store = tight_store(tmp_path)
    loaded = store.load()
    assert_state(loaded, states[OLD if missing == BASE else BASE])
    assert loaded.skipped[0] == (
        f"{SECOND}{', like 1 before it,' if missing == BASE else ''} cannot be loaded, so the {3 - loaded.samples} "
        f"samples trained after {loaded.name} are lost: "
        f"{tmp_path}/{missing}/{MANIFEST} is missing: use an older checkpoint, or copy this one again"
    )
    with pytest.raises(DamagedCheckpoint, match=f"{missing}/{MANIFEST} is missing"):
        store.load(SECOND)


def test_where_a_state_is_there_twice_one_of_both_is_enough(tmp_path: Path, states: dict[str, State]) -> None:
    """As after a compaction that was killed before it removed what it replaces."""
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path, kept)
    tight_store(tmp_path, keep=9).compact(FIRST)
    shutil.copytree(kept / FIRST, tmp_path / FIRST)
    shutil.rmtree(kept)
    for folder in (FIRST, f"{FIRST}-whole"):
        for path in (tmp_path / folder).glob("rows-*"):
            content = path.read_bytes()
            flip(path)
            loaded = tight_store(tmp_path).load()
            assert (loaded.name, loaded.skipped) == (SECOND, ())
            assert_state(loaded, states[SECOND])
            path.write_bytes(content)
    assert tight_store(tmp_path).compact(FIRST) == f"{FIRST}-whole", "it is there"
    assert (tmp_path / FIRST).exists()
    flip(tmp_path / SECOND / "dense.safetensors")
    flip(tmp_path / f"{FIRST}-whole" / "dense.safetensors")
    loaded = tight_store(tmp_path).load()
    assert loaded.name == FIRST
    assert loaded.skipped[1].startswith(f"{FIRST}-whole cannot be loaded, so {FIRST}, of as many samples, takes its")
    assert_state(loaded, states[FIRST])


def test_a_compaction_of_what_is_damaged_writes_nothing(tmp_path: Path, states: dict[str, State]) -> None:
    flip(next((tmp_path / FIRST).glob("rows-*")))
    with pytest.raises(SaveError, match=rf"{SECOND} could not be rewritten as a whole \(.* is not what was written"):
        tight_store(tmp_path).compact(SECOND)
    assert sorted(path.name for path in tmp_path.iterdir()) == list(states)


def scattered(manifest: Manifest) -> Piece:
    return next(piece for piece in manifest.pieces if piece.scattered is not None)


def changed_piece(**changes: object) -> Callable[[Manifest], Manifest]:
    def change(manifest: Manifest) -> Manifest:
        old = scattered(manifest)
        new = msgspec.structs.replace(old, **changes)
        return msgspec.structs.replace(manifest, pieces=tuple(new if p is old else p for p in manifest.pieces))

    return change


def changed_numbers(**changes: object) -> Callable[[Manifest], Manifest]:
    def change(manifest: Manifest) -> Manifest:
        old = scattered(manifest).scattered
        assert old is not None
        numbers = msgspec.structs.replace(old.numbers, **changes)
        return changed_piece(scattered=Scattered(old.stop, numbers))(manifest)

    return change


def changed_users(change: Callable[[Piece], Piece], rows: int = 23) -> Callable[[Manifest], Manifest]:
    """Consistent in itself, so that only the comparison with the parent can find it."""

    def changed(manifest: Manifest) -> Manifest:
        tables = tuple(dataclasses.replace(t, rows=rows) if t.name == "user" else t for t in manifest.tables)
        pieces = tuple(change(piece) if piece.table == "user" else piece for piece in manifest.pieces)
        return msgspec.structs.replace(manifest, tables=tables, pieces=pieces)

    return changed


def longer(piece: Piece) -> Piece:
    assert piece.scattered is not None
    return (
        msgspec.structs.replace(piece, scattered=Scattered(24, piece.scattered.numbers)) if piece.stop == 23 else piece
    )


HOSTILE: dict[str, Callable[[Manifest], Manifest]] = {
    "itself": lambda m: msgspec.structs.replace(m, parent=SECOND),
    "newer": lambda m: msgspec.structs.replace(m, parent="samples-000000000004"),
    "elsewhere": lambda m: msgspec.structs.replace(m, parent="../samples-000000000001"),
    "no name": lambda m: msgspec.structs.replace(m, parent=""),
    "nobody": lambda m: msgspec.structs.replace(m, parent=None),
    "other width": lambda m: msgspec.structs.replace(
        m, tables=tuple(dataclasses.replace(t, rows=t.rows + (t.name == "user")) for t in m.tables)
    ),
    "other tensors than its parent": changed_users(lambda piece: msgspec.structs.replace(piece, wide=())),
    "more rows than its parent": changed_users(longer, 24),
    "other form": changed_piece(wide=()),
    "more rows than the run": changed_piece(rows=30),
    "negative rows": changed_piece(rows=-1),
    "run that overlaps": changed_piece(start=1),
    "half whole": changed_piece(scattered=None),
    "numbers of another type": changed_numbers(dtype="F64"),
    "numbers of another length": changed_numbers(shape=(0,)),
    "numbers in two dimensions": changed_numbers(shape=(1, 1)),
    "numbers beyond the file": changed_numbers(offset=2**40),
    "numbers over the rows": lambda m: changed_numbers(offset=scattered(m).tensors[0].offset)(m),
    "huge run": lambda m: changed_piece(scattered=Scattered(2**62, scattered(m).scattered.numbers))(m),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_delta_that_lies_is_refused(tmp_path: Path, states: dict[str, State], case: str) -> None:
    path = tmp_path / SECOND / MANIFEST
    path.write_bytes(encode(HOSTILE[case](decode(path.read_bytes(), "here"))))
    loaded = tight_store(tmp_path).load()
    assert_state(loaded, states[FIRST])
    assert len(loaded.skipped) == 1


@pytest.mark.parametrize("numbers", [[3, 3], [5, 3], [-1, 3], [3, 23], [3, 2**62]], ids=str)
def test_numbers_that_lie_are_refused(
    tmp_path: Path, states: dict[str, State], numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written with right checksums by somebody who leaves the checks out."""
    monkeypatch.setattr("shadowsync.checkpoint.snapshot._check_kinds", lambda *_: None)
    snapshot = model_on(states).delta(SECOND, [3, 4])
    object.__setattr__(snapshot.tables[0], "numbers", torch.tensor(numbers))
    store = CheckpointStore(str(tmp_path), 9)
    name = store.save(snapshot)
    loaded = tight_store(tmp_path).load()
    assert loaded.name == SECOND
    assert "has impossible row numbers for table user" in loaded.skipped[0]
    with pytest.raises(CheckpointError, match="impossible row numbers"):
        store.open(name).rows("user", 0, 5)
