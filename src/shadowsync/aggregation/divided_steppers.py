"""A dense part that several dense servers share, as one worker sees it.

`P` elements of the flat tensor.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shadowsync.aggregation.dense_shares import DenseShare
from shadowsync.aggregation.stepper_remote import StepperRemote
from shadowsync.aggregation.stepping import DenseGradient, Version
from shadowsync.rpc.pending import Joined, Pending, all_of
from shadowsync.training.pieces import renumbered

NO_VERSION = -1
"""Of parameters that nobody has."""


class DividedSteppers:
    """Gradients go to all servers at once, and parameters come back from all of them (an
    `aggregation.update.DenseParameters`).

    Servers make a step at about the same time, not at the same: the version of the whole is the oldest of its parts.

    Args:
        parts: of the parameters.
        remotes: the ways to their servers.
        length: `P`.
    """

    def __init__(self, parts: Sequence[DenseShare], remotes: Sequence[StepperRemote], length: int) -> None:
        self._parts, self._remotes = parts, remotes
        self._flat = torch.zeros(length)
        self._versions = [NO_VERSION] * len(parts)

    def newer(self, than: int) -> Pending[Version | None]:
        """As `DenseParameters.newer`; what a server has sent, it does not send again before it is newer."""
        pairs = zip(self._remotes, self._versions, strict=True)
        return Joined([remote.newer(version) for remote, version in pairs], lambda found: self._version(than, found))

    def hold(self, number: int, gradient: DenseGradient) -> Pending[None]:
        """As `DenseParameters.hold`."""
        pairs = zip(self._remotes, self._parts, strict=True)
        return all_of([remote.hold(number, part.gradient(gradient)) for remote, part in pairs])

    @property
    def unsent(self) -> dict[str, Tensor]:
        """What codecs remember of the worker's gradients, with the numbers that parameters have in the model."""
        found: dict[str, Tensor] = {}
        for remote, part in zip(self._remotes, self._parts, strict=True):
            found |= renumbered(remote.gradients.encoder.tensors(), dict(enumerate(part.indices)))
        return found

    def restore(self, unsent: Mapping[str, Tensor]) -> bool:
        """Goes on from what `unsent` gave, of any number of servers; False if that is not of this codec."""
        restored = [
            remote.gradients.encoder.restore(renumbered(unsent, {whole: own for own, whole in enumerate(part.indices)}))
            for remote, part in zip(self._remotes, self._parts, strict=True)
        ]
        return all(restored)

    def _version(self, than: int, found: Sequence[Version | None]) -> Version | None:
        newer = [(index, version) for index, version in enumerate(found) if version is not None]
        for index, version in newer:
            self._versions[index] = version.number
        if len(self._parts) == 1:  # all of the model, in its order: nothing to be put together
            return newer[0][1] if newer else None
        for index, version in newer:
            self._parts[index].put(version.flat, self._flat)
        oldest = min(self._versions)
        return Version(oldest, self._flat.clone()) if oldest > than else None
