"""Which tables a job has, and whether they fit the features of its source."""

from collections.abc import Mapping, Sequence

from shadowsync.data.source import Feature, Schema
from shadowsync.embedding.table import Table
from shadowsync.errors import ConfigError
from shadowsync.registry import nearest


def default_tables(schema: Schema, dim: int) -> tuple[Table, ...]:
    """One table for each feature of the source, or for each group of features that name the same table.

    Raises:
        ConfigError: features share a table and want different pooling.
    """
    groups: dict[str, list[Feature]] = {}
    for feature in schema.features:
        groups.setdefault(feature.table or feature.name, []).append(feature)
    return tuple(_shared(name, features, dim) for name, features in groups.items())


def _shared(name: str, features: Sequence[Feature], dim: int) -> Table:
    other = [feature for feature in features if feature.pooling != features[0].pooling]
    if other:
        raise ConfigError(
            f"table {name}: feature {features[0].name} pools by {features[0].pooling} and {other[0].name} by "
            f"{other[0].pooling}; give them the same data.pooling, or tables of their own"
        )
    rows = max(feature.rows for feature in features)
    return Table(name, rows, dim, tuple(feature.name for feature in features), features[0].pooling)


def widths(tables: Sequence[Table]) -> dict[str, int]:
    """Width of each feature's vector, in the order of the columns of pooled vectors."""
    return {feature: table.dim for table in tables for feature in table.features}


def check_tables(tables: Sequence[Table], features: Sequence[str]) -> None:
    """Checks that every feature of the source has exactly one table, and every table only such features.

    Raises:
        ConfigError: naming the first that does not fit, and the nearest that would.
    """
    _check_distinct([table.name for table in tables], "embedding.tables: two tables are called")
    looked_up = [feature for table in tables for feature in table.features]
    for table in tables:
        for feature in table.features:
            if feature not in features:
                raise ConfigError(
                    f"table {table.name}: the source has no feature {feature}{nearest(feature, features)}; it has "
                    f"{', '.join(features)}"
                )
    _check_distinct(looked_up, "embedding.tables: two tables look up feature")
    for feature in features:
        if feature not in looked_up:
            raise ConfigError(
                f"feature {feature} of the source has no table{nearest(feature, looked_up)}; add it to the features of "
                "one of embedding.tables"
            )


def check_rows(tables: Sequence[Table], schema: Schema) -> None:
    """Raises `ConfigError` for a table with fewer rows than the source has ids for one of its features."""
    rows: Mapping[str, int] = {feature.name: feature.rows for feature in schema.features}
    for table in tables:
        for feature in table.features:
            if table.rows < rows[feature]:
                raise ConfigError(
                    f"table {table.name} has rows={table.rows} and the ids of feature {feature} go up to "
                    f"{rows[feature] - 1}: set rows={rows[feature]}"
                )


def _check_distinct(names: Sequence[str], what: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"{what} {name}")
