"""A trainer's way to the others and to the dense servers, in one process or among several."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.sync.all_reduce import Averaging, RemoteAveraging
from shadowsync.sync.dense import CentralCopy
from shadowsync.sync.method import Group
from shadowsync.training.gate import Gate


@dataclass(frozen=True)
class InProcessGroup(Group):
    """Trainers in one process."""

    rank: int
    averaging: Averaging
    servers: CentralCopy

    def mean(self, weights: Tensor) -> Tensor:
        return self.averaging.mean(self.rank, weights)

    def missed(self) -> bool:
        return self.averaging.missed(self.rank)

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        self.averaging.approach(self.rank, weights, target, alpha)

    def elastic(self, weights: Tensor, alpha: float) -> Tensor:
        return self.servers.elastic(weights, alpha)

    def catch_up(self) -> bool:
        return self.servers.catch_up()

    def sequential(self, weights: Tensor, alpha: float) -> Tensor:
        return self.servers.sequential(weights, alpha)

    def cpu_s(self) -> float:
        return self.servers.cpu_s

    def join(self) -> None:
        self.averaging.join(self.rank)

    def leave(self) -> None:
        self.averaging.leave(self.rank)


@dataclass(frozen=True)
class RemoteGroup(Group):
    """Trainers in processes of their own.

    A pause for a checkpoint does not wait for an average, which depends on other processes: nothing changes here
    until it has come. It does wait for an exchange with the dense servers, which would be half done.
    """

    rank: int
    averaging: RemoteAveraging
    servers: CentralCopy
    gate: Gate

    def mean(self, weights: Tensor) -> Tensor:
        """Called by a member of the gate."""
        with self.gate.resting():
            return self.averaging.mean(weights)

    def missed(self) -> bool:
        return self.averaging.missed()

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        self.averaging.approach(weights, target, alpha)

    def elastic(self, weights: Tensor, alpha: float) -> Tensor:
        return self.servers.elastic(weights, alpha)

    def catch_up(self) -> bool:
        return self.servers.catch_up()

    def sequential(self, weights: Tensor, alpha: float) -> Tensor:
        return self.servers.sequential(weights, alpha)

    def cpu_s(self) -> float:
        return self.servers.cpu_s

    def join(self) -> None:
        self.averaging.join()

    def leave(self) -> None:
        self.averaging.leave()


class MainMemory(Group):
    """For a replica on a GPU: vectors are copied to main memory, where codecs and the network have them, and
    what comes back to the replica's device.

    Workers go on stepping a replica while it synchronises. So `approach` adds what an average moves, to the replica as
    it is by then; where nothing else happens, that is the same as in main memory within a rounding error.

    Args:
        group: the trainer's, in main memory.
        device: of the replica.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._mean: tuple[Tensor, Tensor] | None = None

    def mean(self, weights: Tensor) -> Tensor:
        there = self._group.mean(_copied(weights))
        here = there.to(self._device, copy=True)
        self._mean = here, there
        return here

    def missed(self) -> bool:
        return self._group.missed()

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        before = _copied(weights)
        after = before.clone()
        given, self._mean = self._mean, None
        own = given is not None and target is given[0]  # which the group knows when it sees it again
        self._group.approach(after, given[1] if given is not None and own else _copied(target), alpha)
        weights.add_(after.sub_(before).to(self._device))

    def elastic(self, weights: Tensor, alpha: float) -> Tensor:
        return self._group.elastic(_copied(weights), alpha).to(self._device)

    def catch_up(self) -> bool:
        return self._group.catch_up()

    def sequential(self, weights: Tensor, alpha: float) -> Tensor:
        return self._group.sequential(_copied(weights), alpha).to(self._device)

    def cpu_s(self) -> float:
        return self._group.cpu_s()

    def join(self) -> None:
        self._group.join()

    def leave(self) -> None:
        self._group.leave()


def for_replica(flat: Tensor, group: Group) -> Group:
    """The group as a replica `[P]` reaches it."""
    return group if flat.device.type == "cpu" else MainMemory(group, flat.device)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)
