"""What a job keeps in a checkpoint beside its rows, and whether a checkpoint is of the job that wants to load it.

That is counts, and the dense part, which any number of trainers takes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from shadowsync.aggregation.counts import AggregationState
from shadowsync.checkpoint.format import plain_name
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.compression.wire import WireTotals
from shadowsync.data.fitting import Learnt, LearntState
from shadowsync.data.source import Mark, Schema, summary
from shadowsync.embedding.table import Table
from shadowsync.errors import CheckpointError, ConfigError, DataError
from shadowsync.sync.method import State, SyncMethod
from shadowsync.training.course import Course
from shadowsync.training.replica import Replica

_BUFFER, _WAITING = "buffer.", "waiting."


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """Counts that go on after a resume, and what a model needs to be read without its job.

    Attributes:
        recorder: of `metrics.recorder.Recorder`.
        tables: names in the job's order, which is the order of a model's columns.
        layout: shape of each dense parameter, in their order.
        data: by what the training rows are known again; empty where that cannot be said, or an older version wrote it.
        columns: what was learnt of them; None where columns have no names, or an older version wrote it.
        own_losses: labels that were learnt by functions of the user's own, which no configuration names.
    """

    recorder: dict[str, Any]
    syncs: int
    wire: WireTotals
    schema: Schema
    tables: list[str]
    trainers: int
    layout: dict[str, list[int]]
    own_model: bool
    pls: float = 0.0
    aggregation: AggregationState = AggregationState()
    data: tuple[Mark, ...] = ()
    course: Course = Course()
    columns: LearntState | None = None
    own_losses: list[str] = []


def job_state(saved: LoadedCheckpoint) -> JobState:
    """The state in a checkpoint; `CheckpointError` if it is not what a job writes."""
    try:
        state = msgspec.convert(saved.extra, JobState)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{saved.name}: the manifest is not one that this version writes: {error}") from error
    if sorted(state.tables) != sorted(table.name for table in saved.tables) or state.trainers < 1:
        raise CheckpointError(f"{saved.name}: the manifest contradicts itself about its tables or trainers")
    return state


def course_of(saved: LoadedCheckpoint) -> Course:
    """The course of the training up to a checkpoint, with the name of the best one, which may be itself."""
    course = job_state(saved).course
    best = course.best_of(saved.name, saved.samples)
    return msgspec.structs.replace(course, checkpoint="" if best is None else plain_name(best))


def learnt_of(saved: LoadedCheckpoint) -> Learnt | None:
    """What the model of a checkpoint has learnt of its columns, None where it has learnt nothing; `CheckpointError` if
    it is not what a job writes."""
    job = job_state(saved)
    if job.columns is None:
        return None
    try:
        learnt = Learnt.of(job.columns, saved.dense)
        learnt.check(job.schema)
        return learnt
    except (ValueError, ConfigError) as error:
        raise CheckpointError(f"{saved.name}: what it says of its columns is not what a job writes: {error}") from error


@dataclass(frozen=True)
class TrainerImage:
    """One trainer's dense part: its replica as `dense_tensors` names it, and what the replica method keeps."""

    replica: Mapping[str, Tensor]
    method: State

    @classmethod
    def of(cls, replica: Replica, state: State) -> "TrainerImage":
        """A copy."""
        return cls({n: t.clone() for n, t in dense_tensors(replica).items()}, {n: t.clone() for n, t in state.items()})

    def in_main_memory(self) -> "TrainerImage":
        """The same, as it can cross to another role."""
        replica, method = (
            {name: tensor.detach().cpu() for name, tensor in tensors.items()} for tensors in (self.replica, self.method)
        )
        return TrainerImage(replica, method)

    def put_into(self, replica: Replica) -> None:
        """Overwrites what the replica holds, in place."""
        for name, tensor in dense_tensors(replica).items():
            tensor.copy_(self.replica[name].view_as(tensor))


