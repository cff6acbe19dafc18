"""Every storage against a plain reference, against torch's own modules, and against the other storage."""

import importlib
import threading

import pytest
import torch
from embedding_cases import (
    ADAGRAD,
    ADAM,
    BY_NAME,
    CLOSE,
    EACH,
    SGD,
    dense_gradient,
    jagged,
    needs_fbgemm,
    random_ids,
    reference_pull,
    requests,
    table,
    whole,
)
from hypothesis import given, settings

from shadowsync.embedding import fbgemm_storage
from shadowsync.embedding.fbgemm_storage import FbgemmStorage
from shadowsync.embedding.storage import storage_class
from shadowsync.embedding.table import RowNumbers, Shard
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import ConfigError, MissingExtra


def weights_of(made, tables):
    return [made.state()[shard.key]["weight"] for shard in whole(tables)]


@EACH
@settings(deadline=None, max_examples=25, derandomize=True)
@given(request=requests())
def test_pull_is_the_weighted_sum_in_the_order_asked_for(storage, request):
    tables, features, asked, samples, kind = request
    made = storage(whole(tables), features, SGD, 0)
    ids = random_ids([tables[features[feature]].rows for feature in asked], samples, 1, kind)
    weights = weights_of(made, tables)
    expected = reference_pull([weights[features[feature]] for feature in asked], ids)
    torch.testing.assert_close(made.pull(ids, asked), expected, **CLOSE)


@EACH
@BY_NAME
@settings(deadline=None, max_examples=25, derandomize=True)
@given(request=requests())
def test_push_steps_each_row_once_with_the_sum_of_its_gradients(storage, optimizer, request):
    tables, features, asked, samples, kind = request
    made = storage(whole(tables), features, optimizer, 0)
    ids = random_ids([tables[features[feature]].rows for feature in asked], samples, 1, kind)
    for seed in (5, 6):  # the second push meets a state that is not zero
        before = {key: {n: t.clone() for n, t in tensors.items()} for key, tensors in made.state().items()}
        pooled = made.pull(ids, asked)
        gradient = dense_gradient(*pooled.shape, seed)
        made.push(ids, asked, gradient, 0.1)
        leaves = [tensors["weight"].requires_grad_() for tensors in before.values()]
        if samples:
            reference_pull([leaves[features[feature]] for feature in asked], ids).backward(gradient)
        for shard, leaf in zip(whole(tables), leaves, strict=True):
            looked_up = samples and shard.table in [tables[features[feature]] for feature in asked]
            expected = _stepped(before[shard.key], leaf.grad if looked_up else None, optimizer)
            for name, tensor in made.state()[shard.key].items():
                torch.testing.assert_close(tensor, expected[name], **CLOSE)


@EACH
@settings(deadline=None, max_examples=25, derandomize=True)
@given(request=requests())
def test_rows_are_read_by_number_width_by_width(storage, request):
    tables, features, _, seed, _ = request
    made = storage(whole(tables), features, SGD, 0)
    numbers = RowNumbers(whole(tables))
    rows = chosen_rows(numbers, seed)
    by_width = sorted(range(len(tables)), key=lambda index: tables[index].dim)
    all_rows = [row for index in by_width for row in weights_of(made, tables)[index]]
    read = made.read_rows(rows)
    assert [found.shape[1] for found in read] == sorted({found.dim for found in tables})
    for found, row in zip((row for part in read for row in part), rows.tolist(), strict=True):
        assert torch.equal(found, all_rows[row])


@EACH
@BY_NAME
@settings(deadline=None, max_examples=25, derandomize=True)
@given(request=requests())
def test_a_step_of_rows_is_a_push_with_these_gradients(storage, optimizer, request):
    tables, _, _, seed, _ = request
    by_push, by_rows = (storage(whole(tables), range(len(tables)), optimizer, 0) for _ in range(2))
    numbers, shards = RowNumbers(whole(tables)), list(range(len(tables)))
    for step in range(3):
        rows = chosen_rows(numbers, seed + step)
        sums = [
            dense_gradient(len(part), width.dim, step)
            for part, width in zip(numbers.split(rows), numbers.widths, strict=True)
        ]
        by_rows.step_rows(rows, sums, shards, 0.1)
        ids, gradient = as_push(tables, numbers, rows, torch.cat([part.flatten() for part in sums]))
        by_push.push(ids, shards, gradient, 0.1)
    torch.testing.assert_close(by_rows.state(), by_push.state(), **CLOSE)


def chosen_rows(numbers, seed):
    return torch.randperm(numbers.total, generator=torch.Generator().manual_seed(seed))[: 1 + 3 * seed].sort().values


def as_push(tables, numbers, rows, flat):
    """One sample for each row, in which the row's table looks up this row and the others nothing."""
    bags = [[[] for _ in rows] for _ in tables]
    gradient = torch.zeros(len(rows), sum(found.dim for found in tables))
    columns = [sum(found.dim for found in tables[:index]) for index in range(len(tables))]
    taken = 0
    for sample, row in enumerate(rows.tolist()):
        index = max((start, index) for index, start in enumerate(numbers.starts) if start <= row)[1]
        dim = tables[index].dim
        bags[index][sample] = [row - numbers.starts[index]]
        gradient[sample, columns[index] : columns[index] + dim] = flat[taken : taken + dim]
        taken += dim
    return jagged(bags, len(rows)), gradient


