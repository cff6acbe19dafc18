"""A user's mistake is one sentence that names the thing and its place; nothing is left half-written."""

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from command_line import ROWS, CommandLine, assert_sentence, columns, criteo_line, cut_in_half, everything_in, train


@dataclass(frozen=True)
class Mistake:
    """A command that cannot work.

    Attributes:
        arguments: behind `shadowsync`.
        named: what the sentence must hold.
        prepare: makes the mistake's files.
        status: the exit status.
        begins: the run's folder is made before the mistake can be seen.
    """

    arguments: Sequence[str]
    named: Sequence[str]
    prepare: Callable[[Path], object] = lambda folder: None
    status: int = 2
    begins: bool = False


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Writes a file."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def doomed(inject: str, role: str, *settings: str) -> Mistake:
    """A script of failures of a role that is not there; it is told of before the data, which is not there either."""
    return Mistake(
        train("data.path=nowhere.parquet", f"recovery.inject={inject}", *settings), ["recovery.inject", role]
    )


CONFIGURATION: dict[str, Mistake] = {
    "unknown key": Mistake(train("train.batchsize=8"), ["train.batchsize", "did you mean batch_size?", "lr"]),
    "unknown section": Mistake(train("trian.lr=1"), ["trian", "did you mean train?"]),
    "unknown key of a table": Mistake(
        train("embedding.tables=[{name: a, rows: 5, dim: 4, feature: [item]}]"),
        ["embedding.tables.0.feature", "features"],
    ),
    "too small": Mistake(train("train.workers=0"), ["train.workers=0", "greater than or equal to 1"]),
    "not above zero": Mistake(train("train.lr=0"), ["train.lr=0", "greater than 0"]),
    "not a number": Mistake(train("train.lr=fast"), ["train.lr=fast", "number"]),
    "nan": Mistake(train("train.lr=.nan"), ["train.lr=nan", "finite"]),
    "longer than a timer": Mistake(train("train.emulate_step_ms=1e300"), ["train.emulate_step_ms", "or equal to 3200"]),
    "an option longer than a timer": Mistake(train("sync.every_s=1e300"), ["sync.every_s", "or equal to 3200"]),
    "not whole": Mistake(train("train.trainers=1.5"), ["train.trainers=1.5", "integer"]),
    "not a choice": Mistake(train("train.precision=fp16"), ["train.precision=fp16", "fp32", "bf16"]),
    "not a section": Mistake(train("train=3"), ["train"]),
    "option of another method": Mistake(
        train("sync.method=ma", "sync.form=elastic"), ["sync.form", "sync.method=ma", "alpha"]
    ),
    "option misspelt": Mistake(train("sync.method=easgd", "sync.alhpa=0.1"), ["sync.alhpa", "did you mean alpha?"]),
    "option out of range": Mistake(train("sync.method=ma", "sync.alpha=2"), ["sync.alpha=2", "less than or equal"]),
    "a role that no cluster is there for fails": doomed("at:1,kind=reader", "no reader 0"),
    "a role that only other methods have fails": doomed(
        "at:1,kind=dense", "no dense 0", "cluster.runtime=ray", "sync.method=ma"
    ),
    "a trainer too many fails": doomed(
        "gamma:mean_s=9;at:1,kind=trainer,index=0+2", "no trainer 2 that could fail; it has 2", "train.trainers=2"
    ),
    "a server too many fails": doomed("at:1,index=3", "no embedding 3", "embedding.servers=3", "cluster.runtime=ray"),
    "a reader too many fails": doomed("at:1,kind=reader,index=1", "no reader 1", "cluster.runtime=ray"),
    "unknown method": Mistake(train("sync.method=eagsd"), ["sync.method=eagsd", "did you mean easgd?", "bmuf"]),
    "unknown schedule": Mistake(train("sync.schedule=sometimes"), ["sync.schedule=sometimes", "background", "every_k"]),
    "unknown optimizer": Mistake(
        train("train.optimizer=adgrad"),
        ["train.optimizer=adgrad: it is not known", "did you mean adagrad?; allowed: adagrad, adam, sgd"],
    ),
    "unknown optimizer of rows": Mistake(
        train("embedding.optimizer=rowise_adagrad"), ["did you mean rowwise_adagrad?; allowed: adam, row"]
    ),
    "unknown recovery": Mistake(
        train("recovery.mode=partly"), ["did you mean partial?; allowed: auto, full, none, partial"]
    ),
    "unknown priority": Mistake(
        train("recovery.priority=xyz"), ["recovery.priority=xyz: it is not known; allowed: all, mfu, scar, ssu"]
    ),
    "unknown values": Mistake(
        train("train.save_values=int6"), ["train.save_values=int6: it is not known", "allowed: fp32, bf16, int4, int8"]
    ),
    "unknown source": Mistake(train("data.name=parket"), ["data.name=parket", "did you mean parquet?"]),
    "unknown model": Mistake(train("model.name=dlmr"), ["model.name=dlmr", "did you mean dlrm?"]),
    "unknown storage": Mistake(train("embedding.storage=fbgem"), ["embedding.storage=fbgem", "did you mean fbgemm?"]),
    "unknown codec": Mistake(train("compression.push=bf61"), ["compression.push=bf61", "did you mean bf16?"]),
    "unknown option of a codec": Mistake(
        train("compression.push=threshold", "compression.push.kep=0.1"), ["compression.push.kep", "did you mean keep?"]
    ),
    "option of no codec": Mistake(train("compression.pull.keep=0.1"), ["compression.pull.keep", "pull=plain"]),
    "value of a codec's option": Mistake(
        train("compression.push={name: threshold, keep: 2}"), ["compression.push.keep=2", "less than or equal to 1"]
    ),
    "feedback between samples": Mistake(
        train("compression.push.name=threshold", "compression.push.feedback=true"), ["compression.push.feedback=true"]
    ),
    "thresholded parameters": Mistake(
        train("compression.dense=threshold", "sync.form=sequential"),
        ["compression.dense=threshold goes with aggregation.method, and with sync.method=ma, bmuf", "int8"],
    ),
    "a codec without an effect": Mistake(
        train("compression.dense=int8", "sync.method=none"),
        ["compression.dense=int8 has no effect with sync.method=none"],
    ),
    "an option without an effect": Mistake(
        train("compression.push=int8", "compression.push.seed=3"), ["compression.push.seed=3", "rounding=stochastic"]
    ),
    "option of another model": Mistake(train("model.cross_layers=2"), ["model.cross_layers", "model.name=dlrm"]),
    "optimizer's option": Mistake(
        train("train.optimizer=sgd", "train.beta1=0.5"), ["train.beta1", "train.optimizer=sgd"]
    ),
    "rows' optimizer's option": Mistake(
        train("embedding.beta2=0.5"), ["embedding.beta2", "embedding.optimizer=rowwise_adagrad"]
    ),
    "an unknown decay": Mistake(train("train.decay=cosin"), ["train.decay=cosin", "cosine"]),
    "no decay": Mistake(train("train.final_lr=0.5"), ["train.final_lr", "train.decay"]),
    "no method to schedule": Mistake(
        train("sync.method=none", "sync.schedule=every_k", "sync.k=3"), ["sync.k", "sync.method=none"]
    ),
    "no central copy": Mistake(train("sync.method=ma", "cluster.dense_servers=2"), ["cluster.dense_servers=2"]),
    "warm-up beyond the end": Mistake(
        train("train.decay=linear", "train.warmup_samples=60"), ["train.warmup_samples=60", "60 samples"]
    ),
    "a seed of too many digits": Mistake(train("train.seed=99999999999999999999999"), ["train.seed"]),
    "more memory than there is": Mistake(
        train("model.embedding_dim=4096", "data.hash_size=4294967296", config="criteo.yaml"), ["GiB", "data.hash_size"]
    ),
    "a device for no numbers": Mistake(train("train.device=meta"), ["train.device=meta", "cpu and cuda"]),
    "no such device": Mistake(train("train.device=quantum"), ["train.device=quantum"]),
    "a table for nothing": Mistake(
        train("embedding.tables=[{name: a, rows: 50, dim: 4, features: [item, shop, recent, colour]}]"), ["colour"]
    ),
    "a feature without a table": Mistake(
        train("embedding.tables=[{name: a, rows: 50, dim: 4, features: [item, shop]}]"), ["recent"]
    ),
    "a table too small": Mistake(
        train("embedding.tables=[{name: a, rows: 49, dim: 4, features: [item, shop, recent]}]"), ["49", "50"]
    ),
    "unknown interpolation": Mistake(train("data.path=${nowhere}"), ["nowhere"]),
    "too many epochs": Mistake(train("data.epochs=1000001"), ["data.epochs=1000001", "less than or equal to 1000000"]),
    "no ids": Mistake(train("data.categorical=[]"), ["data.categorical is empty: name at least one column of ids"]),
    "the answer as an input": Mistake(train("data.dense=[label]"), ["data.dense names 'label', which is the label"]),
    "too deep": Mistake(train("model.top=" + "[" * 5000), ["configuration"]),
    "too many digits": Mistake(train("train.batch_size=" + "9" * 6000), ["configuration"]),
    "a weight of rows": Mistake(
        train("data.weight=price"), ["data.dense names 'price'", "which is the weight (data.weight)"]
    ),
    "a word for a list": Mistake(train("data.dense=price"), ["data.dense=price", "a list, as [price]"]),
    "a map for a list": Mistake(train("data.dense={price: 1}"), ["data.dense={price: 1}", "whole: data.dense=[a,b]"]),
    "a place in a list": Mistake(train("data.dense.0=price"), ["data.dense", "whole: data.dense=[a,b]"]),
    "a list for a section": Mistake(train("data=[1]"), ["data=[1]", "not a list: write data.KEY=VALUE"]),
    "a number for a section": Mistake(train("train=5"), ["train=5", "write train.KEY=VALUE"]),
    "a word for a map": Mistake(train("data.pooling=sum"), ["data.pooling=sum", "write data.pooling.KEY=VALUE"]),
    "a dense part beyond any memory": Mistake(
        train("model.top=" + str([65536] * 99)), ["the dense part", "GiB", "model.top"]
    ),
    "unclosed bracket": Mistake(train("model.top=[8"), ["configuration", "model.top=[8"]),
    "missing file": Mistake(train(config="nowhere.yaml"), ["nowhere.yaml", "no such configuration file"]),
    "data as the file": Mistake(
        train(config="X.csv"), ["X.csv is data", "data.path=X.csv", "data inspect"], text("X.csv", "a,b")
    ),
    "a list": Mistake(train(config="list.yaml"), ["list.yaml", "not list"], text("list.yaml", "- a\n- b\n")),
    "not YAML": Mistake(train(config="bad.yaml"), ["bad.yaml", "not a YAML file"], text("bad.yaml", "a: [1\nb: }")),
    "a number": Mistake(train(config="number.yaml"), ["number.yaml", "int"], text("number.yaml", "3")),
    "a word": Mistake(train(config="word.yaml"), ["hello", "no such key"], text("word.yaml", "hello")),
    "bytes": Mistake(train(config="bytes.yaml"), ["bytes.yaml"], text("bytes.yaml", bytes(range(256)))),
    "a folder as file": Mistake(train(config="folder"), ["folder"], lambda folder: (folder / "folder").mkdir()),
    "two files": Mistake(("train", "run.yaml", "criteo.yaml"), ["run.yaml and criteo.yaml", "one configuration file"]),
}

