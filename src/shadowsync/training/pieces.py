"""A flat tensor of `N` elements whose `Q` pieces, the parameters of a model, are encoded one by one."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from shadowsync.compression.codec import Codec, Decoded, Encoded, NotFinite, as_numbers
from shadowsync.errors import ConfigError
from shadowsync.training.replica import ParameterSlot

MOST = 300
"""Pieces; each takes up to three frames of a message."""


@dataclass(frozen=True)
class PiecesState:
    """What the codec remembers of each piece."""

    states: tuple[Any, ...]

    def tensors(self) -> dict[str, Tensor]:
        kept = {index: state.tensors() for index, state in enumerate(self.states) if state is not None}
        return {f"{index}.{name}": tensor for index, tensors in kept.items() for name, tensor in tensors.items()}


def renumbered(tensors: Mapping[str, Tensor], numbers: Mapping[int, int]) -> dict[str, Tensor]:
    """What `PiecesState.tensors` gave, with other numbers for the pieces; those that get none are left out.

    What another codec's state gave has no numbers, and stays as it is.
    """
    found = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        if not (name and index.isdigit()):
            found[key] = tensor
        elif int(index) in numbers:
            found[f"{numbers[int(index)]}.{name}"] = tensor
    return found


@dataclass(frozen=True)
class Pieces(Codec):
    """Each piece has a threshold, a drift and a residual of its own, as DCT-DP has it (arXiv 2010.08899).

    No member that can be chosen by name: it goes by that of the codec. The names of the pieces are for errors.
    """

    sparse: ClassVar[bool] = True

    codec: Codec
    names: tuple[str, ...]
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.codec.name)

    def encode(self, tensor: Tensor, state: PiecesState | None = None, groups: Sequence[int] = ()) -> Encoded:
        return self._encode([(part,) for part in self._split(tensor)], tensor, state, self.codec.encode)

    def encode_change(self, change: Tensor, known: Tensor, rate: float, state: PiecesState | None = None) -> Encoded:
        parts = zip(self._split(change), self._split(known), itertools.repeat(rate), strict=False)
        return self._encode(parts, change, state, self.codec.encode_change)

    def _split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return as_numbers(tensor).view(-1).split_with_sizes(list(self.widths))

    def _encode(
        self,
        parts: Iterable[tuple[Any, ...]],
        tensor: Tensor,
        state: PiecesState | None,
        encode: Callable[..., Encoded],
    ) -> Encoded:
        """`encode` gets what `parts` has of each piece, and its state."""
        states = (None,) * len(self.widths) if state is None else state.states
        each = []
        for name, part, before in zip(self.names, parts, states, strict=True):
            try:
                each.append(encode(*part, before))
            except NotFinite as error:
                raise NotFinite(error.tensor, f" of {name}") from None
        counts = torch.tensor([len(encoded.frames) for encoded in each], dtype=torch.uint8)
        return Encoded(
            (counts, *(frame for encoded in each for frame in encoded.frames)),
            tuple(tensor.shape),
            PiecesState(tuple(encoded.state for encoded in each)),
            self._joined([encoded.kept for encoded in each]),
            sum(encoded.refreshes for encoded in each),
            sum(encoded.early for encoded in each),
        )

    def decode(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        return self.decode_kept(frames, shape).tensor

    def decode_kept(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Decoded:
        counts, rest = frames[0], frames[1:]
        if counts.dtype != torch.uint8 or counts.shape != (len(self.widths),) or int(counts.sum()) != len(rest):
            raise ValueError(f"{len(rest)} frames for {len(self.widths)} pieces are counted by {list(counts.shape)}")
        left = iter(rest)
        decoded = [
            self.codec.decode_kept(list(itertools.islice(left, count)), (width,))
            for count, width in zip(counts.tolist(), self.widths, strict=True)
        ]
        return Decoded(
            torch.cat([part.tensor for part in decoded]).view(shape), self._joined([p.kept for p in decoded])
        )

    @property
    def everything(self) -> bool:
        return self.codec.everything

    @property
    def by_known(self) -> bool:
        return self.codec.by_known

    def of_differences(self) -> Codec:
        return replace(self, codec=self.codec.of_differences())

    def restored(self, tensors: Mapping[str, Tensor]) -> PiecesState | None:
        if not tensors:
            return None
        own: list[dict[str, Tensor]] = [{} for _ in self.widths]
        for key, tensor in tensors.items():
            index, _, name = key.partition(".")
            if not index.isdigit() or int(index) >= len(own):
                raise ValueError(f"{key} belongs to none of {len(own)} parameters")
            own[int(index)][name] = tensor
        for name, width, kept in zip(self.names, self.widths, own, strict=True):
            if "residual" in kept and kept["residual"].shape != (width,):
                raise ValueError(f"the residual of {name} has {kept['residual'].numel()} elements, not {width}")
        return PiecesState(tuple(self.codec.restored(kept) for kept in own))

    def _joined(self, kept: Sequence[Tensor | None]) -> Tensor | None:
        if all(positions is None for positions in kept):
            return None
        starts = itertools.accumulate(self.widths, initial=0)
        parts = [
            torch.arange(start, start + width) if positions is None else positions + start
            for positions, start, width in zip(kept, starts, self.widths, strict=False)
        ]
        return torch.cat(parts)


def by_parameter(codec: Codec, slots: Sequence[ParameterSlot], length: int) -> Codec:
    """The codec of a replica's flat tensors: a sparse one looks at each parameter apart, with the gap behind it.

    Raises:
        ConfigError: there are too many parameters.
    """
    if not codec.sparse or not slots:
        return codec
    if len(slots) > MOST:
        raise ConfigError(
            f"compression.dense={codec.name} takes a model of at most {MOST} parameters, and this one has "
            f"{len(slots)}: set compression.dense=int8"
        )
    ends = [*(slot.start for slot in slots[1:]), length]
    return Pieces(
        codec, tuple(slot.name for slot in slots), tuple(e - s.start for s, e in zip(slots, ends, strict=True))
    )
