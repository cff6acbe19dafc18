"""Tables made from a schema, and tables that do not fit one."""

import pytest
from embedding_cases import table

from shadowsync.data.source import Feature, Schema
from shadowsync.embedding.catalog import check_rows, check_tables, default_tables
from shadowsync.embedding.table import Table
from shadowsync.errors import ConfigError


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


def test_features_of_one_table_must_pool_alike():
    found = schema(Feature("a", 5, table="t"), Feature("b", 5, table="t", pooling="mean"))
    with pytest.raises(ConfigError, match="table t: feature a pools by sum and b by mean"):
        default_tables(found, 4)


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