COMMANDS: dict[str, Mistake] = {
    "no such command": Mistake(("trian",), ["trian"]),
    "no such option": Mistake((*train(), "--outt", "a"), ["--outt"]),
    "no value": Mistake(("train", "--out"), ["--out"]),
    "no data": Mistake(("predict", "somewhere", "--out", "a.parquet"), ["--data"]),
    "no folder": Mistake(("evaluate", "nowhere"), ["nowhere", "no such folder"]),
    "predict from nothing": Mistake(
        ("predict", "nowhere", "--data", "test.parquet", "--out", "p.parquet"), ["nowhere", "no such folder"]
    ),
    "export of nothing": Mistake(("export", "nowhere", "--out", "m.pt2"), ["nowhere", "no such folder"]),
    "report of nothing": Mistake(("report", "nowhere"), ["nowhere"]),
    "report of an empty folder": Mistake(("report", "empty"), ["empty"], lambda folder: (folder / "empty").mkdir()),
    "unknown data": Mistake(("data", "crieto", "--out", "x.parquet"), ["crieto", "did you mean criteo?"]),
    "resume from nowhere": Mistake(("train", "--resume", "nowhere"), ["nowhere", "no such folder"]),
    "resume from an empty folder": Mistake(
        ("train", "--resume", "empty"), ["empty", "no checkpoint"], lambda folder: (folder / "empty").mkdir()
    ),
    "resume from a file": Mistake(("train", "--resume", "run.yaml"), ["run.yaml", "no such folder"]),
    "results to a file": Mistake(("train", "run.yaml", "--out", "criteo.yaml"), ["criteo.yaml", "folder"]),
    "a name that is too long": Mistake(("train", "run.yaml", "--out", "x" * 300), ["xxx", "too long"]),
    "results below a file": Mistake(("train", "run.yaml", "--out", "criteo.yaml/x"), ["criteo.yaml/x"], status=1),
}


