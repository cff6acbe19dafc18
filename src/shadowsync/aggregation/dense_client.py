"""The dense part of gradient methods as a worker sees it: one server, or several that each step whole parameters.

`P` elements of the model's flat tensor, `P_j` of server j's, `Q` parameters of the model.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from shadowsync.aggregation.stepping import DenseGradient, DenseStepper, ParameterReceiver, Parameters, Version
from shadowsync.compression.channel import Channel, Stream
from shadowsync.compression.codec import Codec
from shadowsync.errors import DataError
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.kept import FIRST
from shadowsync.rpc.pending import DONE, Mapped, Pending, all_of
from shadowsync.rpc.served import Client, later
from shadowsync.training.pieces import renumbered
from shadowsync.training.replica import ParameterSlot, flat_length, laid_out

NO_VERSION = -1
"""Of parameters that nobody has."""


@dataclass(frozen=True)
class DenseShare:
    """Parameters of one server.

    Attributes:
        indices: among the `Q`, ascending.
        slots: where they lie in the model's flat tensor.
    """

    indices: tuple[int, ...]
    slots: tuple[ParameterSlot, ...]

    @cached_property
    def own(self) -> tuple[ParameterSlot, ...]:
        """Where they lie in the server's flat tensor, as in that of a model which has no others."""
        return laid_out((slot.name, slot.shape) for slot in self.slots)

    @cached_property
    def length(self) -> int:
        """`P_j`."""
        return flat_length(self.own)

    def cut(self, flat: Tensor) -> Tensor:
        """The server's elements, `[P_j]`, of a tensor `[P]`; without a copy where they are the first ones."""
        if self.own == self.slots:
            return flat[: self.length]
        found = flat.new_zeros(self.length)
        for there, here in zip(self.slots, self.own, strict=True):
            here.view(found).copy_(there.view(flat))
        return found

    def put(self, part: Tensor, flat: Tensor) -> None:
        """Writes the server's elements `[P_j]` to their places in a tensor `[P]`.

        Raises:
            DataError: it has another number of elements.
        """
        if part.shape != (self.length,):
            raise DataError(f"{list(part.shape)} elements of the dense part are not those of {self.length} here")
        for there, here in zip(self.slots, self.own, strict=True):
            there.view(flat).copy_(here.view(part))

    def gradient(self, whole: DenseGradient) -> DenseGradient:
        """The server's part of a gradient."""
        return DenseGradient(self.cut(whole.flat), tuple(whole.used[index] for index in self.indices))

    def module(self, whole: nn.Module, buffers: bool) -> nn.Module:
        """A module that holds copies of these parameters of the model under their names, and computes nothing.

        Args:
            whole: the model.
            buffers: with copies of those that the model saves.
        """
        made, parameters = nn.Module(), dict(whole.named_parameters())
        for slot in self.slots:
            folder, leaf = _place(made, slot.name)
            folder.register_parameter(leaf, nn.Parameter(parameters[slot.name].detach().clone()))
        saved: Collection[str] = whole.state_dict().keys() if buffers else ()
        for name, buffer in whole.named_buffers():
            if name in saved:
                folder, leaf = _place(made, name)
                folder.register_buffer(leaf, buffer.detach().clone())
        return made


def divide(slots: Sequence[ParameterSlot], servers: int) -> tuple[DenseShare, ...]:
    """The parameters for each of at most so many servers; none is without any, but for a model that has none.

    The largest are given out first, each to the server with the fewest elements so far.
    """
    shares: list[list[int]] = [[] for _ in range(max(1, min(servers, len(slots))))]
    filled = [0] * len(shares)
    for index in sorted(range(len(slots)), key=lambda index: -slots[index].numel):
        least = filled.index(min(filled))
        shares[least].append(index)
        filled[least] += max(1, slots[index].numel)
    return tuple(DenseShare(tuple(sorted(share)), tuple(slots[index] for index in sorted(share))) for share in shares)


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that holds what has this name, made where it is not there, and the last word of the name."""
    *path, leaf = name.split(".")
    for word in path:
        if word not in root._modules:
            root.add_module(word, nn.Module())
        found = root._modules[word]
        assert found is not None
        root = found
    return root, leaf


def gradient_stream(line: Channel, worker: tuple[int, int], slots: Sequence[ParameterSlot], server: int = 0) -> Stream:
    """The stream of a worker's gradients to a dense server; `slots` there name the parameters in errors."""
    (rank, index), starts = worker, [slot.start for slot in slots]
    named = f"the dense gradient of worker {index} of trainer {rank}"
    return line.stream(("gradients", worker, server), named, lambda at: slots[bisect_right(starts, at) - 1].name)


