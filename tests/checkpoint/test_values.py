"""Rows in fewer bytes: what comes back, that it comes back the same ever after, and files that lie about it."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoint_helpers import (
    BASE,
    EDGES,
    FIRST,
    ITEMS,
    USERS,
    Model,
    State,
    assert_state,
    cut,
    flip,
    forget_memory,
    full_table,
    memory_root,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from shadowsync.checkpoint.format import MANIFEST, Manifest, RowTensor, decode, encode
from shadowsync.checkpoint.snapshot import Snapshot
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.checkpoint.values import SQUARES, RowValues, row_values
from shadowsync.embedding.optimizers import Extent, RowOptimizer
from shadowsync.embedding.table import Rows
from shadowsync.errors import CheckpointError
from shadowsync.registry import members

KINDS = {name: kind() for name, kind in members("shadowsync.checkpoint", RowValues).items()}
EACH = pytest.mark.parametrize("name", KINDS)
OF_WHAT = pytest.mark.parametrize("squares", [False, True], ids=["numbers", "squares"])
ERROR = {"bf16": 1 / 256, "int8": 1 / 253, "int4": 1 / 13.9}
"""Most that a number may be off, over the largest magnitude of its row."""
ORDINARY = st.floats(2**-100, 2**100, width=32) | st.floats(-(2**100), -(2**-100), width=32) | st.just(0.0)


@st.composite
def rows_of(draw: st.DrawFn, numbers: st.SearchStrategy[float]) -> Tensor:
    """`[K, D]`"""
    count, dim = draw(st.integers(0, 4)), draw(st.integers(1, 9))
    drawn = draw(st.lists(numbers, min_size=count * dim, max_size=count * dim))
    return torch.tensor(drawn, dtype=torch.float32).view(count, dim)


def back(kind: RowValues, rows: Tensor, squares: bool) -> Tensor:
    stored, found = kind.encode(rows, squares), torch.full(rows.shape, -7.0)
    assert (stored.dtype, stored.shape) == (torch.uint8, (len(rows), kind.row_bytes(rows.shape[1])))
    kind.decode(stored, squares, found)
    return found


# --- rows by themselves ----------------------------------------------------------------------------------------------


@EACH
@OF_WHAT
@given(rows=rows_of(st.floats(width=32)))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_what_came_back_once_comes_back_for_ever(name: str, squares: bool, rows: Tensor) -> None:
    """Any numbers: huge, subnormal, NaN, infinite, rows of zeros, none at all."""
    kind = KINDS[name]
    rows = rows.abs() if squares else rows
    once = back(kind, rows, squares)
    torch.testing.assert_close(back(kind, once, squares), once, rtol=0, atol=0, equal_nan=True)
    finite = rows.isfinite().all(1)
    assert torch.equal(once.isfinite().all(1), finite)
    assert torch.equal(kind.encode(once, squares)[finite], kind.encode(rows, squares)[finite])
    if squares:
        assert torch.equal((once > 0)[finite], (rows > 0)[finite])


@EACH
@given(rows=rows_of(ORDINARY))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_numbers_are_off_by_no_more_than_is_said(name: str, rows: Tensor) -> None:
    largest = rows.abs().amax(1, keepdim=True).double()
    assert bool(((back(KINDS[name], rows, False).double() - rows).abs() <= ERROR[name] * largest * (1 + 1e-6)).all())


@EACH
@given(rows=rows_of(ORDINARY))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_squares_make_no_step_much_longer(name: str, rows: Tensor) -> None:
    """Nor roots larger than by one step, which is the 15th part of the largest at most."""
    roots = rows.abs().double().sqrt()
    found = back(KINDS[name], rows.abs(), True).double().sqrt()
    assert bool((found >= roots * (2 / 3) * (1 - 1e-6)).all())
    assert bool((found <= (roots + roots.amax(1, keepdim=True) / 14.9) * (1 + 1e-6)).all())


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("bf16", "bf16 bf16 bf16 bf16"), ("int8", "bf16 bf16 int8 int8"), ("int4", "bf16 int4 int4 int4")],
)
def test_where_a_scale_does_not_pay_numbers_are_bf16(name: str, wanted: str) -> None:
    assert " ".join(KINDS[name].of_width(dim).name for dim in (1, 2, 3, 16)) == wanted


def test_bytes_of_a_row() -> None:
    assert [[KINDS[name].row_bytes(dim) for dim in (1, 15, 16)] for name in ("bf16", "int8", "int4")] == [
        [2, 30, 32],
        [3, 17, 18],
        [3, 10, 10],
    ]


def test_whoever_adds_an_optimizer_says_whether_its_state_is_squares() -> None:
    optimizers = members("shadowsync.embedding", RowOptimizer).values()
    of_rows = {name for one in optimizers for name, extent in one.state.items() if extent is not Extent.SHARD}
    assert of_rows == SQUARES | {"exp_avg"}


# --- in checkpoints --------------------------------------------------------------------------------------------------


def store_of(root: Path | str, name: str, piece_bytes: int = 160, keep: int = 9) -> CheckpointStore:
    return CheckpointStore(str(root), keep, row_values(name), piece_bytes=piece_bytes)


def rounded(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """What comes back of a table's tensors; those of the table as a whole as they are, and with `fp32` all."""
    if name == "fp32":
        return tensors
    found = dict(tensors)
    for what in tensors.keys() - {"step"}:
        rows = tensors[what].reshape(len(tensors[what]), -1)
        found[what] = back(KINDS[name].of_width(rows.shape[1]), rows, what in SQUARES).view_as(tensors[what])
    return found


