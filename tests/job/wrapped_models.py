"""Modules as others write them, whose embeddings are looked up with ids, and the same training in plain PyTorch.

`B` samples, `D` width of a row.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import polars as pl
import torch
from job_helpers import laid_over
from test_exactness import in_order
from torch import Tensor, nn

from shadowsync.data.batch import Batch
from shadowsync.data.source import Feature, Schema
from shadowsync.models.inputs import Inputs

ROWS, DIM, BATCH = 40, 4, 16
SCHEMA = Schema(
    ("price", "age"),
    (Feature("user", ROWS), Feature("item", ROWS), Feature("recent", ROWS, multi_hot=True)),
)


def write_clicks(path: Path, rows: int, seed: int = 0) -> Path:
    """A parquet file in which users and items have likings that only their rows can learn."""
    draw = np.random.default_rng(seed)
    user, item = draw.integers(0, ROWS, rows), draw.integers(0, ROWS, rows)
    recent = [draw.integers(0, ROWS, draw.integers(0, 5)).tolist() for _ in range(rows)]
    price, age = draw.normal(size=(2, rows)).astype(np.float32)
    liking = np.where(user % 2, 1.5, -1.5) + np.where(item % 3 == 0, 2.0, -1.0) + 0.5 * price
    label = (liking + draw.logistic(size=rows) > 0).astype(np.int64)
    columns = {"label": label, "price": price, "age": age, "user": user, "item": item}
    weights = [draw.random(len(ids)).astype(np.float32).tolist() for ids in recent]
    pl.DataFrame(columns).with_columns(
        pl.Series("recent", recent, dtype=pl.List(pl.Int64)),
        pl.Series("recent_weights", weights, dtype=pl.List(pl.Float32)),
    ).write_parquet(path)
    return path


def clicks_settings(path: Path, test_path: Path | None = None, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that trains a wrapped module on such a file, with `sections` laid over it."""
    base: dict[str, dict[str, Any]] = {
        "data": {
            "name": "parquet",
            "path": str(path),
            "dense": ["price", "age"],
            "categorical": ["user", "item", "recent"],
            "rows": ROWS,
            "slice_rows": 32,
            "standardise": False,
        },
        "embedding": {"servers": 1, "storage": "torch", "optimizer": "sgd", "lr": 0.5},
        "train": {
            "trainers": 1,
            "workers": 1,
            "batch_size": BATCH,
            "optimizer": "sgd",
            "lr": 0.1,
            "precision": "fp32",
            "kernels": "torch",
            "warmup_samples": 0,
        },
        "sync": {"method": "none"},
        "report": {"html": False, "tensorboard": False, "every_s": 0.05},
    }
    return laid_over(base, test_path, sections)


class Log:
    """Logits of each whole batch that a model was trained on; a copied model writes to the same one."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def write(self, module: nn.Module, logits: Tensor) -> Tensor:
        if module.training and len(logits) == BATCH:  # what it is tried with is smaller
            self.logits.append(logits.detach().clone())
        return logits

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Model(nn.Module):
    """Writes its logits down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.log = Log()
        self.tower = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1))

    def out(self, *parts: Tensor) -> Tensor:
        return self.log.write(self, self.tower(torch.cat(parts, dim=1)).squeeze(1))


class ByName(Model):
    """`forward(user, item, price)`: one `nn.Embedding` for each column."""

    def __init__(self) -> None:
        super().__init__(2 * DIM + 1)
        self.users, self.items = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

    def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:
        return self.out(self.users(user), self.items(item), price[:, None])


