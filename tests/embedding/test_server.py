"""The server: what it refuses, and rows in and out."""

import itertools
from dataclasses import replace

import pytest
import torch
from embedding_cases import ADAGRAD, ADAM, BY_NAME, EACH, SGD, dense_gradient, jagged, random_ids, table, whole

from shadowsync.data.batch import Jagged
from shadowsync.embedding.memory import ShardMemory
from shadowsync.embedding.requests import KNOWN_REQUESTS, Lookup, RowLookup
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Rows, RowSet, Shard, Table
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import CheckpointError, DataError

TABLES = [table("a", 9, 4), table("b", 20, 6)]
GOOD = jagged([[[0, 8], []], [[19], [3]]], 2)


def server(shards=None, optimizer=ADAGRAD, seed=0, storage=TorchStorage):
    return EmbeddingServer(whole(TABLES) if shards is None else shards, storage, optimizer, seed)


def trained(optimizer=ADAGRAD):
    made = server(optimizer=optimizer, seed=1)
    for step in range(3):
        lookup = Lookup((0, 1), random_ids([9, 20], 8, step))
        made.push(lookup, [dense_gradient(8, 10, step)], 0.1)
    return made


def copied(state):
    return [Rows(rows.table, rows.start, {name: t.clone() for name, t in rows.tensors.items()}) for rows in state]


@EACH
@pytest.mark.parametrize(
    "wrong",
    [
        {"values": GOOD.values.int()},
        {"values": GOOD.values[:-1]},
        {"values": GOOD.values.view(2, 2)},
        {"offsets": GOOD.offsets[:-1]},
        {"offsets": GOOD.offsets.int()},
        {"offsets": GOOD.offsets + 1},
        {"offsets": torch.tensor([0, 3, 2, 3, 4])},
        {"offsets": torch.tensor([0, 2, 2, 3, 5])},
        {"offsets": None, "values": GOOD.values[:-1]},
        {"weights": torch.ones(3)},
        {"weights": torch.ones(4, dtype=torch.float64)},
        {"feature_count": 1},
        {"samples": 3},
    ],
)
def test_tensors_that_do_not_fit_each_other_reach_no_operator(storage, wrong):
    made = server(storage=storage)
    lookup = Lookup((0, 1), replace(GOOD, **wrong))
    for call in (lambda: made.pull(lookup), lambda: made.push(lookup, [torch.zeros(2, 10)], 0.1)):
        with pytest.raises(DataError, match=r"do not fit a look-up of 2 features: values int"):
            call()
    assert made.pull(Lookup((0, 1), GOOD))[0].shape == (2, 10)


@EACH
def test_ids_are_checked_at_the_push_too(storage):
    made = server(storage=storage)
    ids = jagged([[[0, 9], []], [[19], [3]]], 2)
    with pytest.raises(DataError, match=r"^feature a: id 9 is not a row of table a, which has rows 0 to 8; give"):
        made.push(Lookup((0, 1), ids), [torch.zeros(2, 10)], 0.1)


def test_an_id_of_a_part_is_named_as_the_user_knows_it():
    made = server([Shard(TABLES[1], 15, 20)])
    with pytest.raises(DataError, match=r"^feature b: id 20 is not a row of table b, which has rows 0 to 19"):
        made.pull(Lookup((0,), Jagged(torch.tensor([4, 5]), None, None, 1, 2)))


@pytest.mark.parametrize("slots", [(2,), (-1,)])
def test_an_unknown_slot_is_refused(slots):
    with pytest.raises(DataError, match=rf"slot {slots[0]} is asked for and this server has 2 slots"):
        server().pull(Lookup(slots, random_ids([3], 2, 0)))


