"""Predictions and embeddings in memory, and models that are named by their class."""

import datetime
import decimal
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from job_helpers import SMALL_DLRM, fails, settings, write_rows
from torch import nn

from shadowsync import Job, Trained
from shadowsync.errors import CheckpointError, ConfigError, DataError, RunError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on a dense column, a vocabulary, hashed values and ids, some of them missing."""
    folder = tmp_path_factory.mktemp("run")
    draw, rows = np.random.default_rng(0), 600
    data = {
        "label": draw.integers(0, 2, rows),
        "price": draw.normal(100, 5, rows),
        "item": [["tea", "milk", "rice", None][number] for number in draw.integers(0, 4, rows)],
        "user": draw.integers(0, 1 << 60, rows),
        "shop": draw.integers(0, 7, rows),
    }
    pl.DataFrame(data).write_parquet(folder / "rows.parquet")
    given = settings(folder / "rows.parquet", model={**SMALL_DLRM, "embedding_dim": 4}, train={"batch_size": 50})
    kinds = {
        "price": "dense",
        "item": "vocabulary",
        "user": {"kind": "hash", "rows": 90},
        "shop": {"kind": "as_is", "rows": 7},
    }
    given["data"] = {"path": str(folder / "rows.parquet"), "columns": kinds}
    Job(given, out=folder / "out").run()
    return folder


FORMS = {
    "polars": lambda frame: frame,
    "lazy": lambda frame: frame.lazy(),
    "arrow": lambda frame: frame.to_arrow(),
    "batches": lambda frame: frame.iter_slices(170),
    "dict": lambda frame: {**frame.to_dict(as_series=False), "price": frame["price"].to_numpy()},
    "pandas": lambda frame: pytest.importorskip("pandas", reason="pip install pandas").DataFrame(
        frame.to_dict(as_series=False)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_in_memory_have_the_scores_of_those_in_files(run: Path, form: str) -> None:
    trained, frame = Trained(run / "out"), pl.read_parquet(run / "rows.parquet").drop("label")
    assert trained.predict(run / "rows.parquet", run / "scores.parquet") == 600
    wanted = pl.read_parquet(run / "scores.parquet")["probability"].to_numpy()
    found = trained.predict(FORMS[form](frame))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-6)  # batches of other sizes round otherwise
    np.testing.assert_array_equal(trained.predict(str(run / "rows.parquet")), wanted)


@pytest.mark.parametrize(
    ("change", "error", "parts"),
    [
        (lambda f: f.drop("item"), DataError, ("data: there is no column 'item'",)),
        (lambda f: f.with_columns(item=pl.lit(3)), DataError, ("column 'item' holds Int32", "trained on strings")),
        (lambda f: f.with_columns(shop=pl.when(pl.int_range(pl.len()) == 5).then(99).otherwise("shop")), DataError,
         ("data, row 6: shop", "99")),
        (lambda f: f.with_columns(shop=pl.lit(2**70)), DataError,
         ("column 'shop'", "Int128, it must hold integers of up to 64 bits")),
        (lambda f: f.head(0), DataError, ("data holds no rows",)),
        (lambda f: 7, ConfigError, ("data is a int",)),
        (lambda f: {"item": "tea", "price": 1.0}, DataError, ("data: cannot be read: the column 'item'",)),
    ],
    ids=["column", "type", "id", "bits", "none", "number", "scalars"],
)  # fmt: skip
def test_rows_that_do_not_fit_are_one_sentence(run: Path, change: Any, error: Any, parts: tuple[str, ...]) -> None:
    frame = pl.read_parquet(run / "rows.parquet").drop("label")
    fails(lambda: Trained(run / "out").predict(change(frame)), error, *parts)


def test_rows_in_memory_are_written_nowhere(run: Path) -> None:
    frame = pl.read_parquet(run / "rows.parquet")
    fails(lambda: Trained(run / "out").predict(frame, "scores.csv"), ConfigError, "leave out=")
    fails(lambda: Trained(run / "out").predict("rows", keep=["item"]), ConfigError, "keep=['item'] has no effect")


def test_a_source_without_columns_takes_them_by_its_features(tmp_path: Path) -> None:
    given = settings(tmp_path / "none", model=SMALL_DLRM)
    given["data"] = {"name": "synthetic", "rows": 300, "slice_rows": 64}
    Job(given, out=tmp_path / "out").run()
    trained = Trained(tmp_path / "out")
    columns = {name: np.zeros(3) for name in trained.schema.dense}
    scores = trained.predict(columns | {feature.name: np.array([0, 1, 0]) for feature in trained.schema.features})
    assert scores.shape == (3,)
    assert scores[0] == scores[2] != scores[1]


def test_embeddings_have_the_ids_that_a_user_knows(run: Path) -> None:
    trained = Trained(run / "out")
    item, user, shop = map(trained.embeddings, ("item", "user", "shop"))
    assert sorted(item.ids) == ["milk", "rice", "tea"]
    assert (item.vectors.shape, user.vectors.shape, shop.vectors.shape) == ((3, 4), (90, 4), (7, 4))
    assert list(user.ids) == list(range(90))
    rows = next(rows for rows in trained.server.state() if rows.table.name == "item").tensors["weight"].numpy()
    np.testing.assert_array_equal(item.vectors, rows[2:], "rows 0 and 1 are of missing and unknown values")
    table = item.arrow()
    assert isinstance(table, pa.Table)
    assert table.column_names == ["id", "vector"]
    assert table["id"].to_pylist() == list(item.ids)
    assert np.allclose(table["vector"].to_pylist(), item.vectors)
    fails(lambda: trained.embeddings("itme"), ConfigError, "no column itme, did you mean item?")


def test_embeddings_of_dates_and_numbers_have_these(tmp_path: Path) -> None:
    moment, span = datetime.datetime(2024, 1, 31, 12, tzinfo=datetime.UTC), datetime.timedelta(hours=1)
    values = {
        "day": moment.date(),
        "moment": moment,
        "span": span,
        "money": decimal.Decimal("8.00"),
        "large": 2**64 - 1,
    }
    rows = pl.DataFrame({"label": [0, 1] * 20, **{name: [value] * 40 for name, value in values.items()}})
    given = {**settings("", model=SMALL_DLRM), "data": {"columns": dict.fromkeys(values, "vocabulary")}}
    Job(given, data=rows, out=tmp_path / "out").run()
    ids = {name: Trained(tmp_path / "out").embeddings(name).ids for name in values}
    assert ids["day"].tolist() == [moment.date()]
    assert ids["moment"].tolist() == [moment.replace(tzinfo=None)]
    assert (ids["span"].tolist(), ids["money"].tolist(), ids["large"].view("u8").tolist()) == (
        [span],
        ["8"],
        [2**64 - 1],
    )


def test_vectors_are_without_the_weights_in_front_of_them(tmp_path: Path) -> None:
    given = settings(
        write_rows(tmp_path / "rows.parquet", 40), model={"name": "deepfm", "embedding_dim": 4, "deep": [8]}
    )
    Job(given, out=tmp_path / "out").run()
    assert Trained(tmp_path / "out").embeddings("c0").vectors.shape == (40, 4)


# --- model.name=package.module:Class ---------------------------------------------------------------------------------

MODELS = """
import torch
from torch import nn
from shadowsync.models.model import ModelSpec
from dataclasses import dataclass
from typing import ClassVar