def state_of(model: Model, name: str) -> State:
    return {table: rounded(tensors, name) for table, tensors in model.copy().items()}


def with_deltas(root: Path | str, *names: str) -> tuple[list[str], list[State]]:
    """A whole checkpoint and deltas on it, each in values of its own, and what each gives back."""
    model = Model()
    model.train(range(USERS.rows))
    saved = [store_of(root, names[0]).save(model.whole())]
    states = [state_of(model, names[0])]
    for name, rows in zip(names[1:], ([0, 3, 8, 9, 22], [3, 10, 11, 15]), strict=False):
        model.changed.clear()
        model.train(rows)
        saved.append(store_of(root, name).save(model.delta(saved[-1])))
        now = state_of(model, name)
        users = {key: tensor.clone() for key, tensor in states[-1]["user"].items()}
        for key in ("weight", "momentum"):
            users[key][rows] = now["user"][key][rows]
        states.append({**now, "user": {**users, "step": now["user"]["step"]}})
    return saved, states


@pytest.mark.parametrize(
    "names",
    [("int8",) * 3, ("int4",) * 3, ("bf16",) * 3, ("fp32", "int4", "bf16"), ("int8", "fp32", "int4")],
    ids="-".join,
)
def test_each_row_comes_back_as_the_newest_that_holds_it_was_written(root: str, names: tuple[str, ...]) -> None:
    saved, states = with_deltas(root, *names)
    for name, state in zip(saved, states, strict=True):
        assert_state(CheckpointStore(root).open(name), state)
    loaded = CheckpointStore(root).load()
    (sentence,) = loaded.skipped
    assert sentence.startswith(f"{saved[-1]} holds rows rounded ")
    assert "train.save_values" in sentence
    assert loaded.exact, "no row is older than another"


@EACH
def test_a_chain_is_rewritten_to_the_same_rows(tmp_path: Path, name: str) -> None:
    saved, states = with_deltas(tmp_path, name, name, name)
    store = store_of(tmp_path, name)
    assert_state(store.open(store.compact(saved[-1])), states[-1])


def test_the_dense_part_and_what_belongs_to_a_table_as_a_whole_are_exact(tmp_path: Path) -> None:
    model = Model(samples=1)
    third = torch.rand(7) / 3
    model.state["user"]["step"] = torch.rand(1) / 3
    whole = model.whole()
    store_of(tmp_path, "int4").save(Snapshot({}, 1, whole.tables, {"final": third}, {}, {}, {}))
    loaded = CheckpointStore(str(tmp_path)).load()
    assert torch.equal(loaded.dense["final"], third)
    assert torch.equal(loaded.rows("user", 0, 3)["step"], model.state["user"]["step"])


