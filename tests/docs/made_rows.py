"""Rows for the examples, made in place of data that one would have to fetch."""

import random
from pathlib import Path

import polars as pl


def criteo_rows(count: int, seed: int) -> str:
    """Rows in Criteo's raw format, with missing values, whose first integer and first category tell the label."""
    dice = random.Random(seed)
    return "".join(_criteo_row(dice) for _ in range(count))


def _criteo_row(dice: random.Random) -> str:
    label = dice.random() < 0.25
    integers = [dice.randrange(50) + 200 * label, *(dice.randrange(-2, 1000) for _ in range(12))]
    categories = [0xA0 + label, *(dice.randrange(1 << 32) for _ in range(25))]
    fields = [*map(str, integers), *(f"{category:08x}" for category in categories)]
    missing = ("" if position and dice.random() < 0.1 else field for position, field in enumerate(fields))
    return "\t".join([str(int(label)), *missing]) + "\n"


def shop(count: int, seed: int) -> pl.DataFrame:
    """Rows of the columns that parquet.yaml names; a low price tells a click."""
    dice = random.Random(seed)
    clicked = [dice.random() < 0.3 for _ in range(count)]
    return pl.DataFrame(
        {
            "clicked": [int(click) for click in clicked],
            "price": [dice.expovariate(1 / 3 if click else 1 / 30) for click in clicked],
            "age": [dice.choice((None, 20.0, 40.0, 60.0)) for _ in range(count)],
            "user": [f"user {dice.randrange(300)}" for _ in range(count)],
            "item": [dice.randrange(5000) for _ in range(count)],
            "brand": [dice.choice(("a", "b", None)) for _ in range(count)],
            "recent": [[dice.randrange(5000) for _ in range(dice.randrange(4))] for _ in range(count)],
        },
        schema_overrides={"recent": pl.List(pl.Int64)},
    )


def write_shop(folder: Path) -> None:
    """The files that parquet.yaml reads, 6,000 training rows in two of them."""
    (folder / "data/train").mkdir(parents=True)
    for part in range(2):
        shop(3000, part).write_parquet(folder / f"data/train/{part}.parquet")
    shop(1000, 9).write_parquet(folder / "data/test.parquet")
