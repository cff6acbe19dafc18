"""When the trainers of a job average, and which of them: decided in one place, while they come, go and die.

`P` dense parameters.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from shadowsync.errors import DataError, RunError
from shadowsync.rpc.served import Client, served

NOTE_BYTES = 1 << 16
"""Longest note on a ring's board."""
BOARD_NOTES = 4096
"""Most notes on it; a ring pins a few for each member."""


class RingBroken(RunError):
    """A ring is void: a member of it died, could not be reached or has given it up."""


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


class Board(Protocol):
    """How the members of a ring tell each other where they listen."""

    def pin(self, key: str, value: bytes) -> None:
        """Tells the others."""
        ...

    def read(self, keys: Sequence[str]) -> tuple[bytes, ...]:
        """Waits until all of these have been told.

        Raises:
            RingBroken: the ring is void.
        """
        ...


@dataclass(frozen=True)
class Seat:
    """One member's place in a ring.

    Attributes:
        epoch: of the ring.
        position: of this member, from 0.
        size: members.
        board: the way to the others while it is built.
    """

    epoch: int
    position: int
    size: int
    board: Board


MakeRing = Callable[[Seat], Ring]


class Phase(Enum):
    """How it stands with one trainer's average."""

    WAIT = "wait"
    """Others are missing: ask again."""
    GO = "go"
    """Reduce now, with these members, and report."""
    VOID = "void"
    """Somebody failed: break off, report it, and ask again with the same vector."""
    DONE = "done"
    """All members have the result, so it counts."""
    OUT = "out"
    """This trainer is not, or not any more, among those that average."""


@dataclass(frozen=True)
class Newest:
    """The newest average that counts.

    Attributes:
        round: its number, from 1; 0 before the first.
        members: whose replicas it was made of, ascending.
    """

    round: int = 0
    members: tuple[int, ...] = ()

    def common(self, members: tuple[int, ...], holds: Mapping[int, int]) -> tuple[bool, bool]:
        """Whether these members, each of which has the average of the number that `holds` says, all have this one; and
        whether it was also made of the replicas of exactly them."""
        common = self.round > 0 and all(holds.get(rank) == self.round for rank in members)
        return common, common and members == self.members


@dataclass(frozen=True)
class Verdict:
    """What a trainer is to do.

    Attributes:
        attempt: number of the attempt to reduce, with `GO`.
        epoch: of the ring; a new one for other members and after a failure.
        members: ranks in the ring, ascending.
        round: number of this average, with `DONE`; each counts up by one.
        common, complete: what the members have in common, with `GO`, as `Newest.common` has it.
    """

    phase: Phase
    attempt: int = 0
    epoch: int = 0
    members: tuple[int, ...] = ()
    round: int = 0
    common: bool = False
    complete: bool = False


@dataclass
class _Attempt:
    """One try to reduce: the ring, members still alive with their turns, those who have not reported."""

    number: int
    epoch: int
    ring: tuple[int, ...]
    turns: dict[int, int]
    unreported: set[int]
    common: bool
    complete: bool
    void: bool = False