class Plain(nn.Module):
    def __init__(self, hidden=4):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(14, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    def forward(self, dense, embeddings):
        return self.tower(torch.cat([dense, *embeddings.values()], dim=1)).squeeze(1)

class Looking(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.out = nn.Embedding(40, 4), nn.Linear(5, 1)
    def forward(self, c0, x):
        return self.out(torch.cat([self.items(c0), x[:, None]], dim=1)).squeeze(1)

@dataclass(frozen=True)
class Spec(ModelSpec):
    name: ClassVar[str] = "spec"
    hidden: int = 3
    def build(self, dense_columns, dims, sequences={}):
        return Plain(self.hidden)

class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
    def forward(self, dense, embeddings):
        return self.scale * {}["missing"]
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models_of_mine.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "models_of_mine", raising=False)
    return tmp_path


def named(folder: Path, name: str, **model: Any) -> dict[str, Any]:
    given = settings(write_rows(folder / "rows.parquet", 40), folder / "rows.parquet")
    return given | {"model": {"name": f"models_of_mine:{name}", **model}}


@pytest.mark.parametrize(
    ("name", "options"), [("Plain", {"hidden": 6}), ("Looking", {}), ("Spec", {"hidden": 5})], ids=str
)
def test_a_model_is_named_by_its_class(models: Path, name: str, options: dict[str, Any]) -> None:
    given = named(models, name, **options, **({} if name == "Looking" else {"embedding_dim": 4}))
    result = Job(given, out="out").run()
    key = f"models_of_mine:{name}"
    fails(lambda: Trained("out"), ConfigError, "trained a module of your own", key, "--model")
    assert result.test is not None
    assert Trained("out", key).evaluate().logloss == pytest.approx(result.test.logloss, abs=1e-6)
    given["data"]["epochs"] = 2
    assert Job(given, out="out", resume="out").run().data.trained_samples == 80
    assert Job(given, out="again", start_from="out").run().data.trained_samples == 80


@pytest.mark.parametrize("name", ["Plain", "Spec"])
def test_a_module_stands_for_the_class_and_the_options_that_are_stored(models: Path, name: str) -> None:
    result = Job(named(models, name, hidden=6, embedding_dim=4), out="out").run()
    plain = importlib.import_module("models_of_mine").Plain
    assert result.test is not None
    assert Trained("out", plain(6)).evaluate().logloss == pytest.approx(result.test.logloss, abs=1e-6)
    fails(lambda: Trained("out", plain(5)), CheckpointError, "parameter tower.0.weight is [6, 14] in the checkpoint")


def test_a_module_in_place_of_a_model_of_the_package_is_compared_with_it(models: Path) -> None:
    Job(settings(write_rows(models / "rows.parquet", 40), model=SMALL_DLRM), out="out").run()
    fails(lambda: Trained("out", nn.Linear(14, 1)), CheckpointError, "parameter", "absent in this model")


def test_code_that_a_folder_names_is_not_run(models: Path) -> None:
    """Not even imported, by whatever reads the folder."""
    Job(named(models, "Spec", embedding_dim=4), out="out").run()
    del sys.modules["models_of_mine"]
    (models / "models_of_mine.py").write_text("raise SystemExit('it was run')")
    fails(lambda: Trained("out"), ConfigError, "models_of_mine:Spec")
    given = settings(models / "rows.parquet", model=SMALL_DLRM)
    Job(given, out="other", start_from="out").run()


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("Gone", {}, ("models_of_mine:Gone: models_of_mine has no Gone",)),
        ("nn", {}, ("is no subclass of", "ModelSpec", "torch.nn.modules.module.Module")),
        ("Plain", {"hiden": 3}, ("cannot be made with hiden", "TypeError", "unexpected keyword argument 'hiden'")),
        ("Plain", {"hidden": "x"}, ("cannot be made with hidden", "models_of_mine.py, line ")),
        ("Spec", {"hiden": 3}, ("model.hiden is not an option of", "did you mean hidden?")),
    ],
)
def test_a_class_that_cannot_be_used_is_one_sentence(
    models: Path, name: str, options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    fails(lambda: Job(named(models, name, **options)), ConfigError, *parts)


def test_what_a_module_raises_on_a_batch_is_its_own_error_with_its_line(models: Path) -> None:
    job = Job(named(models, "Failing", embedding_dim=4), out="out")
    fails(job.run, RunError, "the model Failing failed on a batch: KeyError: 'missing' (", "models_of_mine.py, line 34")
