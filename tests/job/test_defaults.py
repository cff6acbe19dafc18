"""What is left open in the configuration is chosen by where the job runs."""

from typing import Any

import pytest

from shadowsync.assembly import prefetch
from shadowsync.choices import choose_all, server_count, warmup_samples
from shadowsync.config import merge, parse
from shadowsync.job import too_short


@pytest.mark.parametrize(
    ("given", "servers", "pulls"),
    [
        ({}, 1, 0),
        ({"cluster": {"runtime": "ray"}}, 1, 0),
        ({"cluster": {"runtime": "processes"}}, 1, 0),
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


ONE_TRAINER = {"batch_size": 10, "trainers": 1, "workers": 4}


@pytest.mark.parametrize(
    ("given", "total", "said"),
    [
        ({"train": ONE_TRAINER}, 191, None),
        ({"train": ONE_TRAINER}, 190, "only 19 step(s) of each replica, 190 samples in all by 10 x 1 trainer(s)"),
        ({"train": {"trainers": 1000}}, 4000, "only 1 step(s) of each replica"),
        ({"train": {"batch_size": 10**12}}, 4000, "only 1 step(s) of each replica"),
        ({"aggregation": {"method": "gba", "global_batch": 102_400}}, 4000, "only 1 global step(s), 4,000 samples"),
        ({"train": ONE_TRAINER, "aggregation": {"method": "gba", "global_batch": 10}}, 200, None),
        ({"train": ONE_TRAINER | {"warmup_samples": 999}}, 1000, None),
        ({"train": ONE_TRAINER | {"warmup_samples": 1000}}, 1000, "=1000 is not less than the 1,000 samples"),
    ],
)
def test_a_job_too_short_to_learn_anything_is_told_of(given: dict[str, Any], total: int, said: str | None) -> None:
    found = too_short(parse(given), total)
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_an_empty_map_clears_the_one_below_it() -> None:
    stored = {"data": {"name": "parquet", "tables": {"a": "b"}, "rows": 5}, "train": {"lr": 0.1}}
    for values, overrides in (({}, ["data.tables={}"]), ({"data": {"tables": {}}}, [])):
        assert merge(stored, values, overrides) == {**stored, "data": {"name": "parquet", "tables": {}, "rows": 5}}
    assert merge(stored, {"train": {}}, ["data={}"]) == stored  # of a section they say nothing
    assert merge(stored, {}, ["data.tables.c=d"])["data"]["tables"] == {"a": "b", "c": "d"}
