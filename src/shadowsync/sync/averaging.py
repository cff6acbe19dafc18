"""When the trainers of a job average, and which of them: decided in one place, while they come, go and die.

`P` dense parameters.
"""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from shadowsync.errors import DataError, RunError
from shadowsync.rpc.pending import Pending, Promise
from shadowsync.rpc.served import Client, served
from shadowsync.sync.meeting import EVERYBODY, Meeting

NOTE_BYTES = 1 << 16
"""Longest note on a ring's board."""
BOARD_NOTES = 4096
"""Most notes on it; a ring pins a few for each member."""
PATIENCE_S = 30.0
"""A trainer that waits asks again after this time: a call that stays open for ever would stop its connection."""


class RingBroken(RunError):
    """A ring is void: a member of it died, could not be reached or has given it up."""


class Phase(Enum):
    """How it stands with one trainer's average."""

    WAIT = "wait"
    """Others are missing: the answer comes later."""
    GO = "go"
    """Reduce now, with these members, and report."""
    VOID = "void"
    """Somebody failed: break off, report it, and ask again with the same vector."""
    DONE = "done"
    """All members have the result, so it counts."""
    OUT = "out"
    """This trainer is not, or not any more, among those that average."""


class LastAverages:
    """The averages that count: of each trainer the number of its last one, and the ranks of those whose replicas that
    was made of, ascending.

    Attributes:
        round: number of the newest, from 1; 0 before the first.
    """

    def __init__(self) -> None:
        self.round = 0
        self._of: dict[int, tuple[int, tuple[int, ...]]] = {}

    def add(self, ranks: Iterable[int], members: tuple[int, ...]) -> None:
        """One more, of these members; `ranks` have it."""
        self.round += 1
        self._of.update(dict.fromkeys(ranks, (self.round, members)))

    def forget(self, rank: int) -> None:
        self._of.pop(rank, None)

    def common(self, members: tuple[int, ...], holds: Mapping[int, int]) -> tuple[bool, bool]:
        """Whether these members, each of which has the average of the number that `holds` says, all have the same one;
        and whether it was also made of the replicas of exactly them."""
        last, made_of = self._of.get(members[0], (0, ()))
        common = last > 0 and all(holds.get(rank) == last for rank in members)
        return common, common and members == made_of


@dataclass(frozen=True)
class Verdict:
    """What a trainer is to do.

    Attributes:
        attempt: number of the attempt to reduce, with `GO`.
        epoch: of the ring; a new one for other members and after a failure.
        members: ranks in the ring, ascending.
        round: number of this average, with `DONE`; each counts up by one.
        common, complete: what the members have in common, with `GO`, as `LastAverages.common` has it.
        leaders: with `GO`, the members that reduce among each other: of each machine the first.
        near: with `GO`, where the replicas of this trainer's machine lie, of members in their order; empty where none
            lie where others see them.
    """

    phase: Phase
    attempt: int = 0
    epoch: int = 0
    members: tuple[int, ...] = ()
    round: int = 0
    common: bool = False
    complete: bool = False
    leaders: tuple[int, ...] = ()
    near: tuple[str, ...] = ()

    @property
    def weight(self) -> float:
        """By which the mean of this trainer's machine counts among those of all."""
        return len(self.near) * len(self.leaders) / len(self.members)


@dataclass
class _Attempt:
    """One try to reduce: the ring, members still alive with their turns, those who have not reported."""

    number: int
    epoch: int
    ring: tuple[int, ...]
    turns: dict[int, int]
    unreported: set[int]
    in_common: tuple[bool, bool]
    void: bool = False


