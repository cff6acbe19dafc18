"""What becomes of a column of a table: the kinds that `data.columns` chooses among, each with its options, what the
values of a column must be for it, and what it learns of the training rows.

What a kind makes of values is in `serving.py`, under the same name, for training and whoever serves the model alike.

`L` values of a column.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import Field

from shadowsync.data.source import Dynamic
from shadowsync.data.values import LONG, Values, form_of, has_numbers, integers, numbers, texts, words
from shadowsync.errors import ConfigError, DataError
from shadowsync.registry import build, choose, split_options
from shadowsync.serving import LARGEST, NOTHING, TEXTS, scaled

MOST_VALUES = 20_000_000
"""Different values of a column that are counted for a vocabulary."""
_MERGED = 1 << 21
Sees = Literal["nothing", "sample", "some", "all"]
Rows = Annotated[int, Field(ge=1, le=1 << 32)]
HashRows = Annotated[int, Field(ge=2, le=1 << 32, description="rows of its table; more collides less")]
Missing = Annotated[
    Literal["own", "error"], Field(description="own: a missing value has an id of its own; error: its row is a bad one")
]


class Fit(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was learnt of a column; at its defaults nothing was.

    Attributes:
        form: of the values, as `values.form_of` says.
        mean, scale: a number becomes `(x − mean) / scale`.
        low, high: bounds to which numbers are moved before that.
        edges: between buckets, ascending.
        listed: each row has a list of values.
    """

    form: str | None = None
    mean: float = 0.0
    scale: float = 1.0
    low: float | None = None
    high: float | None = None
    edges: tuple[float, ...] = ()
    listed: bool = False


@dataclass(frozen=True)
class Kind(ABC):
    """What becomes of a column."""

    name: ClassVar[str]

    @property
    def sees(self) -> Sees:
        """Of which training rows it learns before any of them is trained: `some` are some millions."""
        return "nothing"

    def seen(self, values: pl.Series) -> pl.DataFrame:
        """What is kept of the values of some rows; missing ones are null."""
        raise NotImplementedError

    def fit(self, seen: pl.DataFrame) -> Fit | Values:
        """What is learnt of all that was seen."""
        raise NotImplementedError

    @abstractmethod
    def refusal(self, kind: pl.DataType) -> str | None:
        """What the column must hold, if that is not what it holds."""

    def parts(self, name: str) -> tuple[str, ...]:
        """The columns of the data that it is made of."""
        return (name,)

    def described(self) -> dict[str, Any]:
        """As `data.columns` declares it, with every option."""
        return {"kind": self.name, **asdict(self)}


@dataclass(frozen=True)
class Dense(Kind):
    """A number per row; of booleans 0 or 1, of dates and times days. What is far beyond the others moves to the bounds
    of `clip`, then comes the logarithm, then mean 0 and standard deviation 1."""

    name: ClassVar[str] = "dense"

    log: Annotated[
        bool, Field(description="take log(1 + max(x, 0)), for counts and prices; left out: data.log_dense")
    ] = False
    standardise: Annotated[
        bool, Field(description="to mean 0 and standard deviation 1 of the training rows; left out: data.standardise")
    ] = True
    clip: Annotated[
        float | None,
        Field(gt=0, lt=0.5, description="share of the numbers at each end that move to the bounds of the others"),
    ] = None
    missing: Annotated[
        Annotated[float, Field(allow_inf_nan=False)] | Literal["mean", "indicator", "error"],
        Field(
            description="what a missing number counts as: a number, or the mean (0 where not standardised); indicator: "
            "the mean, and a column NAME_missing says which; error: its row is a bad one"
        ),
    ] = "mean"

    @property
    def sees(self) -> Sees:
        return "sample" if self.clip is not None else "some" if self.standardise else "nothing"

    def refusal(self, kind: pl.DataType) -> str | None:
        return None if has_numbers(kind) else "one number per row"

    def seen(self, values: pl.Series) -> pl.DataFrame:
        found = _numbers(values)
        return _moments(scaled(found, self.log, {})) if self.clip is None else pl.DataFrame({"value": found})

    def fit(self, seen: pl.DataFrame) -> Fit:
        low = high = None
        if self.clip is not None:
            drawn = seen["value"].to_numpy()
            if len(drawn):
                low, high = np.quantile(drawn, [self.clip, 1 - self.clip]).tolist()
            seen = _moments(scaled(drawn, self.log, {"low": low, "high": high}))
        if not self.standardise or not seen["count"].sum():
            return Fit(low=low, high=high)
        count, means, variances = (seen.filter(pl.col("count") > 0)[name].to_numpy() for name in seen.columns)
        mean = float(np.average(means, weights=count))
        deviation = float(np.sqrt(np.average(variances + np.square(means - mean), weights=count)))
        same = deviation <= 1e-14 * abs(mean)  # all numbers are alike: they become 0
        return Fit(mean=mean, scale=1.0 if same else deviation, low=low, high=high)


