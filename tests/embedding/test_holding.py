"""Gradients that wait for a global step: applied once, averaged as the step says, and never lost or kept for ever."""

import pytest
import torch
from embedding_cases import (
    ADAGRAD,
    BY_NAME,
    CLOSE,
    EACH,
    KINDS,
    OPTIMIZERS,
    ROWS,
    SGD,
    SOURCE,
    TABLES,
    client,
    dense_gradient,
    placements,
    random_ids,
    rows_of,
    whole,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.data.batch import Jagged
from shadowsync.embedding.routing import NEVER, UniqueRows
from shadowsync.embedding.server import RowStep
from shadowsync.errors import DataError

ONE = [whole(TABLES)]
UNIQUE = [NEVER, UniqueRows("always", every=2)]


def row_step(weights, divisor=1.0, step=0, below=0, lr=0.1):
    return RowStep(step, weights, divisor, lr, below)


def commit(servers, step):
    for server in servers:
        server.commit(step)


def hold(job, number, kind="multi", samples=6):
    pulled = job.pull(random_ids(ROWS, samples, number, kind))
    job.hold(pulled, dense_gradient(samples, job.width, number), number).result()


def weights_of(servers):
    return {table.name: rows_of(servers, table.name).clone() for table in TABLES}


@EACH
@pytest.mark.parametrize(("kind", "optimizer"), list(zip(KINDS, OPTIMIZERS, strict=True)), ids=KINDS)
@pytest.mark.parametrize("unique", UNIQUE, ids=lambda unique: unique.mode)
def test_a_step_of_one_batch_is_a_push(storage, optimizer, unique, kind):
    job, held, _ = client(TABLES, SOURCE, ONE, storage, optimizer, unique=unique)
    pushed, pushing, _ = client(TABLES, SOURCE, ONE, storage, optimizer)
    for number in range(3):
        hold(job, number, kind)
        before = weights_of(held)
        commit(held, row_step({number: 1.0}, step=number))
        assert any(not torch.equal(before[name], now) for name, now in weights_of(held).items())
        pulled = pushed.pull(random_ids(ROWS, 6, number, kind))
        pushed.push(pulled, dense_gradient(6, pushed.width, number), 0.1).result()
    torch.testing.assert_close(weights_of(held), weights_of(pushing), **CLOSE)
    assert [server.held_bytes for server in held] == [0]


def joined(numbers, samples=6):
    """The ids of several batches as one large batch of single ids."""
    parts = [random_ids(ROWS, samples, number, "single").values.view(len(ROWS), samples) for number in numbers]
    return Jagged(torch.cat(parts, 1).flatten(), None, None, len(ROWS), samples * len(numbers))


@BY_NAME
@pytest.mark.parametrize("unique", UNIQUE, ids=lambda unique: unique.mode)
def test_divided_by_the_buffer_it_is_one_step_of_the_large_batch(optimizer, unique):
    job, held, _ = client(TABLES, SOURCE, ONE, optimizer=optimizer, unique=unique)
    large, stepped, _ = client(TABLES, SOURCE, ONE, optimizer=optimizer)
    for number in (3, 1, 2, 0):
        hold(job, number, "single")
    commit(held, row_step(dict.fromkeys((2, 0, 1, 3), 1.0), divisor=4.0))
    gradient = torch.cat([dense_gradient(6, large.width, number) for number in range(4)]) / 4
    large.push(large.pull(joined(range(4))), gradient, 0.1).result()
    torch.testing.assert_close(weights_of(held), weights_of(stepped), **CLOSE)


@settings(deadline=None, max_examples=12)
@given(placed=placements(), factors=st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=1, max_size=5), data=st.data())
def test_each_row_is_averaged_over_the_batches_that_contain_it(placed, factors, data):
    unique = data.draw(st.sampled_from(UNIQUE))
    job, held, _ = client(TABLES, SOURCE, placed, optimizer=SGD, unique=unique)
    before = weights_of(held)
    sums = {name: torch.zeros_like(rows) for name, rows in before.items()}
    counts = {name: torch.zeros(len(rows)) for name, rows in before.items()}
    for number, factor in enumerate(factors):
        hold(job, number)
        alone, stepped, _ = client(TABLES, SOURCE, ONE, optimizer=SGD)
        pulled = alone.pull(random_ids(ROWS, 6, number))
        alone.push(pulled, dense_gradient(6, alone.width, number), 1.0).result()
        for name, rows in weights_of(stepped).items():
            change = before[name] - rows
            sums[name] += factor * change
            counts[name] += (change.abs().sum(1) > 0) * float(factor > 0)
    commit(held, row_step(dict(enumerate(factors)), divisor=None))
    for name, rows in weights_of(held).items():
        expected = before[name] - 0.1 * sums[name] / counts[name].clamp_min(1)[:, None]
        torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-5)