class AveragingBook:
    """Who averages with whom: a state machine of calls and verdicts, without clock or thread.

    A round starts when those have arrived that are to meet: all present members, or a group of them while others are
    in rounds of their own. Its members reduce their vectors among themselves and report; only when all of them have
    succeeded does it count. If one failed or died, all who are left try again, with the vectors they had, in a ring of
    a new epoch. So those of a round that stay always have the same result.

    A trainer counts its averages, its `turn`: any call may be repeated without harm.

    Attributes:
        members: trainers that a round waits for, the first one those that are given.
        epoch: of the newest ring.

    Args:
        meeting: who of those that have arrived meet.
    """

    def __init__(self, members: Iterable[int] = (), meeting: Meeting = EVERYBODY) -> None:
        self.epoch = 0
        self.members = set(members)
        self._meeting = meeting
        self._last = LastAverages()
        self._holds: dict[int, int] = {}
        self._arrived: dict[int, int] = {}
        self._settled: dict[int, tuple[int, int]] = {}
        self._under_way: dict[int, _Attempt] = {}  # by rank
        self._attempts = 0
        self._rings: dict[tuple[int, ...], int] = {}  # their epochs; of rings that have a member in common the newest

    @property
    def round(self) -> int:
        return self._last.round

    @property
    def epochs(self) -> Collection[int]:
        """Of all rings that still serve somebody."""
        return {*self._rings.values(), *(attempt.epoch for attempt in self._under_way.values())}

    def join(self, rank: int) -> None:
        self.members.add(rank)

    def leave(self, rank: int) -> None:
        """`rank` is not waited for any more. A round that has started ends with it, one that has not without it."""
        self._remove(rank)
        self._start()

    def dead(self, rank: int) -> None:
        """`rank` left and will not report; whoever comes under this rank later begins anew."""
        self._settled.pop(rank, None)
        self._holds.pop(rank, None)
        self._last.forget(rank)
        self._remove(rank)
        self._drop_from_attempt(rank)
        self._start()

    def arrive(self, rank: int, turn: int, holds: int = 0) -> None:
        """`rank` has a vector for its average number `turn`, counted from 1; it has given up all earlier ones.

        It has the average of round `holds`, 0 for none.
        """
        attempt = self._under_way.get(rank)
        started = attempt.turns[rank] if attempt is not None else 0
        if rank not in self.members or turn <= max(started, self._settled.get(rank, (0, 0))[0]):
            return
        self._arrived[rank], self._holds[rank] = turn, holds
        self._drop_from_attempt(rank)
        self._start()

    def report(self, rank: int, attempt_number: int, success: bool) -> None:
        """`rank` has ended its part of an attempt; after a failure it has left the ring as well."""
        attempt = self._under_way.get(rank)
        if attempt is None or attempt.number != attempt_number or rank not in attempt.unreported:
            return
        attempt.unreported.discard(rank)
        attempt.void |= not success
        self._end_if_all_reported(attempt)

    def verdict(self, rank: int, turn: int) -> Verdict:
        """How it stands with average number `turn` of `rank`."""
        settled = self._settled.get(rank, (0, 0))
        if settled[0] == turn:
            return Verdict(Phase.DONE, round=settled[1])
        attempt = self._under_way.get(rank)
        if attempt is not None and attempt.turns[rank] == turn:
            if rank not in attempt.unreported:
                return Verdict(Phase.WAIT)
            phase, (common, complete) = Phase.VOID if attempt.void else Phase.GO, attempt.in_common
            return Verdict(phase, attempt.number, attempt.epoch, attempt.ring, common=common, complete=complete)
        return Verdict(Phase.WAIT if self._arrived.get(rank) == turn else Phase.OUT)

    def reducing(self, rank: int, epoch: int) -> bool:
        """`rank` is to reduce in the ring of that epoch: it was told to go and has not reported, and nobody failed."""
        attempt = self._under_way.get(rank)
        return attempt is not None and not attempt.void and rank in attempt.unreported and epoch == attempt.epoch

    def _remove(self, rank: int) -> None:
        self.members.discard(rank)
        self._arrived.pop(rank, None)
        self._drop_rings({rank})  # who leaves may close its end, so that the ring serves nobody any more

    def _drop_rings(self, of: Collection[int]) -> None:
        self._rings = {ring: epoch for ring, epoch in self._rings.items() if not set(ring) & set(of)}

    def _drop_from_attempt(self, rank: int) -> None:
        attempt = self._under_way.pop(rank, None)
        if attempt is None:
            return
        del attempt.turns[rank]
        attempt.unreported.discard(rank)
        attempt.void |= bool(attempt.unreported)  # those may wait in vain for what it was to send
        self._end_if_all_reported(attempt)

    def _start(self) -> None:
        while chosen := self._meeting.choose(tuple(self._arrived), self.members):
            ring = tuple(sorted(chosen))
            if ring not in self._rings:
                self._drop_rings(ring)  # each of them has but one
                self.epoch += 1
                self._rings[ring] = self.epoch
            self._attempts += 1
            in_common = self._last.common(ring, self._holds)
            turns = {rank: self._arrived.pop(rank) for rank in ring}
            attempt = _Attempt(self._attempts, self._rings[ring], ring, turns, set(ring), in_common)
            self._under_way.update(dict.fromkeys(ring, attempt))

    def _end_if_all_reported(self, attempt: _Attempt) -> None:
        if attempt.unreported:
            return
        for rank in attempt.turns:
            del self._under_way[rank]
        if attempt.void:
            self._rings.pop(attempt.ring, None)
            self._arrived.update({rank: turn for rank, turn in attempt.turns.items() if rank in self.members})
        elif attempt.turns:
            self._last.add(attempt.turns, attempt.ring)
            self._settled.update({rank: (turn, self.round) for rank, turn in attempt.turns.items()})
        self._start()