def _numbers(values: pl.Series) -> NDArray[np.float64]:
    """Those that are there and that float32 holds."""
    found = numbers(values.drop_nulls())
    return found[np.abs(found) <= LARGEST]  # not so either where one is no number


def _moments(found: NDArray[np.float64]) -> pl.DataFrame:
    """Those of a piece, of which those of all are made."""
    values = pl.Series(found)
    moments = [len(found)], [values.mean()], [values.var(ddof=0)]
    return pl.DataFrame(moments, {"count": pl.Int64, "mean": pl.Float64, "variance": pl.Float64})


# --- categorical columns ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Categorical(Kind):
    """A column whose values become ids, of a table of its own.

    Attributes:
        tells_apart: values, so that their form matters.
    """

    name: ClassVar[str]
    tells_apart: ClassVar[bool] = True

    def refusal(self, kind: pl.DataType) -> str | None:
        return None if form_of(kind) is not None else "text, whole numbers, booleans or dates, or lists of them"


@dataclass(frozen=True)
class Hash(Categorical):
    """Values of any type are hashed to `[1, rows)`; a missing one has id 0."""

    name: ClassVar[str] = "hash"

    rows: HashRows = 100_000
    missing: Missing = "own"


@dataclass(frozen=True)
class Keys(Dynamic, Categorical):
    """Values of any type, however many there will be, of which those that come, or come often enough, have a row of
    their own as long as there is room: whole numbers and dates are their own ids, text its hash of 64 bits."""

    name: ClassVar[str] = "dynamic"

    capacity: Annotated[int, Field(ge=1, le=1 << 36, description="values that can have a row at a time")] = 100_000
    missing: Missing = "own"
    pinned: Annotated[
        tuple[int | str, ...], Field(description="values that have a row at their first look-up and keep it")
    ] = ()  # type: ignore[assignment]

    def ids(self, column: str, form: str | None) -> Dynamic:
        """How they get their rows, where the column's values have this form, or are not known yet; raises `ConfigError`
        for text that is to be pinned in a column of numbers."""
        text = [value for value in self.pinned if isinstance(value, str)]
        if form in TEXTS:
            pinned = words(pl.Series(list(map(str, self.pinned)), dtype=pl.String)).view(np.int64).tolist()
        elif text and form not in (None, NOTHING):
            raise ConfigError(f"data.columns.{column}.pinned holds {text[0]!r} and the column's values are no text")
        else:
            pinned = [value for value in self.pinned if value not in text]
        options = {option.name: getattr(self, option.name) for option in fields(Dynamic)}
        return Dynamic(**options | {"pinned": tuple(pinned)})


@dataclass(frozen=True)
class Vocabulary(Categorical):
    """Each value that the training rows have often enough has an id of its own, from 2 on, the most frequent first; all
    others share id 1, and a missing one has id 0."""

    name: ClassVar[str] = "vocabulary"

    min_count: Annotated[
        int,
        Field(ge=1, description="a value that comes less often is unknown; with 1 no row teaches what unknown means"),
    ] = 2
    max_size: Annotated[
        int, Field(ge=1, le=1 << 28, description="values at most, the most frequent ones; more costs memory")
    ] = 1_000_000
    missing: Missing = "own"

    @property
    def sees(self) -> Sees:
        return "all"

    def seen(self, values: pl.Series) -> pl.DataFrame:
        given = values.drop_nulls()
        plain = texts(given) if form_of(given.dtype) in TEXTS else pl.Series(integers(given))
        counts = plain.alias("value").value_counts(name="count")
        return counts.select("value", pl.col("count").cast(pl.Int64))

    def fit(self, seen: pl.DataFrame) -> Values:
        counted = seen.group_by("value").agg(pl.col("count").sum()).filter(pl.col("count") >= self.min_count)
        return Values(counted.sort(["count", "value"], descending=[True, False]).head(self.max_size)["value"])

    def merged(self, parts: list[pl.DataFrame], column: str) -> list[pl.DataFrame]:
        """What was seen, in bounded memory; raises `DataError` for values of two types, or too many of them."""
        if len({part["value"].dtype for part in parts if len(part)}) > 1:
            raise DataError(f"data.tables shares the table of {column!r} with a column of another type: cast one")
        if sum(map(len, parts)) <= _MERGED + 2 * len(parts[0]):
            return parts
        whole = pl.concat([part for part in parts if len(part)]).group_by("value").agg(pl.col("count").sum())
        if len(whole) > MOST_VALUES:
            raise DataError(
                f"column {column!r} has more than {MOST_VALUES:,} different values, which no vocabulary holds: "
                f"hash it with data.columns.{column}={{kind: hash, rows: 1000000}}"
            )
        return [whole]


