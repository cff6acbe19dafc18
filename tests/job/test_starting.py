"""Runs that begin with what another one has learnt: one run where nothing changed, grown where it did."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from job_helpers import SMALL_DLRM, checkpoints, decided, fails, settings, train_counted, weights, write_rows
from torch.nn import functional as F
from wrapped_models import ByName, clicks_settings, write_clicks

from shadowsync import Job, Trained, wrap
from shadowsync.choices import resumed
from shadowsync.config import merge
from shadowsync.data.columns import Fit, Kinds, Vocabulary, declared
from shadowsync.data.fitting import Learnt
from shadowsync.data.values import Values
from shadowsync.errors import ConfigError
from shadowsync.starting import grown


def columns(path: Path, items: list[str], rows: int = 400, seed: int = 0) -> Path:
    """Clicks on items by their names, a price, and ids of users."""
    draw = np.random.default_rng(seed)
    data = {
        "label": draw.integers(0, 2, rows),
        "item": [items[number] for number in draw.integers(0, len(items), rows)],
        "user": draw.integers(0, 20, rows),
        "price": draw.normal(5.0 + 10 * seed, 2.0, rows),
    }
    pl.DataFrame(data).write_parquet(path)
    return path


def configuration(path: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    found = settings(path, model={**SMALL_DLRM, "embedding_dim": 4}, train={"batch_size": 20})
    found["data"] = {
        "path": str(path),
        "columns": {"price": "dense", "item": "vocabulary", "user": {"kind": "as_is", "rows": 20}},
    }
    return merge(found, dict(sections), [])


@pytest.mark.parametrize("name", ["start_from", "resume", "out"])
def test_what_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    fails(lambda: Job(settings(tmp_path), **{name: 5}), ConfigError, f"{name}=5 is no path")  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_two_runs_over_the_same_rows_are_one_over_two_epochs(tmp_path: Path, optimizer: str) -> None:
    rows = {"adagrad": "rowwise_adagrad", "adam": "adam"}[optimizer]
    config = settings(
        write_rows(tmp_path / "rows.parquet", 40),
        model=SMALL_DLRM,
        data={"shuffle": False},
        train={"optimizer": optimizer},
        embedding={"optimizer": rows},
    )
    Job(merge(config, {"data": {"epochs": 2}}, []), out=tmp_path / "both").run()
    Job(config, out=tmp_path / "monday").run()
    result = Job(config, out=tmp_path / "tuesday", start_from=tmp_path / "monday").run()
    both, tuesday = weights(tmp_path / "both"), weights(tmp_path / "tuesday")
    assert both.keys() == tuesday.keys()
    for name, tensor in both.items():
        assert torch.equal(tensor, tuesday[name]), name
    assert result.data.trained_samples == 40, "the position and the counts begin anew"


@pytest.mark.parametrize("runtime", ["inprocess", "processes"])
def test_vocabularies_and_tables_grow_and_what_was_learnt_stays(tmp_path: Path, runtime: str) -> None:
    still = {"train": {"lr": 1e-12, "trainers": 2}, "embedding": {"lr": 1e-12, "servers": 2, "split_rows": 15}}
    monday = columns(tmp_path / "monday.parquet", ["tea", "milk", "rice"])
    Job(configuration(monday), out=tmp_path / "one").run()
    tuesday = columns(tmp_path / "tuesday.parquet", ["rice", "oil", "tea", "salt", "salt"], seed=1)
    config = configuration(tuesday, **still, cluster={"runtime": runtime})
    config["data"]["columns"]["user"] = {"kind": "as_is", "rows": 30}
    Job(config, out=tmp_path / "two", start_from=tmp_path / "one").run()
    one, two = Trained(tmp_path / "one"), Trained(tmp_path / "two")
    before, now = one.embeddings("item"), two.embeddings("item")
    assert list(now.ids) == [*before.ids, "salt", "oil"], "the new ones behind, the most frequent first"
    for name, count in (("item", 3), ("user", 20)):
        was, found = one.embeddings(name).vectors[:count], two.embeddings(name).vectors
        assert np.allclose(was, found[:count], atol=1e-6)
        assert len(found) > count
    assert one.choices.source.learnt.fit("price") == two.choices.source.learnt.fit("price")
    assert torch.allclose(*(weights(tmp_path / name)["final"] for name in ("one", "two")), atol=1e-6)


def test_what_means_something_else_begins_anew_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    config = configuration(columns(tmp_path / "monday.parquet", ["tea", "milk"]))
    Job(config, out=tmp_path / "one").run()
    config["data"]["columns"]["user"] = {"kind": "hash", "rows": 50}
    config["data"]["columns"]["shop"] = {"kind": "cross", "of": ["item", "user"], "rows": 9}
    config["embedding"]["optimizer"] = "adam"
    Job(config, out=tmp_path / "two", start_from=tmp_path / "one").run()
    told = capsys.readouterr().err
    lines = (
        r"table user .* begins anew: its ids mean something else",
        r"table shop .* begins anew",
        r"table item .* 4 rows",
        r"parameter top\.0\.weight .* begins anew",
        r"rows' optimizer .* begins anew",
    )
    for line in lines:
        assert re.search(line, told), line
    assert any(sentence.startswith("begins with samples-") for sentence in decided(tmp_path / "two"))


@pytest.mark.parametrize("what", ["dense columns", "features", "labels"])
def test_columns_and_labels_in_another_order_are_not_taken_for_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rows = columns(tmp_path / "monday.parquet", ["tea", "milk"], rows=40)
    more = {"bought": pl.col("label"), "cost": -pl.col("price"), "friend": pl.col("user")}
    pl.read_parquet(rows).with_columns(**more).write_parquet(rows)
    config = settings(rows, model={"name": "mmoe", "experts": 2, "expert": [4], "top": [4], "embedding_dim": 4})
    each: dict[str, Any] = {
        "dense": ["price", "cost"],
        "categorical": ["user", "friend"],
        "labels": {"label": "logloss", "bought": "logloss"},
    }
    config["data"] |= each
    Job(config, out=tmp_path / "one").run()
    Job(config, out=tmp_path / "same", start_from=tmp_path / "one").run()
    assert "begins anew" not in capsys.readouterr().err
    key = {"dense columns": "dense", "features": "categorical"}.get(what, what)
    turned = dict(reversed(each[key].items())) if key == "labels" else each[key][::-1]
    config["data"] |= {key: turned}
    Job(config, out=tmp_path / "two", start_from=tmp_path / "one").run()
    told = capsys.readouterr().err
    assert re.search(f"dense part .* begins anew: its {what} are others, or in another order", told)
    assert "parameter" not in told.replace("parameters", "")


def test_what_is_lost_of_the_run_before_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that another one stands for, and a loss that no configuration names."""
    config = settings(write_rows(tmp_path / "rows.parquet", 20), model=SMALL_DLRM)
    one, losses = tmp_path / "one", {"loss": partial(F.binary_cross_entropy_with_logits, reduction="none")}
    Job(config, out=one, **losses).run()
    longer = merge(config, {"data": {"epochs": 2}}, [])
    Job(longer, out=one, resume=one, **losses).run()
    newest = checkpoints(one)[-1]
    for file in newest.rglob("*.safetensors"):
        file.write_bytes(b"")
    capsys.readouterr()
    Job(config, out=tmp_path / "two", start_from=one).run()
    told = capsys.readouterr().err
    assert newest.name in told
    assert "was trained with a loss of your own for label, which this run lacks" in told
    Job(config, out=tmp_path / "three", start_from=one, **losses).run()
    assert "loss of your own" not in capsys.readouterr().err


