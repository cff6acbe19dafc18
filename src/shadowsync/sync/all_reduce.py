"""How the vectors of trainers are averaged: whole or as differences, in one process or among several.

`P` dense parameters, `n` members of an average; `w_i` the replica of member i, `v_i` what the average has of it, `r`
the mean of all `v_i`.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shadowsync.compression.channel import Channel
from shadowsync.compression.codec import Codec, Encoded, Rate, full_rate, naming, received
from shadowsync.compression.plain import Plain
from shadowsync.compression.wire import WireCounter
from shadowsync.errors import RunError
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.errors import GONE, CallTimeout
from shadowsync.rpc.pending import Pending, ended
from shadowsync.rpc.served import Client, ask, later
from shadowsync.rpc.tensors import bundle, bundle_length, unbundle
from shadowsync.sync.averaging import AveragingService, LastAverages, Phase, Verdict
from shadowsync.sync.machine import Neighbours, ReplicaMemory
from shadowsync.sync.meeting import EVERYBODY, Meeting
from shadowsync.sync.rendezvous import Left, Rendezvous

_LOG = logging.getLogger(__name__)
_SELF = Client("")
"""Stands for this trainer; the service knows by itself who asks."""
SLICE_S = 0.2
"""How often a wait for an answer looks whether the trainer has left."""
LEAVING_S = 2.0
"""How long a trainer that has left still waits for the end of a round that had started."""
CHECK_S = 0.25
"""How often a reduction that does not end asks whether somebody has died."""
GIVE_UP_S = 120.0
"""An average that keeps failing for so long ends the trainer."""
QUESTION_CPU_S = 2e-4
"""What a question to the driver costs in other threads than the caller's, both ends together: a guess, from what
messages cost elsewhere; not measured."""
RING_CPU_S_PER_BYTE = 1e-9
"""What a byte that crosses in a ring costs there, both ends together: a guess, a third of what one of an exchange costs
with its encryption; not measured."""


@dataclass(frozen=True)
class Board:
    """How the members of a ring tell each other where they listen: by the driver's notes for that epoch."""

    connection: Connection
    rank: int
    epoch: int

    def pin(self, key: str, value: bytes) -> None:
        ask(self.connection, AveragingService.note, _SELF, self.rank, self.epoch, key, value)

    def read(self, keys: Sequence[str]) -> tuple[bytes, ...]:
        """Waits until all of these have been told.

        Raises:
            RingBroken: the ring is void.
        """
        while True:
            try:
                return later(
                    self.connection, AveragingService.notes, _SELF, self.rank, self.epoch, tuple(keys)
                ).result()
            except CallTimeout:
                continue


class Seat(NamedTuple):
    """One member's place in the ring of an epoch: its position, from 0, of so many."""

    epoch: int
    position: int
    size: int
    board: Board


class Ring(Protocol):
    """A way to reduce among the members of one epoch (`gloo.GlooRing`)."""

    def mean(self, vector: Tensor) -> Future[Tensor]:
        """The mean of the members' `[P]` vectors, float32, the same bits for all; they move in the vector's type."""
        ...

    def gather(self, message: Tensor, most: int) -> Future[tuple[Tensor, ...] | None]:
        """The members' messages (bytes) in their order, for all; None for all if they are more than `most` together."""
        ...

    def close(self) -> None:
        """Ends what is under way, here and so at the other members; returns at once."""
        ...


MakeRing = Callable[[Seat], Ring]
Come = Callable[[Future[Any]], Any]
"""Waits for what a ring promised; what it raises is to pass."""


@dataclass
class Payload:
    """A trainer's vector during one average, in which it may be sent several times.

    Attributes:
        vector: `[P]`, as it moves where vectors cross whole.
        message: the difference, where the last attempt began with differences.
        whole: the last attempt sent the vector.
    """

    vector: Tensor
    message: Encoded | None = None
    whole: bool = True


