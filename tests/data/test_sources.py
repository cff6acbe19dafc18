"""What every source must do; a new one is one more line in MEMBERS."""

import dataclasses
import gzip
import json
import random
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import market_samples
import polars as pl
import pytest
import torch
from data_samples import criteo_row, same, write_criteo

from shadowsync import registry
from shadowsync.data import completejourney
from shadowsync.data.batch import Batch
from shadowsync.data.criteo import Criteo
from shadowsync.data.csv import Csv
from shadowsync.data.jsonl import Jsonl
from shadowsync.data.parquet import Parquet
from shadowsync.data.source import OpenSource, Source, check_ids
from shadowsync.data.synthetic import Synthetic
from shadowsync.errors import ConfigError


def criteo(folder: Path) -> Source:
    paths = [write_criteo(folder / f"{k}.tsv", [criteo_row(n) for n in range(k, k + 30)]) for k in (0, 30)]
    return Criteo(path=tuple(map(str, paths)), test_path=str(paths[0]), hash_size=1000)


def criteo_gz(folder: Path) -> Source:
    lines = "".join(criteo_row(n) + "\n" for n in range(60)).encode()
    path = folder / "rows.gz"
    path.write_bytes(gzip.compress(lines[:3000]) + gzip.compress(lines[3000:]))
    return Criteo(path=str(path), test_path=str(path), hash_size=1000)


def parquet(folder: Path) -> Source:
    frame = pl.DataFrame(
        {
            "clicked": [k % 2 for k in range(60)],
            "price": [k / 7 for k in range(60)],
            "item": list(range(60)),
            "words": [[f"w{j}" for j in range(k % 4)] for k in range(60)],
            "seen": [list(range(k % 3)) for k in range(60)],
            "seen_weights": [[0.5] * (k % 3) for k in range(60)],
        }
    )
    frame[:25].write_parquet(folder / "a.parquet", row_group_size=4)
    frame[25:].write_parquet(folder / "b.parquet", row_group_size=50)
    return Parquet(
        path=str(folder / "*.parquet"),
        test_path=str(folder / "b.parquet"),
        label="clicked",
        dense=("price",),
        categorical=("item", "words", "seen"),
        rows={"item": 60, "seen": 2},
        hash_size={"words": 50},
        weights={"seen": "seen_weights"},
    )


def csv(folder: Path) -> Source:
    rows = [f"{k % 2},{k / 7},{k if k % 5 else ''},{'|'.join(map(str, range(k % 3)))}\n" for k in range(60)]
    (folder / "a.csv").write_text("clicked,price,item,seen\n" + "".join(rows[:25]))
    (folder / "b.csv").write_text("clicked,price,item,seen\n" + "".join(rows[25:]))
    return Csv(
        path=str(folder / "*.csv"),
        test_path=str(folder / "b.csv"),
        label="clicked",
        dense=("price",),
        categorical=("item", "seen"),
        rows={"seen": 2},
        hash_size={"item": 100},
        lists={"seen": "|"},
    )


def jsonl_gz(folder: Path) -> Source:
    objects = [{"label": k % 2, "price": k / 7, "words": [f"w{j}" for j in range(k % 4)]} for k in range(60)]
    path = folder / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in objects).encode()))
    return Jsonl(path=str(path), test_path=str(path), dense=("price",), categorical=("words",), hash_size=50)


def remote(member: Callable[[Path], Source]) -> Callable[[Path], Source]:
    """The same source, its files in fsspec's memory."""

    def moved(folder: Path) -> Source:
        source, filesystem = member(folder), fsspec.filesystem("memory")
        place = f"/{folder.name}"
        for path in folder.iterdir():
            filesystem.pipe_file(f"{place}/{path.name}", path.read_bytes())
            path.unlink()

        def url(path: str | tuple[str, ...]) -> str | tuple[str, ...]:
            one = str(path).replace(str(folder), f"memory:/{place}")
            return one if isinstance(path, str) else tuple(str(url(each)) for each in path)

        return dataclasses.replace(source, path=url(source.path), test_path=url(source.test_path))

    return moved


def demo(folder: Path) -> Source:
    return completejourney.CompleteJourney(cache=str(folder), first_test_week=4, negatives=2)


MEMBERS: dict[str, Callable[[Path], Source]] = {
    "criteo": criteo,
    "criteo .gz": criteo_gz,
    "parquet": parquet,
    "csv": csv,
    "jsonl .gz": jsonl_gz,
    "criteo, remote": remote(criteo),
    "criteo .gz, remote": remote(criteo_gz),
    "parquet, remote": remote(parquet),
    "csv, remote": remote(csv),
    "jsonl .gz, remote": remote(jsonl_gz),
    "synthetic": lambda _: Synthetic(rows=60, test_rows=10, features=4, table_rows=50),
    "synthetic, over blocks": lambda _: Synthetic(rows=9000, test_rows=10, features=2, table_rows=50),
    "synthetic, multi-hot": lambda _: Synthetic(
        rows=5000, test_rows=10, features=3, table_rows=(5, 9, 50), multi_hot=2
    ),
    "synthetic, repeated": lambda _: Synthetic(rows=9000, test_rows=10, features=2, repeat_blocks=1),
    "completejourney": demo,
}