@EACH
def test_adam_counts_a_step_for_the_shards_that_are_named(storage):
    made = storage(whole([table("a", dim=4), table("b", dim=8), table("c", dim=4)]), [0, 1, 2], ADAM, 0)
    nothing = [torch.zeros(0, 4), torch.zeros(0, 8)]
    made.step_rows(torch.zeros(0, dtype=torch.int64), nothing, [0, 2], 0.1)
    made.step_rows(torch.tensor([14]), [torch.zeros(0, 4), torch.ones(1, 8)], [1, 2], 0.1)
    assert [int(tensors["step"]) for tensors in made.state().values()] == [1, 1, 2]


def _stepped(state, gradient, optimizer):
    """One row at a time, as the docstrings say."""
    state = {name: tensor.detach().clone() for name, tensor in state.items()}
    if gradient is None:
        return state
    if "step" in state:
        state["step"] += 1
    for row in gradient.abs().sum(1).nonzero().flatten().tolist():
        _STEPS[optimizer.name](state, row, gradient[row], optimizer)
    return state


def _adagrad_step(state, row, gradient, optimizer):
    state["momentum"][row] += gradient.square().mean()
    state["weight"][row] -= 0.1 * gradient / (state["momentum"][row].sqrt() + optimizer.eps)


def _adam_step(state, row, gradient, optimizer):
    step = int(state["step"])
    mean, square = state["exp_avg"][row], state["exp_avg_sq"][row]
    mean.copy_(optimizer.beta1 * mean + (1 - optimizer.beta1) * gradient)
    square.copy_(optimizer.beta2 * square + (1 - optimizer.beta2) * gradient**2)
    corrected = mean / (1 - optimizer.beta1**step)
    state["weight"][row] -= 0.1 * corrected / ((square / (1 - optimizer.beta2**step)).sqrt() + optimizer.eps)


def _sgd_step(state, row, gradient, optimizer):
    state["weight"][row] -= 0.1 * gradient


_STEPS = {"rowwise_adagrad": _adagrad_step, "adam": _adam_step, "sgd": _sgd_step}


@EACH
@pytest.mark.parametrize(
    ("optimizer", "torch_optimizer"),
    [(SGD, lambda p: torch.optim.SGD(p, 0.1)), (ADAM, lambda p: torch.optim.Adam(p, 0.1, (0.9, 0.999), ADAM.eps))],
    ids=["sgd", "adam"],
)
def test_equals_embedding_bag_with_torch_optim_where_every_row_is_used(storage, optimizer, torch_optimizer):
    made = storage([Shard(table("t", 5, 8), 0, 5)], [0], optimizer, 0)
    bag = torch.nn.EmbeddingBag(5, 8, mode="sum", include_last_offset=True)
    bag.weight.data.copy_(made.state()["t[0:5]"]["weight"])
    stepper = torch_optimizer(bag.parameters())
    ids = jagged([[[0, 1], [2, 2, 3], [4], []]], 4)
    for step in range(5):
        gradient = dense_gradient(4, 8, step)
        pooled = bag(ids.values, ids.offsets)
        torch.testing.assert_close(made.pull(ids, [0]), pooled.detach(), **CLOSE)
        stepper.zero_grad()
        pooled.backward(gradient)
        stepper.step()
        made.push(ids, [0], gradient, 0.1)
    torch.testing.assert_close(made.state()["t[0:5]"]["weight"], bag.weight.data, **CLOSE)


@EACH
@BY_NAME
def test_the_learning_rate_comes_with_the_push(storage, optimizer):
    made = storage([Shard(table("t"), 0, 7)], [0], optimizer, 0)
    weight, ids = made.state()["t[0:7]"]["weight"], jagged([[[3]]], 1)
    before = weight.clone()
    made.push(ids, [0], torch.ones(1, 4), 0.0)
    assert torch.equal(weight, before)
    made.push(ids, [0], torch.ones(1, 4), 0.5)
    assert torch.equal((weight != before).any(1).nonzero(), torch.tensor([[3]]))


@EACH
def test_empty_requests_and_an_empty_server(storage):
    made = storage(whole([table("a", dim=4), table("b", dim=8)]), [0, 1], ADAM, 0)
    before = {key: {n: t.clone() for n, t in tensors.items()} for key, tensors in made.state().items()}
    no_samples = random_ids([7, 7], 0, 0, "single")
    assert made.pull(no_samples, [1, 0]).shape == (0, 12)
    made.push(no_samples, [1, 0], torch.zeros(0, 12), 0.1)
    assert made.pull(random_ids([], 3, 0), []).shape == (3, 0)
    made.push(random_ids([], 3, 0), [], torch.zeros(3, 0), 0.1)
    torch.testing.assert_close(made.state(), before, rtol=0, atol=0)
    no_ids = jagged([[[], []], [[], []]], 2)
    assert torch.equal(made.pull(no_ids, [0, 1]), torch.zeros(2, 12))
    made.push(no_ids, [0, 1], torch.ones(2, 12), 0.1)
    assert torch.equal(made.state()["a[0:7]"]["weight"], before["a[0:7]"]["weight"])
    assert storage([], [], ADAM, 0).state() == {}