class Strategy(ABC):
    """One trainer's end of averages; what it keeps changes only where an average counts.

    Attributes:
        rate: of the trainer, for codecs that select by it.
        known: `[P]` v_i as of the last average; None before the first.
    """

    rate: Rate = staticmethod(full_rate)

    def __init__(self) -> None:
        self.known: Tensor | None = None

    @abstractmethod
    def pack(self, vector: Tensor) -> Payload:
        """A payload of this copy `[P]` of a replica, which is the payload's from now on.

        Raises:
            NonFiniteTensor: it holds NaN or infinities, and the codec cannot carry them.
        """

    @abstractmethod
    def mean(self, payload: Payload, ring: Ring, complete: bool, come: Come) -> Tensor:
        """The average `[P]` through the ring, the same bits for all members; `complete` as in `LastAverages.common`."""

    def mean_here(self, ends: Sequence["Strategy"], payloads: Sequence[Payload], complete: bool) -> Tensor:
        """The average `[P]` of all members' payloads, in their order; `ends` are theirs."""
        return mean_of([payload.vector.to(torch.float32) for payload in payloads])

    @abstractmethod
    def settle(self, payload: Payload, average: Tensor, members: int) -> None: ...

    def after(self, payload: Payload) -> Tensor:
        """`[P]` v_i once this payload's average counts."""
        return payload.vector.to(torch.float32)

    def follow(self, target: Tensor, alpha: float, weight: float) -> None:  # noqa: B027 (not where vectors cross whole)
        """What others have of a machine's replicas, of which each counts `weight`, goes as these do by `approach`."""

    @abstractmethod
    def missed(self, between: bool, common: bool) -> bool:
        """As `Group.missed`, where others averaged without this trainer `between` its last two averages."""

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        """As `Group.approach`."""
        move(weights, target, self._known, alpha)
        self.follow(target, alpha, 1.0)

    @property
    def _known(self) -> Tensor:
        assert self.known is not None, "an average comes first"
        return self.known


def move(weights: Tensor, target: Tensor, known: Tensor, alpha: float) -> None:
    """`w_i += α (target − v_i)`, in one step, as workers may be writing to the replica."""
    weights.add_((target - known).mul_(alpha))


class Vectors(Strategy):
    """Vectors cross, and are added up, in the codec's own type.

    Bytes are counted as those of a ring all-reduce: each of n trainers sends 2 (n − 1) / n of what moves.
    """

    def __init__(self, codec: Codec, counter: WireCounter) -> None:
        super().__init__()
        self._codec, self._counter = codec, counter

    def pack(self, vector: Tensor) -> Payload:
        (encoded,) = self._codec.encode(vector).frames
        return Payload(encoded)

    def mean(self, payload: Payload, ring: Ring, complete: bool, come: Come) -> Tensor:
        average: Tensor = come(ring.mean(payload.vector))
        return average

    def settle(self, payload: Payload, average: Tensor, members: int) -> None:
        self.known = self.after(payload)
        share, raw = 2 * (members - 1) / members, payload.vector.numel() * torch.float32.itemsize
        self._counter.add("dense", round(payload.vector.nbytes * share), round(raw * share))

    def missed(self, between: bool, common: bool) -> bool:
        return between


