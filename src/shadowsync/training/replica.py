"""A trainer's replica of the dense part: one flat tensor that its Hogwild workers step without locks.

`P` elements of the flat tensor, `B` samples, `N` dense columns, `F` features, `D_f` width of feature f's vector.
"""

import copy
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from shadowsync.data.batch import Batch, Jagged
from shadowsync.errors import ConfigError, RunError, ShadowSyncError, blamed, lacks_memory, line_of
from shadowsync.models.layers import Dropout
from shadowsync.models.model import class_of, copy_module
from shadowsync.models.vectors import NO_SEQUENCES, JaggedVectors, LookedUp, Pooled, VectorGradients
from shadowsync.models.wrapping import Wrapped
from shadowsync.training.kernels import IN_FP32, PRECISIONS, Computing, accelerate, parse_kernels
from shadowsync.training.losses import Objective
from shadowsync.training.optimizers import DenseOptimizer

_ALIGNMENT = 16
"""Parameters start at multiples of this many float32: 64 bytes, a cache line and a vector register."""


@dataclass(frozen=True)
class ParameterSlot:
    """Where a parameter lies: elements `start … start + numel − 1` of the flat tensor."""

    name: str
    shape: torch.Size
    start: int

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's part of a tensor `[P]`, in the parameter's shape."""
        return flat[self.start : self.start + self.numel].view(self.shape)


class Replica:
    """All trainable parameters of a module in one flat tensor, with the optimizer's state beside it.

    The module given is copied, not touched. Parameters tied to each other take one slot. Frozen parameters
    (`requires_grad=False`) and buffers are no part of the flat tensor: all workers share them, so the running
    statistics of a batch normalisation are those of all workers, and each replica keeps its own. A job is evaluated
    with those of its first trainer.

    Attributes:
        module: the copy; its parameters are views of `flat`, so it is always up to date.
        dims: the pooled features with their widths, in the order of the columns of pooled vectors.
        slots: the layout of `flat`, in the order of `module.named_parameters()`.
        flat: float32 `[P]`; the gaps between slots stay zero. Whoever writes to it changes every worker.
        state: the optimizer's tensors by name, `[P]`, or one element per slot.
        waiting: gradients that wait for others to make a step with; None where each makes one.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: DenseOptimizer,
        dims: Mapping[str, int],
        device: str = "cpu",
        memory: Tensor | None = None,
        accumulate: int = 1,
        objective: Objective = binary_cross_entropy_with_logits,
    ) -> None:
        """
        The module is called as `module(dense [B, N], {feature: [B, D_f]}) → logits [B]`; under a feature that is not
        pooled stand `JaggedVectors`. `memory`, float32 `[P]`, is where `flat` is to lie unless that is on a GPU. The
        gradients of so many batches to `accumulate` make one step of what makes the `objective` smaller.

        Raises:
            ConfigError: a parameter is not float32 or not initialised, the module cannot be copied, or there is no
                such device.
        """
        copied = copy_module(module)
        self.slots = _layout(copied)
        try:
            kind = torch.zeros(0, device=device).device.type
        except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
            raise ConfigError(f"train.device={device} cannot be used: {str(error).splitlines()[0]}") from error
        if kind not in ("cpu", "cuda"):
            raise ConfigError(f"train.device={device} cannot be used: allowed are cpu and cuda")
        self.module = copied.to(device)
        self.dims = dict(dims)
        self.optimizer = optimizer
        self.objective = objective
        length = flat_length(self.slots)
        self.flat = torch.zeros(length, device=device) if memory is None or kind != "cpu" else memory.zero_()
        for slot, parameter in zip(self.slots, _trainable(self.module), strict=True):
            slot.view(self.flat).copy_(parameter.detach())
        self.alias(self.module)
        self.state = optimizer.init(len(self.flat), len(self.slots), self.flat.device)
        self.waiting = WaitingGradients(self, accumulate) if accumulate > 1 else None

    def worker_module(
        self, computing: Computing = IN_FP32, clip_norm: float | None = None, seed: tuple[int, int] = (0, 0)
    ) -> "WorkerModule":
        """A worker's own module over the shared parameters, with `clip_norm` as in `Stepper`; one per worker thread.

        `seed`, the job's and the worker's number, is that of the module's dropout.
        """
        return WorkerModule(self, computing, clip_norm, seed)

    def ask(self, batch: Batch) -> tuple[Jagged, LookedUp | None]:
        """The ids that `predict` needs the vectors of, and what it is to be told of them."""
        return _ask(self.module, batch, training=False)

    def predict(
        self,
        dense: Tensor,
        pooled: Tensor,
        sequences: Mapping[str, JaggedVectors] = NO_SEQUENCES,
        looked_up: LookedUp | None = None,
    ) -> Tensor:
        """Logits `[B]` or `[B, T]` in float32 with the parameters as they are, of `dense`, float32 `[B, N]`, the pooled
        features in the order of `dims`, float32 `[B, Σ D_f]`, and the other features; `looked_up` as `ask` gave it.
        """
        self.module.eval()
        with torch.inference_mode():
            device = self.flat.device
            placed = {name: found.to(device) for name, found in sequences.items()}
            try:
                logits: Tensor = self.module(dense.to(device), Pooled(pooled.to(device), self.dims, placed, looked_up))
            except Exception as error:
                _explain(self.module, error)
                raise
        return logits.float().cpu()

    def parts(self, name: str) -> list[Tensor]:
        """The optimizer's tensor `name` cut into what belongs to each slot, as views."""
        tensor = self.state[name]
        if name in self.optimizer.per_parameter:
            return list(tensor.unbind())
        return [slot.view(tensor) for slot in self.slots]

    def alias(self, module: nn.Module) -> None:
        """Makes the trained parameters of a copy of the module views of `flat`."""
        for slot, parameter in zip(self.slots, _trainable(module), strict=True):
            parameter.data = slot.view(self.flat)


