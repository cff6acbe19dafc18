"""Whole jobs with dynamic tables: as exact as with fixed ones, resumed, moved, killed, evaluated, exported, refused."""

import datetime
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from job_helpers import SMALL_DLRM, fails, settings
from wrapped_models import make

from shadowsync import Callback, Job, Trained, serving, wrap
from shadowsync.data.values import words
from shadowsync.embedding.keys import DEFAULT, LOWEST, NOBODY, Counts, hashes_of, salt_of, sets_of
from shadowsync.embedding.table import WAYS
from shadowsync.errors import CheckpointError, ConfigError, DataError
from shadowsync.memory.shared import can_share
from shadowsync.report.files import read_frames

USERS, ITEMS = 60, 300
VOCABULARY: dict[str, Any] = {"user": {"kind": "vocabulary"}, "item": {"kind": "as_is", "rows": ITEMS}}
AT_ONCE: dict[str, Any] = {"kind": "dynamic", "admit": 1}
ROOMY = {"user": {**AT_ONCE, "capacity": 1600}, "item": {**AT_ONCE, "capacity": 6400}}
TIGHT = {"user": {**AT_ONCE, "capacity": 32}, "item": {**AT_ONCE, "capacity": 64}}


def write_log(path: Path, rows: int, seed: int = 0) -> Path:
    """Clicks of users, by name, on items, by number, of which some come often."""
    draw = np.random.default_rng(seed)
    user, item = draw.integers(0, USERS, rows), np.minimum(draw.zipf(1.3, rows), ITEMS) - 1
    price = draw.normal(size=rows).astype(np.float32)
    clicked = (np.where(user % 2, 1.5, -1.5) + np.where(item % 3, 1.0, -1.0) + price + draw.logistic(size=rows)) > 0
    names = [f"user {number}" for number in user]
    pl.DataFrame({"label": clicked.astype(np.int64), "price": price, "user": names, "item": item}).write_parquet(path)
    return path


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("logs")
    return write_log(folder / "train.parquet", 1200), write_log(folder / "test.parquet", 400, 1)


def job(logs: tuple[Path, Path], columns: Mapping[str, Any], **sections: Mapping[str, Any]) -> dict[str, Any]:
    data = {"name": "parquet", "path": str(logs[0]), "test_path": str(logs[1]), "slice_rows": 64, "columns": columns}
    base: dict[str, dict[str, Any]] = {
        "data": {**data, "standardise": False},
        "model": {**SMALL_DLRM, "embedding_dim": 4},
        "embedding": {"storage": "torch", "lr": 0.1},
        "train": {
            "trainers": 1,
            "workers": 1,
            "batch_size": 16,
            "precision": "fp32",
            "kernels": "torch",
            "warmup_samples": 0,
        },
        "sync": {"method": "none"},
        "report": {"html": False, "tensorboard": False, "every_s": 0.05},
    }
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}


