"""Whole jobs with modules as they are: equal to plain PyTorch, with several trainers, resumed, evaluated, exported."""

import importlib
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import polars as pl
import pytest
import torch
import wrapped_models
from job_helpers import by_gradients, fails
from test_exactness import NO_FBGEMM, in_order
from torch import Tensor, nn
from wrapped_models import (
    BATCH,
    CASES,
    DIM,
    ROWS,
    ByName,
    Model,
    called,
    clicks_settings,
    make,
    plain_loop,
    weighted_data,
    write_clicks,
)

from shadowsync import Job, Trained, Wrapped, wrap
from shadowsync.data.batch import Batch
from shadowsync.errors import CheckpointError, ConfigError
from shadowsync.models.inputs import Inputs

STEPS = 40
RATES = {"sgd": 0.5, "rowwise_adagrad": 0.1}
NO_TORCHREC = "install it to try its own modules: pip install torchrec"


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clicks(tmp_path_factory.mktemp("clicks") / "rows.parquet", STEPS * BATCH)


def wrapped(name: str, model: nn.Module | None = None) -> Wrapped:
    return wrap(make(name) if model is None else model, **CASES[name][1])


def equals_plain(config: dict[str, Any], name: str, out: Path) -> Trained:
    """Trains a case by a job and by a plain loop, and compares logits, losses and the whole module."""
    probable = CASES[name][1].get("output") == "probability"
    ours, theirs = make(name), make(name)

    def loss_of(batch: Batch) -> Tensor:
        found, labels = called(theirs, name, batch).flatten(), batch.labels
        functional = nn.functional
        if probable:
            return functional.binary_cross_entropy(found, labels)
        return functional.binary_cross_entropy_with_logits(found, labels)

    losses = list(plain_loop(config, theirs, loss_of))
    Job(config, model=wrapped(name, ours), out=out).run()
    assert len(ours.log.logits) == len(theirs.log.logits) == len(losses) == STEPS
    for logits, loss, batch in zip(ours.log.logits, losses, in_order(config), strict=True):
        found = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        assert abs(float(found) - loss) < 2e-5
    for step, (one, other) in enumerate(zip(ours.log.logits, theirs.log.logits, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5, msg=lambda found, at=step: f"step {at}: {found}")
    trained = Trained(out, model=wrapped(name))
    untrained, state = make(name).state_dict(), trained.unwrapped().state_dict()
    assert state.keys() == untrained.keys()
    moved = 0
    for key, tensor in theirs.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-4, atol=2e-5, msg=lambda found, at=key: f"{at}: {found}")
        moved += bool((tensor - untrained[key]).abs().max() > 1e-2)
    assert moved >= 3, "nothing was trained"
    return trained


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("storage", "optimizer"), [("torch", "sgd"), ("fbgemm", "rowwise_adagrad")])
def test_the_job_equals_plain_torch_step_by_step(
    clicks: Path, tmp_path: Path, storage: str, optimizer: str, name: str
) -> None:
    if storage == "fbgemm":
        pytest.importorskip("fbgemm_gpu", reason=NO_FBGEMM)
    embedding = {"storage": storage, "optimizer": optimizer, "lr": RATES[optimizer]}
    config = clicks_settings(clicks, embedding=embedding, data=weighted_data(name))
    equals_plain(config, name, tmp_path / "out")


@pytest.mark.parametrize("name", ["one table", "shared, padded", "bags"])
def test_servers_that_share_the_tables_change_nothing(clicks: Path, tmp_path: Path, name: str) -> None:
    embedding = {"servers": 2, "split_rows": 11, "unique_rows": "always"}
    equals_plain(clicks_settings(clicks, embedding=embedding, train={"prefetch": 0}), name, tmp_path / "out")