def test_a_run_that_began_so_is_resumed_without_the_other_folder(tmp_path: Path) -> None:
    """Its first checkpoint is what it began with."""
    config = configuration(columns(tmp_path / "monday.parquet", ["tea", "milk"]))
    Job(config, out=tmp_path / "one").run()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Job(config, out=tmp_path / "two", start_from=tmp_path / "one").run(on_frame=stop)
    assert checkpoints(tmp_path / "two")[0].name == "samples-000000000000"
    (tmp_path / "one").rename(tmp_path / "elsewhere")
    result = Job(config, out=tmp_path / "two", resume=tmp_path / "two").run()
    assert result.data.trained_samples == 400


def test_a_wrapped_module_goes_on_with_its_rows(tmp_path: Path) -> None:
    config = clicks_settings(write_clicks(tmp_path / "rows.parquet", 96))
    Job(config, model=wrap(ByName()), out=tmp_path / "one").run()
    quiet = merge(config, {"train": {"lr": 1e-12}, "embedding": {"lr": 1e-12}}, [])
    Job(quiet, model=wrap(ByName()), out=tmp_path / "two", start_from=tmp_path / "one").run()
    plain = [Trained(tmp_path / name, model=wrap(ByName())).unwrapped() for name in ("one", "two")]
    for one, two in zip(*(model.parameters() for model in plain), strict=True):
        assert torch.allclose(one, two, atol=1e-6)
    config["data"] |= {"rows": None, "hash_size": 40}
    job = Job(config, model=wrap(ByName()), out=tmp_path / "three", start_from=tmp_path / "one")
    fails(job.run, ConfigError, "the ids of column user are not those", "declare the column as it was")


