"""What is left open in the configuration is chosen by where the job runs."""

from typing import Any

import pytest

from shadowsync.assembly import prefetch
from shadowsync.choices import choose_all, server_count
from shadowsync.config import merge, parse


@pytest.mark.parametrize(
    ("given", "servers", "pulls"),
    [
        ({}, 1, 0),
        ({"cluster": {"runtime": "ray"}}, 1, 2),
        ({"cluster": {"runtime": "ray", "address": "10.0.0.1:6379"}}, 2, 2),
        ({"embedding": {"servers": 5}, "train": {"prefetch": 1}}, 5, 1),
        ({"cluster": {"runtime": "ray"}, "aggregation": {"method": "gba"}}, 1, 2),
        ({"cluster": {"runtime": "ray"}, "aggregation": {"method": "sync"}}, 1, 0),
    ],
)
def test_servers_and_pulls_ahead(given: dict[str, Any], servers: int, pulls: int) -> None:
    config = parse(given)
    assert (server_count(config), prefetch(config, choose_all(config, own_model=False))) == (servers, pulls)


def test_an_empty_map_clears_the_one_below_it() -> None:
    stored = {"data": {"name": "parquet", "tables": {"a": "b"}, "rows": 5}, "train": {"lr": 0.1}}
    for values, overrides in (({}, ["data.tables={}"]), ({"data": {"tables": {}}}, [])):
        assert merge(stored, values, overrides) == {**stored, "data": {"name": "parquet", "tables": {}, "rows": 5}}
    assert merge(stored, {"train": {}}, ["data={}"]) == stored  # of a section they say nothing
    assert merge(stored, {}, ["data.tables.c=d"])["data"]["tables"] == {"a": "b", "c": "d"}
