"""Numbers as a person reads them."""

import math

import pytest

from shadowsync.report import words


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (words.count(1234567.4), "1,234,567"),
        (words.decimal(0.93121), "0.9312"),
        (words.percent(0.931, 1), "93.1 %"),
        (words.short(1_200_000), "1.2M"),
        (words.short(850_000), "850k"),
        (words.short(0.25), "0.25"),
        (words.data_size(1_284_000_000), "1.28 GB"),
        (words.data_size(12), "12 bytes"),
        (words.duration(45.21), "45.2 s"),
        (words.duration(59.96), "1 min 00 s"),
        (words.duration(185), "3 min 05 s"),
        (words.duration(7620), "2 h 07 min"),
        (words.clock(45.4), "0:45"),
        (words.clock(723), "12:03"),
        (words.clock(7650), "2:07:30"),
        (words.plural(1, "trainer"), "1 trainer"),
        (words.plural(2, "trainer"), "2 trainers"),
    ],
)
def test_numbers(found: str, expected: str) -> None:
    assert found == expected


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
@pytest.mark.parametrize(
    "write", [words.count, words.decimal, words.percent, words.short, words.data_size, words.duration, words.clock]
)
def test_what_is_not_defined_is_a_dash(write, value) -> None:
    assert write(value) == words.MISSING