@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.parametrize("name", ["first of a list", "in place", "shared, padded", "bags", "weights", "collections"])
def test_batches_without_ids_are_those_of_plain_torch(clicks: Path, tmp_path: Path, name: str, optimizer: str) -> None:
    emptied = pl.int_range(pl.len()) // (2 * BATCH) % 2 == 0  # every other slice, which is two batches
    lists = [
        pl.when(emptied).then(pl.col(column).list.head(0)).otherwise(pl.col(column)).alias(column)
        for column in ("recent", "recent_weights")
    ]
    path = tmp_path / "rows.parquet"
    pl.read_parquet(clicks).with_columns(lists).write_parquet(path)
    embedding = {"optimizer": optimizer, "lr": RATES[optimizer]}
    config = clicks_settings(path, embedding=embedding, data=weighted_data(name))
    assert any(not len(batch.ids.select([2]).values) for batch in in_order(config))
    equals_plain(config, name, tmp_path / "out")


def test_padding_is_not_trained(clicks: Path, tmp_path: Path) -> None:
    trained = equals_plain(clicks_settings(clicks), "shared, padded", tmp_path / "out")
    items = trained.unwrapped().items
    assert isinstance(items, nn.Embedding)
    assert torch.equal(items.weight[ROWS], torch.full((DIM,), 0.25))


