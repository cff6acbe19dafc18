"""When the trainers of a job average, and which of them: decided in one place, while they come, go and die."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


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
class Ground:
    """What the members of an average have in common before it.

    Attributes:
        common: all of them have the newest average.
        complete: and it was made of the replicas of exactly these members.
    """

    common: bool = False
    complete: bool = False


@dataclass(frozen=True)
class Newest:
    """The newest average that counts.

    Attributes:
        round: its number, from 1; 0 before the first.
        members: whose replicas it was made of, ascending.
    """

    round: int = 0
    members: tuple[int, ...] = ()

    def ground(self, members: tuple[int, ...], holds: Mapping[int, int]) -> Ground:
        """What these members have in common, each of which has the average of the number that `holds` says."""
        common = self.round > 0 and all(holds.get(rank) == self.round for rank in members)
        return Ground(common, common and members == self.members)


@dataclass(frozen=True)
class Verdict:
    """What a trainer is to do.

    Attributes:
        attempt: number of the attempt to reduce, with `GO`.
        epoch: of the ring; a new one for other members and after a failure.
        members: ranks in the ring, ascending.
        round: number of this average, with `DONE`; each counts up by one.
        ground: what the members have in common, with `GO`.
    """

    phase: Phase
    attempt: int = 0
    epoch: int = 0
    members: tuple[int, ...] = ()
    round: int = 0
    ground: Ground = Ground()


@dataclass
class _Attempt:
    """One try to reduce: the ring, members still alive with their turns, those who have not reported."""

    number: int
    epoch: int
    ring: tuple[int, ...]
    turns: dict[int, int]
    unreported: set[int]
    ground: Ground
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
            return Verdict(phase, attempt.number, attempt.epoch, attempt.ring, ground=attempt.ground)
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
        ground = self._newest.ground(ring, self._holds)
        self._attempt = _Attempt(self._attempts, self.epoch, ring, dict(self._arrived), set(ring), ground)
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