@pytest.fixture(scope="module", params=MEMBERS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    folder = tmp_path_factory.mktemp("source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completejourney, "read_package", market_samples.tables)
        yield MEMBERS[request.param](folder)
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{folder.name}"):
        memory.rm(f"/{folder.name}", recursive=True)


@pytest.fixture(scope="module")
def opened(source: Source) -> OpenSource:
    found = source.open("train", "error")
    assert found is not None
    return found


def whole(opened: OpenSource, rows: int = 1 << 30) -> Batch:
    return Batch.join([opened.read(part) for part in opened.slices(rows)])


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_slices_have_neither_overlap_nor_gap(opened, rows):
    parts = opened.slices(rows)
    assert [part.index for part in parts] == list(range(len(parts)))
    assert max(part.rows for part in parts) <= rows
    for file in {part.file for part in parts}:
        spans = [(part.start, part.start + part.rows) for part in parts if part.file == file]
        assert spans[0][0] == 0
        assert [start for start, _ in spans[1:]] == [stop for _, stop in spans[:-1]]
    assert sum(part.rows for part in parts) == opened.rows


def test_batches_have_the_shape_that_the_schema_says(opened):
    part = opened.slices(50)[0]
    batch = opened.read(part)
    features = opened.schema.features
    assert batch.labels.shape == (part.rows,)
    assert set(batch.labels.tolist()) <= {0.0, 1.0}
    assert batch.dense.shape == (part.rows, len(opened.schema.dense))
    assert batch.labels.dtype == batch.dense.dtype == torch.float32
    assert batch.ids.values.dtype == torch.int64
    assert (batch.ids.feature_count, batch.ids.samples) == (len(features), part.rows)
    assert batch.dense.isfinite().all()
    lengths = batch.ids.lengths().view(len(features), part.rows)
    for feature, of_samples in zip(features, lengths, strict=True):
        assert feature.multi_hot or (of_samples == 1).all()
    check_ids(batch, opened, part)


@pytest.mark.parametrize("rows", [7, 3000, 4096])
def test_rows_do_not_depend_on_the_cut(opened, rows):
    assert same(whole(opened, rows), whole(opened))


def test_slices_may_be_read_from_several_threads_in_any_order(source, opened):
    fresh = source.open("train", "error")
    parts = list(opened.slices(5 + opened.rows // 40))
    shuffled = random.Random(0).sample(parts, len(parts))
    with ThreadPoolExecutor(4) as pool:
        read = dict(zip([part.index for part in shuffled], pool.map(fresh.read, shuffled), strict=True))
    assert same(Batch.join([read[part.index] for part in parts]), whole(opened))


def test_a_second_opening_gives_the_same(source, opened):
    assert same(whole(source.open("train", "skip")), whole(opened))
    assert opened.bad_rows.count == 0


def test_places_name_rows_from_one(opened):
    part = opened.slices(5)[1]
    assert opened.place(part, 2).endswith(f"row {part.start + 3}")


def test_the_test_split_has_the_same_schema(source, opened):
    test = source.open("test", "error")
    assert test.schema == opened.schema
    assert len(whole(test)) == test.rows > 0


@pytest.mark.parametrize("without", [Criteo(path="x"), Synthetic(test_rows=0)])
def test_there_may_be_no_test_rows(without):
    assert without.open("test", "error") is None


def test_the_seam_knows_its_members():
    found = registry.members("shadowsync.data", Source)
    assert set(found) == {name.split(" ")[0].rstrip(",") for name in MEMBERS}


def test_options_are_checked_and_named():
    for member, options, message in (
        (Criteo, {"path": "x", "hash_size": 1}, "data.hash_size"),
        (Synthetic, {"zipf": -1}, "data.zipf"),
        (Synthetic, {"rows": 10**18}, r"data\.rows=1000000000000000000: .*less than or equal to 10+$"),
        (Synthetic, {"test_rows": 10**18}, r"data\.test_rows=1000000000000000000: .*less than or equal to 10+$"),
        (Synthetic, {"multi_hot": 0.5}, "data.multi_hot"),
        (Parquet, {"categorical": ["a"]}, "data.path"),
        (completejourney.CompleteJourney, {"negatives": 0}, "data.negatives"),
    ):
        with pytest.raises(ConfigError, match=message):
            registry.build(member, options, "data")


def test_every_option_says_what_it_does():
    for member in registry.members("shadowsync.data", Source).values():
        for name in registry.option_names(member):
            metadata = getattr(typing.get_type_hints(member, include_extras=True)[name], "__metadata__", ())
            assert any(getattr(part, "description", None) for part in metadata), f"{member.__name__}.{name}"
