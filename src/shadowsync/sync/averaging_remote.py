"""A trainer's end of averaging across processes.

`P` dense parameters, `n` members of a ring.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from shadowsync.compression.channel import Counter
from shadowsync.compression.codec import Codec
from shadowsync.errors import RunError
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.errors import GONE
from shadowsync.rpc.pending import Pending, ended
from shadowsync.rpc.served import Client, ask, later
from shadowsync.sync.averaging import Ground, Phase, Verdict
from shadowsync.sync.averaging_service import AveragingService
from shadowsync.sync.averaging_ways import Parcel, way_of
from shadowsync.sync.rendezvous import Left
from shadowsync.sync.ring import MakeRing, Ring, Seat

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_SELF = Client("")
"""Stands for this trainer; the service knows by itself who asks."""
SLICE_S = 0.2
"""How often a wait for an answer looks whether the trainer has left."""
LEAVING_S = 2.0
"""How long a trainer that has left still waits for the end of a round that had started."""


@dataclass(frozen=True)
class AveragingOptions:
    """Patience.

    Attributes:
        poll_s: pause between two questions that were answered at once; more has slower rounds on a busy driver.
        check_s: how often a reduction that does not end asks whether somebody has died.
        give_up_s: an average that keeps failing for so long ends the trainer.
    """

    poll_s: float = 0.002
    check_s: float = 0.25
    give_up_s: float = 120.0


@dataclass(frozen=True)
class RemoteBoard:
    """The driver's board, for one ring (a `ring.Board`)."""

    connection: Connection
    rank: int
    epoch: int
    poll_s: float

    def pin(self, key: str, value: bytes) -> None:
        ask(self.connection, AveragingService.note, _SELF, self.rank, self.epoch, key, value)

    def read(self, keys: Sequence[str]) -> tuple[bytes, ...]:
        wanted, pause = tuple(keys), threading.Event()
        while (notes := ask(self.connection, AveragingService.notes, _SELF, self.rank, self.epoch, wanted)) is None:
            pause.wait(self.poll_s)
        return notes


class _BrokenOff(Exception):
    """This attempt gives no average; another one will."""


@dataclass
class _Round:
    """One `mean` under way."""

    weights: Tensor
    turn: int
    generation: int
    parcel: Parcel | None = None
    result: Tensor | None = None
    members: int = 1
    ground: Ground = field(default_factory=Ground)
    failures: int = 0
    failing_since: float = 0.0


