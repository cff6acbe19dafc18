"""The section `recovery` of the configuration."""

from typing import Any

import pytest
import torch

from shadowsync.config import RecoveryConfig, load, parse
from shadowsync.embedding.table import Rows, Table
from shadowsync.embedding.watching import RowTracking
from shadowsync.errors import ConfigError
from shadowsync.recovery.failures import Gamma
from shadowsync.recovery.priority import EveryRow, MostFrequentlyUsed, Scar, SubSampledUsed
from shadowsync.recovery.settings import RecoverySettings, recovery_settings, row_tracking


def settings(runtime: str = "inprocess", **given: Any) -> RecoverySettings:
    return recovery_settings(RecoveryConfig(**given), runtime)


def test_what_nobody_set_is_recovered_where_something_can_fail() -> None:
    assert settings().goal.mode == "none"
    assert settings(runtime="ray").goal.mode == "auto"
    assert settings(runtime="processes").goal.mode == "none", "what a process held outlives it"
    assert settings(inject="at:1").goal.mode == "auto"
    assert settings(runtime="ray", mode="none").goal.mode == "none"


def test_every_key_reaches_its_part() -> None:
    found = settings(
        mode="partial",
        priority="mfu",
        target_pls=0.05,
        share=0.25,
        min_rows=7,
        interval_s=30.0,
        prior_fail_s=99.0,
        prior_lost_servers=2.5,
        inject="gamma:mean_s=5,seed=3",
    )
    assert (found.goal.mode, found.goal.target_pls, found.goal.interval_s) == ("partial", 0.05, 30)
    assert (found.priors.fail_s, found.priority, found.share, found.min_rows) == (99, "mfu", 0.25, 7)
    assert found.priors.lost_servers == 2.5
    assert found.schedules == (Gamma(mean_s=5.0, seed=3),)


def test_without_priority_a_save_holds_every_row() -> None:
    assert settings(runtime="ray").share == 1
    assert settings(runtime="ray", priority="ssu").share == 0.125


def test_schedules_are_written_on_the_command_line_as_they_are() -> None:
    config = load(None, ["recovery.inject=gamma:mean_s=5,seed=3;at:0.45+0.9,unit=epoch"])
    schedules = recovery_settings(config.recovery, runtime="inprocess").schedules
    assert [part.name for part in schedules] == ["gamma", "at"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"inject": "gama:mean_s=5"}, "recovery.inject=gama is not known, did you mean gamma"),
        ({"mode": "partial", "share": 0.5}, "recovery.share=0.5 has no effect with recovery.priority=all"),
        ({"mode": "full", "priority": "scar"}, "recovery.priority=scar has no effect with recovery.mode=full"),
        ({"mode": "full", "target_pls": 0.2}, "recovery.target_pls=0.2 has no effect with recovery.mode=full"),
        ({"mode": "full", "prior_lost_servers": 2.0}, "recovery.prior_lost_servers=2.0 has no effect with"),
        ({"interval_s": 9.0}, "recovery.interval_s=9.0 has no effect with recovery.mode=none"),
        ({"mode": "none", "prior_fail_s": 9.0}, "recovery.prior_fail_s=9.0 has no effect with recovery.mode=none"),
    ],
)
def test_keys_that_change_nothing_or_make_no_sense(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings(**given)


def test_a_key_at_its_default_is_no_mistake() -> None:
    """So that what a stored configuration has can be taken back."""
    assert settings(mode="full", priority="all", target_pls=0.1).goal.mode == "full"


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "some"},
        {"target_pls": 0},
        {"share": 1.5},
        {"prior_fail_s": float("inf")},
        {"prior_lost_servers": 0.5},
        {"prior_lost_servers": float("nan")},
    ],
)
def test_values_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"recovery.{next(iter(wrong))}"):
        parse({"recovery": wrong})


# --- which shards are tracked ---------------------------------------------------------------------------------------

BIG, SMALL = Table("big", 100, 2, ("big",)), Table("small", 99, 2, ("small",))


def tracking(runtime: str = "ray", **recovery: Any) -> RowTracking | None:
    return row_tracking(recovery_settings(parse({"recovery": recovery}).recovery, runtime), seed=1)


def shard(table: Table, start: int, stop: int) -> Rows:
    return Rows(table, start, {"weight": torch.zeros(stop - start, table.dim)})


@pytest.mark.parametrize(
    ("recovery", "runtime"),
    [({}, "inprocess"), ({}, "processes"), ({"mode": "none"}, "ray"), ({"mode": "full"}, "ray")],
    ids=str,
)
def test_nothing_is_tracked_where_no_single_rows_are_saved(recovery: dict[str, Any], runtime: str) -> None:
    assert tracking(runtime, **recovery) is None


@pytest.mark.parametrize("mode", ["auto", "partial", None])
@pytest.mark.parametrize(("priority", "kind"), [("scar", Scar), ("mfu", MostFrequentlyUsed), ("ssu", SubSampledUsed)])
def test_tables_of_min_rows_are_tracked_however_they_are_cut(mode: str | None, priority: str, kind: type) -> None:
    made = tracking(mode=mode, priority=priority, min_rows=100, share=0.13)
    assert made is not None
    assert isinstance(made.watch(shard(BIG, 90, 100)), kind)
    assert made.watch(shard(SMALL, 0, 99)) is None
    assert (made.count(100), made.count(10), made.count(1)) == (13, 2, 1)


def test_what_is_compared_is_what_checkpoints_give_back() -> None:
    chosen = recovery_settings(parse({"recovery": {"mode": "partial", "priority": "scar"}}).recovery, "ray")
    weights = torch.rand(3, 8)
    for values, same in (("fp32", True), ("int8", False)):
        made = row_tracking(chosen, 1, values)
        assert made is not None
        assert torch.equal(made.restored(weights), weights) == same


def test_without_a_priority_every_table_is_tracked() -> None:
    made = tracking(mode="partial")
    assert made is not None
    assert all(isinstance(made.watch(shard(table, 0, 9)), EveryRow) for table in (BIG, SMALL))
