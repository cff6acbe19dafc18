"""Features with pooling=none: their rows stay apart, cross once, and take one step with all that share them."""

from dataclasses import replace

import pytest
import torch
from embedding_cases import (
    ADAM,
    BY_NAME,
    CLOSE,
    EACH,
    HISTORIES,
    HISTORY_ROWS,
    HISTORY_SOURCE,
    KINDS,
    SGD,
    assert_close_rows,
    client,
    jagged,
    placements,
    random_gradient,
    random_ids,
    rows_of,
    table,
    train_histories,
    whole,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowsync.compression.bf16 import Bf16
from shadowsync.data.batch import Jagged
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.messages import pack_rows
from shadowsync.embedding.routing import UniqueChoice, UniqueRows
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Shard, Table
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import DataError
from shadowsync.models.vectors import VectorGradients

TABLE_OF = {feature: found for found in HISTORIES for feature in found.features}


def bags(ids: Jagged, feature: str) -> list[tuple[Tensor, Tensor]]:
    """Ids and weights of each sample."""
    mine = ids.select([HISTORY_SOURCE.index(feature)])
    weights = torch.ones(len(mine.values)) if mine.weights is None else mine.weights
    lengths = mine.lengths().tolist()
    return list(zip(mine.values.split(lengths), weights.split(lengths), strict=True))


def plain_vectors(weights: dict[str, Tensor], ids: Jagged) -> tuple[Tensor, dict[str, Tensor]]:
    """What one would write oneself: pooled vectors in the order of the tables, and sequences; differentiable."""
    pooled, sequences = [], {}
    for feature, found in TABLE_OF.items():
        rows = [weights[found.name][index] * scale[:, None] for index, scale in bags(ids, feature)]
        if found.poolings[feature] == "none":
            sequences[feature] = torch.cat([*rows, torch.zeros(0, found.dim)])
        else:
            mean = found.poolings[feature] == "mean"
            sums = [row.sum(0) / (max(1, len(row)) if mean else 1) for row in rows]
            pooled.append(torch.stack(sums) if sums else torch.zeros(0, found.dim))
    return torch.cat(pooled, 1), sequences


@EACH
@settings(deadline=None, max_examples=15, derandomize=True)
@given(servers=placements(HISTORIES), kind=st.sampled_from(KINDS), samples=st.integers(0, 5), always=st.booleans())
def test_vectors_and_sgd_steps_are_those_of_plain_tables(storage, servers, kind, samples, always):
    job, held, _ = client(
        HISTORIES, HISTORY_SOURCE, servers, storage, SGD, unique=UniqueRows("always" if always else "never")
    )
    weights = {found.name: rows_of(held, found.name).clone().requires_grad_() for found in HISTORIES}
    for step in range(3):
        ids = random_ids(HISTORY_ROWS, samples, step, kind)
        pulled = job.pull(ids)
        pooled, sequences = plain_vectors(weights, ids)
        torch.testing.assert_close(pulled.pooled, pooled.detach(), **CLOSE)
        assert pulled.sequences.keys() == sequences.keys()
        for name, found in pulled.sequences.items():
            torch.testing.assert_close(found.values, sequences[name].detach(), **CLOSE)
            assert found.lengths().tolist() == [len(index) for index, _ in bags(ids, name)]
        gradient = random_gradient(pulled, step)
        parts = [(pooled, gradient.pooled), *((sequences[name], by) for name, by in gradient.sequences.items())]
        loss = sum((vectors * by).sum() for vectors, by in parts) + sum(0 * weight.sum() for weight in weights.values())
        by_weight = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        job.push(pulled, gradient, 0.1).result()
        with torch.no_grad():
            for name, weight in weights.items():
                weight.sub_(0.1 * by_weight[name])
                torch.testing.assert_close(rows_of(held, name), weight, **CLOSE)


@EACH
@BY_NAME
def test_placement_changes_nothing(storage, optimizer):
    one, held_one, _ = client(HISTORIES, HISTORY_SOURCE, [whole(HISTORIES)], storage, optimizer)
    item, user, shop, tag, word = HISTORIES
    cut = [[Shard(item, 9, 30), *whole([user, word])], [Shard(shop, 0, 4), Shard(item, 0, 9)], [Shard(shop, 4, 25)]]
    cut[2] += whole([tag])
    many, held_many, _ = client(HISTORIES, HISTORY_SOURCE, cut, storage, optimizer)
    torch.testing.assert_close(train_histories(many, 4, "weighted"), train_histories(one, 4, "weighted"), **CLOSE)
    assert_close_rows(held_many, held_one, HISTORIES)


@EACH
@BY_NAME
def test_a_row_that_features_share_takes_one_step_with_the_sum_of_their_gradients(storage, optimizer):
    """The sum of a sequence is the pooled vector, so both ways give the same rows, whatever the optimizer."""
    ids, factor = random_ids([9, 9, 9], 6, 1), torch.randn(6, 3, 4)
    found = {}
    for pooling in ("sum", ("sum", "none", "none")):
        shared = Table("t", 9, 4, ("a", "b", "c"), pooling)
        job, held, _ = client([shared], ["a", "b", "c"], [whole([shared])], storage, optimizer)
        for _ in range(3):
            pulled = job.pull(ids)
            width = pulled.pooled.shape[1]
            by_sequence = {
                name: factor[vectors.owners, ["a", "b", "c"].index(name)] for name, vectors in pulled.sequences.items()
            }
            job.push(pulled, VectorGradients(factor.flatten(1)[:, :width], by_sequence), 0.1).result()
        found[pooling] = {name: rows_of(held, "t", name) for name in held[0].state()[0].tensors if name != "step"}
    torch.testing.assert_close(*found.values(), rtol=1e-4, atol=1e-6)


def test_adam_counts_one_push_per_batch():
    job, held, _ = client(HISTORIES, HISTORY_SOURCE, [whole(HISTORIES)], optimizer=ADAM)
    train_histories(job, 3)
    assert [int(rows.tensors["step"]) for rows in held[0].state()] == [3] * 5


def test_each_row_crosses_once_whatever_features_it_occurs_in():
    item = Table("item", 10, 8, ("item", "seen"), ("sum", "none"))
    other = table("other", 10, 4)
    for codec, size in ((None, 4), (Bf16(), 2)):
        job, _, counter = client([item, other], ["item", "other", "seen"], [whole([item]), whole([other])], codec=codec)
        pulled = job.pull(jagged([[[1], [6]], [[3], [3]], [[6, 1, 6], [9]]], 2))
        job.push(pulled, random_gradient(pulled, 0), 0.1).result()
        looked_up = 4 * 2 + 4 * 3  # two ids of `other` with the offsets of their bags
        rows, pooled = 3 * 8, 2 * 4
        assert counter.totals().bytes == {
            "pull": pack_rows(torch.tensor([1, 3, 6]), 10).nbytes + looked_up + (rows + pooled) * size,
            "push": (rows + pooled) * size,
        }


def test_codecs_round_sequences_too():
    plain, _, _ = client(HISTORIES, HISTORY_SOURCE, [whole(HISTORIES)])
    coded, held, _ = client(HISTORIES, HISTORY_SOURCE, [whole(HISTORIES)], codec=Bf16(), optimizer=SGD)
    ids = random_ids(HISTORY_ROWS, 6, 0)
    exact, rounded = plain.pull(ids), coded.pull(ids)
    for name, found in exact.sequences.items():
        assert torch.equal(rounded.sequences[name].values, found.values.bfloat16().float())
    before = rows_of(held, "shop").clone()
    gradient = random_gradient(rounded, 0)
    coded.push(rounded, gradient, 1.0).result()
    summed = torch.zeros_like(before).index_add(
        0, torch.cat([index for index, _ in bags(ids, "visited")]), gradient.sequences["visited"]
    )
    torch.testing.assert_close(before - rows_of(held, "shop"), summed.bfloat16().float(), rtol=1e-5, atol=1e-5)


@EACH
@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 5000, 0], [3000, 0, 1]], ids=str)
def test_empty_and_very_long_sequences(storage, lengths):
    one = Table("t", 50, 4, ("a", "b"), ("sum", "none"))
    job, held, _ = client([one], ["a", "b"], [[Shard(one, 0, 20)], [Shard(one, 20, 50)]], storage, SGD)
    before = rows_of(held, "t").clone()
    flat = torch.randint(50, (sum(lengths),))
    ids = [part.tolist() for part in flat.split(lengths)]
    pulled = job.pull(jagged([[[], [], []], ids], 3))
    found = pulled.sequences["b"]
    assert found.lengths().tolist() == lengths
    assert torch.equal(found.values, before[flat])
    gradient = VectorGradients(torch.ones(3, 4), {"b": torch.ones_like(found.values)})
    job.push(pulled, gradient, 0.5).result()
    counts = torch.bincount(flat, minlength=50)
    torch.testing.assert_close(rows_of(held, "t"), before - 0.5 * counts[:, None], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_may_have_nothing_but_sequences(kind):
    only = [replace(found, pooling="none") for found in HISTORIES]
    job, _, _ = client(only, HISTORY_SOURCE, [whole(only)])
    pulled = job.pull(random_ids(HISTORY_ROWS, 6, 0, kind))
    assert pulled.pooled.shape == (6, 0)
    assert job.width == 0
    assert set(pulled.sequences) == set(HISTORY_SOURCE)
    job.push(pulled, random_gradient(pulled, 1), 0.1).result()


@pytest.mark.parametrize("bad", [-1, 25, 2**63 - 1])
def test_an_id_that_is_no_row_is_refused_before_anybody_is_asked(bad):
    job, _, counter = client(HISTORIES, HISTORY_SOURCE, [whole(HISTORIES)])
    ids = random_ids(HISTORY_ROWS, 6, 0, "single")
    ids.values[3 * 6 + 2] = bad
    with pytest.raises(DataError, match=rf"^feature visited: id {bad} is not a row of table shop, which has rows 0 to"):
        job.pull(ids)
    assert counter.totals().bytes == {}


def test_gradients_that_do_not_fit_are_refused():
    job, held, _ = client(HISTORIES, HISTORY_SOURCE, [whole(HISTORIES)])
    before = rows_of(held, "item").clone()
    pulled = job.pull(random_ids(HISTORY_ROWS, 6, 0))
    right = random_gradient(pulled, 0)
    with pytest.raises(DataError, match="there is no gradient for the sequences of feature seen"):
        job.push(pulled, right.pooled, 0.1)
    short = {**right.sequences, "seen": right.sequences["seen"][:-1]}
    with pytest.raises(
        DataError, match=r"a gradient of torch.float32 .* does not fit the sequences of feature seen, of"
    ):
        job.push(pulled, VectorGradients(right.pooled, short), 0.1)
    assert torch.equal(rows_of(held, "item"), before)


def test_tables_with_sequences_are_never_left_to_the_estimate():
    tables = [Table("a", 1000, 16, ("a", "h"), ("sum", "none")), table("b", 1000, 16)]
    ids = Jagged(torch.arange(3000) % 1000, None, None, 3, 1000)
    for mode, chosen in (("never", {"a"}), ("auto", {"a"}), ("always", {"a", "b"})):
        choice = UniqueChoice(UniqueRows(mode), tables, ["a", "h", "b"], [whole(tables)])
        assert choice.tables(ids) == chosen
    repeated = Jagged(torch.arange(3000) % 10, None, None, 3, 1000)
    assert UniqueChoice(UniqueRows("auto"), tables, ["a", "h", "b"], [whole(tables)]).tables(repeated) == {"a", "b"}


def test_a_watch_sees_the_rows_of_sequences():
    seen: list[Tensor] = []

    class Watch:
        sees, counts, compares = True, False, False

        def seen(self, rows):
            seen.append(rows)

    class Watching:
        def watch(self, own, allocate):
            return Watch() if own.table.name == "shop" else None

        def count(self, rows):
            return rows

    server = EmbeddingServer(whole(HISTORIES), TorchStorage, SGD, 0, Watching())
    job = EmbeddingClient(HISTORIES, HISTORY_SOURCE, [server])
    ids = random_ids(HISTORY_ROWS, 6, 0)
    pulled = job.pull(ids)
    job.push(pulled, random_gradient(pulled, 0), 0.1).result()
    server.watches._tell()
    assert set(torch.cat(seen).tolist()) == set(torch.cat([index for index, _ in bags(ids, "visited")]).tolist())