@dataclass(frozen=True)
class Ids(Categorical):
    """Whole numbers from 0 to `rows` − 1 are the ids, as they are; with `missing: own` a missing one has id `rows`."""

    name: ClassVar[str] = "as_is"
    tells_apart: ClassVar[bool] = False

    rows: Annotated[int, Field(ge=1, le=1 << 32, description="ids lie in [0, rows)")]
    missing: Missing = "error"

    def refusal(self, kind: pl.DataType) -> str | None:
        if str(kind) in LONG:
            return "integers of up to 64 bits"
        if kind.is_integer() or kind in (pl.Boolean, pl.Null):
            return None
        return "integers, unless data.hash_size is given" if form_of(kind) in TEXTS else "integers or strings, or lists"


@dataclass(frozen=True)
class Buckets(Categorical):
    """Numbers and dates by the quantile they lie in: ids 1 … `count`, with about as many training rows in each; a
    missing one has id 0."""

    name: ClassVar[str] = "buckets"
    tells_apart: ClassVar[bool] = False

    count: Annotated[
        int, Field(ge=2, le=100_000, description="quantiles; more is finer and has fewer rows in each")
    ] = 20
    missing: Missing = "own"

    @property
    def sees(self) -> Sees:
        return "sample"

    def refusal(self, kind: pl.DataType) -> str | None:
        return None if has_numbers(kind) else "numbers or dates, or lists of them"

    def seen(self, values: pl.Series) -> pl.DataFrame:
        return pl.DataFrame({"value": _numbers(values)})

    def fit(self, seen: pl.DataFrame) -> Fit:
        """Where many numbers are alike there are fewer buckets."""
        drawn = seen["value"].to_numpy()
        if not len(drawn):
            return Fit()
        edges = np.unique(np.quantile(drawn, np.arange(1, self.count) / self.count, method="inverted_cdf"))
        return Fit(edges=tuple(edges[edges < drawn.max()].tolist()))


@dataclass(frozen=True)
class Cross(Categorical):
    """The pair of values of two other columns is hashed to `[1, rows)`, whatever else becomes of them; id 0 where one
    is missing."""

    name: ClassVar[str] = "cross"

    of: Annotated[tuple[str, str], Field(description="the two columns")]
    rows: HashRows = 100_000

    def parts(self, name: str) -> tuple[str, ...]:
        return self.of


class Kinds(NamedTuple):
    """What becomes of the columns of the data, by their names (of a cross its own), in the model's order."""

    dense: Mapping[str, Dense]
    ids: Mapping[str, Categorical]

    def all(self) -> Iterator[tuple[str, Kind]]:
        """A column may be dense and have ids; then only one of the two learns."""
        yield from self.dense.items()
        yield from self.ids.items()


def declared(column: str, given: str | Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> Kind:
    """What `data.columns` says of a column: the name of a kind, or a map of `kind` and its options.

    `defaults` has options by the name of a kind. Raises `ConfigError`.
    """
    key = f"data.columns.{column}"
    options = {"kind": given} if isinstance(given, str) else dict(given)
    name = options.pop("kind", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"{key} does not say what becomes of the column: write {key}=dense, or {key}.kind=hash beside its options"
        )
    member = choose(f"{key}.kind", name, "shadowsync.data", Kind)
    (checked,) = split_options(key, options, {f"kind={name}": member}, ("kind",))
    found: Kind = build(member, {**defaults.get(name, {}), **checked}, key)
    return found