def test_gradient_methods_begin_so_too(tmp_path: Path) -> None:
    config = settings(write_rows(tmp_path / "rows.parquet", 40), model=SMALL_DLRM)
    Job(config, out=tmp_path / "one").run()
    del config["sync"]
    still = {"train": {"trainers": 2, "lr": 1e-12}, "embedding": {"lr": 1e-12}}
    again = merge(config, {"aggregation": {"method": "sync"}, **still}, [])
    Job(again, out=tmp_path / "two", start_from=tmp_path / "one").run()
    assert torch.allclose(*(weights(tmp_path / name)["final"] for name in ("one", "two")), atol=1e-6)


def test_what_cannot_be_begun_with_is_one_sentence(tmp_path: Path) -> None:
    config = settings(write_rows(tmp_path / "rows.parquet", 20), model=SMALL_DLRM)
    fails(lambda: Job(config, resume="a", start_from="b"), ConfigError, "give one of them")
    fails(Job(config, out=tmp_path / "x", start_from=tmp_path / "none").run, ConfigError, "there is no such folder")
    train_counted(config, tmp_path / "one")
    _, rows = train_counted(config, tmp_path / "one", resume=tmp_path / "one")
    assert rows.total() == 0
    assert any("--from" in sentence for sentence in decided(tmp_path / "one"))
    own = Job(config, out=tmp_path / "two", start_from=tmp_path / "one")
    own.run()  # of another model rows are taken, the dense part begins anew


@pytest.mark.parametrize(
    ("before", "given", "name"),
    [
        ("parquet", {"path": "new.csv"}, "csv"),
        ("csv", {"path": ["new.jsonl.gz", "newer.jsonl.gz"]}, "jsonl"),
        ("csv", {"path": "new.csv", "name": "parquet"}, "parquet"),
        ("csv", {"path": "new.tsv"}, "csv"),
        ("csv", {"path": "folder"}, "csv"),
        ("criteo", {"path": "day_1.tsv"}, "criteo"),
    ],
)
def test_rows_of_another_format_are_read_by_what_they_are_called(before: str, given: dict[str, Any], name: str) -> None:
    found = resumed({"data": {"name": before, "path": "old"}}, {"data": given})
    assert found["data"] == {"name": name, "path": given["path"]}


def learnt(values: list[str], kind: Vocabulary) -> Learnt:
    return Learnt(
        Kinds({}, {"item": kind}), {"item": Fit(form="text")}, {"item": Values(pl.Series(values, dtype=pl.String))}, 9
    )


def test_a_vocabulary_keeps_its_ids_and_its_bound() -> None:
    kind = declared("item", {"kind": "vocabulary", "max_size": 4}, {})
    assert isinstance(kind, Vocabulary)
    found = grown(learnt(["a", "b", "c"], kind), learnt(["c", "x", "a", "y"], kind), {})
    assert found.values["item"].values.to_list() == ["a", "b", "c", "x"]
    assert grown(learnt([], kind), learnt(["c"], kind), {}).values["item"].values.to_list() == ["c"]
    assert grown(learnt(["c"], kind), learnt([], kind), {}).values["item"].values.to_list() == ["c"]
