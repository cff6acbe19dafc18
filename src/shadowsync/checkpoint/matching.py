"""Whether a checkpoint is of the job that wants to load it."""

from collections.abc import Collection, Mapping, Sequence

from shadowsync.data.source import Mark, summary
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
            raise _other(f"the checkpoint has no table {table.name} (it has {', '.join(by_name) or 'none'})")
        there = _described(by_name[table.name])
        for what, here in _described(table).items():
            if here != there[what]:
                raise _other(f"table {table.name} has {what} {there[what]} in the checkpoint and {here} in this job")
    if surplus := by_name.keys() - {table.name for table in wanted}:
        raise _other(f"the checkpoint has a table {min(surplus)} that this job has not")


def _other(difference: str) -> CheckpointError:
    return CheckpointError(f"{difference}: configure the tables that the checkpoint was trained with")


def _described(table: Table) -> dict[str, object]:
    poolings = sorted(table.poolings.items())
    kinds = {pooling for _, pooling in poolings}
    pooling = kinds.pop() if len(kinds) == 1 else ", ".join(f"{kind} of {feature}" for feature, kind in poolings)
    return {"rows": table.rows, "dim": table.dim, "pooling": pooling, "features": ", ".join(sorted(table.features))}


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
        saved: what it was trained on; empty where that is not known.
        given: what there is now.
        accepted: `data.accept`, the summary of data with which to go on all the same.

    Raises:
        CheckpointError: says what differs, and how to go on.
    """
    if not saved or not given or tuple(saved) == tuple(given) or accepted == (word := summary(given)):
        return
    had, has = ([mark.name for mark in marks] for marks in (saved, given))
    if had != has and sorted(had) == sorted(has):
        difference = f"its files came in another order, from {had[0]} to {had[-1]}"
    elif len(had) != len(has):
        difference = f"it had {len(had)} file(s), {had[0]} to {had[-1]}, and this is {len(has)}, {has[0]} to {has[-1]}"
    else:
        there, here = next(pair for pair in zip(saved, given, strict=True) if pair[0] != pair[1])
        if there.name != here.name:
            difference = f"it was {there.name}, this is {here.name}"
        elif there.size != here.size:
            difference = f"{here.name} was of size {there.size:,} and is of size {here.size:,}"
        else:
            difference = f"{here.name} is of the same size and has other contents"
    raise CheckpointError(
        f"{name} was trained on other data: {difference}; give it the same data, or set data.accept={word} to go on "
        "with this data from the same row"
    )
