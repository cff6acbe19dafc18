"""Where nothing is approximate, the whole job equals a plain PyTorch loop.

`B` samples, `N` dense columns, `D` width of a row.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from job_helpers import FEATURES, ROWS, settings, write_rows
from torch import Tensor, nn

from shadowsync import Job, Table, Trained
from shadowsync.assembly import place_tables
from shadowsync.choices import choose_all
from shadowsync.config import parse
from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.reader import Reader, ReaderOptions
from shadowsync.embedding.memory import fill
from shadowsync.embedding.table import Shard

DIM = 4
BATCH = 8
NewOptimizer = Callable[..., torch.optim.Optimizer]
NO_FBGEMM = "install the extra to compare it: pip install 'shadowsync[fbgemm]'"
TABLES = (
    Table("first", ROWS, DIM, ("c0",)),
    Table("both", ROWS, DIM, ("c1", "many"), "mean"),
)


class Log:
    """What a model saw at each step; a copied model writes to the same one."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Tower(nn.Module):
    """Writes down its own parameters and the vectors it gets, before each step."""

    def __init__(self, log: Log | None = None) -> None:
        super().__init__()
        self.log = log if log is not None else Log()
        generator = torch.Generator().manual_seed(3)
        self.hidden, self.out = nn.Linear(2 + 3 * DIM, 8), nn.Linear(8, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        vectors = {name: embeddings[name] for name in FEATURES}
        if self.training:
            own = {name: parameter.detach().clone() for name, parameter in self.named_parameters()} | {"dense": dense}
            self.log.steps.append(own | {name: vector.detach().clone() for name, vector in vectors.items()})
        hidden = self.hidden(torch.cat([dense, *vectors.values()], dim=1)).relu()
        return self.out(hidden).squeeze(1)


@dataclass
class PlainRows:
    """An embedding table as one would write it oneself: a plain EmbeddingBag and a textbook optimizer of rows."""

    table: Table
    optimizer: str

    def __post_init__(self) -> None:
        weight = torch.empty(self.table.rows, self.table.dim)
        fill([(Shard(self.table, 0, self.table.rows), weight)], seed=0)
        self.bag = nn.EmbeddingBag(self.table.rows, self.table.dim, mode=self.table.pooling, _weight=weight)
        self.squares = torch.zeros(self.table.rows)
        self.occurred = torch.zeros(self.table.rows, dtype=torch.bool)

    def pool(self, ids: Jagged, feature: int) -> Tensor:
        """`[B, D]`."""
        chosen = ids.select([feature])
        self.occurred[chosen.values] = True
        return self.bag(chosen.values, chosen.bag_offsets()[:-1])

    @torch.no_grad()
    def step(self, lr: float, l2: float = 0.0) -> None:
        touched, self.occurred = self.occurred, torch.zeros_like(self.occurred)
        gradient = (self.bag.weight.grad + l2 * self.bag.weight) * touched[:, None]
        scale = torch.full((self.table.rows, 1), lr)
        if self.optimizer == "rowwise_adagrad":
            self.squares += gradient.square().mean(1)
            scale = lr / (self.squares.sqrt()[:, None] + 1e-8)
        self.bag.weight[touched] -= (scale * gradient)[touched]
        self.bag.weight.grad = None


def plain_loop(
    config: dict[str, Any], optimizer: Callable[..., torch.optim.Optimizer]
) -> tuple[Tower, list[PlainRows]]:
    """The same training, with torch alone but for the reader, which gives the order of the data."""
    checked = parse(config)
    tower, tables = Tower(), [PlainRows(table, checked.embedding.optimizer) for table in TABLES]
    table_of = {feature: table for table in tables for feature in table.table.features}
    groups = [
        {"params": [p for p in tower.parameters() if p.dim() > 1], "weight_decay": checked.train.l2},
        {"params": [p for p in tower.parameters() if p.dim() < 2]},
    ]
    dense, count = optimizer(groups, lr=checked.train.lr), checked.train.accumulate
    for number, batch in enumerate(in_order(config), start=1):
        pooled = {name: table_of[name].pool(batch.ids, index) for index, name in enumerate(FEATURES)}
        loss = nn.functional.binary_cross_entropy_with_logits(tower(batch.dense, pooled), batch.labels)
        parameters = list(tower.parameters())
        found = torch.autograd.grad(loss, [*parameters, *(table.bag.weight for table in tables)])
        for parameter, gradient in zip(parameters, found, strict=False):
            parameter.grad = gradient / count if parameter.grad is None else parameter.grad + gradient / count
        for table, gradient in zip(tables, found[len(parameters) :], strict=True):
            table.bag.weight.grad = gradient
            table.step(checked.embedding.lr, checked.embedding.l2)
        if number % count == 0:
            if checked.train.clip_norm is not None:
                nn.utils.clip_grad_norm_(tower.parameters(), checked.train.clip_norm)
            dense.step()
            dense.zero_grad()
    return tower, tables


def in_order(config: dict[str, Any]) -> Iterator[Batch]:
    """The batches in the order in which a single worker gets them."""
    checked = parse(config)
    source = choose_all(checked, own_model=True).source.open("train", "error")
    options = ReaderOptions(checked.train.batch_size, checked.data.slice_rows, checked.data.epochs)
    reader = Reader(source, options)
    feed = reader.feed(0)
    while (leased := feed.next()) is not None:
        yield leased.batch
        feed.done(leased)
    reader.close()


def job_config(tmp_path: Path, rows: int = 100, **sections: Mapping[str, Any]) -> dict[str, Any]:
    data = write_rows(tmp_path / "rows.parquet", rows)
    base: dict[str, dict[str, Any]] = {"data": {"slice_rows": 32, "epochs": 2}, "train": {"batch_size": BATCH}}
    return settings(
        data, data, **{key: base.get(key, {}) | dict(sections.get(key, {})) for key in {**base, **sections}}
    )


def train(config: dict[str, Any], out: Path) -> tuple[Log, Trained]:
    log = Log()
    Job(config, model=Tower(log), tables=TABLES, out=out).run()
    return log, Trained(out, model=Tower())


def table_rows(trained: Trained, table: str) -> Tensor:
    return next(rows.tensors["weight"] for rows in trained.server.state() if rows.table.name == table)


def assert_near(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Equal but for the rounding of float32 sums taken in another order."""
    torch.testing.assert_close(
        ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6, msg=lambda found: f"{what}: {found}"
    )


OPTIMIZERS: dict[str, NewOptimizer] = {
    "sgd": torch.optim.SGD,
    "adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr, eps=1e-8),
    "adam": torch.optim.Adam,
}


@pytest.mark.parametrize(
    ("rows", "dense", "more"),
    [
        ("rowwise_adagrad", "sgd", {}),
        ("sgd", "adagrad", {"clip_norm": 0.25}),
        ("rowwise_adagrad", "adam", {}),
        ("rowwise_adagrad", "sgd", {"l2": 0.1}),
        ("sgd", "adam", {"l2": 0.03}),
        ("rowwise_adagrad", "adagrad", {"l2": 0.03, "accumulate": 2, "clip_norm": 0.25}),
        ("rowwise_adagrad", "adam", {"accumulate": 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("storage", ["torch", "fbgemm"])
def test_the_job_equals_a_plain_loop_step_by_step(
    tmp_path: Path, storage: str, rows: str, dense: str, more: Mapping[str, Any]
) -> None:
    if storage == "fbgemm":
        pytest.importorskip("fbgemm_gpu", reason=NO_FBGEMM)
    config = job_config(
        tmp_path,
        embedding={"storage": storage, "optimizer": rows, "lr": 0.1, "l2": more.get("l2", 0.0)},
        train={"optimizer": dense, "lr": 0.05, **more},
    )
    plain, tables = plain_loop(config, OPTIMIZERS[dense])
    log, trained = train(config, tmp_path / "out")
    assert len(log.steps) == len(plain.log.steps) == 26
    for number, (ours, theirs) in enumerate(zip(log.steps, plain.log.steps, strict=True)):
        for name, tensor in theirs.items():
            assert_near(ours[name], tensor, f"{name} at step {number}")
    for name, parameter in plain.named_parameters():
        assert_near(trained.module.get_parameter(name), parameter, name)
        assert (parameter - Tower().get_parameter(name)).abs().max() > 1e-3, f"{name} did not move"
    for table in tables:
        assert_near(table_rows(trained, table.table.name), table.bag.weight, table.table.name)
        moved = (table.bag.weight - PlainRows(table.table, "sgd").bag.weight).abs().amax(1) > 1e-4
        assert moved.float().mean() > 0.5, f"{table.table.name} did not move"


def test_the_same_job_twice_is_equal_bit_by_bit(tmp_path: Path) -> None:
    config = job_config(tmp_path, train={"optimizer": "adam"}, embedding={"optimizer": "adam", "lr": 0.01})
    first, second = (train(config, tmp_path / out)[0].steps for out in ("one", "two"))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a)


@pytest.mark.parametrize(
    ("storage", "servers", "split_rows"), [("torch", 3, None), ("torch", 1, 9), ("fbgemm", 3, 7), ("torch", 3, 7)]
)
def test_any_number_of_embedding_servers_gives_the_same_model(
    tmp_path: Path, storage: str, servers: int, split_rows: int | None
) -> None:
    if storage == "fbgemm":
        pytest.importorskip("fbgemm_gpu", reason=NO_FBGEMM)
    one, one_trained = train(job_config(tmp_path, embedding={"storage": storage}), tmp_path / "one")
    embedding = {"storage": storage, "servers": servers, "split_rows": split_rows}
    many, many_trained = train(job_config(tmp_path, embedding=embedding), tmp_path / "many")
    if split_rows is not None:
        placed = place_tables(many_trained.config, many_trained.choices, many_trained.schema, TABLES, None)
        assert sum(map(len, placed)) > len(TABLES)
    for ours, theirs in zip(many.steps, one.steps, strict=True):
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)
    for table in TABLES:
        torch.testing.assert_close(table_rows(many_trained, table.name), table_rows(one_trained, table.name))


def test_bf16_stays_close_to_fp32(tmp_path: Path) -> None:
    fp32, exact = train(job_config(tmp_path), tmp_path / "fp32")
    bf16, rounded = train(job_config(tmp_path, train={"precision": "bf16"}), tmp_path / "bf16")
    assert len(bf16.steps) == len(fp32.steps)
    for name, parameter in exact.module.named_parameters():
        torch.testing.assert_close(rounded.module.get_parameter(name), parameter, rtol=0.05, atol=0.02)
    assert any(not torch.equal(bf16.steps[-1][name], fp32.steps[-1][name]) for name in fp32.steps[-1])


def large_batches(rounds: Sequence[Sequence[Batch]], lr: float) -> Tower:
    """SGD on the mean gradient of each round's batches, with frozen embeddings, from the same start."""
    tower, pool = Tower(), frozen_rows()
    optimizer = torch.optim.SGD(tower.parameters(), lr=lr)
    for batches in rounds:
        optimizer.zero_grad()
        for batch in batches:
            logits = tower(batch.dense, dict(zip(FEATURES, pool(batch).split(DIM, dim=1), strict=True)))
            (nn.functional.binary_cross_entropy_with_logits(logits, batch.labels) / len(batches)).backward()
        optimizer.step()
    return tower


def frozen_rows() -> Callable[[Batch], Tensor]:
    """Pooled initial rows, `[B, F · D]`."""
    tables = [PlainRows(table, "sgd") for table in TABLES]
    table_of = {feature: table for table in tables for feature in table.table.features}
    return lambda batch: torch.cat(
        [table_of[name].pool(batch.ids, index).detach() for index, name in enumerate(FEATURES)], dim=1
    )


def test_a_job_averaged_in_the_foreground_takes_large_steps(tmp_path: Path) -> None:
    """In each round every trainer takes one batch; whoever takes which, the average is the step on all of them."""
    trainers, rounds, lr = 4, 2, 0.5
    together, log, out = threading.Barrier(trainers), Log(), tmp_path / "out"
    config = job_config(
        tmp_path,
        rows=BATCH * trainers * rounds,
        data={"epochs": 1, "slice_rows": BATCH, "prefetch": rounds - 1},
        embedding={"lr": 1e-30, "optimizer": "sgd"},
        train={"trainers": trainers, "optimizer": "sgd", "lr": lr},
        sync={"method": "ma", "schedule": "every_k", "k": 1, "alpha": 1.0},
    )
    Job(config, model=Tower(log), tables=TABLES, out=out, failures=lambda *_: together.wait(120)).run()
    by_first_row = {float(batch.dense[0, 0]): batch for batch in in_order(config)}
    taken = [by_first_row[float(step["dense"][0, 0])] for step in log.steps]
    assert len(taken) == trainers * rounds
    expected = large_batches([taken[:trainers], taken[trainers:]], lr)
    trained = Trained(out, model=Tower())
    for name, parameter in expected.named_parameters():
        assert_near(trained.module.get_parameter(name), parameter, name)
