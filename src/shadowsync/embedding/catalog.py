"""Which tables a job has, and whether they fit the features of its source."""

from collections.abc import Mapping, Sequence
from typing import get_args

from shadowsync.data.source import Feature, Pooling, Schema
from shadowsync.embedding.table import Table, pool
from shadowsync.errors import ConfigError
from shadowsync.models.model import SequenceInput
from shadowsync.registry import nearest


def default_tables(schema: Schema, dim: int) -> tuple[Table, ...]:
    """One table for each feature of the source, or for each group of features that name the same table."""
    groups: dict[str, list[Feature]] = {}
    for feature in schema.features:
        groups.setdefault(feature.table or feature.name, []).append(feature)
    return tuple(_shared(name, features, dim) for name, features in groups.items())


def _shared(name: str, features: Sequence[Feature], dim: int) -> Table:
    table = Table(name, max(feature.rows for feature in features), dim, tuple(feature.name for feature in features))
    return pool(table, {feature.name: feature.pooling for feature in features})


def with_pooling(tables: Sequence[Table], poolings: Mapping[str, Pooling], key: str) -> tuple[Table, ...]:
    """The tables with other poolings of some features.

    Args:
        tables: all tables.
        poolings: by feature.
        key: of the configuration, for messages.

    Raises:
        ConfigError: there is no such feature.
    """
    known = [feature for table in tables for feature in table.features]
    for feature in poolings:
        if feature not in known:
            raise ConfigError(
                f"{key}: there is no feature {feature}{nearest(feature, known)}; there are {', '.join(known)}"
            )
    return tuple(pool(t, {f: p for f, p in poolings.items() if f in t.features}) for t in tables)


def widths(tables: Sequence[Table]) -> dict[str, int]:
    """Width of each pooled feature's vector, in the order of the columns of pooled vectors."""
    return {feature: table.dim for table in tables for feature in table.features if feature not in table.sequences}


def histories(tables: Sequence[Table], schema: Schema) -> dict[str, tuple[str, ...]]:
    """The features with several ids per sample that share a table with others of one id, each with those others."""
    partners = _partners(tables, schema)
    several = {feature.name for feature in schema.features if feature.multi_hot}
    pairs = ((feature, partners[table.name]) for table in tables for feature in table.features)
    return {feature: others for feature, others in pairs if feature in several and others}


def sequence_inputs(tables: Sequence[Table], schema: Schema) -> dict[str, SequenceInput]:
    """What a model has to know of the features that are not pooled, in the order of the tables."""
    partners = _partners(tables, schema)
    return {f: SequenceInput(table.dim, partners[table.name]) for table in tables for f in table.sequences}


def _partners(tables: Sequence[Table], schema: Schema) -> dict[str, tuple[str, ...]]:
    """Of each table the pooled features with one id per sample."""
    single = {feature.name for feature in schema.features if not feature.multi_hot}
    return {t.name: tuple(f for f in t.features if f in single and f not in t.sequences) for t in tables}


def check_tables(tables: Sequence[Table], features: Sequence[str]) -> None:
    """Checks that every feature of the source has exactly one table, and every table only such features.

    Raises:
        ConfigError: naming the first that does not fit, and the nearest that would.
    """
    _check_distinct([table.name for table in tables], "embedding.tables: two tables are called")
    for table in tables:
        _check_pooling(table)
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


def _check_pooling(table: Table) -> None:
    given = table.pooling if isinstance(table.pooling, tuple) else (table.pooling,)
    for pooling in given:
        if pooling not in get_args(Pooling):
            raise ConfigError(
                f"table {table.name}: pooling {pooling!r} is not known{nearest(str(pooling), get_args(Pooling))}; "
                f"allowed: {', '.join(get_args(Pooling))}"
            )
    if isinstance(table.pooling, tuple) and len(given) != len(table.features):
        raise ConfigError(
            f"table {table.name} has {len(given)} poolings for {len(table.features)} features: give one for all, or "
            f"one for each of {', '.join(table.features)}"
        )


def _check_distinct(names: Sequence[str], what: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"{what} {name}")