def test_files_are_smaller_and_safetensors(tmp_path: Path) -> None:
    saved, _ = with_deltas(tmp_path, "int4", "int4")
    found: dict[str, Tensor] = {}
    for path in sorted((tmp_path / saved[-1]).glob("rows-*")):
        found |= load_file(path)
    assert {(key.rpartition(".")[2], tensor.dtype) for key, tensor in found.items()} == {
        ("weight", torch.uint8),
        ("momentum", torch.uint8),
        ("step", torch.float32),
        ("numbers", torch.int32),
    }
    widths = {(key.partition("[")[0], tensor.shape[1]) for key, tensor in found.items() if key.endswith("weight")}
    assert widths == {("user", 4), (ITEMS.name, 3)}, "two bytes of a scale, and half a byte for each number"


def test_without_them_a_checkpoint_is_what_it_was(tmp_path: Path) -> None:
    """So that those of before are read, and versions of before read those of today."""
    saved, _ = with_deltas(tmp_path, "fp32", "fp32", "int8")
    formats, keys = [], []
    for name in saved:
        content = msgspec.json.decode((tmp_path / name / MANIFEST).read_bytes())
        formats.append(content["format"])
        keys.append({key for piece in content["body"]["pieces"] for tensor in piece["tensors"] for key in tensor})
    plain = {"name", "dtype", "shape", "offset"}
    assert formats == [1, 2, 3]
    assert keys == [plain, plain, plain | {"values", "squares"}]
    found = load_file(next(iter(sorted((tmp_path / saved[0]).glob("rows-*")))))
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


ROWS = st.integers(0, USERS.rows)


