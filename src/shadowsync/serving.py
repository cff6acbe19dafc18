"""Raw rows to probabilities with numpy and torch alone: what a server of an exported model needs.

    model = load("model.pt2")
    model.score({"user": ["ann", None], "price": [3.5, 7], "seen": [["x", "y"], []]})    # float32 [B]

This file imports nothing else of the package, so that it can be copied next to a server. Training runs the same code:
what becomes of a value is written down here, once.

`B` rows, `N` dense columns, `F` categorical features, `L` values of a column, or ids.
"""

import datetime
import decimal
import functools
import hashlib
import itertools
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Mask = NDArray[np.bool_]
Ids = NDArray[np.int64]
Described = Mapping[str, Any]
Note = Callable[..., None]
"""Called as `note(bad, before, values, after, remedy)`: what is wrong with the rows that are bad `[B]`, between the two
texts the row's value, if `values` are given, and what to do about it where that is not to mend the row."""

NOTHING = "nothing"
"""The form of values that are all missing."""
TEXTS = ("strings", "decimals", "text")
"""The forms of values that are hashed as text; the last one stands for both in files of before they were told apart."""
LARGEST = 1e38
"""Of a dense number: sums and products of larger ones are beyond float32."""
DAY_US = 86_400_000_000
_UNKNOWN = 1
"""The id of values that a vocabulary has not, beside 0, which is for missing ones."""


# --- the hash --------------------------------------------------------------------------------------------------------
# The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), a
# bijection of 64-bit numbers, the same in every process, run and version: the rows of trained models depend on it.

MIXERS = _GOLDEN, _FIRST, _SECOND = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def mix(words: Words) -> Words:
    """SplitMix64's finaliser of `words + golden ratio`, in place; returns `words`."""
    words += _GOLDEN
    shifted = words >> np.uint64(30)
    words ^= shifted
    words *= _FIRST
    np.right_shift(words, np.uint64(27), out=shifted)
    words ^= shifted
    words *= _SECOND
    np.right_shift(words, np.uint64(31), out=shifted)
    words ^= shifted
    return words


def to_rows(hashes: Words, rows: np.uint64 | int) -> Ids:
    """Scales hashes to `[1, rows)` by their upper 32 bits, in place: row 0 is left for missing values."""
    hashes >>= np.uint64(32)
    hashes *= np.uint64(rows) - np.uint64(1)
    hashes >>= np.uint64(32)
    hashes += np.uint64(1)
    return hashes.view(np.int64)


def alike(form: str | None, trained: str | None) -> bool:
    """Whether values of a form are told apart as those that a model was trained on; what is not known is no other."""
    if trained is None or NOTHING in (form, trained):
        return True
    return form == trained or (trained == "text" and form in TEXTS)


def hash_texts(lengths: Ids, words_at: Callable[[int, Any], Words]) -> Words:
    """One word per text of so many UTF-8 bytes, eight of which are a little-endian word, the last filled up with zeros.

    `words_at` gives the words that begin at a byte of those texts.
    """
    hashes = mix(lengths.astype(np.uint64))
    shortest = int(lengths.min()) if len(lengths) else 0
    for position in range(0, int(lengths.max(initial=0)), 8):
        longer: Any = slice(None) if position < shortest else np.flatnonzero(lengths > position)
        hashes[longer] = mix(hashes[longer] ^ words_at(position, longer))
    return hashes


def hash_bytes(text: NDArray[np.uint8], edges: NDArray[np.int64]) -> Words:
    """Of texts one after the other: text `l` is `text[edges[l]:edges[l + 1]]`; behind the last one are eight more,
    bytes, so that a word begins at every byte."""
    every_word = np.ndarray((len(text) - 7,), dtype="<u8", buffer=text, strides=(1,))
    starts, lengths = edges[:-1], np.diff(edges)

    def words_at(position: int, where: Any) -> Words:
        unused_bits = (8 * (8 - np.minimum(lengths[where] - position, 8))).astype(np.uint64)
        return np.asarray((every_word[starts[where] + position] << unused_bits) >> unused_bits)

    return hash_texts(lengths, words_at)


