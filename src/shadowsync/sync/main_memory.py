"""The way from a replica on another device to a group whose vectors are in main memory.

`P` dense parameters.
"""

import torch
from torch import Tensor

from shadowsync.sync.method import Group


class MainMemory:
    """A `Group` for a replica on a GPU: vectors are copied to main memory, where codecs and the network have them, and
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
        """As `Group.mean`."""
        there = self._group.mean(_copied(weights))
        here = there.to(self._device, copy=True)
        self._mean = here, there
        return here

    def missed(self) -> bool:
        """As `Group.missed`."""
        return self._group.missed()

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        """As `Group.approach`."""
        before = _copied(weights)
        after = before.clone()
        self._group.approach(after, self._as_given(target), alpha)
        self._mean = None
        weights.add_(after.sub_(before).to(self._device))

    def elastic(self, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.elastic`."""
        return self._group.elastic(_copied(weights), alpha).to(self._device)

    def catch_up(self) -> bool:
        """As `Group.catch_up`."""
        return self._group.catch_up()

    def sequential(self, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.sequential`."""
        return self._group.sequential(_copied(weights), alpha).to(self._device)

    def cpu_s(self) -> float:
        """As `Group.cpu_s`."""
        return self._group.cpu_s()

    def join(self) -> None:
        """As `Group.join`."""
        self._group.join()

    def leave(self) -> None:
        """As `Group.leave`."""
        self._group.leave()

    def _as_given(self, target: Tensor) -> Tensor:
        """The group knows its own average when it sees it again."""
        if self._mean is not None and target is self._mean[0]:
            return self._mean[1]
        return _copied(target)


def for_replica(flat: Tensor, group: Group) -> Group:
    """The group as a replica `[P]` reaches it."""
    return group if flat.device.type == "cpu" else MainMemory(group, flat.device)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)