def test_a_step_is_carried_out_once_and_in_order():
    job, held, _ = client(TABLES, SOURCE, ONE)
    hold(job, 0)
    hold(job, 1)
    commit(held, row_step({0: 1.0}, step=5))
    after = weights_of(held)
    for again in (row_step({0: 1.0, 1: 1.0}, step=5), row_step({1: 1.0}, step=4)):
        commit(held, again)
        assert all(torch.equal(after[name], rows) for name, rows in weights_of(held).items())
    commit(held, row_step({1: 1.0}, step=6))
    assert not torch.equal(after["user"], weights_of(held)["user"])


@pytest.mark.parametrize(
    "step",
    [row_step({0: 0.0, 1: 0.0}), row_step({7: 1.0, 0: 0.0, 1: 0.0}), row_step({}, below=2)],
    ids=["dropped", "unknown", "below"],
)
def test_what_is_dropped_moves_nothing_and_is_held_no_longer(step):
    job, held, _ = client(TABLES, SOURCE, ONE)
    before = weights_of(held)
    hold(job, 0)
    hold(job, 1)
    assert held[0].held_bytes > 0
    commit(held, step)
    assert held[0].held_bytes == 0
    assert all(torch.equal(before[name], rows) for name, rows in weights_of(held).items())


def test_a_batch_below_comes_too_late():
    job, held, _ = client(TABLES, SOURCE, ONE)
    commit(held, row_step({}, below=4))
    hold(job, 3)
    assert held[0].held_bytes == 0
    hold(job, 4)
    assert held[0].held_bytes > 0


def test_a_server_that_loses_its_rows_loses_what_it_held():
    job, held, _ = client(TABLES, SOURCE, ONE)
    hold(job, 0)
    held[0].lose(None)
    before = weights_of(held)
    commit(held, row_step({0: 1.0}))
    assert all(torch.equal(before[name], rows) for name, rows in weights_of(held).items())


def test_after_going_back_steps_count_from_there():
    job, held, _ = client(TABLES, SOURCE, ONE)
    commit(held, row_step({}, step=9))
    hold(job, 0)
    held[0].forget_held(3)
    assert held[0].held_bytes == 0
    hold(job, 1)
    before = weights_of(held)
    commit(held, row_step({1: 1.0}, step=4))
    assert not torch.equal(before["user"], weights_of(held)["user"])


def test_gradients_that_do_not_fit_are_not_held():
    job, held, _ = client(TABLES, SOURCE, ONE)
    pulled = job.pull(random_ids(ROWS, 6, 0))
    with pytest.raises(DataError, match="does not fit"):
        job.hold(pulled, dense_gradient(5, job.width, 0), 0)
    _, lookup = pulled.lookups[0]
    with pytest.raises(DataError, match=r"gradients of .* \[6, 3\] do not fit a look-up of float32 \[6, 30\]"):
        held[0].hold(0, lookup, [dense_gradient(6, 3, 0)])
    assert held[0].held_bytes == 0


def test_parts_of_one_batch_count_once_for_a_row():
    """A row that a batch reaches on two ways is in one batch."""
    job, held, _ = client(TABLES, SOURCE, ONE, optimizer=SGD)
    once, stepped, _ = client(TABLES, SOURCE, ONE, optimizer=SGD)
    ids = random_ids(ROWS, 6, 0)
    for _ in range(2):
        job.hold(job.pull(ids), dense_gradient(6, job.width, 0), 0).result()
    commit(held, row_step({0: 1.0}, divisor=None))
    once.push(once.pull(ids), 2 * dense_gradient(6, once.width, 0), 0.1).result()
    torch.testing.assert_close(weights_of(held), weights_of(stepped), **CLOSE)


def test_optimizer_state_moves_with_the_step():
    job, held, _ = client(TABLES, SOURCE, ONE, optimizer=ADAGRAD)
    hold(job, 0)
    assert not rows_of(held, "user", "momentum").any()
    commit(held, row_step({0: 1.0}))
    assert rows_of(held, "user", "momentum").any()
