"""The seam of the replica methods: how one trainer's dense replica meets the others.

`P` dense parameters; `w_i` the replica of trainer i; `w_PS` the central copy on the dense servers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

State = Mapping[str, Tensor]


class Group(Protocol):
    """How a method reaches the other trainers and the dense servers; made by the runtime, one for each trainer."""

    def mean(self, weights: Tensor) -> Tensor:
        """The average of the `[P]` vectors of all trainers still in the group; not to be changed.

        Returns when all of them have called it; those that leave meanwhile are not waited for.

        Raises:
            Left: this trainer left before (`sync.schedule`). A method lets it pass, with replica and state as they
                were.
        """
        ...

    def missed(self) -> bool:
        """Others averaged without this trainer right before its last `mean`: what it kept since then is not theirs.

        Where averages cross in part, it says so to all trainers if any of them had not the average before, since
        `approach` takes them to one point.
        """
        ...

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        """`w_i ← (1−α) w_i + α target`, in place, after a `mean`.

        Where averages cross in part, it is `w_i += α (target − v_i)`, v_i being what the last one has of this replica:
        what it has not stays in full.

        Args:
            weights: `[P]`, the replica.
            target: `[P]`, made of nothing but averages, so that all trainers know it; it is not changed.
            alpha: in (0, 1].
        """
        ...

    def elastic(self, weights: Tensor, alpha: float) -> Tensor:
        """`d = α (w_i − w_PS)` `[P]`, already added to `w_PS`; the caller takes it off `w_i`."""
        ...

    def catch_up(self) -> bool:
        """The next `elastic` leaves out nothing of what a sparse codec has held back; False if nothing is held back."""
        ...

    def sequential(self, weights: Tensor, alpha: float) -> Tensor:
        """The new central copy `[P]`, after `w_PS ← (1−α) w_PS + α w_i`."""
        ...

    def cpu_s(self) -> float:
        """Processor time in seconds that its traffic has cost so far outside the calling thread, about."""
        ...

    def join(self) -> None:
        """This trainer takes part again."""
        ...

    def leave(self) -> None:
        """This trainer takes no further part; nobody waits for it."""
        ...


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

    def resolved(self, trainers: int, foreground: bool) -> Self:
        """The method with every default that depends on the job's size or on the schedule filled in."""
        return self

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
