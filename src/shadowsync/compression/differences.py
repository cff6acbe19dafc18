"""Averages that cross as differences: of each replica what its receivers do not have, as the codec lets it pass.

`P` dense parameters, `n` members; `w_i` the replica of member i, `v_i` what the others have of it, `r` the mean of all
`v_i`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shadowsync.compression.channel import Line
from shadowsync.compression.codec import Codec, Encoded, naming
from shadowsync.compression.rungs import received

Frames = Sequence[Tensor]


class PublicCopy:
    """One member's end of averages that cross as differences; everything is as it was until an average counts.

    `q_i = Q(w_i − v_i); v_i += q_i; r += Σ q_j / n`, after which `approach` takes replica and copy towards a target t
    that all members know: `w_i += α (t − v_i); v_i += α (t − v_i); r += α (t − r)`. With t = r that is CHOCO-SGD
    (Koloskova, Stich, Jaggi 2019, arXiv 1902.00340) on a complete graph, with γ = α and `x̂_i` for `v_i`. There copies
    move by `q_i` alone, so that the step towards the average crosses as well; here all members know it.

    What the codec leaves out, `w_i − v_i`, stays in the replica and so in the next difference, and so does what workers
    did since it was encoded; `approach` takes nothing of either away. So there is no residual beside it, `Σ w_i` is
    conserved where t = r, and a member that forgot its copy loses nothing. Where one has none, or members are others
    than those of r, vectors cross whole, and `v_i = w_i`.

    All members add up the same messages in the same order, and `approach` is made of steps that round alike on all
    processors, so that r has the same bits everywhere. It is the mean of the v_i within rounding errors, which shrink
    by 1 − α in each round.

    Args:
        codec: as configured.
        about: what messages are called in errors.
    """

    def __init__(self, codec: Codec, about: str) -> None:
        self._codec = codec.of_differences()
        self._about = about
        self._standing: _Standing | None = None

    def encode(self, vector: Tensor) -> Encoded:
        """The message that stands for the replica `[P]`, to all others; only where there is an average already.

        Raises:
            NonFiniteTensor: the replica holds NaN or infinities.
        """
        with naming(self._about):
            return self._codec.encode(vector - self._last.known, self._last.state)

    def mean(self, messages: Sequence[Frames]) -> Tensor:
        """The average `[P]` by the messages of all members, in the members' order.

        Raises:
            DataError: frames are none of the codec's.
        """
        total = torch.zeros_like(self._last.average)
        for frames in messages:
            total.add_(self._decoded(frames))
        return total.div_(len(messages)).add_(self._last.average)

    def settle(self, vector: Tensor, average: Tensor, message: Encoded | None, whole: bool) -> None:
        """The average counts.

        Args:
            vector: `[P]`, the replica as it was encoded; it is kept, and not changed.
            average: `[P]`; likewise.
            message: what was encoded for it, if anything was; thresholds that let too much pass are to notice.
            whole: vectors crossed in its place.
        """
        before = None if self._standing is None else self._standing.state
        state = before if message is None else message.state
        crossed = None if whole or message is None else message
        known = vector if crossed is None else self._last.known + self._decoded(crossed.frames)
        self._standing = _Standing(average, known, state)

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        """As `Group.approach`; once after each average."""
        last = self._last
        weights.add_((target - last.known).mul_(alpha))
        average = target if target is last.average else _nearer(last.average, target, alpha)
        self._standing = replace(last, average=average, known=_nearer(last.known, target, alpha))

    @property
    def _last(self) -> "_Standing":
        assert self._standing is not None, "the first average is of whole vectors"
        return self._standing

    def _decoded(self, frames: Frames) -> Tensor:
        shape = tuple(self._last.known.shape)
        with received("an average", self._codec):
            return self._codec.decode(frames, shape)


@dataclass(frozen=True)
class _Standing:
    """What a member has of the last average.

    Attributes:
        average: `[P]` r.
        known: `[P]` v_i.
        state: of the codec.
    """

    average: Tensor
    known: Tensor
    state: Any


def _nearer(point: Tensor, target: Tensor, alpha: float) -> Tensor:
    """`(1−α) point + α target` in single steps, exact at α = 1: one fused operation could round in a way of its own."""
    return target - (target - point).mul_(1 - alpha)


def longest(vector: Tensor) -> int:
    """Bytes of all messages together up to which they cost less than to average the vectors: each of n messages goes to
    n − 1 members, and of each vector 2 (n − 1) / n cross."""
    return 2 * vector.nbytes


def count(line: Line, vector: Tensor, members: int, crossed: Encoded | None) -> None:
    """Counts one member's part in an average: a float32 vector round the ring, or a message to each of the others."""
    raw = round(vector.nbytes * 2 * (members - 1) / members)
    if crossed is None:
        line.count(raw, raw)
        return
    line.count(crossed.byte_count * (members - 1), raw)
    if line.codec.sparse:
        line.count_kept(vector.numel(), crossed.kept_count, crossed.refreshes, crossed.early)
