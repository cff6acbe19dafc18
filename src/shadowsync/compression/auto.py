"""The weakest codec that keeps the network off the critical path, found while a job runs (`compression.choice`)."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.codec import Codec, Encoded
from shadowsync.compression.low_bit import NEAREST, ROUNDING, Block, Int4, Int8, Rounding, Seed
from shadowsync.compression.plain import Plain
from shadowsync.compression.threshold import Threshold
from shadowsync.config import LONGEST_S
from shadowsync.errors import ConfigError

OVERLAPPED, IN_LINE = 0.8, 0.1
"""`share` where pulls are prefetched, and where a step waits for its pull."""
_KEEP = 0.05
_ORDER = ("plain", "bf16", "int8", "int4", "threshold")
_Weakest = Literal["plain", "bf16", "int8", "int4"]
_Strongest = Literal["bf16", "int8", "int4", "threshold"]


@dataclass(frozen=True)
class Auto(Codec):
    """Each trainer measures its link and its steps, and sends in the weakest codec of those (`plain`, `bf16`,
    `int8`, `int4`, and where `strongest` says so `threshold`) with which the network is busy for less than `share` of
    the time that it computes. Where nothing can be measured it is `weakest`: in one process nothing is sent.

    Messages say which of these they are in, so that both ends need not agree on anything else; the codec of
    a pull's answer is the one that was asked for.
    """

    name: ClassVar[str] = "auto"

    weakest: Annotated[_Weakest, Field(description="what it starts with; a stronger one always rounds")] = "plain"
    strongest: Annotated[
        _Strongest, Field(description="the last resort; threshold drops what is small, for pull and push")
    ] = "int4"
    share: Annotated[
        float | None,
        Field(
            gt=0,
            le=10,
            description="seconds that the network may be busy in each second of computing; more compresses less. null: "
            f"{OVERLAPPED} where pulls are prefetched, {IN_LINE} where each step waits for its pull",
        ),
    ] = None
    stay_s: Annotated[
        float,
        Field(
            ge=0,
            le=LONGEST_S,
            allow_inf_nan=False,
            description="least seconds between two changes; more follows later and flaps less",
        ),
    ] = 5.0
    keep: Annotated[
        float | None, Field(gt=0, le=1, description=f"of threshold, with values in int8; null is {_KEEP}")
    ] = None
    rounding: Rounding = "nearest"
    seed: Seed = 0
    block: Block = None

    def __post_init__(self) -> None:
        if _ORDER.index(self.weakest) >= _ORDER.index(self.strongest):
            raise ValueError(
                f"weakest={self.weakest} has to come before strongest={self.strongest} among {', '.join(_ORDER)}"
            )

    @functools.cached_property
    def levels(self) -> tuple[Codec, ...]:
        rounding, seed, block = self.rounding, self.seed, self.block
        every: tuple[Codec, ...] = (
            Plain(),
            Bf16(),
            Int8(rounding, seed, block),
            Int4(rounding, seed, block),
            Threshold(self.keep or _KEEP, values="int8", feedback=False, rounding=rounding, seed=seed, block=block),
        )
        return every[_ORDER.index(self.weakest) : _ORDER.index(self.strongest) + 1]

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.strongest == "bf16":
            yield from ((option, "with strongest=bf16: set strongest=int8 or int4") for option in ROUNDING)
        if self.rounding == "nearest":
            yield "seed", NEAREST
        if self.strongest != "threshold":
            yield "keep", f"with strongest={self.strongest}: set strongest=threshold"

    @property
    def by_feature(self) -> bool:
        return self.levels[0].by_feature

    def encode(self, tensor: Tensor, state: Any = None, groups: Sequence[int] = ()) -> Encoded:
        return self.levels[0].encode(tensor, state, groups)

    def decode(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        return self.levels[0].decode(frames, shape)

    def restored(self, tensors: Mapping[str, Tensor]) -> Any:
        return self.levels[0].restored(tensors)

    def resolved(self, key: str) -> Self:
        if not key.startswith("compression."):
            raise ConfigError(f"{key}=auto has nothing to measure there; allowed: {', '.join(_ORDER)}")
        if key == "compression.dense" and self.strongest == "threshold":
            raise ConfigError(
                f"{key}.strongest=threshold cannot be chosen by auto: what a threshold holds back would come late, or "
                f"not at all, when the codec changes; allowed: bf16, int8, int4, or {key}=threshold by itself"
            )
        return self
