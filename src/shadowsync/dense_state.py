"""Puts the dense part of a checkpoint back, into any number of trainers and under any replica method."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.errors import CheckpointError, DataError
from shadowsync.job_state import job_state
from shadowsync.sync.method import State, SyncMethod
from shadowsync.training.replica import Replica

_BUFFER = "buffer."


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
        return cls(
            {name: t.clone() for name, t in dense_tensors(replica).items()}, {n: t.clone() for n, t in state.items()}
        )

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
        trainers: each one's.
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
    lost.

    Args:
        saved: the checkpoint.
        method: of the job that goes on.
        template: a replica of the job that goes on; says what is needed and is left as it is.
        trainers: of the job that goes on.

    Raises:
        CheckpointError: the checkpoint is of another model or dense optimizer.
    """
    check_layout(saved, template)
    _check_optimizer(saved, template)
    same = job_state(saved).trainers == trainers
    consensus = saved_weights(saved, len(template.flat)).to(template.flat)
    fresh = method.init(consensus)
    images = []
    for rank in range(trainers):
        tensors = {
            name: _saved_state(saved, name, rank if same else None, tensor.numel()).to(tensor.dtype).view_as(tensor)
            for name, tensor in dense_tensors(template).items()
        }
        if not same:
            tensors["weight"] = consensus
        images.append(TrainerImage(tensors, _method_state(saved, rank if same else 0, fresh)))
    return DenseImage(tuple(images), consensus, below(saved.dense, "feedback"))


def _check_optimizer(saved: LoadedCheckpoint, replica: Replica) -> None:
    """Raises `CheckpointError` if the checkpoint keeps other tensors for a replica than this job."""
    start = "replica.0."
    there = {name.removeprefix(start) for name in saved.dense if name.startswith(start)}
    here = set(dense_tensors(replica))
    if there != here:
        raise CheckpointError(
            f"{saved.name} keeps {', '.join(sorted(there)) or 'nothing'} for each replica and this job needs "
            f"{', '.join(sorted(here))}: set train.optimizer to the one it was trained with"
        )


def restore_final(saved: LoadedCheckpoint, replica: Replica) -> None:
    """Fills a replica with the parameters a finished job is evaluated with, and the buffers of the first trainer.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    check_layout(saved, replica)
    replica.load(saved.dense_tensor("final", len(replica.flat)))
    for name, tensor in dense_tensors(replica).items():
        if is_buffer(name):
            tensor.copy_(saved.dense_tensor(f"replica.0.{name}", tensor.numel()).view_as(tensor))


def saved_weights(saved: LoadedCheckpoint, size: int) -> Tensor:
    """The central copy of a checkpoint, or the mean of its replicas where it has none, `[P]`."""
    if "center" in saved.dense:
        return saved.dense_tensor("center", size).clone()
    return _mean(saved, "weight", size)


def _saved_state(saved: LoadedCheckpoint, name: str, rank: int | None, elements: int) -> Tensor:
    if rank is None:
        return _mean(saved, name, elements)
    key = f"replica.{rank}.{name}"
    if key not in saved.dense:
        raise CheckpointError(
            f"{saved.name} has no {name} of the dense optimizer: set train.optimizer to the one it was trained with"
        )
    return saved.dense_tensor(key, elements)


def _mean(saved: LoadedCheckpoint, name: str, elements: int) -> Tensor:
    count = job_state(saved).trainers
    return torch.stack([_saved_state(saved, name, rank, elements) for rank in range(count)]).double().mean(0)


def _method_state(saved: LoadedCheckpoint, rank: int, fresh: State) -> State:
    """What the method kept, or its state at the start where another method was used before."""
    keys = {name: f"sync.{rank}.{name}" for name in fresh}
    if any(key not in saved.dense for key in keys.values()):
        return fresh
    return {n: saved.dense_tensor(k, fresh[n].numel()).clone().to(fresh[n].device) for n, k in keys.items()}
