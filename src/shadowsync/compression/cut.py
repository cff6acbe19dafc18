"""A cut through a model of one's own: what crosses it, forward and backward, passes a codec and is counted."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from shadowsync.compression.codec import Codec, in_vain, naming
from shadowsync.errors import ConfigError, NonFiniteTensor
from shadowsync.registry import build, choose, split_options

FP32 = 4
"""Bytes."""


class CompressedCut(nn.Module):
    """Stands between two stages of a model as a network would: DCT-MP (arXiv 2010.08899) with `codec="threshold"`.

        model = nn.Sequential(bottom, CompressedCut(keep=0.05, values="int8"), top)

    Forward, activations X become X·M as the other side would see them; M holds the elements that the codec keeps (for
    `threshold` those of magnitude τ and more, chosen exactly every `refresh` batches). Backward, the gradient becomes
    grad·M, so that its positions need not cross again. Nothing is made up for later: an activation's error belongs to
    one sample. Without a mask (`bf16`, `int8`, `int4`) both ways are merely rounded, and the gradient passes straight
    through. What the wire would carry is counted; nothing is sent.

    In eval mode what is below τ of the last training batch is zero too, as the layers behind have learnt from so few
    elements, and would take all of them for a far larger sum; a prediction hangs on its own sample alone, so that
    values are not rounded, and τ and counts stay. τ is a buffer, in the `state_dict`; one from before it was saved is
    loaded as 0, nothing chosen. A module that is loaded into begins training with an exact choice. In training mode
    tensors are compressed under `torch.no_grad()` too. They may have any shape, and batches any size. One module
    belongs to one thread.

    Args:
        codec: a codec by name: `threshold`, `int8`, `int4`, `bf16`, `plain`.
        groups: widths of the groups of columns (features) in the last dimension, for `scope="group"`, and for `int8`
            and `int4`, which then have a scale for each.
        label: what the cut is called in errors.
        options: of the codec, as under `compression` in the configuration.

    Attributes:
        forward_bytes, backward_bytes: sent so far in each direction.
        raw_bytes: what both would have been in fp32.
        kept_share: of the elements of the last batch that crossed.
        later_buffers: that earlier versions did not save.
        tau: magnitude from which on elements pass in eval mode, 0 before any was chosen; `[C]` for C columns in groups,
            None for codecs without a mask.

    Raises:
        ConfigError: there is no such codec or option, or groups that it has no use for.
    """

    later_buffers: ClassVar[tuple[str, ...]] = ("tau",)

    def __init__(
        self, codec: str = "threshold", *, groups: Sequence[int] = (), label: str = "the cut", **options: Any
    ) -> None:
        super().__init__()
        member = choose("codec", str(codec), "shadowsync.compression", Codec)
        (own,) = split_options("codec", options, {f"codec={codec}": member})
        self.codec = build(member, own, "codec").resolved("codec")
        for _, told in in_vain("codec", self.codec, own, self.codec.unused()):
            raise ConfigError(told)
        self.groups, self.label = _widths(groups, self.codec), label
        self.forward_bytes = self.backward_bytes = self.raw_bytes = 0
        self.kept_share = 1.0
        self._state: Any = None
        self._way_back: Any = None
        self.tau: Tensor | None
        tau = torch.zeros((sum(self.groups),) if self.groups else ())
        self.register_buffer("tau", tau if self.codec.sparse else None)

    def forward(self, activations: Tensor) -> Tensor:
        """`activations`, of any shape and floating type, as they arrive at the other side; in eval mode unrounded.

        Under `torch.compile` it runs as it is, between two graphs.

        Raises:
            NonFiniteTensor: they, or in the backward pass their gradient, hold NaN or infinities where they would cross
                (`plain` and `bf16` carry those), or numbers that float32 cannot hold.
            TypeError: they are no floating-point numbers.
        """
        if self.training:
            return self._cross(activations)
        return activations if self.tau is None else torch.where(activations.abs() < self.tau, 0, activations)

    @_disable_dynamo  # as torch.compiler.disable, which would load all of dynamo together with this file
    def _cross(self, activations: Tensor) -> Tensor:
        if not activations.is_floating_point():
            raise TypeError(f"{self.label} takes floating-point numbers, not {activations.dtype}")
        crossed: Tensor = _Cross.apply(activations, self)  # type: ignore[no-untyped-call]
        return crossed

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *given: Any) -> None:
        if self.tau is not None:
            none = torch.zeros_like(self.tau, device="cpu" if self.tau.is_meta else None)
            state_dict.setdefault(f"{prefix}tau", none)
        self._state = self._way_back = None
        super()._load_from_state_dict(state_dict, prefix, *given)

    def extra_repr(self) -> str:
        return f"{self.codec}" + (f", groups={self.groups}" if self.groups else "")

    def send(self, activations: Tensor) -> tuple[Tensor, Tensor | None]:
        """What arrives of the activations, and the positions that crossed."""
        with naming(about := f"the activations at {self.label}"):
            activations = _single(activations, about)
            encoded = self.codec.encode(activations, self._state, self.groups)
        self._state = encoded.state
        if self.tau is not None and (floors := self.codec.thresholds(encoded.state)) is not None:
            self.tau.copy_(floors.repeat_interleave(torch.tensor(self.groups)) if self.groups else floors[0])
        self.forward_bytes += encoded.byte_count
        self.raw_bytes += FP32 * activations.numel()
        self.kept_share = 1.0 if encoded.kept is None else len(encoded.kept) / activations.numel()
        return self.codec.decode(encoded.frames, encoded.shape), encoded.kept

    def send_back(self, gradient: Tensor, kept: Tensor | None) -> Tensor:
        """What arrives of the gradient under the mask of its activations."""
        with naming(about := f"the gradient at {self.label}"):
            gradient = _single(gradient, about)
            if kept is None and not self.codec.sparse:
                encoded = self.codec.encode(gradient, self._way_back, self.groups)
            else:
                encoded = self.codec.encode_under(gradient, kept, self._way_back)
        self._way_back = encoded.state
        self.backward_bytes += encoded.byte_count
        self.raw_bytes += FP32 * gradient.numel()
        return self.codec.decode_under(encoded.frames, encoded.shape, kept)


class _Cross(torch.autograd.Function):
    """The way there, and the way back under the same mask."""

    @staticmethod
    def forward(ctx: Any, activations: Tensor, cut: CompressedCut) -> Tensor:
        arrived, ctx.kept = cut.send(activations.detach())
        ctx.cut = cut
        return _like(arrived, activations)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _like(ctx.cut.send_back(gradient, ctx.kept), gradient), None


def _like(arrived: Tensor, tensor: Tensor) -> Tensor:
    """In the type and on the device of another tensor; rounding up does not lead out of a narrower type."""
    largest = torch.finfo(tensor.dtype).max
    if largest < torch.finfo(torch.float32).max:
        arrived = torch.where(arrived.isinf(), arrived, arrived.clamp(-largest, largest))
    return arrived.to(tensor, copy=True)


def _widths(groups: Sequence[int], codec: Codec) -> tuple[int, ...]:
    """The groups, checked."""
    if isinstance(groups, str) or not isinstance(groups, Sequence):
        raise ConfigError(f"groups={groups} are no widths of columns: give whole numbers, for instance groups=(16, 16)")
    if wrong := [width for width in groups if isinstance(width, bool) or not isinstance(width, int) or width < 1]:
        raise ConfigError(f"groups: a width is a whole number from 1 on, not {wrong[0]!r}")
    if groups and not codec.by_feature:
        raise ConfigError(
            f"groups have no effect with codec={codec.name} here, but with threshold and scope=group, or with int8 and "
            "int4 without block: leave them out"
        )
    if getattr(codec, "scope", None) == "group" and not groups:
        raise ConfigError("codec.scope=group has no effect without groups, the widths of the groups: give them")
    return tuple(groups)


def _single(tensor: Tensor, about: str) -> Tensor:
    """In float32 and main memory."""
    single = tensor.to("cpu", torch.float32)
    if tensor.dtype == torch.float64 and not bool((single.isfinite() == tensor.cpu().isfinite()).all()):
        raise NonFiniteTensor(f"{about} cannot be sent: {float(tensor.abs().max()):g} is beyond the range of float32")
    return single
