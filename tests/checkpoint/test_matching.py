"""A checkpoint of another model is refused with its first difference."""

import dataclasses

import pytest
from checkpoint_helpers import ITEMS, LONE, USERS

from shadowsync.checkpoint.job_state import match_optimizer, match_tables
from shadowsync.errors import CheckpointError

TABLES = (USERS, ITEMS, LONE)


def test_the_same_tables_match_in_any_order() -> None:
    match_tables(TABLES, TABLES)
    match_tables(TABLES, TABLES[::-1])
    match_tables((dataclasses.replace(ITEMS, features=ITEMS.features[::-1]),), (ITEMS,))
    match_tables((), ())


DIFFERENCES = {
    "rows": (dataclasses.replace(USERS, rows=24), "table user has rows 23 in the checkpoint and 24 in this job"),
    "dim": (dataclasses.replace(USERS, dim=5), "table user has dim 4 in the checkpoint and 5 in this job"),
    "pooling": (dataclasses.replace(USERS, pooling="mean"), "has pooling sum in the checkpoint and mean in this job"),
    "features": (dataclasses.replace(USERS, features=("x", "y")), "has features user_id in the checkpoint and x, y in"),
    "name": (
        dataclasses.replace(USERS, name="users"),
        "the checkpoint has no table users .it has user, item / wide, lone",
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_difference_is_named(case: str) -> None:
    table, message = DIFFERENCES[case]
    with pytest.raises(CheckpointError, match=message):
        match_tables(TABLES, (table, ITEMS, LONE))


def test_a_table_too_many_is_named() -> None:
    with pytest.raises(CheckpointError, match="the checkpoint has a table lone that this job has not"):
        match_tables(TABLES, (USERS, ITEMS))


def test_the_state_of_another_optimizer_is_named() -> None:
    adagrad, adam = ("weight", "momentum"), ("weight", "exp_avg", "exp_avg_sq", "step")
    match_optimizer({"user": adam}, {"user": adam[::-1]})
    with pytest.raises(
        CheckpointError, match="table user kept momentum in the checkpoint and needs exp_avg, exp_avg_sq"
    ):
        match_optimizer({"user": adagrad}, {"user": adam})
    with pytest.raises(CheckpointError, match="table user kept nothing in the checkpoint and needs momentum"):
        match_optimizer({"user": ("weight",)}, {"user": adagrad})