class PublicCopy(Strategy):
    """Differences cross, from each member to each other one; everything is as it was until an average counts.

    `q_i = Q(w_i − v_i); v_i += q_i; r += Σ q_j / n`, after which copy and average go towards the target t as replicas
    do: `w_i += α (t − v_i); v_i += α (t − v_i); r += α (t − r)`. With t = r that is CHOCO-SGD
    (Koloskova, Stich, Jaggi 2019, arXiv 1902.00340) on a complete graph, with γ = α and `x̂_i` for `v_i`. There copies
    move by `q_i` alone, so that the step towards the average crosses as well; here all members know it.

    What the codec leaves out, `w_i − v_i`, stays in the replica and so in the next difference, and so does what workers
    did since it was encoded; `approach` takes nothing of either away. So there is no residual beside it, `Σ w_i` is
    conserved where t = r, and a member that forgot its copy loses nothing. Where one has none, or members are others
    than those of r, vectors cross whole, and `v_i = w_i`; and so they do where the messages together, each of which
    goes to n − 1 members, would be more than twice a vector, of which 2 (n − 1) / n cross.

    All members add up the same messages in the same order, and `approach` is made of steps that round alike on all
    processors, so that r has the same bits everywhere. It is the mean of the v_i within rounding errors, which shrink
    by 1 − α in each round.

    Attributes:
        average: `[P]` r.
    """

    def __init__(self, codec: Codec, counter: WireCounter, about: str) -> None:
        super().__init__()
        self._codec, self._counter, self._about = codec.of_differences(), counter, about
        self._state: Any = None
        self.average = torch.zeros(0)

    def pack(self, vector: Tensor) -> Payload:
        return Payload(vector)

    def mean(self, payload: Payload, ring: Ring, complete: bool, come: Come) -> Tensor:
        self._begin(payload, complete)
        if payload.message is not None:
            messages = come(ring.gather(bundle(payload.message.frames), 2 * payload.vector.nbytes))
            if messages is not None:
                payload.whole = False
                return self._mean([unbundle(message) for message in messages])
        average: Tensor = come(ring.mean(payload.vector))
        return average

    def mean_here(self, ends: Sequence[Strategy], payloads: Sequence[Payload], complete: bool) -> Tensor:
        for end, payload in zip(ends, payloads, strict=True):
            assert isinstance(end, PublicCopy), "all members send alike"
            end._begin(payload, complete and len(ends) > 1)
        messages = [payload.message for payload in payloads if payload.message is not None]
        if not messages or sum(bundle_length(each.frames) for each in messages) > 2 * payloads[0].vector.nbytes:
            return super().mean_here(ends, payloads, complete)
        for payload in payloads:
            payload.whole = False
        return self._mean([message.frames for message in messages])

    def settle(self, payload: Payload, average: Tensor, members: int) -> None:
        message, vector = payload.message, payload.vector
        if message is not None:
            self._state = message.state  # also where vectors crossed: thresholds that let too much pass are to notice
        raw = round(vector.nbytes * 2 * (members - 1) / members)
        self.known = self.after(payload)
        if payload.whole or message is None:
            self._counter.add("dense", raw, raw)
        else:
            self._counter.add("dense", message.byte_count * (members - 1), raw)
            if self._codec.sparse:
                self._counter.add_kept("dense", vector.numel(), message.kept_count, message.refreshes, message.early)
        self.average = average

    def missed(self, between: bool, common: bool) -> bool:
        return not common

    def follow(self, target: Tensor, alpha: float, weight: float) -> None:
        self.known = _nearer(self._known, target if weight == 1 else weight * target, alpha)
        if target is not self.average:
            self.average = _nearer(self.average, target, alpha)

    def _begin(self, payload: Payload, complete: bool) -> None:
        """An attempt, with the message that it had before if that is one of differences too."""
        payload.whole = True
        if not complete:
            payload.message = None
        elif payload.message is None:
            with naming(self._about):
                change = payload.vector - self._known
                payload.message = self._codec.encode_change(change, self._known, self.rate(), self._state)

    def after(self, payload: Payload) -> Tensor:
        if payload.whole or payload.message is None:
            return payload.vector
        return self._known + self._decoded(payload.message.frames)

    def _mean(self, messages: Sequence[Sequence[Tensor]]) -> Tensor:
        total = torch.zeros_like(self.average)
        for frames in messages:
            total.add_(self._decoded(frames))
        return total.div_(len(messages)).add_(self.average)

    def _decoded(self, frames: Sequence[Tensor]) -> Tensor:
        with received("an average", self._codec):
            return self._codec.decode(frames, tuple(self._known.shape))


def _nearer(point: Tensor, target: Tensor, alpha: float) -> Tensor:
    """`(1−α) point + α target` in single steps, exact at α = 1: one fused operation could round in a way of its own."""
    return target - (target - point).mul_(1 - alpha)