@pytest.mark.parametrize(
    ("shards", "rows", "message"),
    [
        ((0, 2), [1], "shard 2 is asked for and this server has 2 shards"),
        ((-1,), [1], "shard -1 is asked for"),
        ((0, 1), [3, 3], "distinct and in ascending order"),
        ((0, 1), [4, 3], "distinct and in ascending order"),
        ((0, 1), [-1, 3], "1 of 2 row numbers are not rows of the shards"),
        ((0, 1), [28, 29], "1 of 2 row numbers are not rows of the shards"),
        ((1,), [8, 9], "1 of 2 row numbers are not rows of the shards"),
        ((), [0], "1 of 1 row numbers are not rows of the shards"),
        ((0,), [[0]], r"row numbers are int64 \[K\], not rows int64\[1, 1\]"),
        ((0,), [0.0], r"row numbers are int64 \[K\], not rows float32\[1\]"),
    ],
)
def test_row_numbers_that_are_none_are_refused(shards, rows, message):
    made, lookup = server(), RowLookup(shards, torch.tensor(rows))
    before = copied(made.state())
    for call in (lambda: made.pull(lookup), lambda: made.push(lookup, [torch.zeros(1, 4)] * 2, 0.1)):
        with pytest.raises(DataError, match=message):
            call()
    torch.testing.assert_close([dict(r.tensors) for r in made.state()], [r.tensors for r in before], rtol=0, atol=0)


@pytest.mark.parametrize(
    "gradients",
    [
        [],
        [torch.zeros(2, 4)],
        [torch.zeros(2, 4), torch.zeros(2, 6)],
        [torch.zeros(2, 4), torch.zeros(1, 6).double()],
    ],
)
def test_gradients_of_other_rows_are_refused(gradients):
    with pytest.raises(DataError, match=r"do not fit a look-up of float32 \[2, 4\], \[1, 6\]"):
        server().push(RowLookup((0, 1), torch.tensor([0, 8, 9])), gradients, 0.1)


def test_no_rows_of_no_shards_are_nothing():
    made = server()
    assert [found.shape for found in made.pull(RowLookup((), torch.zeros(0, dtype=torch.int64)))] == [
        (0, 4),
        (0, 6),
    ]


def test_requests_that_are_made_up_fill_no_memory():
    made = server()
    for bits in range(2 * KNOWN_REQUESTS):
        slots = tuple(int(bit) for bit in f"{bits:010b}")
        made.pull(Lookup(slots, jagged([[[0]]] * 10, 1)))
    assert made._bounds.cache_info().currsize == KNOWN_REQUESTS


def test_slots_are_looked_up_in_the_order_asked_for():
    made, ids = server(), random_ids([20, 9], 5, 0)
    (both,) = made.pull(Lookup((1, 0), ids))
    assert torch.equal(both[:, :6], made.pull(Lookup((1,), ids.select([0])))[0])
    assert torch.equal(both[:, 6:], made.pull(Lookup((0,), ids.select([1])))[0])


@BY_NAME
@pytest.mark.parametrize("edges", [[0, 20], [0, 1, 20], [0, 7, 13, 20]])
def test_state_loads_into_any_cut_and_training_goes_on_alike(optimizer, edges):
    source = trained(optimizer)
    parts = [Shard(TABLES[1], start, stop) for start, stop in itertools.pairwise(edges)]
    cut = server([*parts, *whole(TABLES[:1])], optimizer)
    cut.load(copied(source.state()))
    again = server(optimizer=optimizer, seed=2)
    again.load(copied(cut.state()))
    torch.testing.assert_close(*({r.table.name: dict(r.tensors) for r in s.state()} for s in (again, source)))
    lookup, gradient = Lookup((0, 1), random_ids([9, 20], 8, 9)), dense_gradient(8, 10, 9)
    for made in (source, again):
        made.push(lookup, [gradient], 0.1)
    torch.testing.assert_close(*({r.table.name: dict(r.tensors) for r in s.state()} for s in (again, source)))