@dataclass(frozen=True)
class DenseImage:
    """The dense part of a job, with the central copy `[P]`, None where the method keeps none.

    `feedback` is what workers of a gradient method have not sent of their gradients, by `trainer.worker.name`.
    """

    trainers: tuple[TrainerImage, ...]
    center: Tensor | None
    feedback: Mapping[str, Tensor] = field(default_factory=dict)

    def feedback_of(self, *of: int) -> dict[str, Tensor]:
        """That of a trainer, or of a trainer's worker."""
        return below(self.feedback, ".".join(map(str, of)))


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin with the prefix and a dot, without it."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def layout(replica: Replica) -> dict[str, list[int]]:
    """The parameters with their shapes, in their order."""
    return {slot.name: list(slot.shape) for slot in replica.slots}


def dense_tensors(replica: Replica) -> dict[str, Tensor]:
    """What a replica holds, live: its parameters as `weight`, the optimizer's state, the module's buffers by name, and
    gradients that wait for a step."""
    waiting = {} if replica.waiting is None else replica.waiting.tensors
    found = {"weight": replica.flat} | replica.state | buffers(replica)
    return found | {_WAITING + name: tensor for name, tensor in waiting.items()}


def buffers(replica: Replica) -> dict[str, Tensor]:
    """Those of a replica's module that it saves, live: constants that it can make again are not among them."""
    kept = replica.module.state_dict().keys()
    return {_BUFFER + name: buffer for name, buffer in replica.module.named_buffers() if name in kept}


def without_waiting(image: TrainerImage) -> TrainerImage:
    """The same where no gradient waits for a step."""
    tensors = image.replica.items()
    return TrainerImage({n: torch.zeros_like(t) if _is_waiting(n) else t for n, t in tensors}, image.method)


def _is_waiting(name: str) -> bool:
    return name.startswith(_WAITING)


def is_buffer(name: str) -> bool:
    """Whether `dense_tensors` gives a buffer of the module that name."""
    return name.startswith(_BUFFER)


def check_image(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """`DataError` if names, types or sizes of an image's tensors are not those of what it is to be put into."""

    def described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, int]]:
        return {name: (tensor.dtype, tensor.numel()) for name, tensor in tensors.items()}

    if described(given) != described(own):
        names = sorted({*given, *own})
        wrong = next((n for n in names if described(given).get(n) != described(own).get(n)), "nothing")
        raise DataError(f"an image with another {wrong} does not fit this role")


def _later(replica: Replica) -> set[str]:
    """Those of `buffers` that modules did not save in earlier versions, so that a checkpoint may lack them
    (`later_buffers`)."""
    named = replica.module.named_modules(prefix=_BUFFER.rstrip("."))
    later = {f"{prefix}.{name}" for prefix, module in named for name in getattr(module, "later_buffers", ())}
    return later & buffers(replica).keys()


def check_layout(saved: LoadedCheckpoint, replica: Replica) -> None:
    """Raises `CheckpointError` naming the first parameter or buffer that differs between the checkpoint and this model;
    buffers may have another shape."""
    there, here = job_state(saved).layout, layout(replica)
    for name in {**there, **here}:
        if there.get(name) != here.get(name):
            raise CheckpointError(
                f"{saved.name}: parameter {name} is {there.get(name, 'absent')} in the checkpoint and "
                f"{here.get(name, 'absent')} in this model: configure the model that the checkpoint was trained with"
            )
    had, has = {name for name in below(saved.dense, "replica.0") if is_buffer(name)}, buffers(replica).keys()
    for name in sorted((had ^ has) - _later(replica)):
        without = "this model" if name in had else "the checkpoint"
        raise CheckpointError(
            f"{saved.name}: {without} has no buffer {name.removeprefix(_BUFFER)}: configure the model that the "
            "checkpoint was trained with"
        )