def damaged(name: str, change: Callable[[pl.DataFrame], pl.DataFrame]) -> Callable[[Path], object]:
    """A parquet file with something wrong in it."""
    return lambda folder: change(columns(60)).write_parquet(folder / name)


def at(row: int, column: str, value: Any) -> Callable[[pl.DataFrame], pl.DataFrame]:
    """Sets one value; rows count from 0."""
    return lambda frame: frame.with_columns(
        pl.when(pl.int_range(pl.len()) == row).then(pl.lit(value)).otherwise(column).alias(column)
    )


def bad_file(change: Callable[[pl.DataFrame], pl.DataFrame], *named: str, key: str = "path") -> Mistake:
    """A file that is seen to be wrong before training."""
    return Mistake(train(f"data.{key}=bad.parquet"), ["bad.parquet", *named], damaged("bad.parquet", change))


def bad_row(column: str, value: Any, *named: str) -> Mistake:
    """Row 42 of a file holds a value that cannot be used: seen when it is read."""
    wrong = bad_file(at(41, column, value), ", row 42", column, *named)
    return replace(wrong, begins=True)


def criteo(lines: Sequence[str], *named: str, begins: bool = True) -> Mistake:
    """A Criteo log of these lines."""
    content = gzip.compress("".join(line + "\n" for line in lines).encode())
    return Mistake(train(config="criteo.yaml"), ["log.tsv.gz", *named], text("log.tsv.gz", content), begins=begins)