def mean_of(vectors: Sequence[Tensor]) -> Tensor:
    """The mean `[P]` of vectors, added up in their order, so that every trainer would get the same result."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total.add_(vector)
    return total.div_(len(vectors))


def strategy_of(codec: Codec, counter: WireCounter, rank: int) -> Strategy:
    """Vectors cross where they can be added up as they are encoded, else differences."""
    if codec.everything or codec.levels[0].elementwise:
        return Vectors(Plain() if codec.everything else codec, counter)
    return PublicCopy(codec, counter, f"the replica of trainer {rank}")


class Averaging(ABC):
    """One trainer's averages with the others, as `Group` has them.

    Attributes:
        holds: number of the last average that it took part in; 0 before the first.
        missed: as `Group.missed`.
        cpu_s: processor time in seconds that averages have cost so far outside the calling thread, about.
    """

    def __init__(self, rank: int, codec: Codec, counter: WireCounter) -> None:
        self.rank, self.strategy, self.holds = rank, strategy_of(codec, counter, rank), 0
        self.missed, self.cpu_s = False, 0.0

    @abstractmethod
    def mean(self, weights: Tensor) -> Tensor: ...

    @abstractmethod
    def join(self) -> None: ...

    @abstractmethod
    def leave(self) -> None:
        """This trainer is not waited for any more; a `mean` of another thread ends."""

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        """As `Group.approach`."""
        self.strategy.approach(weights, target, alpha)

    def settle(self, payload: Payload | None, average: Tensor, members: int, number: int, common: bool) -> None:
        """The average of that number counts, for which this trainer has sent that to so many (None: nothing).

        `common` as in `LastAverages.common`.
        """
        if payload is not None:
            self.strategy.settle(payload, average, members)
        self.missed = self.strategy.missed(number > self.holds + 1, common)
        self.holds = number


class LocalAverages:
    """The averages of the trainers in one process.

    `waiting` is entered while a trainer waits for others to come; `of` has each trainer's end, by rank. `meeting` says
    who of those that have come average.
    """

    def __init__(
        self,
        trainers: Sequence[int],
        channel: Channel,
        waiting: Callable[[], AbstractContextManager[None]],
        meeting: Meeting = EVERYBODY,
    ) -> None:
        place: Rendezvous[Tensor, Tensor] = Rendezvous(trainers, self.combine, waiting, meeting=meeting)
        self.of = {rank: LocalAveraging(rank, channel, place) for rank in trainers}
        self._last = LastAverages()

    def combine(self, replicas: Mapping[int, Tensor]) -> Tensor:
        """The average `[P]` of replicas by rank, ascending, to which workers may be writing."""
        ends = [self.of[rank] for rank in replicas]
        common, complete = self._last.common(tuple(replicas), {end.rank: end.holds for end in ends})
        payloads = [end.strategy.pack(replicas[end.rank].clone()) for end in ends]
        average = ends[0].strategy.mean_here([end.strategy for end in ends], payloads, complete)
        self._last.add(replicas, tuple(replicas))
        for end, payload in zip(ends, payloads, strict=True):
            end.settle(payload, average, len(ends), self._last.round, common)
        return average


class LocalAveraging(Averaging):
    """A trainer's end of `LocalAverages`; the average is one tensor for all of them."""

    def __init__(self, rank: int, channel: Channel, place: Rendezvous[Tensor, Tensor]) -> None:
        super().__init__(rank, channel.codec, channel.counter)
        self._place = place

    def mean(self, weights: Tensor) -> Tensor:
        return self._place.arrive(self.rank, weights)

    def join(self) -> None:
        self._place.join(self.rank)

    def leave(self) -> None:
        self._place.leave(self.rank)


class _BrokenOff(Exception):
    """This attempt gives no average; another one will."""


