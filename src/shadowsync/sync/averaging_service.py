"""The averaging of trainers in several processes, as the driver serves it: the book and the ring's notice board."""

import threading
from collections.abc import Callable, Iterable

from shadowsync.errors import DataError, RunError
from shadowsync.rpc.served import Client, served
from shadowsync.sync.averaging import AveragingBook, Phase, Verdict
from shadowsync.sync.ring import RingBroken

NOTE_BYTES = 1 << 16
"""Longest note on the board."""
BOARD_NOTES = 4096
"""Most notes on it; a ring pins a few for each member."""


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
            if self._reducing(rank, epoch, client):
                self._board.pin(epoch, key, value)
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
            return self._board.read(epoch, keys)

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
