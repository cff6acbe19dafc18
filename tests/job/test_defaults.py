"""What is left open in the configuration is chosen by where the job runs."""

from typing import Any

import pytest

from shadowsync.assembly import prefetch
from shadowsync.choices import choose_all, server_count, warmup_samples
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


@pytest.mark.parametrize(
    ("given", "total", "samples"),
    [
        ({}, 2_000_000, 50_000),
        ({}, 800_000, 40_000),
        ({}, 150_000, 20 * 512 * 2),
        ({}, 50_000, 12_500),
        ({"aggregation": {"method": "gba", "global_batch": 2048}}, 200_000, 20 * 2048),
        ({"train": {"batch_size": 8, "trainers": 3, "workers": 2}}, 10_000, 20 * 48),
        ({}, 3, 0),
    ],
)
def test_a_warm_up_has_some_steps_and_leaves_most_of_a_short_job(
    given: dict[str, Any], total: int, samples: int
) -> None:
    config = parse({**given, "train": {"batch_size": 512, "trainers": 2, "workers": 1} | given.get("train", {})})
    assert warmup_samples(config, total) == samples


def test_an_empty_map_clears_the_one_below_it() -> None:
    stored = {"data": {"name": "parquet", "tables": {"a": "b"}, "rows": 5}, "train": {"lr": 0.1}}
    for values, overrides in (({}, ["data.tables={}"]), ({"data": {"tables": {}}}, [])):
        assert merge(stored, values, overrides) == {**stored, "data": {"name": "parquet", "tables": {}, "rows": 5}}
    assert merge(stored, {"train": {}}, ["data={}"]) == stored  # of a section they say nothing
    assert merge(stored, {}, ["data.tables.c=d"])["data"]["tables"] == {"a": "b", "c": "d"}
