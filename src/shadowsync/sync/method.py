"""The seam of the replica methods: how one trainer's dense replica meets the others.

`P` dense parameters; `w_i` the replica of trainer i; `w_PS` the central copy on the dense servers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shadowsync.compression.codec import Rate, full_rate
from shadowsync.sync.all_reduce import Averaging
from shadowsync.sync.dense import CentralCopy
from shadowsync.sync.meeting import EVERYBODY, Meeting

State = Mapping[str, Tensor]


@dataclass
class Group:
    """How a method reaches the other trainers and the dense servers; one for each trainer."""

    averaging: Averaging
    servers: CentralCopy

    def mean(self, weights: Tensor) -> Tensor:
        """The average of the `[P]` vectors of all trainers still in the group, or of those of them that meet; not to be
        changed.

        Returns when all of these have called it; those that leave meanwhile are not waited for.

        Raises:
            Left: this trainer left before (`sync.rendezvous`). A method lets it pass, with replica and state as they
                were.
        """
        return self.averaging.mean(weights)

    def missed(self) -> bool:
        """Others averaged without this trainer right before its last `mean`: what it kept since then is not theirs.

        Where averages cross in part, it says so to all trainers if any of them had not the average before, since
        `approach` takes them to one point.
        """
        return self.averaging.missed

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        """`w_i += α (target − v_i)`, in place, after a `mean`; v_i is what that average has of this replica.

        What it has not stays in full: what workers have done since, and what a codec left out.

        Args:
            weights: `[P]`, the replica.
            target: `[P]`, made of nothing but averages, so that all trainers know it; it is not changed.
            alpha: in (0, 1].
        """
        self.averaging.approach(weights, target, alpha)

    def elastic(self, weights: Tensor, alpha: float) -> Tensor:
        """`d = α (w_i − w_PS)` `[P]`, already added to `w_PS`; the caller takes it off `w_i`."""
        return self.servers.elastic(weights, alpha)

    def sequential(self, weights: Tensor, alpha: float) -> Tensor:
        """The new central copy `[P]`, after `w_PS ← (1−α) w_PS + α w_i`."""
        return self.servers.sequential(weights, alpha)

    def catch_up(self) -> bool:
        """The next `elastic` leaves out nothing of what a sparse codec has held back; False if nothing is held back."""
        return self.servers.catch_up()

    def cpu_s(self) -> float:
        """Processor time in seconds that its traffic has cost so far outside the calling thread, about."""
        return self.servers.cpu_s + self.averaging.cpu_s

    def join(self) -> None:
        self.averaging.join()

    def leave(self) -> None:
        """This trainer takes no further part; nobody waits for it."""
        self.averaging.leave()


@dataclass
class DeviceGroup(Group):
    """The group of a replica on a GPU: vectors are copied to main memory, where codecs and the network have them, and
    what comes back to the replica's device.

    Where nothing else happens, a replica moves as in main memory within a rounding error.
    """

    device: torch.device
    _mean: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def mean(self, weights: Tensor) -> Tensor:
        there = super().mean(_copied(weights))
        here = there.to(self.device, copy=True)
        self._mean = here, there
        return here

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        given, self._mean = self._mean, None
        own = given is not None and target is given[0]  # which the average's end knows when it sees it again
        there = given[1] if given is not None and own else _copied(target)
        moved = torch.zeros_like(there)
        super().approach(moved, there, alpha)
        weights.add_(moved.to(self.device))

    def elastic(self, weights: Tensor, alpha: float) -> Tensor:
        return super().elastic(_copied(weights), alpha).to(self.device)

    def sequential(self, weights: Tensor, alpha: float) -> Tensor:
        return super().sequential(_copied(weights), alpha).to(self.device)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def group_of(flat: Tensor, averaging: Averaging, servers: CentralCopy, rate: Rate = full_rate) -> Group:
    """The group of a replica `[P]`, wherever it lies; `rate` is its trainer's."""
    averaging.strategy.rate = servers.rate = rate
    return Group(averaging, servers) if flat.device.type == "cpu" else DeviceGroup(averaging, servers, flat.device)


class SyncMethod(ABC):
    """A replica method: hyper-parameters only; what moves goes in and out as `state`.

    Attributes:
        collective: all trainers of the group take part in a synchronisation at the same time.
        centralised: there is a central copy, held by the dense servers.
        active: there is something to do at all.
        codec_options: of a sparse `compression.dense`, where the user does not give them.
    """

    name: ClassVar[str]
    active: ClassVar[bool] = True
    collective: ClassVar[bool] = False
    centralised: ClassVar[bool] = False
    codec_options: ClassVar[Mapping[str, Any]] = {}

    @property
    def takes_differences(self) -> bool:
        """Whatever crosses may be a part of a difference from what the other side has."""
        return False

    def resolved(self, trainers: int) -> Self:
        """The method with every default that depends on the job's size filled in."""
        return self

    def meeting(self) -> Meeting:
        """Who meet in an average of a collective method; a new one for each job."""
        return EVERYBODY

    @abstractmethod
    def init(self, weights: Tensor) -> State:
        """The state of a trainer whose replica is `weights` `[P]` at the start; float32 tensors by name."""

    @abstractmethod
    def sync(self, weights: Tensor, group: Group, state: State) -> State:
        """Synchronises `weights` `[P]` in place, while workers may be writing to it, and returns the new state.

        Raises:
            Left: the trainer left its group meanwhile; `weights` is as it was.
        """

    def final(self, replicas: Sequence[Tensor], center: Tensor | None) -> Tensor:
        """The dense parameters `[P]` that the finished job is evaluated with; the mean replica unless overridden."""
        return torch.stack(list(replicas)).mean(0)
