"""Whatever happens to the files: an older checkpoint loads, or one sentence says what is wrong. Never wrong data."""

import dataclasses
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from checkpoint_helpers import assert_holds, flip, make_snapshot, small_store
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.checkpoint import format as manifests
from shadowsync.checkpoint.files import LocalFiles
from shadowsync.checkpoint.format import MANIFEST, DamagedCheckpoint, Manifest, TensorEntry, decode, encode
from shadowsync.errors import CheckpointError

NEWEST = "samples-000000000020"
FILES = ["dense.safetensors", MANIFEST, "random.safetensors", *(f"rows-{i:05d}.safetensors" for i in range(4))]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a checkpoint of 10 samples and one of 20."""
    for samples in (10, 20):
        small_store(tmp_path).save(make_snapshot(samples))
    assert sorted(path.name for path in (tmp_path / NEWEST).iterdir()) == FILES
    return tmp_path


def is_one_sentence(message: str) -> bool:
    return "\n" not in message and len(message) < 700 and "Traceback" not in message


def assert_falls_back(root: Path, defect: str) -> None:
    """The newest is left out with a sentence, and the one before it loads in full."""
    loaded = small_store(root).load()
    assert_holds(loaded, 10)
    assert len(loaded.skipped) == 1, defect
    assert loaded.skipped[0].startswith(
        f"{NEWEST} cannot be loaded, so the 10 samples trained after samples-000000000010"
    )
    assert is_one_sentence(loaded.skipped[0])
    with pytest.raises(CheckpointError) as caught:
        small_store(root).load(NEWEST).verify()
    assert is_one_sentence(str(caught.value))


def test_without_its_manifest_a_folder_is_no_checkpoint(root: Path) -> None:
    (root / NEWEST / MANIFEST).unlink()
    loaded = small_store(root).load()
    assert_holds(loaded, 10)
    assert loaded.skipped == ()


def positions(size: int) -> Iterator[int]:
    """Every border and many places between."""
    yield from {0, 1, 7, 8, 9, size // 2, size - 1, *range(0, size, 37)}


@pytest.mark.parametrize("file", FILES)
def test_a_file_cut_anywhere_longer_or_gone_is_never_loaded(root: Path, file: str) -> None:
    path = root / NEWEST / file
    content = path.read_bytes()
    for length in sorted(positions(len(content))):
        path.write_bytes(content[:length])
        assert_falls_back(root, f"{file} cut to {length}")
    path.write_bytes(content + b"\0")
    assert_falls_back(root, f"{file} longer")
    if file != MANIFEST:
        path.unlink()
        assert_falls_back(root, f"{file} gone")


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_never_loaded(root: Path, file: str) -> None:
    path = root / NEWEST / file
    content = path.read_bytes()
    for place in sorted(positions(len(content))):
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :])
        store = small_store(root)
        try:
            loaded = store.load()
        except CheckpointError as error:  # the format's number grew
            assert "format" in str(error)  # noqa: PT017
            assert file == MANIFEST
        else:
            assert_holds(loaded, 10)
            assert len(loaded.skipped) == 1


def test_rows_are_checked_when_they_are_read(root: Path) -> None:
    store = small_store(root)
    loaded = store.load(NEWEST)
    path = root / NEWEST / "rows-00000.safetensors"
    flip(path)
    content = path.read_bytes()
    with pytest.raises(DamagedCheckpoint, match=r"rows-00000.safetensors is not what was written"):
        loaded.rows("user", 0, 23)
    path.write_bytes(content[:-5])
    with pytest.raises(DamagedCheckpoint, match=r"rows-00000.safetensors ends before byte \d+ of \d+"):
        loaded.rows("user", 0, 23)
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match=r"rows-00000.safetensors is missing"):
        loaded.rows("user", 0, 23)


def test_where_nothing_can_be_loaded_the_newest_reason_is_given(root: Path) -> None:
    for name in ("samples-000000000010", NEWEST):
        (root / name / "dense.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"none of the 2 checkpoints of .*{NEWEST}/dense.safetensors is missing"):
        small_store(root).load()


def test_after_a_fall_back_the_damaged_one_goes_with_the_next_save(root: Path) -> None:
    (root / NEWEST / "dense.safetensors").unlink()
    store = small_store(root)
    assert store.load().samples == 10
    store.save(make_snapshot(15))
    assert store.names() == ["samples-000000000010", "samples-000000000015"]


def test_a_file_system_that_fails_is_not_taken_for_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: LocalFiles, path: str, start: int, stop: int) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalFiles, "read", denied)
    with pytest.raises(CheckpointError, match=f"{NEWEST}/manifest.json cannot be read: Permission denied"):
        small_store(root).load()


def test_a_newer_format_is_an_error_and_not_skipped(root: Path) -> None:
    path = root / NEWEST / MANIFEST
    path.write_bytes(b'{"format": 4, "unheard": "of"}')
    with pytest.raises(CheckpointError, match="has format 4 and this shadowsync reads up to 3: install"):
        small_store(root).load()


def test_a_manifest_too_large_is_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsync.checkpoint.loading.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(DamagedCheckpoint, match="more than any manifest"):
        small_store(root).load(NEWEST)


Change = Callable[[Manifest], Manifest]


def replaced(**changes: object) -> Change:
    return lambda m: msgspec.structs.replace(m, **changes)


def first(kind: str, **changes: object) -> Change:
    """Changes the first of the files, pieces or tables."""

    def change(m: Manifest) -> Manifest:
        one, *others = getattr(m, kind)
        replace = dataclasses.replace if kind == "tables" else msgspec.structs.replace
        return msgspec.structs.replace(m, **{kind: (replace(one, **changes), *others)})

    return change


def tensor(index: int = 0, **changes: object) -> Change:
    """Changes a tensor of the first piece."""

    def change(m: Manifest) -> Manifest:
        tensors = list(m.pieces[0].tensors)
        tensors[index] = msgspec.structs.replace(tensors[index], **changes)
        return first("pieces", tensors=tuple(tensors))(m)

    return change


def without_width(m: Manifest) -> Manifest:
    """Rows that take no bytes, so that any number of them fits into the file."""
    name, width = m.tables[0].name, {"weight": 0}
    pieces = []
    for piece in m.pieces:
        tensors = [
            msgspec.structs.replace(t, shape=(piece.rows, width.get(t.name, 1))[: len(t.shape)]) for t in piece.tensors
        ]
        pieces.append(msgspec.structs.replace(piece, tensors=tuple(tensors)) if piece.table == name else piece)
    return first("tables", dim=0)(msgspec.structs.replace(m, pieces=tuple(pieces)))


HUGE = 2**62
HOSTILE: dict[str, Change] = {
    "parent folder": first("files", name="../x.safetensors"),
    "absolute path": first("files", name="/etc/passwd"),
    "other kind of file": first("files", name="rows.pickle"),
    "unlisted file": first("files", name="rows-00009.safetensors"),
    "huge file": first("files", bytes=HUGE),
    "negative file": first("files", bytes=-1),
    "no checksums": first("files", crc32=()),
    "other size": lambda m: first("files", bytes=m.files[0].bytes - 1)(m),
    "file twice": lambda m: msgspec.structs.replace(m, files=(*m.files, m.files[0])),
    "huge tensor": tensor(shape=(HUGE, HUGE)),
    "negative shape": tensor(shape=(-1, 4)),
    "many dimensions": tensor(shape=(1,) * 9),
    "unknown dtype": tensor(dtype="PICKLE"),
    "other dtype": tensor(dtype="I32"),
    "negative offset": tensor(offset=-8),
    "inside the header's length": tensor(offset=4),
    "beyond the file": tensor(offset=HUGE),
    "over its neighbour": lambda m: tensor(1, offset=m.pieces[0].tensors[0].offset)(m),
    "name twice": lambda m: tensor(name=m.pieces[0].tensors[1].name)(m),
    "no weight": tensor(name="weigth"),
    "rows of nobody": first("pieces", table="nobody"),
    "rows beyond": first("pieces", start=5),
    "rows missing": lambda m: msgspec.structs.replace(m, pieces=m.pieces[1:]),
    "rows twice": lambda m: msgspec.structs.replace(m, pieces=(m.pieces[0], *m.pieces)),
    "no rows": first("pieces", rows=0),
    "negative rows": first("pieces", rows=-4),
    "huge rows": first("pieces", rows=HUGE),
    "other state": lambda m: first("pieces", tensors=m.pieces[0].tensors[:1])(m),
    "huge table": first("tables", rows=HUGE),
    "other width": first("tables", dim=5),
    "table without rows": first("tables", rows=0),
    "table without width": without_width,
    "table twice": lambda m: msgspec.structs.replace(m, tables=(*m.tables, m.tables[0])),
    "negative samples": replaced(samples=-1),
    "no blocks": replaced(block_bytes=0),
    "huge blocks": replaced(block_bytes=HUGE),
    "config is a list": replaced(config=msgspec.Raw(b"[]")),
    "deep nesting": replaced(extra=msgspec.Raw(b"[" * 100_000 + b"]" * 100_000)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_manifest_that_lies_is_refused(root: Path, case: str) -> None:
    """The checksum is right: whoever made these knew how."""
    path = root / NEWEST / MANIFEST
    manifest = decode(path.read_bytes(), "here")
    path.write_bytes(encode(HOSTILE[case](manifest)))
    assert_falls_back(root, case)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"null",
        b"[1]",
        b"\xff\xfe",
        b'{"format": "1"}',
        b'{"format": 1}',
        b'{"format": 0, "crc32": 0, "body": {}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_manifest_is_refused(root: Path, content: bytes) -> None:
    (root / NEWEST / MANIFEST).write_bytes(content)
    assert_falls_back(root, repr(content[:20]))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda s: (
            st.lists(s)
            | st.dictionaries(st.sampled_from(["samples", "config", "tables", "files", "pieces", "name"]), s)
        ),
    )
)
@settings(deadline=None, max_examples=30, derandomize=True)
def test_a_body_of_any_json_is_refused(body: object) -> None:
    raw = json.dumps(body).encode()
    content = b'{"format": 1, "crc32": %d, "body": %s}' % (zlib.crc32(raw), raw)
    with pytest.raises(DamagedCheckpoint):
        decode(content, "here")


def test_the_manifest_survives_its_own_writing(root: Path) -> None:
    content = (root / NEWEST / MANIFEST).read_bytes()
    assert encode(decode(content, "here")) == content
    assert manifests.FORMAT == 3
    assert content.startswith(b'{"format":1,')


def forged(manifest: Manifest) -> bytes:
    """As `encode`, of any size."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode({"format": 1, "crc32": zlib.crc32(body), "body": msgspec.Raw(body)})


