"""Whether a checkpoint is of the job that wants to load it."""

from collections.abc import Collection, Mapping, Sequence

from shadowsync.data.fingerprint import Mark, summary
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


def match_data(name: str, saved: Sequence[Mark], given: Sequence[Mark], accepted: str | None) -> None:
    """Compares the data that a checkpoint was trained on with that of the job.

    Args:
        name: of the checkpoint.
        saved: what it was trained on; empty where that is not known.
        given: what there is now.
        accepted: `data.accept`, the summary of data with which to go on all the same.

    Raises:
        CheckpointError: says what differs, and how to go on.
    """
    if not saved or not given or tuple(saved) == tuple(given) or accepted == (word := summary(given)):
        return
    raise CheckpointError(
        f"{name} was trained on other data: {_data_difference(saved, given)}; give it the same data, or set "
        f"data.accept={word} to go on with this data from the same row"
    )


def _data_difference(saved: Sequence[Mark], given: Sequence[Mark]) -> str:
    had, has = ([mark.name for mark in marks] for marks in (saved, given))
    if had != has and sorted(had) == sorted(has):
        return f"its files came in another order, from {had[0]} to {had[-1]}"
    if len(had) != len(has):
        return f"it had {len(had)} file(s), {had[0]} to {had[-1]}, and this is {len(has)}, {has[0]} to {has[-1]}"
    there, here = next((there, here) for there, here in zip(saved, given, strict=True) if there != here)
    if there.name != here.name:
        return f"it was {there.name}, this is {here.name}"
    if there.size != here.size:
        return f"{here.name} was of size {there.size:,} and is of size {here.size:,}"
    return f"{here.name} is of the same size and has other contents"


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
