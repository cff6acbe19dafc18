"""Only large elements cross: dynamic communication thresholding (DCT)."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.codec import Codec, Decoded, Encoded, NotFinite, as_numbers, nothing
from shadowsync.compression.low_bit import NEAREST, ROUNDING, Block, Draws, Int4, Int8, LowBit, Rounding, Seed
from shadowsync.compression.plain import Plain
from shadowsync.compression.positions import (
    LEAST,
    Bits,
    Positions,
    check_groups,
    exact_floors,
    pack,
    reach,
    unpack,
)
from shadowsync.errors import ConfigError

SMALL = 256
"""Tensors of fewer elements cross whole."""
KEEP_FED_BACK, KEEP_AT_THE_CUT = 0.01, 0.2
"""`keep` where nothing is given, for the dense part, and for pulls and pushes."""
SETTLING = 8
"""Messages over which the kept share is averaged, and that an early refresh waits for after the last refresh."""
FURTHEST = 3.0
"""A share that is further above what was asked for, in multiples of it, corrects τ no more than this does."""
_LARGEST = 0x7F7FFFFF
"""The bits of the largest finite number."""
_COUNTS, _SHARES = ("age", "pause", "refreshes", "early"), ("share", "reached", "keep")
_NEEDED = {"age", "share", "refreshes", "early"}
_ALLOWED = {*_COUNTS, *_SHARES, "floors", "residual"}
_VALUES = "values."

Values = Literal["fp32", "bf16", "int8", "int4"]
Select = Literal["largest", "significant"]


@dataclass(frozen=True)
class ThresholdState:
    """What a stream remembers.

    Attributes:
        floors: `[G]` bits (int32) of the thresholds of the groups; None before the first selection.
        residual: `[N]` what has not been sent yet, if anything.
        spare: memory of an earlier residual, to be overwritten.
        age: messages since the last selection.
        share: of the elements that cross, a running mean since then.
        reached: share that the last selection let pass: more than was asked for where magnitudes are equal, less where
            there are zeros.
        pause: messages before a selection that let too much pass is tried again.
        keep: share that the last selection was asked for.
        refreshes: selections so far.
        early: those of them that came early, because the share had left its band.
        draws: what the codec of the values remembers.
    """

    floors: Bits | None = None
    residual: Tensor | None = None
    spare: Tensor | None = None
    age: int = 0
    share: float = 0.0
    reached: float = 0.0
    pause: int = 0
    keep: float = 0.0
    refreshes: int = 0
    early: int = 0
    draws: Draws | None = None

    def tensors(self) -> dict[str, Tensor]:
        found = {name: torch.tensor(getattr(self, name)) for name in _COUNTS}
        found |= {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in _SHARES}
        if self.floors is not None:
            found["floors"] = torch.from_numpy(self.floors.copy())
        if self.residual is not None:
            found["residual"] = self.residual.clone()
        inner = {} if self.draws is None else self.draws.tensors()
        return found | {_VALUES + name: tensor for name, tensor in inner.items()}


@dataclass(frozen=True)
class Threshold(Codec):
    """`w = g + e`, send `w` where `|w| ≥ τ`, keep the rest as the next `e`: dynamic communication thresholding
    (DCT, arXiv 2010.08899), DCT-DP with feedback and DCT-MP without.

    Every `refresh` messages τ is the exact quantile of `|w|` that keeps the share asked for; in between an element
    costs one comparison. Tensors of fewer than 256 elements cross whole. What was sent and what is left add up to what
    was given: bit for bit with fp32 values, and with fewer bits what they round off is left too.

    Ours differs: with a τ that stays, the real share drifts (with feedback what was not sent piles up, so that many
    times the share may cross). So τ is corrected after each message, `τ *= exp(correction (s / keep − 1))` with s a
    running mean of the share: on average that rests where s is `keep`. And τ is chosen anew early where s leaves a band
    around `keep`, or before a single message would let far more pass; but not again and again where no τ can reach the
    share, because most elements are zero or equal. Groups of columns may have a τ each, corrected together. A zero is
    not sent unless everything is. Equal magnitudes cross together or not at all. How positions cross is `positions`'
    affair.

    `select: significant` is Gaia's filter in place of τ (Hsieh et al., NSDI 2017): of what has changed since it was
    sent, crosses what has done so by at least v of the value that the receiver has; v is `significance` times the
    learning rate as a share of the full one. How much crosses is then what training makes of it, and what stays below v
    never does. In Gaia v falls with the root of the number of steps, as the learning rate does there.
    """

    name: ClassVar[str] = "threshold"
    sparse: ClassVar[bool] = True
    selecting: ClassVar[frozenset[str]] = frozenset(
        {"select", "significance", "keep", "refresh", "band", "correction", "feedback", "scope"}
    )

    keep: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="share of the elements that cross; more loses less. null: "
            f"{KEEP_FED_BACK} for dense, where the rest is sent later; {KEEP_AT_THE_CUT} for pull and push, where it "
            "is lost",
        ),
    ] = None
    select: Annotated[
        Select,
        Field(
            description="the share `keep` of the largest, or for replicas that are merged (dense) what has changed by "
            "`significance` of its value"
        ),
    ] = "largest"
    significance: Annotated[
        float,
        Field(
            gt=0,
            le=100,
            description="of select=significant: change over value (v) from which on an element crosses, at the full "
            "learning rate; less sends more",
        ),
    ] = 0.01
    refresh: Annotated[
        int,
        Field(ge=1, description="messages (L) from one exact selection to the next; more is quicker and drifts more"),
    ] = 1000
    band: Annotated[
        float,
        Field(
            ge=1,
            allow_inf_nan=False,
            description="factor by which the mean share may leave keep before τ is chosen anew, and its square that of "
            "a single message; 1e9 with correction=0 leaves τ alone, as the paper does",
        ),
    ] = 2.0
    correction: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="how strongly the share that crossed moves τ from message to message; more is back at keep "
            "sooner and swings more, 0 leaves τ as it was chosen",
        ),
    ] = 0.05
    values: Annotated[Values, Field(description="how elements cross; fewer bits cost fewer bytes and round")] = "fp32"
    feedback: Annotated[
        bool | None,
        Field(description="what is not sent is added to the next message; null: for dense, not for pull and push"),
    ] = None
    scope: Annotated[
        Literal["tensor", "group"], Field(description="one threshold, or one for each group of columns (feature)")
    ] = "tensor"
    rounding: Rounding = "nearest"
    seed: Seed = 0
    block: Block = None

    def resolved(self, key: str) -> Self:
        if key == "compression.dense":
            if self.scope == "group":
                raise ConfigError(f"{key}.scope=group has no meaning: every parameter has a threshold; leave it out")
            return replace(self, keep=self.asked, feedback=self.feedback is not False)
        if self.feedback:
            raise ConfigError(
                f"{key}.feedback=true has no meaning: a position stands for another sample in each "
                "message; leave it out"
            )
        if self.by_known:
            raise ConfigError(
                f"{key}.select=significant has no meaning: nobody has an earlier value of what crosses there; "
                "leave it out"
            )
        return replace(self, keep=KEEP_AT_THE_CUT if self.keep is None else self.keep, feedback=False)

    @property
    def asked(self) -> float:
        return KEEP_FED_BACK if self.keep is None else self.keep

    @property
    def everything(self) -> bool:
        return self.keep == 1 and self.values == "fp32" and not self.by_known

    @property
    def by_known(self) -> bool:
        return self.select == "significant"

    def of_differences(self) -> Codec:
        return replace(self, feedback=False)

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.values in ("fp32", "bf16"):
            why = f"with values={self.values}: set values=int8 or int4"
            yield from ((option, why) for option in ROUNDING)
        if self.rounding == "nearest":
            yield "seed", NEAREST
        if self.by_known:
            why = "with select=significant: set select=largest"
            yield from ((option, why) for option in ("keep", "refresh", "band", "correction"))
            return
        yield "significance", "with select=largest: set select=significant, where replicas are merged"
        if self.keep == 1:
            why = "with keep=1, where everything crosses: set a smaller keep"
            yield from ((option, why) for option in ("refresh", "band", "correction", "scope"))
        if self.refresh == 1:
            why = "with refresh=1, where every message has a threshold of its own: set a larger refresh"
            yield from ((option, why) for option in ("band", "correction"))
        if self.everything:
            yield "feedback", "with keep=1 and values=fp32, where nothing is left: set a smaller keep"

    @property
    def by_feature(self) -> bool:
        return self.scope == "group"

    @functools.cached_property
    def value_codec(self) -> Codec:
        if self.values in ("int8", "int4"):
            return (Int8 if self.values == "int8" else Int4)(self.rounding, self.seed, self.block)
        return Bf16() if self.values == "bf16" else Plain()

    def encode(self, tensor: Tensor, state: ThresholdState | None = None, groups: Sequence[int] = ()) -> Encoded:
        before, shape = state or ThresholdState(), tuple(tensor.shape)
        check_groups(groups, shape)
        if not tensor.numel():
            return Encoded((), shape, before)
        total = self._total(as_numbers(tensor).view(-1), before)
        kept, chosen = self._select(total, before, tuple(groups) if self.scope == "group" else ())
        return self._message(tensor, total, kept, before, chosen, groups)

    def encode_change(self, change: Tensor, known: Tensor, rate: float, state: ThresholdState | None = None) -> Encoded:
        if not self.by_known or change.numel() < SMALL:
            return self.encode(change, state)
        before, total = state or ThresholdState(), as_numbers(change).view(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            least = as_numbers(known).view(-1).numpy() * np.float32(self.significance * rate)
        floors = np.maximum(np.abs(least, out=least).view(np.int32), LEAST)
        kept = reach(total.numpy(), floors)
        return self._message(change, total, kept, before, before)

    def _message(
        self,
        tensor: Tensor,
        total: Tensor,
        kept: Positions | None,
        before: ThresholdState,
        chosen: ThresholdState,
        groups: Sequence[int] = (),
    ) -> Encoded:
        """The elements of the total at `kept`; `chosen` is the state with what selecting them changed in it."""
        shape = tuple(tensor.shape)
        if kept is not None and len(kept) == len(total):
            kept = None
        sent = total if kept is None else torch.from_numpy(total.numpy().take(kept))
        if not bool(np.isfinite(sent.numpy()).all()):
            raise NotFinite(total.view(shape))
        if kept is None:
            positions, values = None, self.value_codec.encode(sent.view(shape), before.draws, groups)
            frames = (torch.empty(0, dtype=torch.uint8), *values.frames)
        else:
            positions, values = torch.from_numpy(kept), self.value_codec.encode(sent, before.draws)
            frames = (pack(kept, len(total)), *values.frames) if len(kept) else ()
        after = self._left(chosen, tensor, total, positions, values)
        refreshes, early = after.refreshes - before.refreshes, after.early - before.early
        return Encoded(frames, shape, after, positions, refreshes, early)

    def decode(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        return self.decode_kept(frames, shape).tensor

    def decode_kept(self, frames: Sequence[Tensor], shape: tuple[int, ...]) -> Decoded:
        if not frames:
            return Decoded(nothing(shape), torch.empty(0, dtype=torch.int64) if math.prod(shape) else None)
        kept = unpack(frames[0], math.prod(shape))
        positions = None if kept is None else torch.from_numpy(kept)
        return Decoded(self.value_codec.decode_under(frames[1:], shape, positions), positions)

    def encode_under(self, tensor: Tensor, kept: Tensor | None, state: Draws | None = None) -> Encoded:
        encoded = self.value_codec.encode_under(tensor, kept, state)
        if kept is None and not bool(tensor.isfinite().all()):
            raise NotFinite(tensor)
        return encoded

    def decode_under(self, frames: Sequence[Tensor], shape: tuple[int, ...], kept: Tensor | None) -> Tensor:
        return self.value_codec.decode_under(frames, shape, kept)

    def thresholds(self, state: ThresholdState) -> Tensor | None:
        return None if state.floors is None else torch.from_numpy(state.floors.view(np.float32))

    def restored(self, tensors: Mapping[str, Tensor]) -> ThresholdState | None:
        if not tensors:
            return None
        inner = {name.removeprefix(_VALUES): tensors[name] for name in tensors if name.startswith(_VALUES)}
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(_VALUES)}
        if not _NEEDED <= own.keys() <= _ALLOWED:
            raise ValueError(f"threshold remembers floors, a residual and counts, but got {', '.join(sorted(tensors))}")
        draws = self.value_codec.restored(inner) if isinstance(self.value_codec, LowBit) else None
        floors, residual = _row(own, "floors", torch.int32), _row(own, "residual", torch.float32)
        counts: Any = {name: int(_number(own[name], name)) for name in _COUNTS if name in own}
        shares: Any = {name: _number(own[name], name) for name in _SHARES if name in own}
        return ThresholdState(None if floors is None else floors.numpy(), residual, draws=draws, **counts, **shares)

    def _total(self, flat: Tensor, before: ThresholdState) -> Tensor:
        """`g + e`, in the spare memory; `g` itself where nothing is left from before."""
        if before.residual is None or self.feedback is False:
            return flat
        if len(before.residual) != len(flat):
            raise ValueError(
                f"a stream with feedback carries tensors of one size, but {len(flat):,} elements came after "
                f"{len(before.residual):,}"
            )
        return torch.add(flat, before.residual, out=_memory(before, flat))

    def _select(
        self, total: Tensor, before: ThresholdState, groups: tuple[int, ...]
    ) -> tuple[Positions | None, ThresholdState]:
        """The positions that cross, None for all of them; and the state with what the selection changes in it."""
        count, flat = len(total), total.numpy()
        if self.keep == 1 or count < SMALL or self.by_known:
            return None, replace(before, age=before.age + 1)
        asked = max(self.asked, 1 / count)
        other = before.keep != self.asked or before.floors is None or len(before.floors) != max(1, len(groups))
        due = other or before.age >= self.refresh
        fresh = due or self._drifted(before, asked)
        floors = exact_floors(flat, self.asked, groups) if fresh else self._corrected(before, asked)
        kept = reach(flat, floors, groups)
        # so much more than was asked for would cross that it is no chance, nor magnitudes that are equal
        bursts = before.reached <= asked * self.band and len(kept) > asked * count * self.band**2 + SETTLING
        if not fresh and bursts:
            fresh, floors = True, exact_floors(flat, self.asked, groups)
            kept = reach(flat, floors, groups)
        share = len(kept) / count
        if fresh:
            pause = min(max(1, 2 * before.pause), self.refresh) if share > asked * self.band else 0
            after = replace(before, age=1, share=share, reached=share, pause=pause, keep=self.asked)
            after = replace(after, refreshes=before.refreshes + 1, early=before.early + (not due))
        else:
            after = replace(before, age=before.age + 1, share=before.share + (share - before.share) / SETTLING)
        return kept, replace(after, floors=floors)

    def _drifted(self, before: ThresholdState, asked: float) -> bool:
        """The mean share has left its band, and a selection can be expected to bring it back."""
        if before.reached > asked * self.band:
            return before.age >= before.pause
        low = before.share * self.band < asked <= before.reached * self.band
        return before.age >= SETTLING and (low or before.share > asked * self.band)

    def _corrected(self, before: ThresholdState, asked: float) -> Bits:
        """The thresholds after what the last message said; they stay where magnitudes are equal."""
        assert before.floors is not None, "a selection is due where there is none"
        if self.correction == 0 or before.reached > asked * self.band:
            return before.floors
        factor = math.exp(self.correction * min(FURTHEST, before.share / asked - 1))
        with np.errstate(over="ignore"):
            moved = (before.floors.view(np.float32) * np.float32(factor)).view(np.int32)
        return np.clip(moved, LEAST, _LARGEST)

    def _left(
        self, after: ThresholdState, given: Tensor, total: Tensor, kept: Tensor | None, values: Encoded
    ) -> ThresholdState:
        """The state with what `values` leave of the total."""
        if self.feedback is False or self.by_known:
            return replace(after, residual=None, spare=None, draws=values.state)
        codec = self.value_codec
        if kept is None:
            rest = None if codec.exact else total - codec.decode(values.frames, values.shape).view(-1)
        else:
            rest = _memory(after, total).copy_(total) if total.data_ptr() == given.data_ptr() else total
            sent = codec.decode(values.frames, values.shape)
            rest[kept] = torch.zeros(()) if codec.exact else total[kept] - sent
        return replace(after, residual=rest, spare=after.residual, draws=values.state)


def _number(tensor: Tensor, name: str) -> float:
    number = float(tensor) if tensor.numel() == 1 else math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} is {tensor.tolist() if tensor.numel() < SETTLING else list(tensor.shape)}")
    return number


def _row(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor | None:
    """A copy of a tensor of one dimension."""
    tensor = tensors.get(name)
    if tensor is None:
        return None
    if tensor.dim() != 1 or not len(tensor) or tensor.dtype != dtype:
        raise ValueError(f"{name} are {tensor.dtype} {list(tensor.shape)}, not a row of {dtype}")
    return tensor.clone()


def _memory(before: ThresholdState, like: Tensor) -> Tensor:
    """Memory for a residual: that of the one before the last, where it fits, because new memory is slow to touch."""
    spare = before.spare
    return spare if spare is not None and len(spare) == len(like) else torch.empty_like(like)