class Known:
    """The values of a vocabulary by their words `[V]`, in the order of their ids."""

    def __init__(self, words: Words) -> None:
        self._order = np.argsort(words, kind="stable")
        self._sorted = words[self._order]

    def __len__(self) -> int:
        return len(self._sorted)

    def find(self, wanted: Words) -> Ids:
        """The position of each value by its word, −1 where there is none, `[L]`."""
        if not len(self._sorted):
            return np.full(len(wanted), -1, dtype=np.int64)
        places = np.searchsorted(self._sorted, wanted)
        np.minimum(places, len(self._sorted) - 1, out=places)
        return np.where(self._sorted[places] == wanted, self._order[places], -1)


# --- what becomes of a column ----------------------------------------------------------------------------------------


class Cells(Protocol):
    """A column of `B` rows, its values one after the other; those that are missing count as 0 in the arrays.

    Attributes:
        rows, flat: rows and values as they came, for messages.
        counts: values of each row, `[B]`; None: one each.
        missing: which values are, `[L]`; None if none is.
        words: of 64 bits that tell values apart, not to be changed.
        integers, numbers, floats: the values as int64, float64 and float32.
        fractions: which values are no whole numbers; None if all are.
    """

    rows: Any
    flat: Any
    counts: Ids | None
    missing: Mask | None

    @property
    def words(self) -> Words: ...
    @property
    def integers(self) -> Ids: ...
    @property
    def numbers(self) -> NDArray[np.float64]: ...
    @property
    def floats(self) -> NDArray[np.float32]: ...
    @property
    def fractions(self) -> Mask | None: ...

    def owners(self, flags: Mask) -> Ids:
        """The row of each value that has a flag."""
        return np.flatnonzero(flags) if self.counts is None else np.arange(len(self.counts)).repeat(self.counts)[flags]

    def rows_with(self, flags: Mask) -> Mask:
        """Which rows have a flag among their values, `[B]`."""
        found = np.zeros(len(self.rows), dtype=np.bool_)
        found[self.owners(flags)] = True
        return found


def told(row: int, before: str, values: Any, after: str) -> str:
    """What a `Note` says of a row."""
    value = None if values is None else values[row]
    value = value.item() if isinstance(value, np.generic) else value
    return f"{before}{'' if values is None else 'missing' if value is None else repr(value)}{after}"


def scaled(found: NDArray[Any], log: bool, fit: Described) -> NDArray[Any]:
    """`(log(1 + max(x, 0)) − mean) / scale` of numbers that were moved to the bounds `low` and `high`."""
    mean, scale = fit.get("mean", 0.0), fit.get("scale", 1.0)
    if fit.get("low") is not None:
        found = np.clip(found, fit["low"], fit["high"])
    if log:
        found = np.log1p(np.maximum(found, 0))
    return (found - mean) / scale if scale != 1 or mean else found


def indicator_of(name: str) -> str:
    """The column that says where a dense one is missing."""
    return f"{name}_missing"


class DenseColumn:
    """A column that becomes a number; `names` are those of its dense columns, one of which may be an indicator."""

    def __init__(self, name: str, kind: Described, fit: Described) -> None:
        self.name, self.missing, self._log, self._fit = name, kind["missing"], kind["log"], fit
        self.names = (name, indicator_of(name)) if self.missing == "indicator" else (name,)
        self._given = not isinstance(self.missing, str)
        self._learnt = kind["standardise"] or kind["clip"] is not None

    def plain(self, cells: Cells) -> bool:
        """The numbers are what they were."""
        return not (self._learnt or self._log or (self._given and cells.missing is not None))

    def scaled(self, cells: Cells) -> NDArray[Any]:
        """`[B]`, computed in float64 where something was learnt, so that large numbers keep their differences."""
        found: NDArray[Any] = cells.numbers if self._learnt or self._given else cells.floats
        if cells.missing is None:
            return scaled(found, self._log, self._fit)
        if self._given:
            return scaled(np.where(cells.missing, self.missing, found), self._log, self._fit)
        return np.where(cells.missing, 0, scaled(found, self._log, self._fit))


