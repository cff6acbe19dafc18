"""What a job keeps in a checkpoint beside its rows: counts, and the dense part, which any number of trainers takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from shadowsync.aggregation.counts import AggregationState
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.data.source import Mark, Schema
from shadowsync.errors import CheckpointError, DataError
from shadowsync.sync.method import State, SyncMethod
from shadowsync.training.replica import Replica

_BUFFER = "buffer."


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


@dataclass(frozen=True)
class TrainerImage:
    """One trainer's dense part.

    Attributes:
        replica: as `dense_tensors` names them.
        method: what the replica method keeps.
    """

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
    """The dense part of a job.

    Attributes:
        center: the central copy `[P]`, None where the method keeps none.
        feedback: what workers of a gradient method have not sent of their gradients, by `trainer.worker.name`.
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
    """What a replica holds, live: its parameters as `weight`, the optimizer's state, the module's buffers by name."""
    kept = replica.module.state_dict().keys()  # constants that the module can make again are not among them
    buffers = {_BUFFER + name: buffer for name, buffer in replica.module.named_buffers() if name in kept}
    return {"weight": replica.flat} | replica.state | buffers


def is_buffer(name: str) -> bool:
    """Whether `dense_tensors` gives a buffer of the module that name."""
    return name.startswith(_BUFFER)


def check_image(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Compares the tensors of an image with those that it is to be put into.

    Raises:
        DataError: names, types or sizes differ.
    """

    def described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, int]]:
        return {name: (tensor.dtype, tensor.numel()) for name, tensor in tensors.items()}

    if described(given) != described(own):
        names = sorted({*given, *own})
        wrong = next((n for n in names if described(given).get(n) != described(own).get(n)), "nothing")
        raise DataError(f"an image with another {wrong} does not fit this role")


def check_layout(saved: LoadedCheckpoint, replica: Replica) -> None:
    """Raises `CheckpointError` naming the first parameter that differs between the checkpoint and this model."""
    there, here = job_state(saved).layout, layout(replica)
    for name in {**there, **here}:
        if there.get(name) != here.get(name):
            raise CheckpointError(
                f"{saved.name}: parameter {name} is {there.get(name, 'absent')} in the checkpoint and "
                f"{here.get(name, 'absent')} in this model: configure the model that the checkpoint was trained with"
            )


def restored_dense(saved: LoadedCheckpoint, method: SyncMethod, template: Replica, trainers: int) -> DenseImage:
    """The dense part of a checkpoint for so many trainers.

    With as many trainers as were saved each goes on with its own replica. With another number, all of them start from
    one point: the central copy if there was one, else the mean replica, with the mean of the optimizers' states.
    What workers had not sent of their gradients is that of the worker of the same number; where there is none, it is
    lost. Of another replica method than before each state is that at the start.

    Args:
        saved: the checkpoint.
        method: of the job that goes on.
        template: a replica of the job that goes on; says what is needed and is left as it is.
        trainers: of the job that goes on.

    Raises:
        CheckpointError: the checkpoint is of another model or dense optimizer.
    """
    check_layout(saved, template)
    needed = dense_tensors(template)
    there = below(saved.dense, "replica.0").keys()
    if there != needed.keys():
        raise CheckpointError(
            f"{saved.name} keeps {', '.join(sorted(there)) or 'nothing'} for each replica and this job needs "
            f"{', '.join(sorted(needed))}: set train.optimizer to the one it was trained with"
        )
    count = job_state(saved).trainers

    def of_replica(rank: int, name: str) -> Tensor:
        if f"replica.{rank}.{name}" not in saved.dense:
            raise CheckpointError(
                f"{saved.name} has no {name} of the dense optimizer: set train.optimizer to the one it was trained with"
            )
        return saved.dense_tensor(f"replica.{rank}.{name}", needed[name].numel())

    def mean(name: str) -> Tensor:
        return torch.stack([of_replica(rank, name) for rank in range(count)]).double().mean(0)

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
    """Fills a replica with the parameters a finished job is evaluated with, and the buffers of the first trainer.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    check_layout(saved, replica)
    replica.flat.copy_(saved.dense_tensor("final", len(replica.flat)))
    for name, tensor in dense_tensors(replica).items():
        if is_buffer(name):
            tensor.copy_(saved.dense_tensor(f"replica.0.{name}", tensor.numel()).view_as(tensor))