GOOD = [criteo_line(row) for row in range(20)]


DATA: dict[str, Mistake] = {
    "missing": Mistake(train("data.path=nowhere.parquet"), ["nowhere.parquet"]),
    "nothing matches": Mistake(train("data.path=none-*.parquet"), ["none-*.parquet"]),
    "no path": Mistake(("train", "data.name=parquet", "--out", "out"), ["data.path", "required"]),
    "a folder": Mistake(train("data.path=folder"), ["folder"], lambda folder: (folder / "folder").mkdir()),
    "empty": bad_file(lambda frame: frame.head(0), "no rows"),
    "no parquet": Mistake(train("data.path=run.yaml"), ["run.yaml", "not a parquet file"]),
    "a .gz of nothing": Mistake(
        train("data.path=nothing.gz", config="criteo.yaml"),
        ["nothing.gz", "no rows"],
        text("nothing.gz", gzip.compress(b"")),
    ),
    "no bytes": Mistake(train("data.path=zero.parquet"), ["zero.parquet"], text("zero.parquet", "")),
    "cut": Mistake(train(), ["train.parquet"], lambda folder: cut_in_half(folder / "train.parquet")),
    "no such column": Mistake(train("data.dense=[prices]"), ["train.parquet", "'prices'", "did you mean price?"]),
    "a column twice": Mistake(train("data.categorical=[item,item]"), ["item", "twice"]),
    "no sizes": Mistake(train("data.rows=null"), ["'item'", "data.hash_size"]),
    "text as ids": bad_file(lambda f: f.with_columns(pl.col("item").cast(pl.String)), "'item'", "data.hash_size"),
    "text as numbers": bad_file(lambda f: f.with_columns(pl.col("price").cast(pl.String)), "'price'", "number"),
    "test without a column": bad_file(lambda frame: frame.drop("shop"), "'shop'", key="test_path"),
    "label 2": bad_row("label", 2, "2"),
    "no label": bad_row("label", None),
    "id out of rows": bad_row(
        "item",
        ROWS,
        str(ROWS),
        "hash the column with data.hash_size={item: 100000} (of data.columns: data.columns.item.kind=hash), or raise",
        "data.rows (data.columns.item.rows)",
    ),
    "negative id": bad_row("shop", -1, "-1"),
    "no id": bad_row("item", None),
    "beyond float32": bad_row("price", 3e38, "3e+38", "at most 1e+38"),
    "a folder of folders": Mistake(
        train("data.path=rows"),
        ["is a folder without files that end in .parquet", "rows/*/*.parquet"],
        lambda folder: (folder / "rows/day=1").mkdir(parents=True),
    ),
    "infinite": bad_row("price", float("inf"), "inf"),
    "id in a list": replace(
        bad_file(lambda f: f.with_columns(pl.concat_list("recent", pl.lit(1000))), ", row 1", "recent", "1000"),
        begins=True,
    ),
    "too few columns": criteo([*GOOD[:7], GOOD[7].rsplit("\t", 3)[0], *GOOD[8:]], "row 8"),
    "too many columns": criteo([*GOOD[:7], GOOD[7] + "\t1", *GOOD[8:]], "row 8"),
    "label of a log": criteo([*GOOD[:3], "2" + GOOD[3][1:]], "row 4", "2"),
    "not hexadecimal": criteo([*GOOD[:3], GOOD[3][:-1] + "x"], "row 4"),
    "blank line": criteo([*GOOD[:3], "", *GOOD[3:]], "row 4"),
    "truncated gzip": Mistake(
        train(config="criteo.yaml"), ["log.tsv.gz", "gzip", "cut"], lambda folder: cut_in_half(folder / "log.tsv.gz")
    ),
}


