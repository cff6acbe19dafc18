"""The dense part of gradient methods: one copy with one optimizer state, and the gradients that wait for a global step.

`P` elements of the flat tensor, `Q` parameters in it.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shadowsync.errors import DataError
from shadowsync.training.replica import Replica, Stepper


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
        lr: learning rate.
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


class DenseStepper:
    """Applies global steps with the job's optimizer (GBA, arXiv 2205.11048, algorithm 2; a role).

    Any thread may hold gradients and read versions; nobody waits for a step that is being made.

    Args:
        replica: the parameters and the optimizer's state, changed in place.
        clip_norm: the gradient of a global step of a larger L2 norm is scaled down to it, as that of one large batch.
        version: global steps made before.
    """

    def __init__(self, replica: Replica, clip_norm: float | None, version: int = 0) -> None:
        self.replica = replica
        self._stepper = Stepper(replica, clip_norm)
        self._held: dict[int, DenseGradient] = {}
        self._below = 0
        self._lock = threading.Lock()
        self._stepping = threading.Lock()
        self._newest = Version(version, replica.flat.clone())

    @property
    def newest(self) -> Version:
        """The parameters after the last step."""
        return self._newest

    @property
    def held_bytes(self) -> int:
        """Memory of the gradients that wait."""
        with self._lock:
            return sum(gradient.flat.nbytes for gradient in self._held.values())

    def newer(self, than: int) -> Version | None:
        """The newest parameters, or None if their version is not above `than`."""
        newest = self._newest
        return newest if newest.number > than else None

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

    def commit(self, step: DenseStep) -> None:
        """Makes a global step. Steps come in ascending order; one that came already changes nothing."""
        with self._stepping:
            if step.step < self._newest.number:
                return
            gradients = self._step_gradients(step)
            if gradients is not None:
                self._stepper.step(gradients, step.lr, step.norm)
            self._newest = Version(step.step + 1, self.replica.flat.clone())

    def norm(self, step: DenseStep) -> float:
        """The L2 norm of the gradient that `commit` of this step would take, unclipped; nothing is changed."""
        with self._stepping:
            with self._lock:
                named = [(self._held.get(number), weight) for number, weight in step.weights.items()]
            gradients = self._sum(named, step.divisor)
            return 0.0 if gradients is None else float(nn.utils.get_total_norm(g for g in gradients if g is not None))

    def restart(self, version: int) -> None:
        """Whoever loaded the replica says so: all gradients are forgotten, and the parameters have this version."""
        with self._stepping, self._lock:
            self._held.clear()
            self._newest = Version(version, self.replica.flat.clone())

    def _step_gradients(self, step: DenseStep) -> list[Tensor | None] | None:
        """The gradient of each parameter; None if no batch brings any."""
        with self._lock:
            named = [(self._held.pop(number, None), weight) for number, weight in step.weights.items()]
            self._below = max(self._below, step.below)
            for number in [number for number in self._held if number < self._below]:
                del self._held[number]
        return self._sum(named, step.divisor)

    def _sum(self, named: Sequence[tuple[DenseGradient | None, float]], divisor: float) -> list[Tensor | None] | None:
        kept = [(gradient, weight) for gradient, weight in named if gradient is not None and weight]
        if not kept:
            return None
        total = torch.zeros_like(self.replica.flat)
        for gradient, weight in kept:
            total.add_(gradient.flat, alpha=weight)
        total /= divisor
        used = [any(flags) for flags in zip(*(gradient.used for gradient, _ in kept), strict=True)]
        return [slot.view(total) if there else None for slot, there in zip(self.replica.slots, used, strict=True)]
