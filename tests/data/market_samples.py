"""A few weeks of a shop with two households, made by hand."""

import polars as pl

#              household store product week
PURCHASES = [
    (1, 10, 100, 1),
    (1, 10, 200, 1),
    (1, 10, 100, 2),
    (2, 10, 300, 2),
    (1, 10, 100, 3),
    (2, 11, 100, 3),
    (2, 11, 200, 4),
    (1, 10, 300, 4),
]
#              product store week display mailer
PROMOTIONS = [
    (100, 10, 1, "0", "A"),
    (100, 10, 2, "3", "A"),
    (100, 10, 2, "5", "D"),
    (200, 10, 2, "9", "0"),
    (300, 10, 2, "A", "0"),
    (100, 10, 3, "1", "0"),
    (200, 10, 3, "0", "H"),
    (200, 11, 3, "0", "H"),
    (100, 11, 3, "0", "H"),
    (300, 11, 3, "2", "H"),
    (100, 10, 4, "0", "0"),
    (300, 10, 4, "7", "X"),
    (200, 11, 4, "7", "X"),
    (300, 11, 4, "7", "0"),
    (100, 12, 4, "7", "0"),
]


def tables() -> dict[str, pl.DataFrame]:
    """In the layout of the package's tables."""
    transactions = pl.DataFrame(PURCHASES, schema=["household_id", "store_id", "product_id", "week"], orient="row")
    promotions = pl.DataFrame(
        PROMOTIONS, schema=["product_id", "store_id", "week", "display_location", "mailer_location"], orient="row"
    )
    products = pl.DataFrame(
        {
            "product_id": [100, 200, 300, 400],
            "manufacturer_id": [1, 1, 2, 3],
            "department": ["GROCERY", "GROCERY", "MEAT", "MEAT"],
            "brand": ["National", "Private", "National", "Private"],
            "product_category": ["BREAD", "MILK", None, "BEEF"],
            "product_type": ["TOAST", "WHOLE", None, "LEAN"],
            "package_size": [None, "1 L", None, None],
        }
    )
    return {"transactions": transactions, "promotions": promotions, "products": products}
