"""What a job keeps in a checkpoint beside tensors and the reader's position."""

from typing import Any

import msgspec

from shadowsync.aggregation.counts import AggregationState
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.data.fingerprint import Mark
from shadowsync.data.source import Schema
from shadowsync.errors import CheckpointError


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """Counts that go on after a resume, and what a model needs to be read without its job.

    Attributes:
        recorder: of `metrics.recorder.Recorder`.
        syncs: synchronisations, all trainers.
        wire: as `metrics.wire.WireTotals.by_name`.
        schema: of the source that was trained on.
        tables: names in the job's order, which is the order of a model's columns.
        trainers: how many replicas there are.
        layout: shape of each dense parameter, in their order.
        own_model: the dense part is a module of the user's own.
        pls: portion of samples that failures have lost so far.
        aggregation: what gradient methods did.
        data: by what the training rows are known again; empty where that cannot be said, or an older version wrote it.
    """

    recorder: dict[str, Any]
    syncs: int
    wire: dict[str, dict[str, int]]
    schema: Schema
    tables: list[str]
    trainers: int
    layout: dict[str, list[int]]
    own_model: bool
    pls: float = 0.0
    aggregation: AggregationState = AggregationState()
    data: tuple[Mark, ...] = ()

    def builtins(self) -> dict[str, Any]:
        """As plain JSON values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def job_state(saved: LoadedCheckpoint) -> JobState:
    """The state in a checkpoint.

    Raises:
        CheckpointError: it is not what a job writes.
    """
    try:
        state = msgspec.convert(saved.extra, JobState)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{saved.name}: the manifest is not one that this version writes: {error}") from error
    if sorted(state.tables) != sorted(table.name for table in saved.tables) or state.trainers < 1:
        raise CheckpointError(f"{saved.name}: the manifest contradicts itself about its tables or trainers")
    return state