class AveragingBook:
    """Who averages with whom: a state machine of calls and verdicts, without clock or thread.

    A round starts when all present members have arrived. Its members reduce their vectors among themselves and
    report; only when all of them have succeeded does it count. If one failed or died, all who are left try again,
    with the vectors they had, in a ring of a new epoch. So those that stay always have the same results.

    A trainer counts its averages, its `turn`: any call may be repeated without harm.

    Args:
        members: trainers that the first round waits for.

    Attributes:
        epoch: of the newest ring.
        version: changes with every change that may give somebody another verdict than the caller.
    """

    def __init__(self, members: Iterable[int] = ()) -> None:
        self.epoch = 0
        self.version = 0
        self._members = set(members)
        self._newest = Newest()
        self._holds: dict[int, int] = {}
        self._arrived: dict[int, int] = {}
        self._settled: dict[int, tuple[int, int]] = {}
        self._attempt: _Attempt | None = None
        self._attempts = 0
        self._ring: tuple[int, ...] = ()

    @property
    def members(self) -> frozenset[int]:
        """Trainers that a round waits for."""
        return frozenset(self._members)

    @property
    def round(self) -> int:
        """Averages so far."""
        return self._newest.round

    def join(self, rank: int) -> None:
        """`rank` is waited for from the next round on."""
        self._members.add(rank)

    def leave(self, rank: int) -> None:
        """`rank` is not waited for any more. A round that has started ends with it, one that has not without it."""
        self._remove(rank)
        self._start_if_all_here()

    def dead(self, rank: int) -> None:
        """`rank` left and will not report; whoever comes under this rank later begins anew."""
        self._settled.pop(rank, None)
        self._holds.pop(rank, None)
        self._remove(rank)
        self._drop_from_attempt(rank)
        self._start_if_all_here()

    def arrive(self, rank: int, turn: int, holds: int = 0) -> None:
        """`rank` has a vector for its average number `turn`, counted from 1; it has given up all earlier ones.

        It has the average of round `holds`, 0 for none.
        """
        attempt = self._attempt
        started = attempt.turns.get(rank, 0) if attempt is not None else 0
        if rank not in self._members or turn <= max(started, self._settled.get(rank, (0, 0))[0]):
            return
        self._arrived[rank], self._holds[rank] = turn, holds
        self._drop_from_attempt(rank)
        self._start_if_all_here()

    def report(self, rank: int, attempt_number: int, success: bool) -> None:
        """`rank` has ended its part of an attempt; after a failure it has left the ring as well."""
        attempt = self._attempt
        if attempt is None or attempt.number != attempt_number or rank not in attempt.unreported:
            return
        attempt.unreported.discard(rank)
        if not success:
            attempt.void = True
            self.version += 1
        self._end_if_all_reported(attempt)

    def verdict(self, rank: int, turn: int) -> Verdict:
        """How it stands with average number `turn` of `rank`."""
        settled = self._settled.get(rank, (0, 0))
        if settled[0] == turn:
            return Verdict(Phase.DONE, round=settled[1])
        attempt = self._attempt
        if attempt is not None and attempt.turns.get(rank) == turn:
            if rank not in attempt.unreported:
                return Verdict(Phase.WAIT)
            phase = Phase.VOID if attempt.void else Phase.GO
            return Verdict(
                phase, attempt.number, attempt.epoch, attempt.ring, common=attempt.common, complete=attempt.complete
            )
        return Verdict(Phase.WAIT if self._arrived.get(rank) == turn else Phase.OUT)

    def reducing(self, rank: int, epoch: int) -> bool:
        """`rank` is to reduce in the ring of that epoch: it was told to go and has not reported, and nobody failed."""
        attempt = self._attempt
        return attempt is not None and not attempt.void and rank in attempt.unreported and epoch == attempt.epoch

    def _remove(self, rank: int) -> None:
        self._members.discard(rank)
        self._arrived.pop(rank, None)
        if rank in self._ring:
            self._ring = ()  # who leaves may close its end, so that the ring serves nobody any more
        self.version += 1

    def _drop_from_attempt(self, rank: int) -> None:
        attempt = self._attempt
        if attempt is None or attempt.turns.pop(rank, None) is None:
            return
        attempt.unreported.discard(rank)
        attempt.void |= bool(attempt.unreported)  # those may wait in vain for what it was to send
        self._end_if_all_reported(attempt)

    def _start_if_all_here(self) -> None:
        if self._attempt is not None or not self._arrived or not self._members <= self._arrived.keys():
            return
        ring = tuple(sorted(self._arrived))
        if ring != self._ring:
            self.epoch += 1
            self._ring = ring
        self._attempts += 1
        common, complete = self._newest.common(ring, self._holds)
        self._attempt = _Attempt(self._attempts, self.epoch, ring, dict(self._arrived), set(ring), common, complete)
        self._arrived.clear()
        self.version += 1

    def _end_if_all_reported(self, attempt: _Attempt) -> None:
        if attempt.unreported:
            return
        self._attempt = None
        if attempt.void:
            self._ring = ()
            self._arrived.update({rank: turn for rank, turn in attempt.turns.items() if rank in self._members})
        elif attempt.turns:
            self._newest = Newest(self.round + 1, attempt.ring)
            self._settled.update({rank: (turn, self.round) for rank, turn in attempt.turns.items()})
        self.version += 1
        self._start_if_all_here()