class AveragingService:
    """Lets trainers in other processes average (a role; `all_reduce.RemoteAveraging` is the other end).

    A trainer that has to wait is answered when its time has come; no thread here waits with it.

    Args:
        members: ranks that the first round waits for, also if they come late.
        banned: connections that are not listened to.
        meeting: as in `AveragingBook`.
    """

    def __init__(self, members: Iterable[int] = (), banned: Iterable[str] = (), meeting: Meeting = EVERYBODY) -> None:
        self._book = AveragingBook(members, meeting)
        # a leader of the next group would overwrite what another one of the last has not read yet
        self._see_each_other = meeting.together
        self._lock = threading.Lock()
        self._clients: dict[int, str] = {}
        self._dead = set(banned)
        self._waiting: dict[int, tuple[int, str, Promise[Verdict]]] = {}
        self._given_up: list[Promise[Verdict]] = []
        self._readers: list[tuple[int, int, str, tuple[str, ...], Promise[tuple[bytes, ...]]]] = []
        self._boards: dict[int, dict[str, bytes]] = {}  # notes by the epoch of their ring
        self._places: dict[int, tuple[str, str]] = {}

    @property
    def clients(self) -> frozenset[str]:
        """All connections that have spoken."""
        with self._lock:
            return frozenset(self._dead | set(self._clients.values()))

    def dead(self, rank: int) -> None:
        """Trainer `rank` is given up: nobody waits for it, and its connection is not listened to any more."""
        with self._changing():
            self._forget(rank)

    def expect(self, rank: int) -> None:
        with self._changing():
            self._book.join(rank)

    def place(self, rank: int, machine: str, path: str | None) -> None:
        """Where the next trainer of that rank is, and the memory in which those of its machine see its replica: of all
        trainers, or of none."""
        with self._lock:
            self._places.pop(rank, None)
            if path is not None and self._see_each_other:
                self._places[rank] = machine, path

    def client_gone(self, client: str) -> None:
        """As `dead` of the trainer that spoke over that connection, if one did."""
        with self._changing():
            for rank in [rank for rank, owner in self._clients.items() if owner == client]:
                self._forget(rank)

    def close(self) -> None:
        """Lets everybody go who waits; nobody is listened to any more."""
        with self._changing():
            self._dead |= set(self._clients.values())

    @served(quick=True)
    def join(self, client: Client, rank: int) -> None:
        """As `AveragingBook.join`.

        Raises:
            RunError: whoever asks was given up.
        """
        with self._changing():
            if client in self._dead:
                raise RunError(f"trainer {rank} was given up and cannot average any more")
            if self._clients.get(rank, client) != client:
                self._forget(rank)  # it was started anew before anybody noticed that it had died
            self._clients[rank] = client
            self._book.join(rank)

    @served(quick=True)
    def leave(self, client: Client, rank: int) -> None:
        with self._changing():
            if self._owns(rank, client):
                self._book.leave(rank)

    @served(quick=True, timeout_s=PATIENCE_S)
    def arrive(self, client: Client, rank: int, turn: int, holds: int) -> Pending[Verdict]:
        """As `AveragingBook.arrive`; answers when it is decided what the trainer is to do."""
        with self._changing():
            if self._owns(rank, client):
                self._book.arrive(rank, turn, holds)
            return self._answer(rank, turn, client)

    @served(quick=True, timeout_s=PATIENCE_S)
    def report(self, client: Client, rank: int, turn: int, attempt: int, success: bool) -> Pending[Verdict]:
        with self._changing():
            if self._owns(rank, client):
                self._book.report(rank, attempt, success)
            return self._answer(rank, turn, client)

    @served(once=False, quick=True)
    def check(self, client: Client, rank: int, turn: int) -> Verdict:
        with self._lock:
            return self._verdict(rank, turn, client)

    @served(quick=True)
    def note(self, client: Client, rank: int, epoch: int, key: str, value: bytes) -> None:
        """What a member tells the others of its ring: where it listens, say."""
        with self._changing():
            if not self._reducing(rank, epoch, client):
                return
            if epoch not in self._boards:
                alive = self._book.epochs
                self._boards = {one: notes for one, notes in self._boards.items() if one in alive}
            notes = self._boards.setdefault(epoch, {})
            if len(notes) >= BOARD_NOTES or max(len(key), len(value)) > NOTE_BYTES:
                raise DataError(f"a ring's board holds at most {BOARD_NOTES} notes of {NOTE_BYTES} bytes")
            notes[key] = value

    @served(once=False, quick=True, timeout_s=PATIENCE_S)
    def notes(self, client: Client, rank: int, epoch: int, keys: tuple[str, ...]) -> Pending[tuple[bytes, ...]]:
        """What was told under these keys, in their order; answers when none is missing.

        It ends in `RingBroken` if the ring is void.
        """
        answer: Promise[tuple[bytes, ...]] = Promise()
        with self._changing():
            self._readers.append((rank, epoch, client, keys, answer))
        return answer

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Under the lock; whoever need not wait any longer then is answered without it."""
        with self._lock:
            yield
            given_up, self._given_up = self._given_up, []
            answers: list[tuple[Promise[Any], Any]] = [(answer, Verdict(Phase.WAIT)) for answer in given_up]
            for rank, (turn, client, answer) in list(self._waiting.items()):
                verdict = self._verdict(rank, turn, client)
                if verdict.phase is not Phase.WAIT:
                    del self._waiting[rank]
                    answers.append((answer, verdict))
            readers, self._readers = self._readers, []
            for rank, epoch, client, keys, read in readers:
                notes = self._boards.get(epoch, {})
                if not self._reducing(rank, epoch, client):
                    answers.append((read, RingBroken(f"ring {epoch} is void")))
                elif all(key in notes for key in keys):
                    answers.append((read, tuple(notes[key] for key in keys)))
                else:
                    self._readers.append((rank, epoch, client, keys, read))
        for answer, given in answers:
            if isinstance(given, BaseException):
                answer.fail(given)
            else:
                answer.keep(given)

    def _answer(self, rank: int, turn: int, client: str) -> Pending[Verdict]:
        """Under the lock: decided at its end at the earliest. Whoever asks again is answered in place of before."""
        answer: Promise[Verdict] = Promise()
        if self._owns(rank, client):
            if (before := self._waiting.get(rank)) is not None:  # it asks again, and listens to that one no more
                self._given_up.append(before[2])
            self._waiting[rank] = turn, client, answer
        else:
            answer.keep(Verdict(Phase.OUT))
        return answer

    def _forget(self, rank: int) -> None:
        if (client := self._clients.pop(rank, None)) is not None:
            self._dead.add(client)
        self._book.dead(rank)

    def _owns(self, rank: int, client: str) -> bool:
        """The first connection that speaks for a member is its own until it is dead or joins over another one."""
        if client in self._dead or rank not in self._book.members | self._clients.keys():
            return False
        return self._clients.setdefault(rank, client) == client

    def _verdict(self, rank: int, turn: int, client: str) -> Verdict:
        if not self._owns(rank, client):
            return Verdict(Phase.OUT)
        verdict = self._book.verdict(rank, turn)
        return self._by_machine(verdict, rank) if verdict.phase is Phase.GO else verdict

    def _by_machine(self, verdict: Verdict, rank: int) -> Verdict:
        machines: dict[str, list[int]] = {}
        for member in verdict.members:
            machine, _ = self._places.get(member, (f"\0{member}", ""))  # who shares nothing is alone
            machines.setdefault(machine, []).append(member)
        near = next(members for members in machines.values() if rank in members)
        paths = tuple(self._places[member][1] for member in near) if rank in self._places else ()
        return replace(verdict, leaders=tuple(members[0] for members in machines.values()), near=paths)

    def _reducing(self, rank: int, epoch: int, client: str) -> bool:
        return self._owns(rank, client) and self._book.reducing(rank, epoch)