class InPlace(Model):
    """Changes in place what embeddings and layers give it."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.users, self.recent, self.hidden = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM), nn.Linear(DIM, DIM)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, user: Tensor, recent: Tensor) -> Tensor:
        vectors, history = self.users(user), self.recent(recent)
        vectors *= 0.5
        history.masked_fill_((recent == 0).unsqueeze(-1), 0.0)
        vectors += history.sum(dim=1)
        return self.out(self.activation(self.hidden(vectors)))


class FirstOfList(Model):
    """Takes one id of a list, if there is one in the batch."""

    def __init__(self) -> None:
        super().__init__(2 * DIM)
        self.users, self.recent = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

    def forward(self, user: Tensor, recent: Tensor) -> Tensor:
        return self.out(self.users(user), self.recent(recent[:, :1]).sum(dim=1))


class OneTable(Model):
    """As torchfm has it: all columns in one table, each behind the one before, and one more table of width 1."""

    def __init__(self) -> None:
        super().__init__(2 * DIM + 1)
        self.embedding, self.first_order = nn.Embedding(2 * ROWS, DIM), nn.Embedding(2 * ROWS, 1)
        self.register_buffer("starts", torch.tensor([0, ROWS]))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.starts
        return self.out(self.embedding(x).flatten(1), self.first_order(x).sum(dim=1))


class Shared(Model):
    """One table for items and for histories, which are padded; the last row is the padding."""

    def __init__(self) -> None:
        super().__init__(2 * DIM)
        self.items = nn.Embedding(ROWS + 1, DIM, padding_idx=ROWS)
        with torch.no_grad():
            self.items.weight[ROWS] = 0.25  # not zero, and to stay so

    def forward(self, item: Tensor, history: Tensor) -> Tensor:
        return self.out(self.items(item), self.items(history).sum(dim=1))


class Bags(Model):
    """Bags of all kinds over ids that lie one after the other."""

    def __init__(self) -> None:
        super().__init__(5 * DIM + 2)
        self.sums = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        self.means = nn.EmbeddingBag(ROWS, DIM, mode="mean", include_last_offset=True)
        self.largest = nn.EmbeddingBag(ROWS, DIM, mode="max")
        self.padded = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=0)
        self.flat = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.learnt = nn.Parameter(torch.ones(ROWS))

    def forward(self, dense: Tensor, values: Tensor, offsets: Tensor, pairs: Tensor) -> Tensor:
        first = offsets[:-1]
        return self.out(
            dense,
            self.sums(values, first),
            self.means(values, offsets),
            self.largest(values, first),
            self.padded(values, first),
            self.flat(pairs, per_sample_weights=self.learnt[pairs]),
        )


class Weighted(Model):
    """A bag whose ids carry weights."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")

    def forward(self, values: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return self.out(self.bag(values, offsets[:-1], per_sample_weights=weights))


class Probable(Model):
    """As FuxiCTR has it: a dict of columns in, a dict with a probability out; a frozen table stays in it."""

    def __init__(self) -> None:
        super().__init__(2 * DIM + 1)
        self.tables = nn.ModuleDict({"user": nn.Embedding(ROWS, DIM), "item": nn.Embedding(ROWS, DIM)})
        self.tables["item"].weight.requires_grad_(False)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        vectors = [table(inputs[name].long()) for name, table in self.tables.items()]
        return {"y_pred": self.out(*vectors, inputs["price"][:, None]).sigmoid()[:, None]}


class Matrix(Model):
    """As DeepCTR-Torch has it: one matrix of floats, of which some columns are ids."""

    def __init__(self) -> None:
        super().__init__(2 * DIM + 1)
        self.tables = nn.ModuleDict({"user": nn.Embedding(ROWS, DIM), "item": nn.Embedding(ROWS, DIM)})

    def forward(self, x: Tensor) -> Tensor:
        vectors = [table(x[:, at : at + 1].long()).squeeze(1) for at, table in enumerate(self.tables.values(), 1)]
        return self.out(x[:, :1], *vectors)[:, None].sigmoid()


class KeyedIds:
    """A double of TorchRec's `KeyedJaggedTensor`: what its collections use of it."""

    def __init__(self, batch: Inputs) -> None:
        self.parts = {name: batch.jagged(name) for name in ("item", "recent")}


class Collections(Model):
    """A double of TorchRec's collections: bags that are keyed by feature, beside a sequence of the same ids."""

    def __init__(self) -> None:
        super().__init__(3 * DIM + 2)
        names = ("item", "recent")
        self.bags = nn.ModuleDict(
            {name: nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True) for name in names}
        )
        self.sequence = nn.Embedding(ROWS, DIM)

    def forward(self, dense: Tensor, ids: KeyedIds) -> Tensor:
        pooled = [bag(ids.parts[name].values, ids.parts[name].bag_offsets()) for name, bag in self.bags.items()]
        recent = ids.parts["recent"]
        owners = torch.repeat_interleave(torch.arange(len(dense), device=dense.device), recent.lengths())
        summed = dense.new_zeros(len(dense), DIM).index_add(0, owners, self.sequence(recent.values))
        return self.out(dense, *pooled, summed)


