"""The dense part of gradient methods: one copy with one optimizer state, and the gradients that wait for a global step.

It is one server's, or divided among several that each step whole parameters. `P` elements of the flat tensor (`P_j` of
server j's), `Q` parameters in it.
"""

import itertools
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from shadowsync.compression.channel import Differences, Message
from shadowsync.compression.codec import Codec, received
from shadowsync.compression.plain import Plain
from shadowsync.embedding.server import check_batch, check_step
from shadowsync.errors import DataError
from shadowsync.rpc.kept import PerClient, check_generation
from shadowsync.rpc.served import Client, served
from shadowsync.training.replica import ParameterSlot, Replica, Stepper, flat_length, laid_out


@dataclass(frozen=True)
class DenseGradient:
    """Gradient of one batch's mean loss.

    Attributes:
        flat: `[P]`, zero where there is none.
        used: for each parameter, whether the loss depended on it; `Q` of them.
    """

    flat: Tensor
    used: tuple[bool, ...]


@dataclass(frozen=True)
class DenseStep:
    """A global step as the dense part carries it out.

    Attributes:
        step: its number k; the parameters have version k + 1 after it. Each is carried out once.
        weights: factor of each batch's gradient, by the batch's number; 0 drops it.
        divisor: of the weighted sum.
        below: as in `RowStep`.
        norm: L2 norm of the step's gradient by all parameters, where several steppers have a part of them each and
            gradients are clipped; None if the stepper has all.
    """

    step: int
    weights: Mapping[int, float]
    divisor: float
    lr: float
    below: int
    norm: float | None = None


@dataclass(frozen=True)
class Version:
    """Parameters between two global steps; `flat`, `[P]`, is not written to any more."""

    number: int
    flat: Tensor


