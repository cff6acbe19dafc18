"""Which shards are tracked is decided by the section `recovery`."""

from typing import Any

import pytest
import torch

from shadowsync.config import parse
from shadowsync.embedding.table import Rows, Table
from shadowsync.recovery.priority_all import ChangedRows
from shadowsync.recovery.priority_mfu import Counters
from shadowsync.recovery.priority_scar import Changes
from shadowsync.recovery.priority_ssu import Sample
from shadowsync.recovery.settings import recovery_settings
from shadowsync.recovery.tracking import RowTracking, row_tracking

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
@pytest.mark.parametrize(("priority", "kind"), [("scar", Changes), ("mfu", Counters), ("ssu", Sample)])
def test_tables_of_min_rows_are_tracked_however_they_are_cut(mode: str | None, priority: str, kind: type) -> None:
    made = tracking(mode=mode, priority=priority, min_rows=100, share=0.13)
    assert made is not None
    assert isinstance(made.watch(shard(BIG, 90, 100)), kind)
    assert made.watch(shard(SMALL, 0, 99)) is None
    assert (made.count(100), made.count(10), made.count(1)) == (13, 2, 1)


def test_without_a_priority_every_table_is_tracked() -> None:
    made = tracking(mode="partial")
    assert made is not None
    assert all(isinstance(made.watch(shard(table, 0, 9)), ChangedRows) for table in (BIG, SMALL))