@EACH
@given(
    edges=st.lists(ROWS, max_size=4),
    piece_bytes=st.integers(1, 700),
    ranges=st.lists(st.tuples(ROWS, ROWS), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=25, derandomize=True)
def test_any_cut_in_any_range_out(name: str, edges: list[int], piece_bytes: int, ranges: list[tuple[int, int]]) -> None:
    forget_memory()
    root, whole = memory_root(), full_table(USERS, 0)
    store_of(root, name, piece_bytes).save(Snapshot({}, 1, cut(USERS, whole, edges), {}, {}, {}, {}))
    loaded, wanted = CheckpointStore(root).load(), rounded(whole, name)
    for start, stop in (sorted(pair) for pair in ranges):
        if start < stop:
            for key, tensor in loaded.rows("user", start, stop).items():
                assert torch.equal(tensor, wanted[key][start:stop]), key


def test_tables_larger_than_what_is_coded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsync.checkpoint.snapshot.CHUNK", 3 * USERS.dim)
    whole = full_table(USERS, 0)
    store_of(tmp_path, "int8", 1 << 20).save(Snapshot({}, 1, (Rows(USERS, 0, whole),), {}, {}, {}, {}))
    found = CheckpointStore(str(tmp_path)).load().rows("user", 0, USERS.rows)
    assert all(torch.equal(found[key], tensor) for key, tensor in rounded(whole, "int8").items())


# --- damage ----------------------------------------------------------------------------------------------------------


def test_damage_leads_to_the_one_before(tmp_path: Path) -> None:
    _, states = with_deltas(tmp_path, "int8", "int8")
    flip(min((tmp_path / FIRST).glob("rows-*")))
    loaded = CheckpointStore(str(tmp_path)).load()
    assert_state(loaded, states[0])
    assert [sentence.partition(" ")[0] for sentence in loaded.skipped] == [FIRST, BASE]
    assert "is not what was written" in loaded.skipped[0]


def changed(**changes: object) -> Callable[[Manifest], Manifest]:
    """Another entry for the weights of the first run of users."""

    def change(manifest: Manifest) -> Manifest:
        first, *others = manifest.pieces
        weight, *state = first.tensors
        assert isinstance(weight, RowTensor)
        tensors = (msgspec.structs.replace(weight, **changes), *state)
        return msgspec.structs.replace(manifest, pieces=(msgspec.structs.replace(first, tensors=tensors), *others))

    return change


HOSTILE = {
    "more bytes than there are": changed(values="bf16"),
    "as they are": changed(values="fp32"),
    "whole numbers": changed(dtype="I32"),
    "other width": changed(shape=(EDGES[1], 6)),
    "far wider": changed(shape=(EDGES[1], 2**62)),
    "more rows": changed(shape=(2**62, 4)),
    "no rows": changed(shape=()),
    "negative": changed(shape=(EDGES[1], -4)),
    "beyond the file": changed(offset=2**62),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    _, states = with_deltas(tmp_path, "int8")
    model = Model(samples=3, state=states[0])
    name = store_of(tmp_path, "int8", 1 << 20).save(model.whole())
    path = tmp_path / name / MANIFEST
    path.write_bytes(encode(HOSTILE[case](decode(path.read_bytes(), "here"))))
    loaded = CheckpointStore(str(tmp_path)).load()
    assert loaded.name == BASE
    assert loaded.skipped[0].startswith(f"{name} cannot be loaded")
    assert "\n" not in loaded.skipped[0]


def test_whole_numbers_are_not_held_in_fewer_bytes(tmp_path: Path) -> None:
    """The state of another optimizer, say, of which nothing else is known."""
    (name,), _ = with_deltas(tmp_path, "int8")
    path = tmp_path / name / MANIFEST
    manifest = decode(path.read_bytes(), "here")
    pieces = []
    for piece in manifest.pieces:
        weight, momentum = piece.tensors
        momentum = msgspec.structs.replace(momentum, dtype="I32" if piece.table == "user" else "F32")
        pieces.append(msgspec.structs.replace(piece, tensors=(weight, momentum)))
    path.write_bytes(encode(msgspec.structs.replace(manifest, pieces=tuple(pieces))))
    with pytest.raises(CheckpointError, match="holds in fewer bytes what is no float32 in table user"):
        CheckpointStore(str(tmp_path)).load()


@pytest.mark.parametrize("values", ["bf16", "int8", "int4"])
def test_a_state_without_numbers_is_not_held_in_fewer_bytes(tmp_path: Path, values: str) -> None:
    (name,), _ = with_deltas(tmp_path, values)
    path = tmp_path / name / MANIFEST
    manifest = decode(path.read_bytes(), "here")
    pieces = []
    for piece in manifest.pieces:
        weight, momentum = piece.tensors
        empty = msgspec.structs.replace(momentum, shape=(piece.rows, 0), values=values)
        pieces.append(msgspec.structs.replace(piece, tensors=(weight, empty)))
    path.write_bytes(encode(msgspec.structs.replace(manifest, pieces=tuple(pieces))))
    with pytest.raises(CheckpointError, match="holds in fewer bytes what is no float32"):
        CheckpointStore(str(tmp_path)).load()


def test_values_in_a_manifest_of_before_there_were_any_are_refused(tmp_path: Path) -> None:
    (name,), _ = with_deltas(tmp_path, "int8")
    path = tmp_path / name / MANIFEST
    content = path.read_bytes()
    assert content.startswith(b'{"format":3')
    path.write_bytes(content.replace(b'{"format":3', b'{"format":1', 1))
    with pytest.raises(CheckpointError, match="has format 1, which has no rows in bf16"):
        CheckpointStore(str(tmp_path)).load()


def test_values_of_a_newer_version_are_an_error_and_not_skipped(tmp_path: Path) -> None:
    (name,), _ = with_deltas(tmp_path, "int8")
    path = tmp_path / name / MANIFEST
    content = path.read_bytes()
    body = msgspec.json.decode(content)["body"]
    for piece in body["pieces"]:
        piece["tensors"][0]["values"] = "int2"
    path.write_bytes(encode(msgspec.json.decode(msgspec.json.encode(body), type=Manifest)))
    with pytest.raises(
        CheckpointError, match="holds rows in 'int2', which this shadowsync does not know: install"
    ) as e:
        CheckpointStore(str(tmp_path)).load()
    assert "\n" not in str(e.value)