class IdColumn:
    """A column whose values become ids in `[0, table_rows)`; this one hashes them.

    Attributes:
        of: the columns of the data that it is made of.
        listed: a row has any number of values; None: unknown.
        weights: the column of the ids' weights, lists as long as this column's.
        whole: numbers must be whole.
    """

    whole: ClassVar[bool] = True
    missing_id = 0

    def __init__(self, name: str, kind: Described, fit: Described, known: Known) -> None:
        self.name, self.of = name, tuple(kind.get("of", (name,)))
        self.own = kind.get("missing", "own") == "own"
        self.known, self.edges = known, np.array(fit.get("edges", ()), dtype=np.float64)
        self.rows: int = kind.get("rows", 0)
        self.listed: bool | None = None
        self.weights: str | None = None

    @property
    def table_rows(self) -> int:
        return self.rows

    def find(self, *cells: Cells) -> Ids:
        """`[L]`; of missing values any."""
        return to_rows(cells[0].words.copy(), self.rows)

    def ids(self, cells: Sequence[Cells], note: Note) -> Ids:
        """Of a column's values, or of the two that are crossed."""
        for name, one in zip(self.of, cells, strict=True):
            if self.whole and one.fractions is not None:
                after = ", which is no whole number: declare the column dense or as buckets, or cast it"
                note(one.rows_with(one.fractions), f"{name} is ", one.rows, after)
        found = self.find(*cells)
        gone = [one.missing for one in cells if one.missing is not None]
        if not gone:
            return found
        missing = np.logical_or.reduce(gone)
        if not self.own:
            self.refuse_missing(cells[0].rows_with(missing), note)
        return np.where(missing, self.missing_id, found)

    def refuse_missing(self, bad: Mask, note: Note) -> None:
        note(bad, f"{self.name} is missing")


class _Cross(IdColumn):
    def find(self, *cells: Cells) -> Ids:
        return to_rows(mix(mix(cells[0].words.copy()) ^ cells[1].words), self.rows)


class _Keys(IdColumn):
    missing_id = -(1 << 63) + 2  # the lowest that has a row

    @property
    def table_rows(self) -> int:
        return self._capacity

    def __init__(self, name: str, kind: Described, fit: Described, known: Known) -> None:
        super().__init__(name, kind, fit, known)
        self._capacity, self._hashed = int(kind["capacity"]), fit.get("form") in (*TEXTS, NOTHING)

    def find(self, *cells: Cells) -> Ids:
        return cells[0].words.view(np.int64) if self._hashed else cells[0].integers


class _Vocabulary(IdColumn):
    @property
    def table_rows(self) -> int:
        return len(self.known) + _UNKNOWN + 1

    def find(self, *cells: Cells) -> Ids:
        return self.known.find(cells[0].words) + (_UNKNOWN + 1)


class _Buckets(IdColumn):
    whole = False

    @property
    def table_rows(self) -> int:
        return len(self.edges) + 2

    def find(self, *cells: Cells) -> Ids:
        return np.searchsorted(self.edges, cells[0].numbers) + 1


