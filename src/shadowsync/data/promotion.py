"""The columns of the promotion-response task, made from strictly earlier weeks.

`E` exposures, `P` products.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from shadowsync.data.exposures import Exposures, Market
from shadowsync.data.history import WEEKS, History, Integers, Sums, distinct

Column = NDArray[np.float32]

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
    return {name: _encode(numbered[column]) for name, column in ATTRIBUTES.items()}


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


def _encode(values: pl.Series) -> Attribute:
    known = values.drop_nulls().cast(pl.String).unique().sort().to_list()
    codes = values.cast(pl.String).cast(pl.Enum(known)).to_physical().cast(pl.Int64).fill_null(-1)
    return Attribute(codes.to_numpy() + 1, len(known) + 1)