def bags_of(batch: Inputs) -> tuple[Tensor, ...]:
    recent = batch.jagged("recent")
    return batch.dense, recent.values, recent.bag_offsets(), batch.ids("user", "item")


def weighted(batch: Inputs) -> tuple[Tensor, ...]:
    recent = batch.jagged("recent")
    assert recent.weights is not None
    return recent.values, recent.bag_offsets(), recent.weights


CASES: dict[str, tuple[type[Model], dict[str, Any]]] = {
    "by name": (ByName, {}),
    "in place": (InPlace, {}),
    "first of a list": (FirstOfList, {}),
    "one table": (OneTable, {"inputs": {"x": ("user", "item")}}),
    "shared, padded": (Shared, {"inputs": {"item": "item", "history": lambda b: b.padded("recent", fill=ROWS)}}),
    "padded to a length": (Shared, {"inputs": lambda b: (b["item"], b.padded("recent", 3, fill=ROWS, left=True))}),
    "bags": (Bags, {"inputs": bags_of}),
    "weights": (Weighted, {"inputs": weighted}),
    "dict of columns": (Probable, {"output": "probability"}),
    "matrix": (Matrix, {"inputs": lambda b: b.matrix("price", "user", "item"), "output": "probability"}),
    "collections": (Collections, {"inputs": lambda b: (b.dense, KeyedIds(b))}),
}


def weighted_data(name: str) -> dict[str, Any]:
    return {"weights": {"recent": "recent_weights"}} if name == "weights" else {}


def make(name: str) -> Model:
    torch.manual_seed(5)
    return CASES[name][0]()


def called(model: nn.Module, name: str, batch: Batch) -> Tensor:
    """Its output for a batch, as somebody calls it who has the batch's columns."""
    inputs = Inputs(SCHEMA, batch.dense, batch.ids)
    given = CASES[name][1].get("inputs")
    if name == "by name":
        return model(inputs["user"], inputs["item"], inputs["price"])
    if name in ("in place", "first of a list"):
        return model(inputs["user"], inputs["recent"])
    if name == "one table":
        return model(torch.stack([inputs["user"], inputs["item"]], dim=1))
    if name == "shared, padded":
        return model(inputs["item"], inputs.padded("recent", fill=ROWS))
    if name == "dict of columns":
        return model({name: inputs[name] for name in ("user", "item", "price")})["y_pred"]
    found = given(inputs)
    return model(*found) if isinstance(found, tuple) else model(found)


def plain_loop(config: Mapping[str, Any], model: nn.Module, loss_of: Callable[[Batch], Tensor]) -> Iterator[float]:
    """Trains the module with torch alone, but for the reader, which gives the order of the data: its losses."""
    rowwise = config["embedding"]["optimizer"] == "rowwise_adagrad"
    kinds = (nn.Embedding, nn.EmbeddingBag)
    tables = [m.weight for m in model.modules() if isinstance(m, kinds) and m.weight.requires_grad]
    others = [p for p in model.parameters() if p.requires_grad and not any(p is table for table in tables)]
    dense = torch.optim.SGD(others, lr=config["train"]["lr"])
    squares = [torch.zeros(len(table)) for table in tables]
    for batch in in_order(dict(config)):
        loss = loss_of(batch)
        model.zero_grad()
        loss.backward()
        dense.step()
        with torch.no_grad():
            for number, table in enumerate(tables):
                gradient = table.grad.to_dense()
                touched = gradient.abs().sum(dim=1) > 0
                squares[number] += gradient.square().mean(dim=1)
                scale = 1 / (squares[number].sqrt()[:, None] + 1e-8) if rowwise else torch.ones(len(table), 1)
                table[touched] -= config["embedding"]["lr"] * (scale * gradient)[touched]
        yield loss.item()