class RemoteAveraging(Averaging):
    """The averages of trainers in processes of their own, for one of them.

    A vector passes the codec and is copied when the round starts, so that it is fresh, and once only, so that a round
    that failed is repeated with the same. Bytes are counted once the round counts. The ring is kept from round to round
    as long as its members stay.

    Trainers of one machine that see each other's replicas average them there, as they are then: the first of them
    copies the replicas of all and adds them up, meets the first ones of other machines in the ring, and leaves the
    average for the others.
    The driver's word that all have come is also that all replicas may be read, its word that all have ended that the
    average may be, so that they need no barrier of their own. The codec is for what goes between machines; there a
    machine stands for a trainer, its replica being their mean, weighted by their number.

    Args:
        connection: to the driver's `AveragingService`.
        make_ring: builds a ring, without waiting for the others.
        codec: as configured; a sparse one looks at each parameter apart (`training.pieces`).
        counter: adds up the bytes.
        resting: entered while the trainer waits for an average, which depends on other processes. A pause for a
            checkpoint does not wait for it: nothing changes here until it has come.
        check_s, give_up_s: as `CHECK_S` and `GIVE_UP_S`.
        neighbours: those of this machine, where replicas can be seen.
        apart: bytes are counted as if each trainer of a machine were on one of its own.
    """

    def __init__(
        self,
        rank: int,
        connection: Connection,
        make_ring: MakeRing,
        codec: Codec,
        counter: WireCounter,
        resting: Callable[[], AbstractContextManager[None]] = nullcontext,
        check_s: float = CHECK_S,
        give_up_s: float = GIVE_UP_S,
        neighbours: Neighbours | None = None,
        apart: bool = False,
    ) -> None:
        super().__init__(rank, codec, counter)
        self._neighbours, self._apart = neighbours, apart
        self._near: list[ReplicaMemory] = []  # of the last average, where the machine stood for them
        self._weight: float | None = None  # of each of those, where this trainer meets other machines for them
        self._connection, self._make_ring, self._resting = connection, make_ring, resting
        self._check_s, self._give_up_s = check_s, give_up_s
        self._turn = 0
        self._ring: tuple[int, Ring] | None = None
        self._one_at_a_time = threading.Lock()
        self._left = threading.Event()
        self._leaves = 0  # so far; that a round under way may notice one though the trainer has joined again
        self._leaves_before = 0  # the round under way
        self._failures, self._failing_since = 0, 0.0  # of the round under way

    def mean(self, weights: Tensor) -> Tensor:
        """As `Averaging.mean`.

        Raises:
            Left: this trainer left before the round started, or it started but has not ended soon after.
            RunError: the driver is lost or has given this trainer up, or the trainers cannot reach each other.
        """
        try:
            with self._resting(), self._one_at_a_time:
                self._turn += 1
                self._leaves_before, self._failures = self._leaves, 0
                try:
                    return self._mean(weights)
                except BaseException:
                    self._drop_ring()
                    raise
        finally:
            self._drop_if_left()

    def join(self) -> None:
        """As `Averaging.join`.

        Raises:
            RunError: the driver is lost or has given this trainer up.
        """
        self._left.clear()
        ask(self._connection, AveragingService.join, _SELF, self.rank)

    def leave(self) -> None:
        self._leaves += 1
        self._left.set()
        self._drop_if_left()
        said = later(self._connection, AveragingService.leave, _SELF, self.rank)
        try:
            if ended([said], LEAVING_S):
                said.result()
            else:
                _LOG.info("trainer %d said that it leaves, and has no answer yet", self.rank)
        except GONE as error:
            _LOG.info("trainer %d could not say that it leaves: %s", self.rank, error)

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        """As `Group.approach`."""
        if not self._near:
            super().approach(weights, target, alpha)
            return
        assert self._neighbours is not None, "it has shown its own"
        move(weights, target, self._neighbours.own.known, alpha)
        if self._weight is not None:
            self.strategy.follow(target, alpha, self._weight)

    def _mean(self, weights: Tensor) -> Tensor:
        if self._neighbours is not None and self._neighbours.own.replica.data_ptr() != weights.data_ptr():
            self._neighbours.own.replica.copy_(weights)
        payload: Payload | None = None
        average: Tensor | None = None
        members, common = 0, False
        verdict = self._arrive()
        while verdict.phase is not Phase.DONE:
            if verdict.phase is Phase.OUT:
                if self._left.is_set() or self._leaves != self._leaves_before:  # it may have joined again meanwhile
                    raise Left
                raise RunError(f"trainer {self.rank} was given up by the driver, so it cannot average any more")
            succeeded = False
            if verdict.phase is Phase.GO:
                members, common = len(verdict.members if self._apart else verdict.leaders), verdict.common
                try:
                    if verdict.near and (len(verdict.near) > 1 or verdict.weight != 1):
                        payload, average = self._with_neighbours(verdict)
                    else:
                        if payload is None or self._near:  # one of before was for those of its machine, too
                            self._near, payload = [], self.strategy.pack(weights.clone())
                        average = self._reduce(payload, verdict)
                    succeeded = True
                except _BrokenOff:
                    pass
            if not succeeded:
                self._drop_ring()
            verdict = self._report(verdict.attempt, succeeded)
        assert average is not None
        if self._near and average is self._near[0].average:
            average = average.clone()  # the next one will lie there, and a method may keep this one
        self.settle(payload, average, members, verdict.round, common)
        return average

    def _arrive(self) -> Verdict:
        said = self.rank, self._turn, self.holds
        return self._await(lambda: later(self._connection, AveragingService.arrive, _SELF, *said))

    def _report(self, attempt: int, succeeded: bool) -> Verdict:
        said = self.rank, self._turn, attempt, succeeded
        return self._await(lambda: later(self._connection, AveragingService.report, _SELF, *said))

    def _await(self, ask: Callable[[], Pending[Verdict]]) -> Verdict:
        """Asks again until there is an answer, but not for long any more once the trainer has left."""
        self.cpu_s += QUESTION_CPU_S
        patience_s = LEAVING_S
        while True:
            asked = ask()
            while not ended([asked], SLICE_S):
                if self._leaves != self._leaves_before:
                    patience_s -= SLICE_S
                if patience_s <= 0:
                    raise Left
            try:
                return asked.result()
            except CallTimeout:
                continue

    def _with_neighbours(self, verdict: Verdict) -> tuple[Payload | None, Tensor]:
        """What this trainer sends in an attempt, and where the average is once that counts."""
        assert self._neighbours is not None, "it has shown its own"
        try:
            near = self._near = self._neighbours.at(verdict.near)
        except RunError as error:
            self._bear(verdict, error)
            raise _BrokenOff from error
        self._weight = None
        if self.rank not in verdict.leaders:
            return Payload(self._neighbours.own.known) if self._apart else None, near[0].average
        weight = verdict.weight
        for each in near:
            each.known.copy_(each.replica)
        mean = mean_of([each.known for each in near])
        if len(verdict.leaders) == 1:  # nothing crosses
            payload, average = Payload(mean), mean
        else:
            mean.mul_(weight)
            payload = self.strategy.pack(mean)
            average = self._reduce(payload, verdict)
            self._weight = weight
            left_out = (mean - self.strategy.after(payload)).div_(weight)
            for each in near:
                each.known.sub_(left_out)
        near[0].average.copy_(average)
        return payload, average

    def _reduce(self, payload: Payload, verdict: Verdict) -> Tensor:
        if len(verdict.leaders) == 1:
            payload.message, payload.whole = None, True
            return payload.vector.to(torch.float32)
        if self._ring is None or self._ring[0] != verdict.epoch:
            self._drop_ring()
            board = Board(self._connection, self.rank, verdict.epoch)
            seat = Seat(verdict.epoch, verdict.leaders.index(self.rank), len(verdict.leaders), board)
            self._ring = (verdict.epoch, self._make_ring(seat))

        def check() -> Pending[Verdict]:
            return later(self._connection, AveragingService.check, _SELF, self.rank, self._turn)

        def come(future: Future[Any]) -> Any:
            while not wait([future], self._check_s).done:
                if self._await(check).phase is not Phase.GO:
                    raise _BrokenOff
            error = future.exception()
            if error is not None:
                self._bear(verdict, error)
                raise _BrokenOff
            return future.result()

        average = self.strategy.mean(payload, self._ring[1], verdict.complete, come)
        self.cpu_s += 2 * payload.vector.nbytes * RING_CPU_S_PER_BYTE
        self._failures = 0
        return average

    def _bear(self, verdict: Verdict, error: BaseException) -> None:
        """Once is normal: somebody died. Again and again, ever slower, they may be cut off from each other for good."""
        _LOG.info("trainer %d: round with %s failed: %s", self.rank, verdict.members, error)
        now = time.monotonic()
        self._failing_since = self._failing_since if self._failures else now
        self._failures += 1
        if now - self._failing_since > self._give_up_s:
            raise RunError(
                f"trainer {self.rank} cannot average with trainers {list(verdict.members)}: {error}; "
                "every trainer must reach every other one on any port"
            ) from error
        if self._failures > 1:
            self._left.wait(min(1.0, 0.01 * 2.0**self._failures))

    def _drop_if_left(self) -> None:
        """The ring is of no use to who has left; a round under way comes here when it has ended."""
        if self._left.is_set() and self._one_at_a_time.acquire(blocking=False):
            self._drop_ring()
            self._one_at_a_time.release()

    def _drop_ring(self) -> None:
        if self._ring is not None:
            self._ring[1].close()
            self._ring = None