def restored_dense(saved: LoadedCheckpoint, method: SyncMethod, template: Replica, trainers: int) -> DenseImage:
    """The dense part of a checkpoint for so many trainers.

    With as many trainers as were saved each goes on with its own replica. With another number, all of them start from
    one point: the central copy if there was one, else the mean replica, with the mean of the optimizers' states.
    What workers had not sent of their gradients is that of the worker of the same number; where there is none, it is
    lost. Of another replica method than before each state is that at the start. Gradients that wait for a step are
    lost where this job has each make one, and where that one had, none waits. A buffer that its module did not save
    yet is the template's.

    `method` and `template`, a replica that is left as it is, are of the job that goes on. `CheckpointError` if the
    checkpoint is of another model or dense optimizer.
    """
    check_layout(saved, template)
    needed, count, later = dense_tensors(template), job_state(saved).trainers, _later(template)
    for rank in range(count):
        there = {name for name in below(saved.dense, f"replica.{rank}") if not _is_waiting(name)}
        if there | later != {name for name in needed if not _is_waiting(name)}:
            raise CheckpointError(
                f"{saved.name} keeps {', '.join(sorted(there)) or 'nothing'} for each replica and this job needs "
                f"{', '.join(sorted(needed))}: set train.optimizer to the one it was trained with"
            )

    def of_replica(rank: int, name: str) -> Tensor:
        if f"replica.{rank}.{name}" not in saved.dense:  # of what may be absent
            return torch.zeros(needed[name].numel()) if _is_waiting(name) else needed[name].flatten()
        return saved.dense_tensor(f"replica.{rank}.{name}", needed[name].numel())

    def mean(name: str) -> Tensor:
        each = torch.stack([of_replica(rank, name) for rank in range(count)])
        return each.double().mean(0) if each.is_floating_point() else each[0]

    size = len(template.flat)
    consensus = saved.dense_tensor("center", size).clone() if "center" in saved.dense else mean("weight")
    consensus = consensus.to(template.flat)
    fresh = method.init(consensus)
    images = []
    for rank in range(trainers):
        tensors = {
            name: (of_replica(rank, name) if count == trainers else mean(name)).to(tensor.dtype).view_as(tensor)
            for name, tensor in needed.items()
        }
        if count != trainers:
            tensors["weight"] = consensus
        of_method = f"sync.{rank if count == trainers else 0}."
        state = fresh
        if all(of_method + name in saved.dense for name in fresh):
            state = {n: saved.dense_tensor(of_method + n, t.numel()).clone().to(t.device) for n, t in fresh.items()}
        images.append(TrainerImage(tensors, state))
    return DenseImage(tuple(images), consensus, below(saved.dense, "feedback"))


def restore_final(saved: LoadedCheckpoint, replica: Replica) -> None:
    """Fills a replica with the parameters a finished job is evaluated with, and the buffers of the first trainer; one
    that its module did not save yet stays.

    `CheckpointError` if the checkpoint is of another model.
    """
    check_layout(saved, replica)
    replica.flat.copy_(saved.dense_tensor("final", len(replica.flat)))
    for name, tensor in dense_tensors(replica).items():
        if is_buffer(name) and f"replica.0.{name}" in saved.dense:
            tensor.copy_(saved.dense_tensor(f"replica.0.{name}", tensor.numel()).view_as(tensor))


# --- is it of this job? ----------------------------------------------------------------------------------------------


def match_tables(saved: Sequence[Table], wanted: Sequence[Table]) -> None:
    """`CheckpointError` names the first difference of a checkpoint's tables from those of the job, in any order."""
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
    size = {"rows" if table.ids is None else "capacity": table.rows}
    return {
        "ids": "rows" if table.ids is None else "dynamic",
        **size,
        "dim": table.dim,
        "pooling": pooling,
        "features": ", ".join(sorted(table.features)),
    }


def match_optimizer(saved: Mapping[str, Collection[str]], wanted: Mapping[str, Collection[str]]) -> None:
    """`CheckpointError` names the first table whose optimizer state is another one's, by the names of its tensors."""
    for table, names in wanted.items():
        kept = saved.get(table, ())
        if set(names) != set(kept):
            has, needs = (", ".join(sorted(set(state) - {"weight"})) or "nothing" for state in (kept, names))
            raise CheckpointError(
                f"the optimizer of table {table} kept {has} in the checkpoint and needs {needs} in this job: set "
                "embedding.optimizer to the one it was trained with"
            )


def match_data(name: str, saved: Sequence[Mark], given: Sequence[Mark], accepted: str | None) -> None:
    """`CheckpointError` says how the data given differs from what was trained on, and how to go on.

    Where either is empty it is not known. `accepted` is `data.accept`, the summary of data to go on with all the same.
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