@EACH
def test_state_is_live_and_its_writes_are_seen(storage):
    made = storage(whole([table("a", 3, 4), table("b", 3, 2), table("c", 3, 4)]), [0, 1, 2], ADAGRAD, 0)
    for value, tensors in enumerate(made.state().values(), start=1):
        tensors["weight"].fill_(value)
    pooled = made.pull(random_ids([3, 3, 3], 2, 0, "single"), [0, 1, 2])
    assert pooled[0].tolist() == [1] * 4 + [2] * 2 + [3] * 4


@EACH
@BY_NAME
def test_hogwild_threads_on_disjoint_rows_lose_nothing(storage, optimizer):
    threads, pushes = 4, 25
    alone, shared = (storage(whole([table("t", 64, 8)]), [0], optimizer, 0) for _ in range(2))
    batches = [[_rows_of_thread(thread, seed) for seed in range(pushes)] for thread in range(threads)]
    # Adam's weights depend on how many pushes came before, which the threads decide; its moments do not
    _run([lambda work=work: [_push(shared, ids) for ids in work] for work in batches])
    for work in batches:
        for ids in work:
            _push(alone, ids)
    names = {"weight", "momentum"} if optimizer is not ADAM else {"exp_avg", "exp_avg_sq", "step"}
    rounding = 1e-5 if storage.on_disk else 0.0  # rows on disk are stepped by other code, and who is there differs
    for name in names & set(alone.state()["t[0:64]"]):
        found, expected = shared.state()["t[0:64]"][name], alone.state()["t[0:64]"][name]
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)


@EACH
@BY_NAME
def test_hogwild_threads_on_shared_rows_stay_finite_and_keep_moving(storage, optimizer):
    made = storage(whole([table("t", 16, 8)]), [0], optimizer, 0)
    before = made.state()["t[0:16]"]["weight"].clone()
    ids = random_ids([16], 64, 0)
    _run([lambda: [_push(made, ids) for _ in range(25)]] * 4)
    after = made.state()["t[0:16]"]["weight"]
    assert bool(torch.isfinite(after).all())
    assert bool((after[ids.values.unique()] != before[ids.values.unique()]).all())


def _rows_of_thread(thread, seed):
    ids = random_ids([16], 8, 100 * thread + seed)
    return type(ids)(ids.values + 16 * thread, ids.offsets, None, 1, 8)


def _push(made, ids):
    made.pull(ids, [0])
    made.push(ids, [0], dense_gradient(ids.samples, 8, int(ids.values.sum())), 0.01)


def _run(works):
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_storage_class_names_what_is_allowed():
    assert storage_class("torch") is TorchStorage
    assert storage_class("fbgemm") is FbgemmStorage
    with pytest.raises(
        ConfigError, match=r"^embedding.storage=fbgem is not known, did you mean fbgemm\?; allowed: auto"
    ):
        storage_class("fbgem")


@needs_fbgemm
def test_auto_takes_fbgemm_where_it_loads():
    assert storage_class("auto") is FbgemmStorage


def _without_fbgemm(monkeypatch, error):
    def refuse(name):
        raise error

    monkeypatch.setattr(fbgemm_storage.importlib, "import_module", refuse)


def test_without_fbgemm_auto_is_torch_and_fbgemm_says_what_to_install(monkeypatch):
    _without_fbgemm(monkeypatch, ModuleNotFoundError("No module named 'fbgemm_gpu'"))
    with pytest.raises(MissingExtra, match=r"pip install 'shadowsync\[fbgemm\]'"):
        FbgemmStorage([], [], SGD, 0)
    monkeypatch.undo()
    monkeypatch.setattr("shadowsync.embedding.fbgemm_storage.load_operators", _raise_missing)
    assert storage_class("auto") is TorchStorage


def _raise_missing():
    raise MissingExtra("fbgemm-gpu-cpu", "fbgemm")


def test_an_fbgemm_that_does_not_fit_this_torch_is_named(monkeypatch):
    _without_fbgemm(monkeypatch, OSError("undefined symbol: _ZN3c10\nmore"))
    with pytest.raises(ConfigError, match=r"cannot be loaded beside torch .* \(undefined symbol: _ZN3c10\)"):
        FbgemmStorage([], [], SGD, 0)


@needs_fbgemm
def test_another_version_of_fbgemm_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.import_module("fbgemm_gpu"), "__version__", "1.9.0")
    with pytest.raises(ConfigError, match=r"FBGEMM 1.9.0 is installed and 1.8 is needed"):
        FbgemmStorage([], [], SGD, 0)
