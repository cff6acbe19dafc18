"""Tables made from a schema, and tables that do not fit one."""

import re

import pytest
from embedding_cases import table

from shadowsync.data.source import Feature, Schema
from shadowsync.embedding.table import (
    Table,
    check_rows,
    check_tables,
    default_tables,
    histories,
    sequence_inputs,
    widths,
    with_pooling,
)
from shadowsync.errors import ConfigError
from shadowsync.models.model import SequenceInput


def schema(*features):
    return Schema((), features)


def test_each_feature_gets_a_table_unless_it_names_one():
    found = schema(
        Feature("user", 10),
        Feature("viewed", 30, table="item", pooling="mean"),
        Feature("tags", 5, pooling="mean"),
        Feature("bought", 20, table="item", pooling="mean"),
    )
    assert default_tables(found, 16) == (
        Table("user", 10, 16, ("user",)),
        Table("item", 30, 16, ("viewed", "bought"), "mean"),
        Table("tags", 5, 16, ("tags",), "mean"),
    )


def test_features_of_one_table_may_pool_in_ways_of_their_own():
    found = schema(
        Feature("a", 5, table="t"),
        Feature("b", 5, table="t", pooling="mean"),
        Feature("c", 5, table="t", pooling="none"),
    )
    (only,) = default_tables(found, 4)
    assert only == Table("t", 5, 4, ("a", "b", "c"), ("sum", "mean", "none"))
    assert only.poolings == {"a": "sum", "b": "mean", "c": "none"}
    assert only.sequences == ("c",)
    assert widths([only]) == {"a": 4, "b": 4}


def test_poolings_are_changed_by_feature():
    tables = [Table("t", 5, 4, ("a", "b")), Table("u", 5, 4, ("c",), "mean")]
    changed = with_pooling(tables, {"b": "none", "c": "none"}, "embedding.pooling")
    assert [one.pooling for one in changed] == [("sum", "none"), "none"]
    assert with_pooling(changed, {"b": "sum"}, "embedding.pooling")[0] == tables[0]
    with pytest.raises(
        ConfigError, match=r"embedding.pooling: there is no feature aa, did you mean a\?; there are a, b"
    ):
        with_pooling(tables, {"aa": "none"}, "embedding.pooling")


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ("maen", "table t: pooling 'maen' is not known, did you mean mean?; allowed: sum, mean, none"),
        (("sum", "max"), "table t: pooling 'max' is not known; allowed: sum, mean, none"),
        (("sum",), "table t has 1 poolings for 2 features: give one for all, or one for each of color, size"),
    ],
)
def test_poolings_that_do_not_fit_are_named(pooling, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        check_tables([Table("t", 5, 4, ("color", "size"), pooling)], ["color", "size"])


def test_what_a_model_is_told_of_sequences():
    found = schema(
        Feature("item", 9, table="item"),
        Feature("seen", 9, table="item", multi_hot=True, pooling="none"),
        Feature("tags", 5, multi_hot=True, pooling="none"),
        Feature("words", 5, table="word", multi_hot=True),
        Feature("word", 5, table="word"),
    )
    tables = default_tables(found, 4)
    assert sequence_inputs(tables, found) == {"seen": SequenceInput(4, ("item",)), "tags": SequenceInput(4)}
    assert histories(tables, found) == {"seen": ("item",), "words": ("word",)}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([table("t", features=("colour", "size"))], "table t: the source has no feature colour, did you mean color"),
        ([table("t", features=("color",))], "feature size of the source has no table; add it"),
        ([table("t", features=("color",)), table("t", features=("size",))], "two tables are called t"),
        ([table("t", features=("color", "size")), table("u", features=("size",))], "two tables look up feature size"),
        ([table("t", features=("color", "size", "size"))], "two tables look up feature size"),
    ],
)
def test_what_does_not_fit_is_named(tables, message):
    with pytest.raises(ConfigError, match=message):
        check_tables(tables, ["color", "size"])


def test_a_table_needs_a_row_for_every_id():
    found = schema(Feature("user", 10), Feature("item", 20))
    check_rows([table("t", 20, features=("item", "user"))], found)
    with pytest.raises(ConfigError, match="table t has rows=19 and the ids of feature item go up to 19: set rows=20"):
        check_rows([table("t", 19, features=("user", "item"))], found)