class WaitingGradients:
    """The sum of the dense gradients of some batches of a replica's workers, until there are enough for a step.

    Attributes:
        tensors: what waits, live: their `sum`, `[P]`, and how many `batches` brought something to it, for each slot and
            at the end in all, float32 `[Q + 1]`.
    """

    def __init__(self, replica: Replica, enough: int) -> None:
        device = replica.flat.device
        self.tensors = {
            "sum": torch.zeros_like(replica.flat),
            "batches": torch.zeros(len(replica.slots) + 1, device=device),
        }
        self._enough, self._slots = enough, replica.slots
        self._lock = threading.Lock()

    def add(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Takes the gradients of a batch, one for each slot in its order; once there are enough, the means of all that
        waited, and nothing waits any more. A slot to which no batch brought one has none.
        """
        total, batches = self.tensors["sum"], self.tensors["batches"]
        brought = torch.tensor([*(gradient is not None for gradient in gradients), True], device=batches.device)
        with self._lock:
            batches += brought
            for slot, gradient in zip(self._slots, gradients, strict=True):
                if gradient is not None:
                    slot.view(total).add_(gradient)
            count = float(batches[-1])
            if count < self._enough:
                return None
            mean, used = total / count, batches.tolist()
            total.zero_()
            batches.zero_()
        return [slot.view(mean) if there else None for slot, there in zip(self._slots, used, strict=False)]


class Stepper:
    """Applies the replica's optimizer in place, without a lock; its `l2` is for parameters of two dimensions and more,
    the weights of layers, and not for biases and norms.

    A gradient of a larger L2 norm than `clip_norm` is scaled down to it; None leaves it alone.
    """

    def __init__(self, replica: Replica, clip_norm: float | None) -> None:
        self._optimizer = replica.optimizer
        self._unpenalised = replace(replica.optimizer, l2=0.0)
        self._clip_norm = clip_norm
        self._views = [slot.view(replica.flat) for slot in replica.slots]
        self._state = {name: replica.parts(name) for name in replica.state}

    def step(self, gradients: Sequence[Tensor | None], lr: float, norm: float | None = None) -> None:
        """One step with a gradient for each slot in its order; a slot without one, and its state, stay as they are.

        `norm` is the L2 norm of the gradient that these are a part of; None if they are all of it.
        """
        where = [index for index, found in enumerate(gradients) if found is not None]
        # the fused kernels read memory in order: sparse and expanded gradients are written out
        used = [found.to_dense().contiguous() for found in gradients if found is not None]
        if not used:
            return
        with torch.no_grad():
            if self._clip_norm is not None:
                # as torch.nn.utils.clip_grad_norm_; not in place, since autograd may return one tensor twice
                total = nn.utils.get_total_norm(used) if norm is None else used[0].new_tensor(norm)
                scale = torch.clamp(self._clip_norm / (total + 1e-6), max=1.0)
                used = list(torch._foreach_mul(used, scale))
            if not self._optimizer.l2:
                self._step(self._optimizer, where, used, lr)
                return
            pairs = list(zip(where, used, strict=True))
            for optimizer, weights in ((self._optimizer, True), (self._unpenalised, False)):
                group = [(index, found) for index, found in pairs if (self._views[index].dim() > 1) == weights]
                if group:
                    self._step(optimizer, [index for index, _ in group], [found for _, found in group], lr)

    def _step(self, optimizer: DenseOptimizer, where: Sequence[int], gradients: list[Tensor], lr: float) -> None:
        state = {name: [parts[index] for index in where] for name, parts in self._state.items()}
        optimizer.step([self._views[index] for index in where], gradients, state, lr)


class WorkerModule:
    """What one Hogwild worker computes with: its own graph and gradients over the replica's parameters.

    Attributes:
        module: the worker's module.
        gradients: of the loss of the last batch, one for each slot of the replica in its order; None for a
            parameter the loss did not depend on. They are not accumulated.
    """

    def __init__(
        self, replica: Replica, computing: Computing, clip_norm: float | None, seed: tuple[int, int] = (0, 0)
    ) -> None:
        self.module = copy.deepcopy(replica.module)
        replica.alias(self.module)
        for own, shared in zip(_untrained(self.module), _untrained(replica.module), strict=True):
            own.data = shared.data
        self.module.train()
        for number, layer in enumerate(layer for layer in self.module.modules() if isinstance(layer, Dropout)):
            drawn = np.random.SeedSequence([*seed, number]).generate_state(1, np.uint64)
            layer.generator = torch.Generator(replica.flat.device).manual_seed(int(drawn[0] >> 1))
        if replica.flat.device.type == "cpu":
            accelerate(self.module, parse_kernels(computing.kernels))
        self.gradients: tuple[Tensor | None, ...] = (None,) * len(replica.slots)
        self._replica = replica
        self._autocast = PRECISIONS[computing.precision]
        self._parameters = _trainable(self.module)
        self._places = [parameter.data_ptr() for parameter in self._parameters]
        self._unused: list[bool] = []
        self._stepper = Stepper(replica, clip_norm)

    def ask(self, batch: Batch) -> tuple[Jagged, LookedUp | None]:
        """The ids that `loss_and_gradients` needs the vectors of, and what it is to be told of them.

        Called in one thread at a time, which may be another than that of the steps.
        """
        return _ask(self.module, batch, training=True)

    def loss_and_gradients(
        self,
        dense: Tensor,
        pooled: Tensor,
        labels: Tensor,
        sequences: Mapping[str, JaggedVectors] = NO_SEQUENCES,
        looked_up: LookedUp | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, VectorGradients]:
        """The forward and the backward pass; `gradients` are there afterwards, and nothing has been stepped.

        `dense` and `pooled` as in `Replica.predict`; `labels` float32 `[B]` or `[B, T]`; `sequences` are the features
        that are not pooled, `looked_up` is as `ask` gave it, and `weights` are those of the samples, float32 `[B]`.

        Returns:
            The loss, 0-d; the logits, float32 as the labels; the loss's gradient by `pooled` and by the values of
            `sequences`, float32. All on the device of `pooled`.

        Raises:
            ConfigError: the module's output is not shaped as the labels, or it has put other parameters in place of
                its own.
        """
        device = self._replica.flat.device
        leaf = pooled.detach().to(device).requires_grad_()
        leaves = {name: found.to(device).leaf() for name, found in sequences.items()}
        logits = self._forward(dense.to(device), Pooled(leaf, self._replica.dims, leaves, looked_up), labels.shape)
        loss = self._replica.objective(logits, labels.to(device), None if weights is None else weights.to(device))
        vectors = [leaf, *(found.values for found in leaves.values())]
        if not all(parameter.requires_grad for parameter in self._parameters):
            raise self._swapped()
        gradients = torch.autograd.grad(loss, [*vectors, *self._parameters], allow_unused=True)
        self.gradients = gradients[len(vectors) :]
        self._check_parameters()
        home = pooled.device
        pairs = zip(vectors, gradients, strict=False)
        by_pooled, *by_sequence = [(torch.zeros_like(v) if g is None else g).to(home) for v, g in pairs]
        found_gradients = VectorGradients(by_pooled, dict(zip(leaves, by_sequence, strict=True)))
        return loss.detach().to(home), logits.detach().to(home), found_gradients

    def _check_parameters(self) -> None:
        """Raises `ConfigError` if the module computes with others than those of the replica, which nothing would train.

        One that was replaced has no gradient any more, so modules are searched only when that changes.
        """
        unused = [gradient is None for gradient in self.gradients]
        same = [parameter.data_ptr() for parameter in self._parameters] == self._places
        if same and unused == self._unused:
            return
        self._unused = unused
        now = _trainable(self.module)
        if not same or [*map(id, now)] != [*map(id, self._parameters)]:
            raise self._swapped()

    def _swapped(self) -> ConfigError:
        return ConfigError(
            f"the model {class_of(self.module)} replaces, freezes or moves parameters while it is trained, "
            "which would not be trained any more: make all of them in __init__ and change them in place "
            "(with torch.no_grad(): parameter.copy_(…))"
        )

    def step(self, lr: float) -> None:
        """Applies the optimizer to the replica in place, without a lock, with `gradients` clipped if so set; or has
        them wait for others."""
        waiting = self._replica.waiting
        gradients = self.gradients if waiting is None else waiting.add(self.gradients)
        if gradients is not None:
            self._stepper.step(gradients, lr)

    def non_finite(self) -> str | None:
        """The first parameter or buffer of the module that holds NaN or infinities, by its name."""
        for kind, tensors in (("parameter", self.module.named_parameters()), ("buffer", self.module.named_buffers())):
            for name, tensor in tensors:
                if not torch.isfinite(tensor).all():
                    return f"{kind} {name}"
        return None

    def flat_gradient(self) -> Tensor:
        """`gradients` as one tensor `[P]`, zero in the gaps and for parameters without one."""
        flat = torch.zeros_like(self._replica.flat)
        for slot, gradient in zip(self._replica.slots, self.gradients, strict=True):
            if gradient is not None:
                slot.view(flat).copy_(gradient)
        return flat

    def _forward(self, dense: Tensor, embeddings: Pooled, shape: torch.Size) -> Tensor:
        try:
            if self._autocast is None:
                logits = self.module(dense, embeddings)
            else:
                with torch.autocast(dense.device.type, self._autocast):
                    logits = self.module(dense, embeddings)
        except Exception as error:
            _explain(self.module, error)
            raise
        if not isinstance(logits, Tensor) or not (logits.requires_grad and logits.is_floating_point()):
            what = "a tensor without a gradient" if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigError(
                f"the model {class_of(self.module)} returns {what}; return logits that depend on its parameters "
                "or on the embeddings"
            )
        if logits.shape != shape:
            one = "one logit per sample"
            wanted = f"{one}, for instance with .squeeze(1)" if len(shape) == 1 else f"{one} and label, {list(shape)}"
            raise ConfigError(
                f"the model {class_of(self.module)} returns logits of shape {list(logits.shape)} for a batch of "
                f"{len(dense)} samples; return {wanted}"
            )
        floats: Tensor = logits.float()
        return floats


def _ask(module: nn.Module, batch: Batch, training: bool) -> tuple[Jagged, LookedUp | None]:
    if not isinstance(module, Wrapped):
        return batch.ids, None
    try:
        return module.ask(batch, training)
    except Exception as error:
        _explain(module, error)
        raise


def _explain(module: nn.Module, error: Exception) -> None:
    """Raises `RunError` for what code of the user's has raised, with its line; where it holds embeddings and was given
    vectors `ConfigError`, with what to do about it."""
    if isinstance(error, ShadowSyncError) or lacks_memory(error):
        return
    kinds = nn.Embedding | nn.EmbeddingBag
    inside = next((name or "an embedding" for name, child in module.named_modules() if isinstance(child, kinds)), None)
    if not isinstance(module, Wrapped) and inside is not None:
        raise ConfigError(
            f"the model {class_of(module)} is called with dense columns and the vectors of each feature, and failed "
            f"({blamed(error)}): it holds {inside}; if it looks ids up itself, or takes a KeyedJaggedTensor, give "
            "it as shadowsync.wrap(model)"
        ) from error
    if line_of(error) is not None:
        raise RunError(f"the model {class_of(module)} failed on a batch: {blamed(error)}") from error


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _untrained(module: nn.Module) -> Iterator[Tensor]:
    """What all workers share: frozen parameters and buffers."""
    frozen = (parameter for parameter in module.parameters() if not parameter.requires_grad)
    return itertools.chain(frozen, module.buffers())


def laid_out(shapes: Iterable[tuple[str, torch.Size]]) -> tuple[ParameterSlot, ...]:
    """Where parameters of these names and shapes lie in a flat tensor."""
    slots, start = [], 0
    for name, shape in shapes:
        slots.append(ParameterSlot(name, shape, start))
        start += _aligned(shape.numel())
    return tuple(slots)


def flat_length(slots: Sequence[ParameterSlot]) -> int:
    """`P` of the flat tensor with these slots."""
    return slots[-1].start + _aligned(slots[-1].numel) if slots else 0


def _layout(module: nn.Module) -> tuple[ParameterSlot, ...]:
    """The slots of a module whose tensors all have values, and whose trained parameters are float32."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(
                f"{name} of the model is on the device meta and has no values: give the module its values first, for "
                'instance with module.to_empty(device="cpu") and its own initialisation'
            )
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    for name, parameter in trained:
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"parameter {name} of the model has no shape yet: call the module once before training it"
            )
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name} of the model is {parameter.dtype}, but trained parameters are torch.float32: call "
                ".float() on the module and set train.precision=bf16 for speed, or freeze it with "
                "requires_grad_(False)"
            )
    return laid_out((name, parameter.shape) for name, parameter in trained)


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT
