"""L2 of rows: added once to the gradient of each row that occurs, by every storage, on every way to it."""

from dataclasses import replace

import pytest
import torch
from embedding_cases import (
    ADAGRAD,
    BY_NAME,
    CLOSE,
    EACH,
    ROWS,
    SGD,
    SOURCE,
    TABLES,
    client,
    dense_gradient,
    jagged,
    placements,
    random_ids,
    reference_pull,
    requests,
    rows_of,
    table,
    train,
    whole,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shadowsync.compression.threshold import Threshold
from shadowsync.embedding.routing import NEVER, UniqueRows
from shadowsync.embedding.server import RowStep
from shadowsync.embedding.table import RowNumbers, Shard

L2 = 0.3


def penalised(optimizer):
    return replace(optimizer, l2=L2)


@EACH
@BY_NAME
@settings(deadline=None, max_examples=25, derandomize=True)
@given(request=requests())
def test_a_push_adds_it_once_for_each_row_that_occurs(storage, optimizer, request):
    tables, features, asked, samples, kind = request
    assume(samples)
    ours, plain = (storage(whole(tables), features, o, 0) for o in (penalised(optimizer), optimizer))
    ids = random_ids([tables[features[feature]].rows for feature in asked], samples, 1, kind)
    numbers, looked_up = RowNumbers(whole(tables)), sorted({features[feature] for feature in asked})
    for step in range(2):
        weights = [plain.state()[shard.key]["weight"] for shard in whole(tables)]
        leaves = [weight.clone().requires_grad_() for weight in weights]
        gradient = dense_gradient(samples, sum(tables[features[feature]].dim for feature in asked), step)
        reference_pull([leaves[features[feature]] for feature in asked], ids).backward(gradient)
        occurring = [torch.zeros(found.rows, dtype=torch.bool) for found in tables]
        for position, feature in enumerate(asked):
            occurring[features[feature]][ids.select([position]).values] = True
        rows, sums = [], []
        for width in numbers.widths:
            own = []
            for index in numbers.members(width.dim):
                at = occurring[index].nonzero().flatten()
                rows.append(at + numbers.starts[index])
                by_loss = torch.zeros_like(weights[index]) if leaves[index].grad is None else leaves[index].grad
                own.append((by_loss + L2 * weights[index])[at])
            sums.append(torch.cat(own))
        ours.push(ids, asked, gradient, 0.1)
        plain.step_rows(torch.cat(rows), sums, looked_up, 0.1)
        torch.testing.assert_close(ours.state(), plain.state(), **CLOSE)


@EACH
def test_it_does_not_depend_on_how_often_a_row_occurs(storage):
    made = storage([Shard(table("t", 4, 3), 0, 4)], [0], penalised(SGD), 0)
    weight = made.state()["t[0:4]"]["weight"]
    before = weight.clone()
    made.push(jagged([[[1, 1, 1], [2], []]], 3), [0], torch.zeros(3, 3), 0.5)
    factor = torch.tensor([1.0, 1 - 0.5 * L2, 1 - 0.5 * L2, 1.0])
    torch.testing.assert_close(weight, before * factor[:, None])


WAYS = {"pooled there": {}, "distinct rows": {"unique": UniqueRows("always")}}


@BY_NAME
@settings(deadline=None, max_examples=10)
@given(placed=placements(), kind=st.sampled_from(["single", "weighted"]))
def test_it_is_the_same_whichever_way_rows_cross(optimizer, placed, kind):
    one, held, _ = client(TABLES, SOURCE, [whole(TABLES)], optimizer=penalised(optimizer))
    expected = train(one, 3, kind)
    for way in WAYS.values():
        job, servers, _ = client(TABLES, SOURCE, placed, optimizer=penalised(optimizer), **way)
        torch.testing.assert_close(train(job, 3, kind), expected, rtol=1e-3, atol=1e-5)
        if optimizer.name != "adam":  # whose count of pushes depends on where a table is cut
            for found in TABLES:
                torch.testing.assert_close(
                    rows_of(servers, found.name), rows_of(held, found.name), rtol=1e-3, atol=1e-5
                )


@EACH
@BY_NAME
@pytest.mark.parametrize("unique", [NEVER, UniqueRows("always")], ids=lambda unique: unique.mode)
def test_a_global_step_adds_it_once_not_for_each_batch(storage, optimizer, unique):
    """Whether its gradient is a mean over batches or a sum."""
    job, held, _ = client(TABLES, SOURCE, [whole(TABLES)], storage, penalised(optimizer), unique=unique)
    pushed, pushing, _ = client(TABLES, SOURCE, [whole(TABLES)], storage, penalised(optimizer))
    ids = random_ids(ROWS, 6, 1)
    for number in range(4):  # the same batch four times: its mean is the batch
        job.hold(job.pull(ids), dense_gradient(6, job.width, 1), number).result()
    for server in held:
        server.commit(RowStep(0, dict.fromkeys(range(4), 1.0), None, 0.1, 0))
    pushed.push(pushed.pull(ids), dense_gradient(6, pushed.width, 1), 0.1).result()
    for found in TABLES:
        torch.testing.assert_close(rows_of(held, found.name), rows_of(pushing, found.name), **CLOSE)


def test_rows_of_whose_gradient_a_codec_keeps_nothing_are_still_drawn_to_zero():
    one = Threshold(keep=0.01)
    job, held, _ = client(TABLES, SOURCE, [whole(TABLES)], optimizer=penalised(SGD), push=one)
    plain, unpenalised, _ = client(TABLES, SOURCE, [whole(TABLES)], optimizer=SGD, push=one)
    ids = random_ids(ROWS, 100, 1, "single")
    before = {found.name: rows_of(held, found.name).clone() for found in TABLES}
    gradient = dense_gradient(100, job.width, 1)
    gradient[:, job.columns["user"]] *= 1e-6  # of no account beside the others
    for each in (job, plain):
        each.push(each.pull(ids), gradient, 0.1).result()
    stayed = drawn = 0
    for found in TABLES:
        with_it, without = rows_of(held, found.name), rows_of(unpenalised, found.name)
        torch.testing.assert_close(with_it - without, (with_it != without) * -0.1 * L2 * before[found.name])
        stayed += int(((without == before[found.name]) & (with_it == without)).all(1).sum())
        drawn += int(((without == before[found.name]) & (with_it != without)).all(1).sum())
    assert stayed > 0
    assert drawn > 0


def test_an_optimizer_without_it_computes_as_before():
    gradient, rows = torch.randn(2, 3), torch.tensor([0, 2])
    block = {"weight": torch.randn(4, 3)}
    assert ADAGRAD.penalised(block, rows, gradient) is gradient