class _AsIs(IdColumn):
    @property
    def table_rows(self) -> int:
        return self.rows + int(self.own)

    def find(self, *cells: Cells) -> Ids:
        return cells[0].integers

    def ids(self, cells: Sequence[Cells], note: Note) -> Ids:
        (one,), self.missing_id = cells, self.rows if self.own else 0
        found, outside = super().ids(cells, note), one.integers.view(np.uint64) >= self.rows
        if outside.any():
            places = zip(one.owners(outside)[::-1].tolist(), np.flatnonzero(outside)[::-1].tolist(), strict=True)
            first = {row: one.flat[place] for row, place in places}
            remedy = f"{self._hash_it}, or raise data.rows (data.columns.{self.name}.rows) above its highest id"
            after = f", outside of 0 … {self.rows - 1} (data.rows)"
            note(one.rows_with(outside), f"{self.name} has id ", first, after, remedy)
        return found

    def refuse_missing(self, bad: Mask, note: Note) -> None:
        note(bad, f"{self.name} has no id", None, "", f"{self._hash_it}, which takes missing ones to row 0")

    @property
    def _hash_it(self) -> str:
        of_columns = f"of data.columns: data.columns.{self.name}.kind=hash"
        return f"hash the column with data.hash_size={{{self.name}: 100000}} ({of_columns})"


KINDS: Mapping[str, type[IdColumn]] = {
    "hash": IdColumn,
    "dynamic": _Keys,
    "cross": _Cross,
    "vocabulary": _Vocabulary,
    "buckets": _Buckets,
    "as_is": _AsIs,
}
"""By the name of the declaration (`data.columns.NAME.kind`)."""


class Inputs(NamedTuple):
    """What the exported program takes.

    Attributes:
        dense: float32 `[B, N]`.
        values: ids, int64 `[L]`, of all rows of feature 0, then of feature 1 …
        offsets: where bag `f * B + b` begins in them, and their number, int64 `[F * B + 1]`; None: one id in each.
        weights: of the ids, float32 `[L]`; None: ones.
    """

    dense: NDArray[np.float32]
    values: Ids
    offsets: Ids | None
    weights: NDArray[np.float32] | None


class Transforms:
    """What becomes of the columns of a table, all of them at once.

    Args:
        described: `dense` and `ids` have each column's declaration, `fits` what was learnt of it, `weights` the columns
            of ids' weights; as `columns.json` of an exported model has it.
        known: vocabularies by column.
        listed: by column, whether a row has any number of values; absent where that is unknown.
    """

    def __init__(self, described: Described, known: Mapping[str, Known], listed: Mapping[str, bool]) -> None:
        fits, nothing = described["fits"], Known(np.empty(0, dtype=np.uint64))
        self.dense = [DenseColumn(name, kind, fits.get(name, {})) for name, kind in described["dense"].items()]
        self.ids = [
            KINDS[kind["kind"]](name, kind, fits.get(name, {}), known.get(name, nothing))
            for name, kind in described["ids"].items()
        ]
        self.names = tuple(name for column in self.dense for name in column.names)
        for column in self.ids:
            column.listed = listed.get(column.name)
            column.weights = described.get("weights", {}).get(column.name)

    def of(self, rows: int, cells_of: Callable[[str, bool], Cells], note: Note) -> Inputs:
        """Of so many rows; `cells_of` gives a column by its name, and whether it is wanted for ids."""
        cells = functools.cache(cells_of)
        return Inputs(self._dense(rows, cells, note), *self._ids(rows, cells, note))

    def _dense(self, rows: int, cells_of: Callable[[str, bool], Cells], note: Note) -> NDArray[np.float32]:
        """What is far from float32's range is noted before anything becomes of it."""
        dense = np.empty((rows, len(self.names)), dtype=np.float32)
        columns = [(column, self.names.index(column.name), cells_of(column.name, False)) for column in self.dense]
        for column, place, cells in columns:
            dense[:, place] = cells.floats
            if column.missing == "indicator":
                dense[:, place + 1] = 0 if cells.missing is None else cells.missing
        if not (dense.max(initial=0) <= LARGEST and dense.min(initial=0) >= -LARGEST):  # nor where one is no number
            after = f", it must be a finite number of at most {LARGEST:.0e}"
            for column, place, cells in columns:
                note(~(np.abs(dense[:, place]) <= LARGEST), f"{column.name} is ", cells.rows, after)
        with np.errstate(over="ignore", invalid="ignore"):  # of numbers that were noted
            for column, place, cells in columns:
                if not column.plain(cells):
                    dense[:, place] = column.scaled(cells)
                if column.missing == "error" and cells.missing is not None:
                    note(cells.missing, f"{column.name} is missing")
        return dense

    def _ids(
        self, rows: int, cells_of: Callable[[str, bool], Cells], note: Note
    ) -> tuple[Ids, Ids | None, NDArray[np.float32] | None]:
        values, counts, weights = [], [], []
        ones = np.ones(rows, dtype=np.int64)
        weighted = any(column.weights for column in self.ids)
        for column in self.ids:
            cells = [cells_of(name, True) for name in column.of]
            values.append(column.ids(cells, note))
            counts.append(ones if cells[0].counts is None else cells[0].counts)
            if column.weights is not None:
                of = cells_of(column.weights, True)
                differs = (ones if of.counts is None else of.counts) != counts[-1]
                note(differs, f"{column.weights} and {column.name} are of different length")
                odd = ~np.isfinite(of.floats) if of.missing is None else of.missing | ~np.isfinite(of.floats)
                note(of.rows_with(odd), f"{column.weights} has a weight that is not a finite number")
                weights.append(of.floats)
            elif weighted:
                weights.append(np.ones(len(values[-1]), dtype=np.float32))
        listed = any(column.listed for column in self.ids) or any(each is not ones for each in counts)
        offsets = np.append(0, np.cumsum(np.concatenate(counts))) if listed else None
        return np.concatenate(values or [ones[:0]]), offsets, np.concatenate(weights) if weighted else None