def with_random(tensors: tuple[TensorEntry, ...]) -> Change:
    return lambda m: msgspec.structs.replace(m, random=msgspec.structs.replace(m.random, tensors=tensors))


MANY_TENSORS = with_random(tuple(TensorEntry(f"t{n}", "F32", (0,), 8) for n in range(manifests.MAX_ENTRIES)))
LARGE_CONFIGURATION = replaced(config=msgspec.Raw(b'{"a":[' + b"[]," * 2_000_000 + b"1]}"))
FAR_TOO_MUCH = {
    "more than any manifest": MANY_TENSORS,
    "lists a tensor of random.safetensors twice": with_random((TensorEntry("t", "F32", (0,), 8),) * 2),
    "has a configuration of 6000009 bytes": LARGE_CONFIGURATION,
}


@pytest.mark.parametrize("defect", FAR_TOO_MUCH)
def test_a_manifest_of_far_too_much_is_refused_before_it_is_looked_through(
    root: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    looked: list[object] = []
    monkeypatch.setattr(manifests, "_table_defects", lambda manifest: looked.append(manifest) or ())
    honest = decode((root / NEWEST / MANIFEST).read_bytes(), "")
    looked.clear()
    with pytest.raises(DamagedCheckpoint, match=defect):
        decode(forged(FAR_TOO_MUCH[defect](honest)), "manifest")
    assert looked == []


def test_a_manifest_that_could_not_be_read_again_is_not_written(root: Path) -> None:
    honest = decode((root / NEWEST / MANIFEST).read_bytes(), "")
    for forge in (MANY_TENSORS, LARGE_CONFIGURATION):
        with pytest.raises(CheckpointError, match="more than can be read again"):
            encode(forge(honest))
