"""Takes a session's moving parts out as a snapshot and puts a checkpoint back into a session."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from shadowsync.aggregation.counts import AggregationState
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.snapshot import Snapshot
from shadowsync.cluster.session import Session
from shadowsync.data.source import Schema
from shadowsync.dense_state import JobState, job_state, layout, restored_dense
from shadowsync.embedding.table import Rows
from shadowsync.errors import CheckpointError, NonFiniteLoss


def take_snapshot(
    session: Session, given: Mapping[str, Any], pls: float = 0.0, rows: Sequence[Rows] | None = None
) -> Snapshot:
    """A copy of everything that moves; everybody must stand still.

    Replicas of trainers that died are left out and the others numbered through, so that nobody goes on from them.

    Args:
        session: whose parts to copy.
        given: the configuration as the user gave it.
        pls: portion of lost samples so far.
        rows: in place of copies of all rows.

    Raises:
        NonFiniteLoss: a dense parameter is NaN or infinite, which no checkpoint should hold.
    """
    image = session.dense_image()
    final = session.final_weights(image).clone()
    if not torch.isfinite(final).all():
        raise NonFiniteLoss(
            f"a dense parameter is no longer finite after {session.reader.trained} samples: lower train.lr or "
            "embedding.lr, or set train.clip_norm=1"
        )
    dense = {"final": final} | ({} if image.center is None else {"center": image.center})
    dense |= {f"feedback.{name}": tensor for name, tensor in image.feedback.items()}
    for number, trainer in enumerate(image.trainers):
        dense |= {f"replica.{number}.{name}": tensor for name, tensor in trainer.replica.items()}
        dense |= {f"sync.{number}.{name}": tensor for name, tensor in trainer.method.items()}
    state = JobState(
        recorder=session.recorder.state(),
        syncs=session.sync_count,
        wire=session.wire_totals(),
        schema=session.schema,
        tables=[table.name for table in session.tables],
        trainers=len(image.trainers),
        layout=layout(session.template),
        own_model=session.choices.model is None,
        pls=pls,
        aggregation=session.aggregation or AggregationState(),
        data=session.train_source.marks(),
    )
    return Snapshot(
        config=dict(given),
        samples=session.reader.trained,
        tables=session.rows() if rows is None else tuple(rows),
        dense=dense,
        position=session.reader.state(),
        random={"torch": torch.get_rng_state()},
        extra=msgspec.to_builtins(state),
    )


def put_back(session: Session, saved: LoadedCheckpoint) -> None:
    """Fills rows, the dense part of all trainers, method states and counts; the reader was made with the position.

    Raises:
        CheckpointError: it is of another model, other tables, another optimizer or other data.
    """
    state = job_state(saved)
    if (difference := column_difference(state.schema, session.schema)) is not None:
        raise CheckpointError(f"{saved.name} was trained on {difference}: give the same columns in the same order")
    session.load_rows(saved)
    session.load_dense(restored_dense(saved, session.choices.method, session.template, session.dense_copies))
    session.go_on(state.syncs, state.wire, state.aggregation)
    try:
        torch.set_rng_state(saved.random["torch"])
        session.recorder.restore(state.recorder)
    except (LookupError, TypeError, ValueError, RuntimeError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{saved.name}: its counts or random state are not those of a job: {error}") from error


def column_difference(there: Schema, here: Schema) -> str | None:
    """What differs in names or order of the columns, as `the … columns X, this data has Y`; None if nothing does."""
    trained, given = (
        {"dense": schema.dense, "categorical": tuple(feature.name for feature in schema.features)}
        for schema in (there, here)
    )
    for kind, columns in trained.items():
        if columns != given[kind]:
            return (
                f"the {kind} columns {', '.join(columns) or 'none'}, this data has {', '.join(given[kind]) or 'none'}"
            )
    return None