# --- rows as a caller has them ---------------------------------------------------------------------------------------


class Given(Cells):
    """A column as a caller gave it: a list or an array with a value, or a list of values, for each row.

    Missing is None, pandas.NA or what an array masks, and among floats NaN, among times NaT. `form` says how values
    are told apart, as `data.values.form_of` does of types.
    """

    def __init__(self, name: str, given: object, listed: bool | None) -> None:
        self.name, self.rows = name, given
        self.flat, self.counts = _flat(name, given, listed)
        self.form, self._values, self.missing = _typed(name, self.flat)

    @functools.cached_property
    def words(self) -> Words:
        if self.form not in TEXTS:
            return mix(self.integers.view(np.uint64).copy())
        try:
            encoded = [_text(value).encode() for value in self._values]
        except UnicodeEncodeError as error:
            raise ValueError(f"column {self.name!r} holds {error.object!r}, which UTF-8 has no bytes for") from error
        edges = np.fromiter(itertools.accumulate(map(len, encoded), initial=0), np.int64, len(encoded) + 1)
        return hash_bytes(np.frombuffer(b"".join([*encoded, bytes(8)]), dtype=np.uint8), edges)

    @functools.cached_property
    def integers(self) -> Ids:
        with np.errstate(invalid="ignore"):  # of floats far beyond, which are noted
            return np.asarray(self._values.astype(np.int64))

    @functools.cached_property
    def numbers(self) -> NDArray[np.float64]:
        if self.form == "strings":
            raise ValueError(f"column {self.name!r} holds text, it must hold numbers")
        found = np.array([float(value) for value in self._values]) if self.form == "decimals" else self._values
        return found.astype(np.float64) / (DAY_US if self.form in ("datetime", "duration", "time") else 1)

    @functools.cached_property
    def floats(self) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):  # of numbers that are noted
            return np.asarray((self._values if self.form == "integers" else self.numbers).astype(np.float32))

    @functools.cached_property
    def fractions(self) -> Mask | None:
        given = self._values
        if self.form != "integers" or given.dtype.kind != "f":
            return None
        found: Mask = ~((np.trunc(given) == given) & (given >= -(2.0**63)) & (given < 2.0**63))
        return found if found.any() else None