def predicts_alone(trained: Trained, config: dict[str, Any], folder: Path) -> None:
    """Its export answers by torch alone what it answers."""
    trained.export(folder / "model.pt2")
    program = torch.export.load(folder / "model.pt2").module()
    for batch in list(in_order(config))[:3]:
        wanted = trained._predict(batch)
        answer = program(batch.dense, batch.ids.values, batch.ids.bag_offsets())
        torch.testing.assert_close(answer["logits"], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(answer["probabilities"], wanted.sigmoid(), rtol=1e-5, atol=1e-6)


class Recommender(Model):
    """TorchRec's own collections in a module with its own key types."""

    def __init__(self) -> None:
        super().__init__(3 * DIM + 2)
        torchrec = pytest.importorskip("torchrec", reason=NO_TORCHREC)
        configs = importlib.import_module("torchrec.modules.embedding_configs")
        bags = [
            configs.EmbeddingBagConfig(ROWS, DIM, name=f"t_{name}", feature_names=[name]) for name in ("item", "recent")
        ]
        self.bags = torchrec.EmbeddingBagCollection(tables=bags)
        rows = configs.EmbeddingConfig(embedding_dim=DIM, num_embeddings=ROWS, name="t_rows", feature_names=["recent"])
        self.rows = torchrec.EmbeddingCollection(tables=[rows])

    def forward(self, dense: Tensor, ids: "KeyedJaggedTensor") -> Tensor:  # noqa: F821
        pooled, rows = self.bags(ids), self.rows(ids)["recent"]
        owners = torch.repeat_interleave(torch.arange(dense.shape[0]), rows.lengths())
        summed = dense.new_zeros(dense.shape[0], DIM).index_add(0, owners, rows.values())
        return self.out(dense, pooled["item"], pooled["recent"], summed)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_collections_of_torchrec_are_served(clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchrec", reason=NO_TORCHREC)

    def with_ids(batch: Inputs) -> tuple[Any, ...]:
        return batch.dense, batch.kjt()

    config = clicks_settings(clicks)
    monkeypatch.setitem(CASES, "torchrec", (Recommender, {"inputs": with_ids}))
    predicts_alone(equals_plain(config, "torchrec", tmp_path / "out"), config, tmp_path)
    by_annotation = wrap(make("torchrec")).planned(Trained(tmp_path / "out", model=wrapped("torchrec")).schema)
    assert [site.form for site in by_annotation.sites] == ["sum", "sum", "rows"]


def test_rows_may_be_given_and_come_back(clicks: Path, tmp_path: Path) -> None:
    model, rows = make("by name"), np.full((ROWS, DIM), 0.5)
    given = wrap(model, rows={"users": rows})
    untouched = clicks_settings(clicks, embedding={"lr": 1e-30}, train={"lr": 1e-30})
    Job(untouched, model=given, out=tmp_path / "one").run()
    trained = Trained(tmp_path / "one", model=wrap(make("by name"))).unwrapped()
    assert isinstance(trained, ByName)
    assert torch.equal(trained.users.weight, torch.full((ROWS, DIM), 0.5))
    assert torch.equal(trained.items.weight, model.items.weight)
    Job(untouched, model=wrap(trained), out=tmp_path / "two").run()
    again = Trained(tmp_path / "two", model=wrap(make("by name"))).unwrapped()
    assert torch.equal(again.users.weight, trained.users.weight), "the rows of a run are the start of another"


METHODS = [
    {"sync": {"method": "easgd"}},
    {"sync": {"method": "ma", "schedule": "every_k", "k": 2}},
    {"sync": {"method": "bmuf", "schedule": "background"}},
    "sync",
    "gba",
    "hop_bs",
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_two_trainers_learn_the_effect(tmp_path: Path, method: dict[str, Any] | str) -> None:
    train, test = write_clicks(tmp_path / "train.parquet", 6000), write_clicks(tmp_path / "test.parquet", 2000, 1)
    embedding = {"optimizer": "rowwise_adagrad", "lr": 0.1, "servers": 2}
    dense = {"trainers": 2, "workers": 2, "optimizer": "adam", "lr": 0.005, "batch_size": 32}
    config = clicks_settings(train, test, embedding=embedding, train=dense, data={"epochs": 3, "slice_rows": 256})
    config = by_gradients(config, method) if isinstance(method, str) else config | method
    result = Job(config, model=wrap(make("by name")), out=tmp_path / "out").run()
    assert result.test is not None
    assert result.test.auc is not None
    assert result.test.auc > 0.82
    again = Trained(tmp_path / "out", model=wrap(make("by name"))).evaluate()
    assert again.auc == pytest.approx(result.test.auc, abs=1e-6)


def test_a_resumed_job_goes_on_as_if_it_had_not_ended(clicks: Path, tmp_path: Path) -> None:
    Job(clicks_settings(clicks, data={"epochs": 2}), model=wrapped("bags"), out=tmp_path / "whole").run()
    Job(clicks_settings(clicks), model=wrapped("bags"), out=tmp_path / "half").run()
    config = clicks_settings(clicks, data={"epochs": 2})
    Job(config, model=wrapped("bags"), out=tmp_path / "half", resume=tmp_path / "half").run()
    whole, half = (Trained(tmp_path / out, model=wrapped("bags")).unwrapped() for out in ("whole", "half"))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(half.state_dict()[name], tensor), name


def test_processes_compute_what_one_process_does(clicks: Path, tmp_path: Path) -> None:
    cloudpickle.register_pickle_by_value(wrapped_models)
    states = {}
    for runtime in ("inprocess", "processes"):
        embedding = {"servers": 2, "split_rows": 11}
        config = clicks_settings(
            clicks,
            embedding=embedding,
            sync={"method": "easgd", "schedule": "every_k", "k": 1},
            cluster={"runtime": runtime},
        )
        Job(config, model=wrapped("by name"), out=tmp_path / runtime).run()
        states[runtime] = Trained(tmp_path / runtime, model=wrapped("by name")).unwrapped().state_dict()
    cloudpickle.unregister_pickle_by_value(wrapped_models)
    for name, tensor in states["inprocess"].items():
        torch.testing.assert_close(states["processes"][name], tensor, rtol=1e-5, atol=1e-6)
        assert (tensor - make("by name").state_dict()[name]).abs().max() > 1e-3


EXPORTED = ["by name", "one table", "shared, padded", "padded to a length", "dict of columns", "matrix", "bags"]


@pytest.mark.parametrize("name", EXPORTED)
def test_the_export_predicts_by_torch_alone_what_the_run_predicts(clicks: Path, tmp_path: Path, name: str) -> None:
    config = clicks_settings(clicks, clicks)
    Job(config, model=wrapped(name), out=tmp_path / "out").run()
    trained = Trained(tmp_path / "out", model=wrapped(name))
    predicts_alone(trained, config, tmp_path)


class Tied(Model):
    """Reads the rows outside of a look-up."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.items = nn.Embedding(ROWS, DIM)

    def forward(self, item: Tensor) -> Tensor:
        return self.out(self.items(item)) + self.items.weight.mean()


class Sometimes(Model):
    """A branch around a look-up that depends on the data."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.items, self.more = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

    def forward(self, item: Tensor, price: Tensor) -> Tensor:
        vectors = self.items(item)
        if len(item) == BATCH and price.max() > 1:
            vectors = vectors + self.more(item)
        return self.out(vectors)


class Random(Model):
    """Ids that nobody can know before."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.items = nn.Embedding(ROWS, DIM)

    def forward(self, item: Tensor) -> Tensor:
        return self.out(self.items(torch.where(torch.rand(len(item)) < 0.5, item, 0)))


class OfVectors(Model):
    """Ids that depend on vectors."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.items, self.next = nn.Embedding(ROWS, DIM), nn.Embedding(DIM, DIM)

    def forward(self, item: Tensor) -> Tensor:
        return self.out(self.next(self.items(item).argmax(dim=1)))


class Late(Random):
    """Random once it is trained, which the second pass finds out."""

    def forward(self, item: Tensor) -> Tensor:
        return super().forward(item) if len(item) == BATCH else self.out(self.items(item))


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (Tied, ("items", "read outside of a look-up")),
        (Sometimes, ("more", "looked up for some rows and not for others")),
        (Random, ("items", "other ids in a second pass")),
        (OfVectors, ("next", "other ids in a second pass")),
        (Late, ("items", "other ids in a second pass")),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_what_cannot_be_served_is_one_sentence(
    clicks: Path, tmp_path: Path, model: type[Model], parts: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    fails(lambda: Job(clicks_settings(clicks), model=wrap(model()), out=tmp_path / "out").run(), ConfigError, *parts)


class OfIds(nn.Module):
    """Takes ids where vectors come."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, 1)

    def forward(self, dense: Tensor, ids: Any) -> Tensor:
        return self.items(ids.values()).squeeze(1)


def test_a_module_that_is_not_wrapped_and_wants_ids_is_told_so(clicks: Path, tmp_path: Path) -> None:
    fails(
        lambda: Job(clicks_settings(clicks), model=ByName(), out=tmp_path / "a"),
        ConfigError,
        "ByName",
        "(user",
        "shadowsync.wrap(model)",
    )
    given = clicks_settings(clicks, model={"embedding_dim": 4})
    fails(
        lambda: Job(given, model=OfIds(), out=tmp_path / "b").run(), ConfigError, "OfIds", "items", "shadowsync.wrap("
    )


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"embedding_dim": 8}}, "model.embedding_dim"),
        ({"embedding": {"pooling": {"recent": "none"}}}, "embedding.pooling"),
        ({"embedding": {"tables": [{"name": "t", "rows": ROWS, "dim": 4, "features": ["user"]}]}}, "embedding.tables"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_options_of_tables_are_refused(clicks: Path, tmp_path: Path, sections: dict[str, Any], key: str) -> None:
    config = clicks_settings(clicks, **sections)
    fails(
        lambda: Job(config, model=wrap(make("by name")), out=tmp_path / "out").run(),
        ConfigError,
        key,
        "has no effect beside a wrapped model",
    )


def test_bf16_is_refused_for_probabilities(clicks: Path, tmp_path: Path) -> None:
    config = clicks_settings(clicks, train={"precision": "bf16"})
    fails(lambda: Job(config, model=wrapped("matrix"), out=tmp_path / "out").run(), ConfigError, "train.precision=bf16")


def test_a_checkpoint_of_another_module_is_refused(clicks: Path, tmp_path: Path) -> None:
    Job(clicks_settings(clicks), model=wrap(make("by name")), out=tmp_path / "out").run()
    fails(lambda: Trained(tmp_path / "out", model=wrapped("bags")), CheckpointError, "the checkpoint was trained with")
    larger = make("by name")
    larger.users = nn.Embedding(ROWS + 5, DIM)
    said = f"table users is [{ROWS}, {DIM}] in the checkpoint and [{ROWS + 5}, {DIM}] in this model"
    fails(lambda: Trained(tmp_path / "out", model=wrap(larger)), CheckpointError, said)