class RemoteAveraging:
    """The average of the trainers in other processes, for one of them (as `sync.group.Averaging`).

    A vector passes the codec and is copied when the round starts, so that it is fresh, and once only, so that a round
    that failed is repeated with the same. Bytes are counted once the round counts. The ring is kept from round to round
    as long as its members stay. How vectors cross is the affair of `averaging_ways`.

    Args:
        rank: of this trainer.
        connection: to the driver's `AveragingService`.
        make_ring: builds a ring, without waiting for the others.
        codec: as configured; a sparse one looks at each parameter apart (`training.pieces`).
        counter: adds up the bytes.
        options: patience.
    """

    def __init__(
        self,
        rank: int,
        connection: Connection,
        make_ring: MakeRing,
        codec: Codec,
        counter: Counter,
        options: AveragingOptions | None = None,
    ) -> None:
        self._rank = rank
        self._connection = connection
        self._make_ring = make_ring
        self._way = way_of(codec, counter, f"the replica of trainer {rank}")
        self._options = options or AveragingOptions()
        self._turn = 0
        self._last_seen = 0
        self._missed = False
        self._ring: tuple[int, Ring] | None = None
        self._one_at_a_time = threading.Lock()
        self._generation = 0
        self._left = threading.Event()

    def mean(self, weights: Tensor) -> Tensor:
        """As `Group.mean`: the average `[P]`, the same bits for all members.

        Raises:
            Left: this trainer left before the round started, or it started but has not ended soon after.
            RunError: the driver is lost or has given this trainer up, or the trainers cannot reach each other.
        """
        with self._one_at_a_time:
            self._turn += 1
            round_ = _Round(weights, self._turn, self._generation)
            try:
                return self._finish(round_)
            except BaseException:
                self._drop_ring()
                raise

    def missed(self) -> bool:
        """As `Group.missed`."""
        return self._missed

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        """As `Group.approach`."""
        self._way.approach(weights, target, alpha)

    def join(self) -> None:
        """This trainer is waited for.

        Raises:
            RunError: the driver is lost or has given this trainer up.
        """
        self._left.clear()
        ask(self._connection, AveragingService.join, _SELF, self._rank)

    def leave(self) -> None:
        """This trainer is not waited for any more; a `mean` of another thread ends."""
        self._generation += 1
        self._left.set()
        said = later(self._connection, AveragingService.leave, _SELF, self._rank)
        try:
            if ended([said], LEAVING_S):
                said.result()
            else:
                _LOG.info("trainer %d said that it leaves, and has no answer yet", self._rank)
        except GONE as error:
            _LOG.info("trainer %d could not say that it leaves: %s", self._rank, error)
        if self._one_at_a_time.acquire(blocking=False):
            self._drop_ring()
            self._one_at_a_time.release()

    def _finish(self, round_: _Round) -> Tensor:
        steps: dict[Phase, Callable[[_Round, Verdict], Verdict]] = {
            Phase.WAIT: self._wait,
            Phase.GO: self._reduce,
            Phase.VOID: self._give_way,
            Phase.OUT: self._out,
        }
        verdict = self._arrive(round_)
        while verdict.phase is not Phase.DONE:
            verdict = steps[verdict.phase](round_, verdict)
        return self._settle(round_, verdict)

    def _wait(self, round_: _Round, _: Verdict) -> Verdict:
        self._left.wait(self._options.poll_s)
        return self._arrive(round_)

    def _arrive(self, round_: _Round) -> Verdict:
        arrive = AveragingService.arrive
        return self._await(round_, later(self._connection, arrive, _SELF, self._rank, round_.turn, self._last_seen))

    def _out(self, round_: _Round, _: Verdict) -> Verdict:
        if self._left.is_set() or self._generation != round_.generation:  # it may have joined again meanwhile
            raise Left
        raise RunError(f"trainer {self._rank} was given up by the driver, so it cannot average any more")

    def _give_way(self, round_: _Round, verdict: Verdict) -> Verdict:
        self._drop_ring()
        return self._report(round_, verdict, False)

    def _reduce(self, round_: _Round, verdict: Verdict) -> Verdict:
        if round_.parcel is None:
            round_.parcel = self._way.pack(round_.weights)
        round_.members, round_.ground = len(verdict.members), verdict.ground
        try:
            round_.result = self._average(round_, round_.parcel, verdict)
        except _BrokenOff:
            self._drop_ring()
            return self._report(round_, verdict, False)
        return self._report(round_, verdict, True)

    def _average(self, round_: _Round, parcel: Parcel, verdict: Verdict) -> Tensor:
        if round_.members == 1:
            return self._way.alone(parcel)

        def come(future: Future[T]) -> T:
            return self._come(round_, verdict, future)

        average = self._way.mean(parcel, self._ring_of(verdict), verdict.ground, come)
        round_.failures = 0
        return average

    def _come(self, round_: _Round, verdict: Verdict, future: Future[T]) -> T:
        while not wait([future], self._options.check_s).done:
            asked = later(self._connection, AveragingService.check, _SELF, self._rank, round_.turn)
            if self._await(round_, asked).phase is not Phase.GO:
                raise _BrokenOff
        error = future.exception()
        if error is not None:
            self._bear(round_, verdict, error)
            raise _BrokenOff
        return future.result()

    def _bear(self, round_: _Round, verdict: Verdict, error: BaseException) -> None:
        """Once is normal: somebody died. Again and again, ever slower, they may be cut off from each other for good."""
        _LOG.info("trainer %d: round with %s failed: %s", self._rank, verdict.members, error)
        now = time.monotonic()
        round_.failing_since = round_.failing_since if round_.failures else now
        round_.failures += 1
        if now - round_.failing_since > self._options.give_up_s:
            raise RunError(
                f"trainer {self._rank} cannot average with trainers {list(verdict.members)}: {error}; "
                "every trainer must reach every other one on any port"
            ) from error
        if round_.failures > 1:
            self._left.wait(min(1.0, 0.01 * 2.0**round_.failures))

    def _ring_of(self, verdict: Verdict) -> Ring:
        if self._ring is None or self._ring[0] != verdict.epoch:
            self._drop_ring()
            board = RemoteBoard(self._connection, self._rank, verdict.epoch, self._options.poll_s)
            seat = Seat(verdict.epoch, verdict.members.index(self._rank), len(verdict.members), board)
            self._ring = (verdict.epoch, self._make_ring(seat))
        return self._ring[1]

    def _drop_ring(self) -> None:
        if self._ring is not None:
            self._ring[1].close()
            self._ring = None

    def _report(self, round_: _Round, verdict: Verdict, success: bool) -> Verdict:
        about = self._rank, round_.turn, verdict.attempt
        return self._await(round_, later(self._connection, AveragingService.report, _SELF, *about, success))

    def _await(self, round_: _Round, asked: Pending[Verdict]) -> Verdict:
        patience_s, answered = LEAVING_S, threading.Event()
        asked.then(lambda _: answered.set())
        while not answered.wait(SLICE_S):
            if self._generation != round_.generation:
                patience_s -= SLICE_S
            if patience_s <= 0:
                raise Left
        return asked.result()

    def _settle(self, round_: _Round, verdict: Verdict) -> Tensor:
        assert round_.parcel is not None
        assert round_.result is not None
        self._way.settle(round_.parcel, round_.result, round_.members)
        self._missed = self._way.missed(verdict.round > self._last_seen + 1, round_.ground)
        self._last_seen = verdict.round
        return round_.result