def _text(value: str | decimal.Decimal) -> str:
    """A decimal is text, without the zeros that only its scale gives it."""
    if isinstance(value, str):
        return value
    fixed = format(value, "f") if value else "0"
    return fixed.rstrip("0").rstrip(".") if "." in fixed else fixed


def _flat(name: str, given: Any, listed: bool | None) -> tuple[Any, Ids | None]:
    """The values one after the other, and how many each row has, None where it has one."""
    flat: Any
    given = without_mask(given)
    if hasattr(given, "__array__"):  # of other libraries, too
        given = np.asarray(given)
        given = given.tolist() if given.dtype == object else given
    if isinstance(given, np.ndarray):
        nested, flat = given.ndim > 1, given.reshape(-1)
        counts = np.full(len(given), given.size // max(len(given), 1))
    else:
        given = _without_na(given)
        cells = [cell for cell in given if cell is not None]
        single = [cell for cell in cells if not isinstance(cell, list | tuple | np.ndarray)]
        nested = len(single) < len(cells) or (not cells and bool(listed))
        if nested and single:
            raise ValueError(f"column {name!r} holds lists and single values: give a list for each row")
        flat, counts = given, np.empty(0, dtype=np.int64)
        if nested:
            counts = np.array([0 if cell is None else len(cell) for cell in given], dtype=np.int64)
            filled = [cell for cell in cells if len(cell)]  # np.array([]) is of floats, whatever the others are of
            types = {cell.dtype if isinstance(cell, np.ndarray) else None for cell in filled}
            alike = len(types) == 1 and None not in types
            flat = _without_na(np.concatenate(filled) if alike else [*itertools.chain.from_iterable(filled)])
    if listed is not None and nested != listed and len(given):
        has, takes = ("lists", "one value") if nested else ("single values", "a list")
        raise ValueError(f"column {name!r} holds {has}, and the model takes {takes} for each row")
    return flat, counts if nested else None


def without_mask(values: Any) -> Any:
    """With None, among times NaT, for what a masked array masks; anything else as it is."""
    if not isinstance(values, np.ma.MaskedArray):
        return values
    return values.filled(values.dtype.type("NaT")) if values.dtype.kind in "mM" else values.tolist()


def _without_na(values: Any) -> Any:
    """With None for each pandas.NA, which is told by its name, as pandas need not be there."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values
    absent = {kind for kind in {*map(type, values)} if kind.__name__ == "NAType"}
    return [None if type(value) in absent else value for value in values] if absent else values


def _typed(name: str, flat: Any) -> tuple[str, NDArray[Any], Mask | None]:
    """The form of values, they themselves as numbers, texts or decimals, and which are missing."""
    if isinstance(flat, np.ndarray) and flat.dtype.kind in "biufMm":
        gone = flat != flat  # noqa: PLR0124 (NaN and NaT are not themselves)
        form, values = _ticks(flat[~gone])
    else:
        gone = np.array([value is None or value != value for value in flat], dtype=np.bool_)  # noqa: PLR0124 (as above)
        form, values = _of_one_kind(name, [*itertools.compress(flat, ~gone)])
    if gone.any():
        known, values = values, np.full(len(gone), decimal.Decimal() if form in TEXTS else 0, dtype=values.dtype)
        values[~gone] = known
    return form, values, gone if gone.any() else None


def _of_one_kind(name: str, values: list[Any]) -> tuple[str, NDArray[Any]]:  # noqa: PLR0911 (a form each)
    kinds = {*map(type, values)}

    def are(*types: type) -> bool:
        return all(issubclass(kind, types) for kind in kinds)

    if not values:
        return NOTHING, np.zeros(0, dtype=np.int64)
    if are(str) or are(decimal.Decimal):
        return "strings" if are(str) else "decimals", np.fromiter(values, dtype=object, count=len(values))
    if are(np.datetime64) or are(np.timedelta64):
        return _ticks(np.array(values))
    if are(bool, int, np.bool_, np.integer):
        lowest, highest = int(min(values)), int(max(values))
        if lowest < -(2**63) or highest >= (2**63 if lowest < 0 else 2**64):
            raise ValueError(f"column {name!r} holds integers of more than 64 bits: give them as text")
        return "integers", np.array(values, dtype=np.int64 if highest < 2**63 else np.uint64)
    if are(bool, int, float, np.bool_, np.integer, np.floating):
        return "integers", np.array(values, dtype=np.float64)
    if are(datetime.datetime):
        utc = [value.astimezone(datetime.UTC).replace(tzinfo=None) if value.tzinfo else value for value in values]
        return _ticks(np.array(utc, dtype="M8[us]"))
    if are(datetime.date) and not any(issubclass(kind, datetime.datetime) for kind in kinds):
        return _ticks(np.array(values, dtype="M8[D]"))
    if are(datetime.timedelta):
        return _ticks(np.array(values, dtype="m8[us]"))
    if are(datetime.time):
        ticks = [((t.hour * 60 + t.minute) * 60 + t.second) * 1_000_000 + t.microsecond for t in values]
        return "time", np.array(ticks, dtype=np.int64)
    held = " and ".join(sorted(kind.__name__ for kind in kinds))
    allowed = "text, numbers, booleans, dates or times of one kind, or lists of them"
    raise ValueError(f"column {name!r} holds {held}, it must hold {allowed}")


def _ticks(array: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    """Numbers as they are, dates as days, times as microseconds; their form."""
    kind = array.dtype.kind
    if kind not in "Mm":
        return "integers", array.astype(np.int64) if kind == "b" else array
    unit, _ = np.datetime_data(array.dtype)
    if kind == "M" and unit in ("Y", "M", "W", "D"):
        return "date", array.astype("M8[D]").astype(np.int64)
    form = "datetime" if kind == "M" else "duration"
    return form, array.astype(np.int64) // 1000 if unit == "ns" else array.astype(f"{kind}8[us]").astype(np.int64)


# --- a model ---------------------------------------------------------------------------------------------------------


class Model:
    """An exported model that takes rows as the data has them.

    Attributes:
        columns: the names of the columns that it needs.
    """

    def __init__(self, program: Callable[..., Mapping[str, Any]], metadata: Described, described: Described) -> None:
        """`metadata` and `described` are `metadata.json` and `columns.json` of the file; `ValueError` if they are of
        different models."""
        features = {feature["name"]: feature for feature in metadata["features"]}
        known = {name: Known(Given(name, values, False).words) for name, values in described["values"].items()}
        several = {name: feature["several"] for name, feature in features.items() if "several" in feature}
        labels = len(metadata.get("labels", ()))
        self._no_rows = np.empty((0, labels) if labels > 1 else 0, dtype=np.float32)
        self._program, self._transforms = program, Transforms(described, known, several)
        dense, ids = self._transforms.dense, self._transforms.ids
        if [*self._transforms.names, *(column.name for column in ids)] != [*metadata["dense"], *features]:
            raise ValueError("columns.json names other columns than metadata.json: they are of different models")
        for column in ids:
            if column.table_rows > (rows := features[column.name]["rows"]):
                raise ValueError(
                    f"column {column.name!r} has ids up to {column.table_rows - 1} and its table {rows} rows: what was "
                    "learnt of it is of another model"
                )
        weights = [column.weights for column in ids if column.weights is not None]
        if metadata["weighted"] and not weights:
            raise ValueError("the file does not say which columns hold the weights of ids: export the model again")
        parts = [name for column in ids for name in column.of]
        self.columns = tuple(dict.fromkeys([*(column.name for column in dense), *parts, *weights]))
        self._forms = {name: described["fits"].get(name, {}).get("form") for name in parts}
        self._forms |= {column.name: "integers" for column in ids if isinstance(column, _AsIs)}
        self._listed = {column.name: column.listed for column in ids} | dict.fromkeys(weights, True)

    def prepare(self, rows: Mapping[str, Any]) -> Inputs:
        """What the program takes, of columns by name; others than it needs are ignored.

        Raises:
            ValueError: a column is missing, of another length or type than it must be, or a row cannot be used.
        """
        count = -1
        for name in self.columns:
            if name not in rows:
                raise ValueError(f"there is no column {name!r}: the model takes {', '.join(self.columns)}")
            given = rows[name]
            if (
                isinstance(given, str | bytes | Mapping)
                or not hasattr(given, "__len__")
                or getattr(given, "ndim", 1) < 1
            ):
                held = type(given).__name__
                raise ValueError(f"column {name!r} is {held}, it must be a list or an array with a value for each row")
            count = len(given) if count < 0 else count
            if len(given) != count:
                raise ValueError(f"column {name!r} has {len(given)} rows, and column {self.columns[0]!r} has {count}")
        found = self._transforms.of(
            max(count, 0), lambda name, for_ids: self._cells(name, rows[name], for_ids), _refuse
        )
        return found._replace(offsets=np.arange(len(found.values) + 1)) if found.offsets is None else found

    def score(self, rows: Mapping[str, Any]) -> NDArray[np.float32]:
        """Probabilities, float32 `[B]`, or predictions of other labels than one click, `[B]` or `[B, T]`; raises as
        `prepare`."""
        return self.run(self.prepare(rows))

    def run(self, inputs: Inputs) -> NDArray[np.float32]:
        """As `score`, of prepared rows."""
        import torch  # noqa: PLC0415 (preparing needs none)

        if not len(inputs.dense):
            return self._no_rows
        with torch.no_grad():
            answer = self._program(*(torch.from_numpy(each) for each in inputs if each is not None))
        return np.asarray(answer["probabilities" if "probabilities" in answer else "predictions"])

    def _cells(self, name: str, given: object, for_ids: bool) -> Given:
        cells = Given(name, given, self._listed.get(name, False) if for_ids else False)
        trained = self._forms.get(name) if for_ids else None
        if not alike(cells.form, trained):
            raise ValueError(
                f"column {name!r} holds {cells.form}, and the model was trained on {trained}: cast it, as its values "
                "would be others"
            )
        return cells


def _refuse(bad: Mask, before: str, values: Any = None, after: str = "", _: str = "") -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"row {row + 1}: {told(row, before, values, after)}")


def digest_of(columns: str) -> str:
    """By which `metadata.json` knows its `columns.json` again."""
    return hashlib.sha256(columns.encode()).hexdigest()


def load(path: str | os.PathLike[str]) -> Model:
    """The model in a file that `shadowsync export` wrote; also in one that an older version wrote.

    Raises:
        ValueError: the file is none, or what it says of its columns is of another model.
    """
    import torch  # noqa: PLC0415 (as above)

    found = {"metadata.json": "", "columns.json": ""}
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no file that shadowsync export wrote")
    program = torch.export.load(path, extra_files=found).module()
    if not found["metadata.json"]:
        raise ValueError(f"{path} is no file that shadowsync export wrote: it has no metadata.json")
    metadata = json.loads(found["metadata.json"])
    if metadata.get("columns") not in (None, digest_of(found["columns.json"])):
        raise ValueError(f"{path}: what it says of its columns was learnt for another model: export the model again")
    described = json.loads(found["columns.json"] or "null")
    if described is None:  # numbers and ids are as the model was trained on them
        plain = {"kind": "dense", "log": False, "standardise": False, "clip": None, "missing": "error"}
        ids = {one["name"]: {"kind": "as_is", "rows": one["rows"], "missing": "error"} for one in metadata["features"]}
        described = {"dense": dict.fromkeys(metadata["dense"], plain), "ids": ids, "fits": {}, "values": {}}
    return Model(program, metadata, described)
