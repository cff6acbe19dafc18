"""What becomes of a column of a table: the kinds that `data.columns` chooses among, each with its options.

A kind holds options only; what was learnt of the training rows is handed in, as `learners.Fit` and `learners.Values`.

`B` rows, `L` values of a column.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import Field

from shadowsync.data.hashing import mix, to_rows
from shadowsync.data.learners import Counts, Fit, Learner, Moments, Sample, Values, seen_numbers
from shadowsync.data.values import Cells, as_numpy, form_of, has_numbers, integers, numbers
from shadowsync.errors import ConfigError
from shadowsync.registry import build, choose, split_options

Rows = Annotated[int, Field(ge=1, le=1 << 32)]
HashRows = Annotated[int, Field(ge=2, le=1 << 32, description="rows of its table; more collides less")]
Missing = Annotated[
    Literal["own", "error"], Field(description="own: a missing value has an id of its own; error: its row is a bad one")
]

_UNKNOWN = 1
"""The id of values that a vocabulary has not, beside 0, which is for missing ones."""


@dataclass(frozen=True)
class Kind(ABC):
    """What becomes of a column."""

    name: ClassVar[str]

    @property
    def learns(self) -> bool:
        """Something is to be learnt of the training rows first."""
        return False

    @property
    def learns_of_all(self) -> bool:
        """Every row counts for it; else some millions tell as much."""
        return False

    def learner(self, column: str, share: float) -> Learner:
        """What learns it; samples take that share of the values."""
        raise NotImplementedError

    def refusal(self, kind: pl.DataType) -> str | None:
        """What the column must hold, if that is not what it holds."""
        return None if form_of(kind) is not None else "text, whole numbers, booleans or dates, or lists of them"

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
        float | Literal["mean", "indicator", "error"],
        Field(
            description="what a missing number counts as: a number, or the mean (0 where not standardised); indicator: "
            "the mean, and a column NAME_missing says which; error: its row is a bad one"
        ),
    ] = "mean"

    @property
    def learns(self) -> bool:
        return self.standardise or self.clip is not None

    @property
    def plain(self) -> bool:
        """Numbers stay as they are."""
        return not (self.learns or self.log)

    def refusal(self, kind: pl.DataType) -> str | None:
        return None if has_numbers(kind) else "one number per row"

    def learner(self, column: str, share: float) -> Learner:
        return _LearnsNumbers(self, share)

    def numbers(self, given: pl.Series, plain: NDArray[np.float32], fit: Fit) -> NDArray[Any]:
        """What becomes of the column `given`, `[B]`; `plain` holds it as float32, 0 where missing."""
        found: NDArray[Any] = plain
        if self.learns or isinstance(self.missing, float):
            exact = numbers(given)
            found = as_numpy(exact, self.missing if isinstance(self.missing, float) else 0)
        found = self.scaled(found, fit)
        if given.null_count() and not isinstance(self.missing, float):
            found = np.where(given.is_null().to_numpy(), 0, found)
        return found

    def scaled(self, found: NDArray[Any], fit: Fit) -> NDArray[Any]:
        if fit.low is not None:
            found = np.clip(found, fit.low, fit.high)
        if self.log:
            found = np.log1p(np.maximum(found, 0))
        return (found - fit.mean) / fit.scale if fit.scale != 1 or fit.mean else found


class _LearnsNumbers(Learner):
    """Of a dense column: where there are bounds, all of a sample, else of every number."""

    def __init__(self, kind: Dense, share: float) -> None:
        self._kind, self._moments, self._sample = kind, Moments(), Sample(share)

    def see(self, values: pl.Series) -> None:
        found = seen_numbers(values)
        if self._kind.clip is None:
            self._moments.add(self._unscaled(found, Fit()))
        else:
            self._sample.add(found)

    def learnt(self) -> tuple[Fit, None]:
        bounds, drawn = Fit(), self._sample.all()
        if self._kind.clip is not None and len(drawn):
            low, high = np.quantile(drawn, [self._kind.clip, 1 - self._kind.clip]).tolist()
            bounds = Fit(low=low, high=high)
            self._moments.add(self._unscaled(drawn, bounds))
        if not self._kind.standardise:
            return bounds, None
        mean, scale = self._moments.fit()
        return Fit(mean=mean, scale=scale, low=bounds.low, high=bounds.high), None

    def _unscaled(self, found: NDArray[np.float64], bounds: Fit) -> NDArray[np.float64]:
        return self._kind.scaled(found, bounds)


# --- categorical columns ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Categorical(Kind, ABC):
    """A column whose values become ids, of a table of its own."""

    name: ClassVar[str]

    @abstractmethod
    def table_rows(self, values: Values | None, fit: Fit) -> int:
        """Ids lie in `[0, rows)`."""

    @abstractmethod
    def ids(self, cells: Cells, fit: Fit, values: Values | None) -> NDArray[np.int64]:
        """`[L]`; of missing values any."""

    @property
    def takes_missing(self) -> bool:
        """Whether a missing value has an id."""
        return getattr(self, "missing", "own") == "own"


@dataclass(frozen=True)
class Hash(Categorical):
    """Values of any type are hashed to `[1, rows)`; a missing one has id 0."""

    name: ClassVar[str] = "hash"

    rows: HashRows = 100_000
    missing: Missing = "own"

    def table_rows(self, values: Values | None, fit: Fit) -> int:
        return self.rows

    def ids(self, cells: Cells, fit: Fit, values: Values | None) -> NDArray[np.int64]:
        return to_rows(cells.words.copy(), np.uint64(self.rows))


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
    def learns(self) -> bool:
        return True

    @property
    def learns_of_all(self) -> bool:
        return True

    def learner(self, column: str, share: float) -> Learner:
        return Counts(column, self.min_count, self.max_size)

    def table_rows(self, values: Values | None, fit: Fit) -> int:
        return _UNKNOWN + 1 + (0 if values is None else len(values))

    def ids(self, cells: Cells, fit: Fit, values: Values | None) -> NDArray[np.int64]:
        if values is None:
            return np.full(len(cells.flat), _UNKNOWN, dtype=np.int64)
        return values.find(cells.words) + (_UNKNOWN + 1)


@dataclass(frozen=True)
class Ids(Categorical):
    """Whole numbers from 0 to `rows` − 1 are the ids, as they are; with `missing: own` a missing one has id `rows`."""

    name: ClassVar[str] = "as_is"

    rows: Annotated[int, Field(ge=1, le=1 << 32, description="ids lie in [0, rows)")]
    missing: Missing = "error"

    def refusal(self, kind: pl.DataType) -> str | None:
        if kind.is_integer() or kind in (pl.Boolean, pl.Null):
            return None
        return (
            "integers, unless data.hash_size is given" if form_of(kind) == "text" else "integers or strings, or lists"
        )

    def table_rows(self, values: Values | None, fit: Fit) -> int:
        return self.rows + (self.missing == "own")

    def ids(self, cells: Cells, fit: Fit, values: Values | None) -> NDArray[np.int64]:
        found = integers(cells.flat)
        if cells.missing is not None and self.missing == "own":
            found[cells.missing] = self.rows
        return found


@dataclass(frozen=True)
class Buckets(Categorical):
    """Numbers and dates by the quantile they lie in: ids 1 … `count`, with about as many training rows in each; a
    missing one has id 0."""

    name: ClassVar[str] = "buckets"

    count: Annotated[
        int, Field(ge=2, le=100_000, description="quantiles; more is finer and has fewer rows in each")
    ] = 20
    missing: Missing = "own"

    @property
    def learns(self) -> bool:
        return True

    def refusal(self, kind: pl.DataType) -> str | None:
        return None if has_numbers(kind) else "numbers or dates, or lists of them"

    def learner(self, column: str, share: float) -> Learner:
        return _LearnsEdges(self.count, share)

    def table_rows(self, values: Values | None, fit: Fit) -> int:
        return len(fit.edges) + 2

    def ids(self, cells: Cells, fit: Fit, values: Values | None) -> NDArray[np.int64]:
        return np.searchsorted(np.array(fit.edges), as_numpy(numbers(cells.flat), 0)) + 1


class _LearnsEdges(Learner):
    """Of buckets: quantiles of a sample; where many numbers are alike there are fewer."""

    def __init__(self, count: int, share: float) -> None:
        self._count, self._sample = count, Sample(share)

    def see(self, values: pl.Series) -> None:
        self._sample.add(seen_numbers(values))

    def learnt(self) -> tuple[Fit, None]:
        drawn = self._sample.all()
        if not len(drawn):
            return Fit(), None
        edges = np.unique(np.quantile(drawn, np.arange(1, self._count) / self._count, method="inverted_cdf"))
        return Fit(edges=tuple(edges[edges < drawn.max()].tolist())), None


@dataclass(frozen=True)
class Cross(Categorical):
    """The pair of values of two other columns is hashed to `[1, rows)`, whatever else becomes of them; id 0 where one
    is missing."""

    name: ClassVar[str] = "cross"

    of: Annotated[tuple[str, str], Field(description="the two columns")]
    rows: HashRows = 100_000

    def table_rows(self, values: Values | None, fit: Fit) -> int:
        return self.rows

    def ids(self, cells: Cells, fit: Fit, values: Values | None) -> NDArray[np.int64]:
        raise NotImplementedError

    def pairs(self, left: Cells, right: Cells) -> NDArray[np.int64]:
        """The ids of all rows, `[B]`."""
        ids = to_rows(mix(mix(left.words.copy()) ^ right.words), np.uint64(self.rows))
        for missing in (left.missing, right.missing):
            if missing is not None:
                ids[missing] = 0
        return ids


class Kinds(NamedTuple):
    """What becomes of the columns of the data, by their names (of a cross its own), in the model's order."""

    dense: Mapping[str, Dense]
    ids: Mapping[str, Categorical]

    def all(self) -> Iterator[tuple[str, Kind]]:
        """A column may be dense and have ids; then only its dense kind learns."""
        yield from self.dense.items()
        yield from self.ids.items()


# --- declarations ----------------------------------------------------------------------------------------------------


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