@pytest.mark.parametrize("mistake", [*CONFIGURATION.values(), *COMMANDS.values()], ids=[*CONFIGURATION, *COMMANDS])
def test_what_the_user_asked_for_cannot_be_done(shadowsync: CommandLine, mistake: Mistake) -> None:
    check(shadowsync, mistake)


@pytest.mark.parametrize("mistake", DATA.values(), ids=DATA)
def test_the_data_cannot_be_used(shadowsync: CommandLine, mistake: Mistake) -> None:
    check(shadowsync, mistake)


def check(shadowsync: CommandLine, mistake: Mistake) -> None:
    """The command fails in one sentence and leaves nothing but what was there."""
    mistake.prepare(shadowsync.folder)
    before = everything_in(shadowsync.folder)
    assert_sentence(shadowsync(*mistake.arguments), mistake.status, mistake.named)
    begun = {"out", "out/config.yaml", "out/metrics.jsonl", "out/events.jsonl"} if mistake.begins else set()
    assert everything_in(shadowsync.folder) - before <= begun


@pytest.mark.parametrize(
    "setting",
    [
        f"model.name={'x' * 100_000}",
        f"data.{'x' * 100_000}=1",
        f"train.lr={'x y ' * 30_000}",
        f"model.name={'x y ' * 30_000}",
        "x" * 100_000 + ".yaml",
    ],
    ids=["word", "key", "words", "name", "file"],
)
def test_an_overlong_value_is_not_echoed_in_full(shadowsync: CommandLine, setting: str) -> None:
    said = shadowsync("train", setting, "--out", "out")
    assert_sentence(said, 2, [])
    assert len(said.err) < 2500