def test_one_row_tables_and_one_row_pieces_keep_their_step():
    single, lone = Table("a", 1, 4, ("a",)), Lookup((0,), Jagged(torch.tensor([0]), None, None, 1, 1))
    source = server([Shard(single, 0, 1)], ADAM)
    source.push(lone, [torch.ones(1, 4)], 0.1)
    target = server([Shard(single, 0, 1)], ADAM, seed=5)
    target.load(source.state())
    assert int(target.state()[0].tensors["step"]) == 1
    assert torch.equal(target.state()[0].tensors["weight"], source.state()[0].tensors["weight"])
    long = trained(ADAM)
    (_, rows) = long.state()
    pieces = [_row(rows, row) for row in range(20)]
    target = server(whole(TABLES[1:]), ADAM, seed=5)
    target.load(pieces)
    torch.testing.assert_close(dict(target.state()[0].tensors), dict(rows.tensors))


def _row(rows, row):
    return Rows(rows.table, row, {n: t if n == "step" else t[row : row + 1] for n, t in rows.tensors.items()})


def test_missing_rows_are_named_and_nothing_is_written():
    made, saved = server(), copied(trained().state())
    before = copied(made.state())
    lacking = [saved[0], Rows(TABLES[1], 0, {n: t[:12] for n, t in saved[1].tensors.items()})]
    with pytest.raises(CheckpointError, match="row 12 of table b is not in the checkpoint"):
        made.load(lacking)
    torch.testing.assert_close([dict(r.tensors) for r in made.state()], [r.tensors for r in before], rtol=0, atol=0)
    made.load(lacking, partial=True)
    assert torch.equal(made.state()[1].tensors["weight"][:12], saved[1].tensors["weight"][:12])
    assert torch.equal(made.state()[1].tensors["weight"][12:], before[1].tensors["weight"][12:])


def test_rows_of_another_shape_or_optimizer_are_refused():
    wide = server([Shard(replace(TABLES[0], dim=8), 0, 9)])
    with pytest.raises(CheckpointError, match="table a has 9 rows of 8 in the checkpoint and 9 of 4 in this job"):
        server().load(wide.state())
    with pytest.raises(
        CheckpointError,
        match=r"table a was saved with momentum, weight, and embedding.optimizer=sgd needs weight: resume with",
    ):
        server(optimizer=SGD).load(trained().state())


def test_tables_of_other_servers_are_passed_over():
    made = server(whole(TABLES[:1]))
    made.load(trained().state())
    assert torch.equal(made.state()[0].tensors["weight"], trained().state()[0].tensors["weight"])


def single(rows, numbers):
    """Some rows of a run as a set."""
    places = torch.tensor(numbers, dtype=torch.int64) - rows.start
    tensors = {name: t if name == "step" else t[places] for name, t in rows.tensors.items()}
    stop = rows.start + len(rows.tensors["weight"])
    return RowSet(rows.table, rows.start, stop, torch.tensor(numbers, dtype=torch.int64), tensors)


@BY_NAME
@pytest.mark.parametrize("numbers", [[], [0], [3, 4, 19], list(range(20))], ids=str)
def test_single_rows_are_laid_over_what_is_there(optimizer, numbers):
    saved = copied(trained(optimizer).state())[1]
    made = server([Shard(TABLES[1], 0, 4), Shard(TABLES[1], 4, 19), Shard(TABLES[1], 19, 20)], optimizer)
    before = copied(made.state())
    made.load([single(saved, numbers)], partial=True)
    for own, old in zip(made.state(), before, strict=True):
        for name, tensor in own.tensors.items():
            if name == "step":
                assert torch.equal(tensor, saved.tensors["step"])
                continue
            for place in range(len(tensor)):
                source = (saved if own.start + place in numbers else old).tensors[name]
                assert torch.equal(tensor[place], source[own.start + place if own.start + place in numbers else place])