class AveragingService:
    """Lets trainers in other processes average (`all_reduce.RemoteAveraging` is the other end).

    A trainer that has to wait is answered when its time has come, or after `hold_s` with the advice to ask again, so
    that no thread of the server is held for long. At most `seats` calls are held at a time; further ones are answered
    at once. With as many threads as `seats` and one more, waiting holds up nobody else.

    Args:
        members: ranks that the first round waits for, also if they come late.
        seats: most calls that are held; as many as trainers give the lowest latency.
        hold_s: longest time to hold a call.
        banned: connections that are not listened to.
    """

    def __init__(
        self, members: Iterable[int] = (), seats: int = 2, hold_s: float = 0.1, banned: Iterable[str] = ()
    ) -> None:
        self._book = AveragingBook(members)
        self._hold_s = hold_s
        self._seats = threading.Semaphore(seats)
        self._changed = threading.Condition()
        self._clients: dict[int, str] = {}
        self._dead = set(banned)
        self._board_epoch, self._notes = 0, dict[str, bytes]()

    @property
    def members(self) -> frozenset[int]:
        """Trainers that a round waits for."""
        with self._changed:
            return self._book.members

    @property
    def round(self) -> int:
        """Averages so far."""
        with self._changed:
            return self._book.round

    def dead(self, rank: int) -> None:
        """Trainer `rank` is given up: nobody waits for it, and its connection is not listened to any more."""
        with self._changed:
            self._forget(rank)

    @property
    def clients(self) -> frozenset[str]:
        """All connections that have spoken."""
        with self._changed:
            return frozenset(self._dead | set(self._clients.values()))

    def expect(self, rank: int) -> None:
        """Trainer `rank` is about to start, in place of one that died or as one more, and is waited for."""
        with self._changed:
            self._book.join(rank)
            self._changed.notify_all()

    def client_gone(self, client: str) -> None:
        """As `dead` of the trainer that spoke over that connection, if one did."""
        with self._changed:
            for rank in [rank for rank, owner in self._clients.items() if owner == client]:
                self._forget(rank)

    def _forget(self, rank: int) -> None:
        if (client := self._clients.pop(rank, None)) is not None:
            self._dead.add(client)
        self._book.dead(rank)
        self._changed.notify_all()

    @served()
    def join(self, client: Client, rank: int) -> None:
        """As `AveragingBook.join`.

        Raises:
            RunError: whoever asks was given up.
        """
        with self._changed:
            if client in self._dead:
                raise RunError(f"trainer {rank} was given up and cannot average any more")
            if self._clients.get(rank, client) != client:
                self._forget(rank)  # it was started anew before anybody noticed that it had died
            self._clients[rank] = client
            self._book.join(rank)

    @served()
    def leave(self, client: Client, rank: int) -> None:
        """As `AveragingBook.leave`."""
        self._change(rank, client, lambda: self._book.leave(rank))

    @served()
    def arrive(self, client: Client, rank: int, turn: int, holds: int) -> Verdict:
        """As `AveragingBook.arrive`, and how it stands then."""
        self._change(rank, client, lambda: self._book.arrive(rank, turn, holds))
        return self._when_decided(rank, turn, client)

    @served()
    def report(self, client: Client, rank: int, turn: int, attempt: int, success: bool) -> Verdict:
        """As `AveragingBook.report`, and how it stands then."""
        self._change(rank, client, lambda: self._book.report(rank, attempt, success))
        return self._when_decided(rank, turn, client)

    @served(once=False)
    def check(self, client: Client, rank: int, turn: int) -> Verdict:
        """How it stands now."""
        with self._changed:
            return self._verdict(rank, turn, client)

    def _change(self, rank: int, client: str, change: Callable[[], None]) -> None:
        with self._changed:
            if not self._owns(rank, client):
                return
            before = self._book.version
            change()
            if self._book.version != before:
                self._changed.notify_all()

    def _owns(self, rank: int, client: str) -> bool:
        """The first connection that speaks for a member is its own until it is dead or joins over another one."""
        if client in self._dead or rank not in self._book.members | self._clients.keys():
            return False
        return self._clients.setdefault(rank, client) == client

    def _verdict(self, rank: int, turn: int, client: str) -> Verdict:
        return self._book.verdict(rank, turn) if self._owns(rank, client) else Verdict(Phase.OUT)

    def _when_decided(self, rank: int, turn: int, client: str) -> Verdict:
        with self._changed:
            verdict = self._verdict(rank, turn, client)
            if verdict.phase is Phase.WAIT:
                self._hold(lambda: self._verdict(rank, turn, client).phase is not Phase.WAIT)
                verdict = self._verdict(rank, turn, client)
        return verdict

    @served()
    def note(self, client: Client, rank: int, epoch: int, key: str, value: bytes) -> None:
        """What a member tells the others of its ring: where it listens, say."""
        with self._changed:
            if not self._reducing(rank, epoch, client):
                return
            if epoch != self._board_epoch:  # older rings are forgotten
                self._board_epoch, self._notes = epoch, {}
            if len(self._notes) >= BOARD_NOTES or max(len(key), len(value)) > NOTE_BYTES:
                raise DataError(f"a ring's board holds at most {BOARD_NOTES} notes of {NOTE_BYTES} bytes")
            self._notes[key] = value
            self._changed.notify_all()

    @served(once=False)
    def notes(self, client: Client, rank: int, epoch: int, keys: tuple[str, ...]) -> tuple[bytes, ...] | None:
        """What was told under these keys, in their order; None as long as one is missing.

        Raises:
            RingBroken: the ring is void.
        """

        def told() -> tuple[bytes, ...] | None:
            if not self._reducing(rank, epoch, client):
                raise RingBroken(f"ring {epoch} is void")
            notes = self._notes if epoch == self._board_epoch else {}
            return tuple(notes[key] for key in keys) if all(key in notes for key in keys) else None

        with self._changed:
            if told() is None:
                self._hold(lambda: told() is not None)
            return told()

    def _reducing(self, rank: int, epoch: int, client: str) -> bool:
        return self._owns(rank, client) and self._book.reducing(rank, epoch)

    def _hold(self, until: Callable[[], bool]) -> None:
        if self._seats.acquire(blocking=False):
            try:
                self._changed.wait_for(until, self._hold_s)
            finally:
                self._seats.release()
