"""The averaging of trainers in several processes, as the driver serves it: the book and the ring's notice board."""

import threading
from collections.abc import Callable, Iterable, Mapping

from shadowsync.errors import DataError, RunError
from shadowsync.rpc.service import Meta, Method, Reply, Request
from shadowsync.sync.averaging import AveragingBook, Ground, Phase, Verdict

NOTE_BYTES = 1 << 16
"""Longest note on the board."""
BOARD_NOTES = 4096
"""Most notes on it; a ring pins a few for each member."""


class Member(Meta, frozen=True):
    """Who joins or leaves."""

    rank: int


class Turn(Meta, frozen=True):
    """One trainer's average number `turn`, counted from 1."""

    rank: int
    turn: int


class Arrival(Meta, frozen=True):
    """As `Turn`, of a trainer that has the average of round `holds`, 0 for none."""

    rank: int
    turn: int
    holds: int = 0


class Report(Meta, frozen=True):
    """How an attempt at that average ended for this trainer."""

    rank: int
    turn: int
    attempt: int
    success: bool


class Answered(Meta, frozen=True):
    """A `Verdict` as it crosses."""

    phase: Phase
    attempt: int
    epoch: int
    members: tuple[int, ...]
    round: int
    common: bool = False
    complete: bool = False

    @classmethod
    def of(cls, verdict: Verdict) -> "Answered":
        """The same as a message."""
        ground = verdict.ground
        return cls(
            verdict.phase,
            verdict.attempt,
            verdict.epoch,
            verdict.members,
            verdict.round,
            ground.common,
            ground.complete,
        )

    def verdict(self) -> Verdict:
        """The same as the book gave it."""
        ground = Ground(self.common, self.complete)
        return Verdict(self.phase, self.attempt, self.epoch, self.members, self.round, ground)


class Note(Meta, frozen=True):
    """What a member tells the others of its ring: where it listens, say."""

    rank: int
    epoch: int
    key: str
    value: bytes


class Wanted(Meta, frozen=True):
    """Asks for what others of the ring have told."""

    rank: int
    epoch: int
    keys: tuple[str, ...]


class Notes(Meta, frozen=True):
    """The values by the order of the keys; none as long as one is missing. `valid` is False once the ring is void."""

    values: tuple[bytes, ...] | None
    valid: bool


class AveragingService:
    """Lets trainers in other processes average (`averaging_remote.RemoteAveraging` is the other end).

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
        self._board = _Board()
        self.methods: Mapping[str, Method] = {
            "join": Method(self._join),
            "leave": Method(self._leave),
            "arrive": Method(self._arrive),
            "check": Method(self._check, once=False),
            "report": Method(self._report),
            "note": Method(self._note),
            "notes": Method(self._notes, once=False),
        }

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

    def close(self) -> None:
        """Nothing to end."""

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

    def _join(self, request: Request) -> Reply:
        rank = request.read(Member).rank
        with self._changed:
            if request.client in self._dead:
                raise RunError(f"trainer {rank} was given up and cannot average any more")
            if self._clients.get(rank, request.client) != request.client:
                self._forget(rank)  # it was started anew before anybody noticed that it had died
            self._clients[rank] = request.client
            self._book.join(rank)
        return Reply()

    def _leave(self, request: Request) -> Reply:
        rank = request.read(Member).rank
        self._change(rank, request.client, lambda: self._book.leave(rank))
        return Reply()

    def _arrive(self, request: Request) -> Reply:
        asked = request.read(Arrival)
        self._change(asked.rank, request.client, lambda: self._book.arrive(asked.rank, asked.turn, asked.holds))
        return self._when_decided(asked.rank, asked.turn, request.client)

    def _report(self, request: Request) -> Reply:
        said = request.read(Report)
        self._change(said.rank, request.client, lambda: self._book.report(said.rank, said.attempt, said.success))
        return self._when_decided(said.rank, said.turn, request.client)

    def _check(self, request: Request) -> Reply:
        asked = request.read(Turn)
        with self._changed:
            return Reply(Answered.of(self._verdict(asked.rank, asked.turn, request.client)))

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

    def _when_decided(self, rank: int, turn: int, client: str) -> Reply:
        with self._changed:
            verdict = self._verdict(rank, turn, client)
            if verdict.phase is Phase.WAIT:
                self._hold(lambda: self._verdict(rank, turn, client).phase is not Phase.WAIT)
                verdict = self._verdict(rank, turn, client)
        return Reply(Answered.of(verdict))

    def _note(self, request: Request) -> Reply:
        note = request.read(Note)
        with self._changed:
            if self._reducing(note.rank, note.epoch, request.client):
                self._board.pin(note.epoch, note.key, note.value)
                self._changed.notify_all()
        return Reply()

    def _notes(self, request: Request) -> Reply:
        asked = request.read(Wanted)
        with self._changed:
            notes = self._read_notes(asked, request.client)
            if notes.valid and notes.values is None:
                self._hold(lambda: self._read_notes(asked, request.client) != Notes(None, True))
                notes = self._read_notes(asked, request.client)
        return Reply(notes)

    def _read_notes(self, asked: Wanted, client: str) -> Notes:
        if not self._reducing(asked.rank, asked.epoch, client):
            return Notes(None, False)
        return Notes(self._board.read(asked.epoch, asked.keys), True)

    def _reducing(self, rank: int, epoch: int, client: str) -> bool:
        return self._owns(rank, client) and self._book.reducing(rank, epoch)

    def _hold(self, until: Callable[[], bool]) -> None:
        if self._seats.acquire(blocking=False):
            try:
                self._changed.wait_for(until, self._hold_s)
            finally:
                self._seats.release()


class _Board:
    """What the members of the newest ring tell each other; older epochs are forgotten."""

    def __init__(self) -> None:
        self._epoch = 0
        self._notes: dict[str, bytes] = {}

    def pin(self, epoch: int, key: str, value: bytes) -> None:
        """Keeps a note, in place of an earlier one of that key."""
        if epoch != self._epoch:
            self._epoch, self._notes = epoch, {}
        if len(self._notes) >= BOARD_NOTES or max(len(key), len(value)) > NOTE_BYTES:
            raise DataError(f"a ring's board holds at most {BOARD_NOTES} notes of {NOTE_BYTES} bytes")
        self._notes[key] = value

    def read(self, epoch: int, keys: Iterable[str]) -> tuple[bytes, ...] | None:
        """The values of these keys, or None as long as one is missing."""
        found = [self._notes.get(key) if epoch == self._epoch else None for key in keys]
        present = tuple(value for value in found if value is not None)
        return present if len(present) == len(found) else None