def owners(trained: Trained) -> dict[str, dict[int, int]]:
    """Of each table, each key and its row; every row is in the set of its key."""
    found = {}
    for rows in trained.server.state():
        keys = rows.tensors["key"].numpy() ^ NOBODY
        taken = np.flatnonzero(keys >= LOWEST)
        assert len(np.unique(keys[taken])) == len(taken), "a key has two rows"
        sets = sets_of(hashes_of(keys[taken], salt_of(rows.table.name)), rows.table.rows // WAYS)
        assert (taken // WAYS == sets).all()
        found[rows.table.name] = dict(zip(keys[taken].tolist(), taken.tolist(), strict=True))
    return found


@pytest.mark.parametrize("servers", [1, 3])
def test_they_train_as_fixed_tables_do(logs: tuple[Path, Path], tmp_path: Path, servers: int) -> None:
    """From the same rows on, and back again."""
    Job(job(logs, VOCABULARY), out=tmp_path / "first").run()
    embedding = {"storage": "torch", "lr": 0.1, "servers": servers}
    for name, columns in (("fixed", VOCABULARY), ("dynamic", ROOMY)):
        Job(job(logs, columns, embedding=embedding), out=tmp_path / name, start_from=tmp_path / "first").run()
    fixed, dynamic = (Trained(tmp_path / name) for name in ("fixed", "dynamic"))
    assert len(owners(dynamic)["user"]) == USERS + 1, "and missing ones, which had a row"
    assert {int(own.tensors["key"][0]) for own in dynamic.server.state()} == {DEFAULT ^ NOBODY}, "is nobody's"
    expected = fixed.predict(logs[1])
    assert np.abs(Trained(tmp_path / "first").predict(logs[1]) - expected).max() > 0.05
    np.testing.assert_allclose(dynamic.predict(logs[1]), expected, rtol=1e-4, atol=1e-6)
    still = {"train": {"lr": 1e-30}, "embedding": {**embedding, "lr": 1e-30}}
    frozen = job(logs, VOCABULARY, **still)
    frozen["train"] = {**job(logs, VOCABULARY)["train"], "lr": 1e-30}
    Job(frozen, out=tmp_path / "back", start_from=tmp_path / "dynamic").run()
    np.testing.assert_allclose(Trained(tmp_path / "back").predict(logs[1]), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("evict", ["lfu", "lru"])
def test_a_resumed_job_in_other_servers_equals_an_undisturbed_one(
    logs: tuple[Path, Path], tmp_path: Path, evict: str
) -> None:
    columns = {name: {**kind, "evict": evict, "admit": 2} for name, kind in TIGHT.items()}
    Job(job(logs, columns, data={"epochs": 2}), out=tmp_path / "whole").run()
    Job(job(logs, columns), out=tmp_path / "half").run()
    again = job(logs, columns, data={"epochs": 2}, embedding={"servers": 3})
    result = Job(again, out=tmp_path / "half", resume=tmp_path / "half").run()
    whole, half = (Trained(tmp_path / name) for name in ("whole", "half"))
    assert result.keys is not None
    assert result.keys.evicted > 10
    assert owners(half) == owners(whole)
    assert np.array_equal(half.predict(logs[1]), whole.predict(logs[1]))


class Copies(Callback):
    """Keeps the folder as it lies when a checkpoint is complete: what is left if the job is killed then."""

    def __init__(self, out: Path, to: Path) -> None:
        self.out, self.to, self.samples = out, to, 0

    def on_checkpoint(self, place: str, samples: int) -> None:
        if not self.to.exists() and samples > 0:
            shutil.copytree(self.out, self.to)
            self.samples = samples


def test_a_job_that_is_killed_goes_on_in_other_servers_as_if_it_had_not_been(
    logs: tuple[Path, Path], tmp_path: Path
) -> None:
    columns = {name: {**kind, "admit": 2} for name, kind in TIGHT.items()}
    train = {**job(logs, columns)["train"], "save_every_s": 0.3}
    config = job(logs, columns, train=train, data={"epochs": 4})
    copies = Copies(tmp_path / "whole", tmp_path / "killed")
    Job(config, out=tmp_path / "whole", callbacks=[copies]).run()
    assert 0 < copies.samples < 4 * 1200
    config["embedding"] = {**config["embedding"], "servers": 3}
    Job(config, out=tmp_path / "killed", resume=tmp_path / "killed").run()
    whole, killed = (Trained(tmp_path / name) for name in ("whole", "killed"))
    assert owners(killed) == owners(whole)
    assert np.array_equal(killed.predict(logs[1]), whole.predict(logs[1]))


def test_rows_in_fewer_bytes_keep_their_owners(logs: tuple[Path, Path], tmp_path: Path) -> None:
    for values in ("fp32", "int4"):
        train = {**job(logs, TIGHT)["train"], "save_values": values}
        Job(job(logs, TIGHT, train=train), out=tmp_path / values).run()
    exact, rounded = (Trained(tmp_path / values) for values in ("fp32", "int4"))
    assert owners(rounded) == owners(exact)
    differences = np.abs(rounded.predict(logs[1]) - exact.predict(logs[1]))
    assert 0 < differences.max() < 0.1


@pytest.mark.parametrize("priority", ["all", "scar", "mfu", "ssu"])
def test_a_lost_server_comes_back_with_the_owners_that_were_saved(
    logs: tuple[Path, Path], tmp_path: Path, priority: str
) -> None:
    by_priority = {} if priority == "all" else {"priority": priority, "share": 0.5, "min_rows": 1}
    recovery = {"mode": "partial", "inject": "at:0.7,unit=epoch,index=1", "interval_s": 0.05, **by_priority}
    config = job(logs, TIGHT, recovery=recovery, embedding={"servers": 2}, train={"emulate_step_ms": 4.0})
    config["train"] = {**job(logs, TIGHT)["train"], "emulate_step_ms": 4.0}
    result = Job(config, out=tmp_path / "out").run()
    assert result.recovery.failures == 1
    assert result.keys is not None
    assert result.keys.evicted > 20
    owners(Trained(tmp_path / "out"))


@pytest.mark.parametrize("form", ["datetime", "text", "seconds"])
def test_ids_that_are_gone_for_a_time_of_the_data_lose_their_rows(tmp_path: Path, form: str) -> None:
    """Half of the users are there on the first day only, and the rows are shuffled within an hour or so."""
    rows, start = 1200, datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)
    days = np.arange(rows) * 10 // rows
    user = np.where(days == 0, np.arange(rows) % 40, 20 + np.arange(rows) % 20)
    at = pl.Series([start + datetime.timedelta(minutes=12.0 * number) for number in range(rows)])
    times = {"datetime": at, "text": at.dt.to_string("%Y-%m-%dT%H:%M:%S"), "seconds": at.dt.epoch("s")}[form]
    frame = pl.DataFrame({"label": user % 2, "user": user, "price": user / 40, "at": times})
    files = (tmp_path / "train.csv", tmp_path / "test.csv") if form == "text" else (tmp_path / "a.parquet",) * 2
    for file in files:
        frame.write_csv(file) if form == "text" else frame.write_parquet(file)
    columns: dict[str, Any] = {"price": "dense", "user": {**AT_ONCE, "capacity": 1600, "ttl": "3d"}}
    config = job(files, columns, data={"time": "at", "shuffle": "within=64"})
    config["data"]["name"] = "csv" if form == "text" else "parquet"
    fails(Job(config | {"data": {**config["data"], "time": "when"}}, out=tmp_path / "x").run, DataError, "(data.time)")
    label = config | {"data": {**config["data"], "time": "label"}}
    fails(lambda: Job(label, out=tmp_path / "x").run(), ConfigError, "data.time=label is the label")
    none = {**config["data"], "columns": {**columns, "user": {**columns["user"], "ttl": 500}}}
    fails(Job(config | {"data": none}, out=tmp_path / "x").run, ConfigError, "data.time=at has no effect")
    without = {key: value for key, value in config["data"].items() if key != "time"}
    fails(Job(config | {"data": without}, out=tmp_path / "x").run, ConfigError, "as data.time=timestamp")
    timeless, file = frame.drop("at"), tmp_path / f"later{files[0].suffix}"
    timeless.write_csv(file) if form == "text" else timeless.write_parquet(file)
    config["data"]["test_path"] = str(file)  # test rows need no time
    Job(config, out=tmp_path / "out").run()
    tight = {**columns, "user": {**columns["user"], "capacity": 16, "evict": "never"}}
    config["data"] = {**config["data"], "columns": tight}
    Job(config, out=tmp_path / "tight").run()
    assert set(owners(Trained(tmp_path / "tight"))["user"]) <= {*range(20, 40)}, "those that are gone gave their rows"
    assert len(Trained(tmp_path / "out").predict({"user": [3, 21], "price": [0.1, 0.2]})) == 2, (
        "predictions need no time"
    )
    measured = Trained(tmp_path / "out").evaluate(timeless)
    assert measured.samples == rows, "nor does evaluation"


@pytest.mark.parametrize(
    ("times", "told"),
    [
        (["2026-11-01", None], "is missing"),
        (["2026-11-01", "yesterday"], "is 'yesterday'"),
        ([1_790_000_000_000, 5], "is 1790000000000"),
        ([-5, 5], "is -5"),
        ([True, False], "it must hold dates, or seconds since 1970"),
    ],
    ids=str,
)
def test_a_time_that_is_none_is_said(tmp_path: Path, times: list[Any], told: str) -> None:
    frame = pl.DataFrame({"label": [0, 1] * 50, "user": [1, 2] * 50, "price": [0.5, 0.1] * 50, "at": times * 50})
    frame.write_parquet(tmp_path / "a.parquet")
    config = job(
        (tmp_path / "a.parquet",) * 2, {"price": "dense", "user": {**AT_ONCE, "ttl": "3d"}}, data={"time": "at"}
    )
    fails(Job(config, out=tmp_path / "x").run, DataError, told)


def test_values_are_pinned_as_they_stand_in_the_column(logs: tuple[Path, Path], tmp_path: Path) -> None:
    rare = f"user {USERS}"
    first = pl.read_parquet(logs[0])
    pl.concat([first[:1].with_columns(user=pl.lit(rare)), first]).write_parquet(tmp_path / "train.parquet")
    lately = {name: {**kind, "evict": "lru"} for name, kind in TIGHT.items()}
    columns = {"user": {**lately["user"], "pinned": [rare]}, "item": {**lately["item"], "pinned": [ITEMS]}}
    config = job((tmp_path / "train.parquet", logs[1]), columns, data={"shuffle": False})
    Job(config, out=tmp_path / "out").run()
    (key,) = words(pl.Series([rare])).view(np.int64).tolist()
    kept = Trained(tmp_path / "out")
    assert key in owners(kept)["user"]
    config["data"]["columns"] = {**columns, "user": lately["user"]}
    Job(config, out=tmp_path / "without").run()
    assert key not in owners(Trained(tmp_path / "without"))["user"]
    config["data"]["columns"] = {**columns, "item": {**columns["item"], "pinned": ["one"]}}
    fails(Job(config, out=tmp_path / "wrong").run, ConfigError, "data.columns.item.pinned holds 'one'")


def test_another_optimizer_of_the_rows_leaves_them_their_owners(logs: tuple[Path, Path], tmp_path: Path) -> None:
    Job(job(logs, ROOMY), out=tmp_path / "first").run()
    other = job(logs, ROOMY, embedding={"lr": 1e-30, "optimizer": "adam"})
    other["train"]["lr"] = 1e-30
    result = Job(other, out=tmp_path / "second", start_from=tmp_path / "first").run()
    assert result.keys is not None
    assert result.keys.admitted == 0
    first, second = (Trained(tmp_path / name) for name in ("first", "second"))
    assert owners(second) == owners(first)
    np.testing.assert_allclose(second.predict(logs[1]), first.predict(logs[1]), rtol=1e-5, atol=1e-7)


def test_capacities_may_change_from_run_to_run(logs: tuple[Path, Path], tmp_path: Path) -> None:
    Job(job(logs, ROOMY), out=tmp_path / "first").run()
    still = {"train": {**job(logs, ROOMY)["train"], "lr": 1e-30}, "embedding": {"lr": 1e-30, "servers": 2}}
    larger = {name: {**kind, "capacity": 3 * kind["capacity"]} for name, kind in ROOMY.items()}
    for name, columns in (("larger", larger), ("tight", TIGHT)):
        Job(job(logs, columns, **still), out=tmp_path / name, start_from=tmp_path / "first").run()
    first, second, tight = (Trained(tmp_path / name) for name in ("first", "larger", "tight"))
    np.testing.assert_allclose(second.predict(logs[1]), first.predict(logs[1]), rtol=1e-5, atol=1e-7)
    assert all(keys.keys() == owners(first)[name].keys() for name, keys in owners(second).items())
    assert 20 < len(owners(tight)["user"]) < 32


def test_evaluation_and_prediction_admit_nobody(logs: tuple[Path, Path], tmp_path: Path) -> None:
    result = Job(job(logs, TIGHT), out=tmp_path / "out").run()
    trained = Trained(tmp_path / "out")
    before = owners(trained)
    assert trained.evaluate().auc == result.test.auc
    one, other = trained.predict({"price": [0.1, 0.1], "user": ["nobody", "a stranger"], "item": [10**12, -5]})
    assert one == other, "who has no row has that of all others"
    assert owners(trained) == before
    assert trained.server.keys == Counts(96, trained.server.keys.keys, 0, 0, 0)


def test_what_became_of_keys_is_told(
    logs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Job(job(logs, TIGHT), out=tmp_path / "out").run()
    assert result.keys is not None
    assert result.keys.rows == 96
    assert result.keys.keys == sum(map(len, owners(Trained(tmp_path / "out")).values()))
    assert result.keys.admitted - result.keys.evicted == result.keys.keys
    assert "of rows taken" in capsys.readouterr().err
    assert read_frames(tmp_path / "out")[-1].keys["rows"] == 96


@pytest.mark.parametrize("unadmitted", ["shared", "zeros"])
def test_the_export_looks_keys_up_by_itself(logs: tuple[Path, Path], tmp_path: Path, unadmitted: str) -> None:
    columns = {name: {**kind, "unadmitted": unadmitted} for name, kind in TIGHT.items()}
    Job(job(logs, columns), out=tmp_path / "out").run()
    trained = Trained(tmp_path / "out")
    trained.export(tmp_path / "model.pt2")
    rows = pl.read_parquet(logs[1]).with_columns(item=pl.col("item") * pl.Series([1, 1, 10**11, -1] * 100))
    expected = trained.predict(rows)
    assert len(np.unique(expected)) > 50
    found = serving.load(tmp_path / "model.pt2").score(rows.to_dict(as_series=False))
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-5, atol=1e-6)


def test_tables_of_ones_own_over_any_source(tmp_path: Path) -> None:
    """The ids of a source that has none but numbers are the keys."""
    tables = [
        {"name": "t", "ids": "dynamic", "capacity": 500, "dim": 8, "features": ["c1", "c2"], "pinned": [3], "admit": 1},
        {"name": "u", "rows": 50, "dim": 8, "features": ["c3"]},
    ]
    data = {"name": "synthetic", "rows": 2000, "test_rows": 200, "features": 3, "table_rows": 50, "slice_rows": 256}
    config = settings(tmp_path / "none", embedding={"tables": tables, "servers": 2, "split_rows": 160})
    config |= {"data": data, "model": {**SMALL_DLRM}, "train": {**config["train"], "batch_size": 32, "trainers": 2}}
    result = Job(config | {"sync": {"method": "easgd"}}, out=tmp_path / "out").run()
    assert result.keys is not None
    assert (result.keys.keys, result.keys.evicted) == (50, 0)


@pytest.mark.skipif(not can_share(), reason="processes have memory in common on Linux only")
@pytest.mark.parametrize("method", [{"sync": {"method": "easgd"}}, {"aggregation": {"method": "gba"}}], ids=str)
def test_processes_share_them(logs: tuple[Path, Path], tmp_path: Path, method: dict[str, Any]) -> None:
    config = job(logs, TIGHT, train={"trainers": 2}, cluster={"runtime": "processes"}, embedding={"servers": 2})
    config = {name: section for name, section in config.items() if name != "sync"} | method
    result = Job(config, out=tmp_path / "out").run()
    assert result.keys is not None
    assert result.keys.evicted > 20
    owners(Trained(tmp_path / "out"))


def test_what_has_no_effect_or_no_sense_is_one_sentence(logs: tuple[Path, Path], tmp_path: Path) -> None:
    def start(columns: Mapping[str, Any] = ROOMY, **sections: Any) -> None:
        Job(job(logs, columns, **sections), out=tmp_path / "out").run()

    fails(lambda: start({**ROOMY, "user": {"kind": "dynamic", "capacity": 0}}), ConfigError, "capacity")
    fails(lambda: start({**ROOMY, "user": {"kind": "dynamic", "evict": "lfo"}}), ConfigError, "did you mean lfu")
    fails(lambda: start({**ROOMY, "user": {"kind": "dynamic", "ttl": "7 days"}}), ConfigError, "for instance 7d")
    fails(lambda: start({**ROOMY, "user": {"kind": "dynamic", "ttl": "0"}}), ConfigError, "data.columns.user.ttl")
    together = {"tables": {"user": "both", "item": "both"}}
    apart = {**ROOMY, "user": {**ROOMY["user"], "evict": "lru"}}
    fails(lambda: start(apart, data=together), ConfigError, "data.tables puts user and item into one table")
    fixed = [{"name": name, "rows": 9, "dim": 4, "features": [name]} for name in ROOMY]
    fails(lambda: start(embedding={"tables": fixed}), ConfigError, "ids: dynamic and capacity in place of rows")
    for wrong, said in (({"admit": 2}, "admit has no effect"), ({"capacity": 5}, "capacity has no effect")):
        fails(lambda wrong=wrong: start(embedding={"tables": [fixed[0] | wrong]}), ConfigError, said)  # type: ignore[misc]
    own = {name: section for name, section in job(logs, ROOMY).items() if name != "model"}
    fails(Job(own, model=wrap(make("by name")), out=tmp_path / "own").run, ConfigError, "user is dynamic")
    Job(job(logs, ROOMY), out=tmp_path / "first").run()
    for columns in (VOCABULARY, TIGHT):
        other = job(logs, columns, data={"epochs": 2})
        fails(Job(other, out=tmp_path / "out", resume=tmp_path / "first").run, CheckpointError, "--from")