class _Server:
    """The way of one worker to one `DenseStepper`: codecs are applied, and what crosses is counted, also where nothing
    is really sent."""

    def __init__(
        self,
        to: Connection | DenseStepper,
        line: Channel,
        worker: tuple[int, int],
        part: DenseShare,
        number: int,
        generation: int,
    ) -> None:
        self._to, self._line, self._worker, self.part = to, line, worker, part
        self._number, self._generation = number, generation
        self._receiver = ParameterReceiver(line, part.length)
        self.version = NO_VERSION

    def stream(self, line: Channel) -> Stream:
        return gradient_stream(line, self._worker, self.part.own, self._number)

    @property
    def gradients(self) -> Stream:
        return self.stream(self._line.now)

    def newer(self) -> Pending[Version | None]:
        """In this process the parameters are those when they are asked for: nothing has to cross before."""
        codec, to, rank = self._line.now.codec, self._to, self._worker[0]
        if isinstance(to, DenseStepper):
            return Mapped(lambda: self._take(codec, to.newer(Client(str(rank)), *self._asked(codec))))
        answer = later(to, DenseStepper.newer, Client(""), *self._asked(codec))
        return Mapped(lambda found: self._take(codec, found), answer)

    def _asked(self, codec: Codec) -> tuple[int, int, str, int]:
        return self._worker[1], self.version, codec.name, self._receiver.having

    def _take(self, codec: Codec, message: Parameters | None) -> Version | None:
        if message is None:
            return None
        found = self._receiver.take(codec, message)
        self.version = found.number
        return found

    def hold(self, number: int, gradient: DenseGradient) -> Pending[None]:
        line, to = self._line.now, self._to
        if isinstance(to, DenseStepper):
            frames = self.stream(line).encode(gradient.flat).frames
            to.receive(number, gradient.used, line.codec.name, frames, self._generation)
            return DONE
        frames = self.stream(line).encode(gradient.flat.cpu()).frames
        return later(to, DenseStepper.receive, number, gradient.used, line.codec.name, frames, self._generation)


class DenseClient:
    """Gradients go to all servers at once, and parameters come back from all of them (an
    `aggregation.update.DenseParameters`).

    Servers make a step at about the same time, not at the same: the version of the whole is the oldest of its parts.

    Args:
        worker: rank of the trainer, and index there.
        parts: of the parameters, for each server.
        servers: of this process, or the ways to them.
        lines: of the dense part, for each server; their codecs are the servers'.
        length: `P`.
        generation: of the parts that the worker belongs to.
    """

    def __init__(
        self,
        worker: tuple[int, int],
        parts: Sequence[DenseShare],
        servers: Sequence[Connection | DenseStepper],
        lines: Sequence[Channel],
        length: int,
        generation: int = FIRST.number,
    ) -> None:
        ways = enumerate(zip(servers, lines, parts, strict=True))
        self.worker = worker
        self._servers = [_Server(to, line, worker, part, number, generation) for number, (to, line, part) in ways]
        self._flat = torch.zeros(length if len(parts) > 1 else 0)

    def newer(self, than: int) -> Pending[Version | None]:
        """As `DenseParameters.newer`; what a server has sent, it does not send again before it is newer."""
        return Mapped(lambda *found: self._version(than, found), *[server.newer() for server in self._servers])

    def hold(self, number: int, gradient: DenseGradient) -> Pending[None]:
        """As `DenseParameters.hold`."""
        if len(self._servers) == 1:  # all of the model, in its order
            return self._servers[0].hold(number, gradient)
        return all_of([server.hold(number, server.part.gradient(gradient)) for server in self._servers])

    @property
    def unsent(self) -> dict[str, Tensor]:
        """What codecs remember of the worker's gradients, with the numbers that parameters have in the model."""
        found: dict[str, Tensor] = {}
        for server in self._servers:
            found |= renumbered(server.gradients.tensors(), dict(enumerate(server.part.indices)))
        return found

    def restore(self, unsent: Mapping[str, Tensor]) -> bool:
        """Goes on from what `unsent` gave, of any number of servers; False if that is not of this codec."""
        restored = [
            server.gradients.restore(renumbered(unsent, {whole: own for own, whole in enumerate(server.part.indices)}))
            for server in self._servers
        ]
        return all(restored)

    def _version(self, than: int, found: Sequence[Version | None]) -> Version | None:
        if len(self._servers) == 1:
            return found[0]
        for server, version in zip(self._servers, found, strict=True):
            if version is not None:
                server.part.put(version.flat, self._flat)
        oldest = min(server.version for server in self._servers)
        return Version(oldest, self._flat.clone()) if oldest > than else None