@dataclass(frozen=True)
class Parameters:
    """Parameters of a version on their way to a worker; `serial` counts the messages to it, from 1 on."""

    version: int
    serial: int
    message: Message


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
        return DenseGradient(self.cut(whole.flat), tuple(whole.used[index] for index in self.indices))

    def module(self, whole: nn.Module, buffers: bool) -> nn.Module:
        """A module that holds copies of these parameters of the model under their names, with `buffers` also of those
        that the model saves, and computes nothing.
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


class ParameterSender:
    """The dense server's end towards one worker (`update.ParameterReceiver` is the other).

    Unless the codec keeps everything, parameters cross as the difference from what the worker has (`Differences`):
    what a codec leaves out or rounds off comes when it has grown. The worker says which message it had last; where that
    is not the one sent last, because an answer was lost or made twice or the worker is new, it gets them whole.
    Versions would not do: two messages may bring the same one, and leave different things out.

    Ours differs from DCT-DP (arXiv 2010.08899), where every trainer makes the step itself from the sum of the sparse
    gradients: here the optimizer is the server's, and may move every parameter in each step (Adam does).
    """

    def __init__(self, about: str) -> None:
        self._differences = Differences(about)
        self._serial = 0
        self._lock = threading.Lock()

    def answer(self, codec: Codec, version: Version, having: int) -> Parameters:
        """The message in that codec that brings a worker to this version, who had message `having` last."""
        with self._lock:
            expected, self._serial = self._serial, self._serial + 1
            if having != expected:
                self._differences.forget()
            return Parameters(version.number, self._serial, self._differences.encode(codec, version.flat.cpu()))


class DenseStepper:
    """Applies global steps with the job's optimizer (GBA, arXiv 2205.11048; a role).

    Any thread may hold gradients and read versions; nobody waits for a step that is being made.

    Args:
        replica: the parameters and the optimizer's state, changed in place.
        clip_norm: the gradient of a global step of a larger L2 norm is scaled down to it, as that of one large batch.
        version: global steps made before.
        codec: of gradients and parameters on their way; Plain if not given.
        generation: whose gradients and steps are taken.
    """

    def __init__(
        self,
        replica: Replica,
        clip_norm: float | None,
        version: int = 0,
        codec: Codec | None = None,
        generation: int = 0,
    ) -> None:
        self.replica = replica
        self._stepper = Stepper(replica, clip_norm)
        self._codec, self._generation = codec or Plain(), generation
        self._senders = PerClient[dict[int, ParameterSender]](dict)  # by stream
        self._held: dict[int, DenseGradient] = {}
        self._below = 0
        self._lock = threading.Lock()
        self._stepping = threading.Lock()
        self._newest = Version(version, replica.flat.clone())

    @property
    def newest(self) -> Version:
        return self._newest

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(gradient.flat.nbytes for gradient in self._held.values())

    def client_gone(self, client: str) -> None:
        self._senders.forget(client)

    # --- called by workers -------------------------------------------------------------------------------------------

    @served(once=False)
    def newer(self, client: Client, stream: int, than: int, codec: str, having: int) -> Parameters | None:
        """The newest parameters in the codec of that name, or None if their version is not above `than`.

        What a stream of a client has is remembered; `having` is the message that came last there, 0 if none did.
        """
        named, newest = self._codec.level(codec), self._newest
        if newest.number <= than:
            return None
        about = f"the dense parameters for worker {stream} of a trainer"
        return self._senders.of(client).setdefault(stream, ParameterSender(about)).answer(named, newest, having)

    @served()
    def receive(
        self, number: int, used: tuple[bool, ...], codec: str, frames: tuple[Tensor, ...], generation: int = 0
    ) -> None:
        """Holds a batch's gradient, `DenseGradient` in frames of that codec."""
        check_generation(self._generation, generation)
        check_batch(number)
        flat, named = self.replica.flat, self._codec.level(codec)
        with received("a gradient", named):
            decoded = named.decode(frames, tuple(flat.shape))
        self.hold(number, DenseGradient(decoded.to(flat.device), used))

    def hold(self, number: int, gradient: DenseGradient) -> None:
        """Keeps a batch's gradient until a `commit` names it; one that will not be named any more is passed over.

        Raises:
            DataError: it is of another model.
        """
        shape, slots = self.replica.flat.shape, len(self.replica.slots)
        if gradient.flat.shape != shape or gradient.flat.dtype != torch.float32 or len(gradient.used) != slots:
            raise DataError(
                f"a gradient of {gradient.flat.dtype} {list(gradient.flat.shape)} for {len(gradient.used)} parameters "
                f"does not fit a dense part of float32 {list(shape)} with {slots}"
            )
        with self._lock:
            if number >= self._below:
                self._held[number] = gradient

    # --- called by whoever has steps carried out ---------------------------------------------------------------------

    @served()
    def commit(self, step: DenseStep, generation: int = 0) -> int:
        """Makes a global step. Steps come in ascending order; one that came already changes nothing.

        Returns:
            memory of the gradients that waited, those of the step with them.
        """
        self._check(step, generation)
        held_bytes = self.held_bytes
        with self._stepping:
            if step.step >= self._newest.number:
                with self._lock:
                    named = [(self._held.pop(number, None), weight) for number, weight in step.weights.items()]
                    self._below = max(self._below, step.below)
                    for number in [number for number in self._held if number < self._below]:
                        del self._held[number]
                gradients = self._sum(named, step.divisor)
                if gradients is not None:
                    self._stepper.step(gradients, step.lr, step.norm)
                self._newest = Version(step.step + 1, self.replica.flat.clone())
        return held_bytes

    @served(once=False)
    def norm(self, step: DenseStep, generation: int = 0) -> float:
        """The L2 norm of the gradient that `commit` of this step would take, unclipped; nothing is changed."""
        self._check(step, generation)
        with self._stepping:
            with self._lock:
                named = [(self._held.get(number), weight) for number, weight in step.weights.items()]
            gradients = self._sum(named, step.divisor)
            return 0.0 if gradients is None else float(nn.utils.get_total_norm(g for g in gradients if g is not None))

    @served()
    def restart(self, version: int, generation: int = 0) -> None:
        """Whoever loaded the replica says so: all gradients are forgotten, and the parameters have this version."""
        check_generation(self._generation, generation)
        with self._stepping, self._lock:
            self._held.clear()
            self._newest = Version(version, self.replica.flat.clone())

    @served()
    def version(self) -> int:
        """Global steps made."""
        return self._newest.number

    @served()
    def held_gradient(self, position: int) -> tuple[int, tuple[bool, ...], Tensor] | None:
        """The one at that position among the gradients that wait for a step, with the number of its batch, as
        `DenseGradient`; None beyond the last. Nobody adds or takes any meanwhile."""
        with self._lock:
            found = next(itertools.islice(self._held.items(), position, None), None) if position >= 0 else None
        return None if found is None else (found[0], found[1].used, found[1].flat.cpu())

    def _check(self, step: DenseStep, generation: int) -> None:
        check_generation(self._generation, generation)
        check_step(step.weights, step.divisor, step.lr)

    def _sum(self, named: Sequence[tuple[DenseGradient | None, float]], divisor: float) -> list[Tensor | None] | None:
        """The gradient of each parameter; None if no batch brings any."""
        kept = [(gradient, weight) for gradient, weight in named if gradient is not None and weight]
        if not kept:
            return None
        total = torch.zeros_like(self.replica.flat)
        for gradient, weight in kept:
            total.add_(gradient.flat, alpha=weight)
        total /= divisor
        used = [any(flags) for flags in zip(*(gradient.used for gradient, _ in kept), strict=True)]
        return [slot.view(total) if there else None for slot, there in zip(self.replica.slots, used, strict=True)]