def test_later_rows_lie_over_earlier_ones_and_together_they_are_everything():
    saved, newer = copied(trained().state())[1], copied(trained().state())[1]
    newer.tensors["weight"].add_(1)
    made = server(whole(TABLES[1:]))
    first = Rows(saved.table, 0, {name: t[:12] for name, t in saved.tensors.items()})
    with pytest.raises(CheckpointError, match="row 13 of table b is not in the checkpoint"):
        made.load([first, single(newer, [3, 12, *range(14, 20)])])
    made.load([first, single(newer, [3, *range(12, 20)])])
    weight = made.state()[0].tensors["weight"]
    fresh = [3, *range(12, 20)]
    assert torch.equal(weight[fresh], newer.tensors["weight"][fresh])
    assert torch.equal(weight[:3], saved.tensors["weight"][:3])


HOSTILE_SETS = {
    "twice": {"numbers": torch.tensor([3, 3])},
    "descending": {"numbers": torch.tensor([4, 3])},
    "negative": {"numbers": torch.tensor([-1, 3])},
    "beyond": {"numbers": torch.tensor([3, 20])},
    "far beyond": {"numbers": torch.tensor([3, 2**62])},
    "outside its run": {"stop": 4},
    "run beyond the table": {"stop": 21},
    "empty run": {"start": 20},
    "other type": {"numbers": torch.tensor([3.0, 4.0])},
    "two dimensions": {"numbers": torch.tensor([[3, 4]])},
    "more numbers than rows": {"numbers": torch.tensor([3, 4, 5])},
    "fewer": {"numbers": torch.tensor([3])},
    "width": {"tensors": {"weight": torch.zeros(2, 5), "momentum": torch.zeros(2)}},
    "state": {"tensors": {"weight": torch.zeros(2, 6), "momentum": torch.zeros(1)}},
    "other table": {"table": replace(TABLES[1], rows=21)},
    "other optimizer": {"tensors": {"weight": torch.zeros(2, 6)}},
}


@pytest.mark.parametrize("case", HOSTILE_SETS)
def test_sets_that_lie_change_nothing(case):
    made, saved = server(), copied(trained().state())[1]
    before = copied(made.state())
    with pytest.raises(CheckpointError, match="table b"):
        made.load([saved, replace(single(saved, [3, 4]), **HOSTILE_SETS[case])], partial=True)
    torch.testing.assert_close([dict(r.tensors) for r in made.state()], [r.tensors for r in before], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["weight", "momentum"])
def test_rows_of_another_width_change_nothing(name):
    made, saved = server(), copied(trained().state())[1]
    before, count = copied(made.state()), len(saved.tensors["weight"])
    wide = replace(saved, tensors={**saved.tensors, name: torch.ones(count, 9)})
    with pytest.raises(
        CheckpointError, match=rf"{name} of {count} rows of table b has the form \[{count}, 9\] and not"
    ):
        made.load([wide], partial=True)
    torch.testing.assert_close([dict(r.tensors) for r in made.state()], [r.tensors for r in before], rtol=0, atol=0)


def test_a_shard_of_one_row_takes_no_row_for_another():
    made = server([Shard(TABLES[1], 7, 8)], ADAM)
    saved = copied(trained(ADAM).state())[1]
    with pytest.raises(CheckpointError, match="weight of 0 rows of table b has the form"):
        made.load([replace(single(saved, []), tensors={n: t[:1] for n, t in saved.tensors.items()})], partial=True)


def test_one_of_many_parts_is_copied_and_loaded_without_a_look_at_the_others(monkeypatch):
    cut = table("cut", 300, 4)
    made = server([Shard(cut, row, row + 1) for row in range(300)])
    looks, view = [], ShardMemory.view
    monkeypatch.setattr(ShardMemory, "view", lambda own, index, name: looks.append(index) or view(own, index, name))
    monkeypatch.setattr("shadowsync.embedding.server.check_fits", lambda *_: looks.append("a comparison"))
    made.load([Rows(cut, 8, made.copy_rows(7, range(7, 8)))], partial=True)
    assert sorted(set(looks), key=str) == [7, "a comparison"]
    assert looks.count("a comparison") == 1
    assert torch.equal(made.state()[7].tensors["weight"], made.state()[8].tensors["weight"])
