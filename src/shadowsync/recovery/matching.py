"""Whether a checkpoint is of the job that wants to load it."""

from collections.abc import Collection, Mapping, Sequence

from shadowsync.embedding.table import Table
from shadowsync.errors import CheckpointError


def match_tables(saved: Sequence[Table], wanted: Sequence[Table]) -> None:
    """Compares the tables of a checkpoint with those of the job, whatever their order.

    Raises:
        CheckpointError: names the first difference.
    """
    by_name = {table.name: table for table in saved}
    for table in wanted:
        if table.name not in by_name:
            raise _differs(f"the checkpoint has no table {table.name} (it has {', '.join(by_name) or 'none'})")
        for what, here, there in _fields(by_name[table.name], table):
            if here != there:
                raise _differs(f"table {table.name} has {what} {here} in the checkpoint and {there} in this job")
    surplus = by_name.keys() - {table.name for table in wanted}
    if surplus:
        raise _differs(f"the checkpoint has a table {min(surplus)} that this job has not")


def match_optimizer(saved: Mapping[str, Collection[str]], wanted: Mapping[str, Collection[str]]) -> None:
    """Compares the names of the tensors kept for each table: another optimizer keeps others.

    Args:
        saved: by table, as `LoadedCheckpoint.tensor_names` gives them.
        wanted: by table, as the job's storage gives them.

    Raises:
        CheckpointError: names the first table whose optimizer state is another one's.
    """
    for table, names in wanted.items():
        kept = saved.get(table, ())
        if set(names) != set(kept):
            has, needs = (", ".join(sorted(set(state) - {"weight"})) or "nothing" for state in (kept, names))
            raise CheckpointError(
                f"the optimizer of table {table} kept {has} in the checkpoint and needs {needs} in this job: set "
                "embedding.optimizer to the one it was trained with"
            )


def _fields(saved: Table, wanted: Table) -> tuple[tuple[str, object, object], ...]:
    return (
        ("rows", saved.rows, wanted.rows),
        ("dim", saved.dim, wanted.dim),
        ("pooling", _pooling(saved), _pooling(wanted)),
        ("features", ", ".join(sorted(saved.features)), ", ".join(sorted(wanted.features))),
    )


def _pooling(table: Table) -> str:
    """One word, or one for each feature."""
    kinds = {*table.poolings.values()}
    if len(kinds) == 1:
        return kinds.pop()
    return ", ".join(f"{pooling} of {feature}" for feature, pooling in sorted(table.poolings.items()))


def _differs(difference: str) -> CheckpointError:
    return CheckpointError(f"{difference}: configure the tables that the checkpoint was trained with")
