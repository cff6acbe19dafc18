"""What the driver serves, at two endpoints: the leases with the records, and the averaging."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from shadowsync.aggregation.coordinator import StepCoordinator
from shadowsync.cluster.records import RecordTaker
from shadowsync.data.leases import DoneLog, Lease, LeaseStatus
from shadowsync.data.reader import Reader
from shadowsync.data.source import OpenSource
from shadowsync.errors import DataError, RunError
from shadowsync.rpc.connection import Handle, JobKeys, Method, Payload, Service
from shadowsync.rpc.pending import Pending
from shadowsync.rpc.served import NOTHING, Client, Served, served
from shadowsync.sync.averaging import AveragingService
from shadowsync.sync.meeting import EVERYBODY, Meeting

if TYPE_CHECKING:
    from shadowsync.rpc.server import WireServer as Server


class DriverService:
    """What trainers ask the driver for: leases, where rows come from, under gradient methods leave to compute; and what
    they tell it.

    A trainer that was given up may still run on a machine that cannot be reached; once banned it gets no answer but an
    error, so that it takes no rows from the one that has its place.
    """

    def __init__(
        self,
        reader: Reader,
        source: OpenSource,
        records: RecordTaker,
        banned: frozenset[str] = frozenset(),
        conducting: StepCoordinator | None = None,
    ) -> None:
        self._reader, self._source = reader, source
        self._conducting = conducting
        self._clients: dict[int, set[str]] = {}
        self._banned = set(banned)
        self._heard: set[str] = set()
        self._lock = threading.Lock()
        # its own come last: they stand in place of the lease service's
        methods = {**Served(reader.leases).methods, **Served(records).methods, **Served(self).methods}
        methods |= {} if conducting is None else Served(conducting).methods
        self.methods = {name: Method(self._guarded(m.handle), m.once, m.quick) for name, m in methods.items()}

    @property
    def clients(self) -> frozenset[str]:
        """All connections that have spoken."""
        with self._lock:
            return frozenset(self._heard | self._banned)

    def client_gone(self, client: str) -> None:
        """What a trainer holds goes back when the job gives the trainer up, not with its connection."""

    def close(self) -> None:
        """Nothing to end."""

    @served(quick=True)
    def lease(self, trainer: int, idle: bool, client: Client) -> tuple[LeaseStatus, Lease | None]:
        """As `LeaseService.lease`; remembers over which connections a trainer asks."""
        with self._lock:
            self._clients.setdefault(trainer, set()).add(client)
        return self._reader.leases.lease(trainer, idle)

    @served(quick=True)
    def abandon(self, trainer: int) -> None:
        """What a trainer has leased goes to the others."""
        self._forget_batches(trainer)  # first: what it has sent and not seen stepped is not to be trained again
        self._reader.leases.abandon(trainer)
        self._forget_batches(trainer)  # it may just have claimed one more

    @served(once=False)
    def place(self, number: int) -> str:
        """Where a slice of the training rows comes from, for messages: `the 8192 rows from rows.tsv, row 17 on`.

        Raises:
            DataError: there is no such slice.
        """
        if not 0 <= number < len(self._reader.slices):
            raise DataError(f"there is no slice {number}")
        part = self._reader.slices[number]
        return f"the {part.rows} rows from {self._source.place(part, 0)} on"

    def ban(self, rank: int, take_log: Callable[[], DoneLog | None] = lambda: None) -> None:
        """Gives up a trainer: its connections are not listened to any more, and what it had leased and has not done,
        by its log too, goes to the others."""
        with self._lock:
            self._banned |= self._clients.pop(rank, set())
        if (log := take_log()) is not None:
            self._reader.leases.redo(log)
        self.abandon(rank)

    def _forget_batches(self, rank: int) -> None:
        if self._conducting is not None:
            self._conducting.abandoned(rank)

    def _guarded(self, handle: Handle) -> Handle:
        def guarded(request: Payload) -> Payload | Pending[Payload]:
            if request.client in self._banned:
                raise RunError("this trainer was given up")
            if request.client not in self._heard:
                with self._lock:
                    self._heard.add(request.client)
            return handle(request)

        return guarded


class Endpoints:
    """The servers of the driver.

    Args:
        keys: of the job; None where all roles are in this process, and nothing has to be served.

    Attributes:
        driver: what the first one serves now; None before `open`.
        averaging: what the second one does; likewise.
        records: takes the records of the present generation.
    """

    def __init__(self, keys: JobKeys | None, host: str, records: RecordTaker, forget_s: float) -> None:
        self.records = records
        self.driver: DriverService | None = None
        self.averaging: AveragingService | None = None
        self._servers: list[Server] = []
        if keys is None:
            return
        from shadowsync.rpc.server import WireServer  # noqa: PLC0415 an extra

        for threads in (4, 1):
            server = WireServer(NOTHING, keys, host, threads=threads, forget_client_after_s=forget_s)
            self._servers.append(server)
            server.start()

    @property
    def addresses(self) -> tuple[str, str]:
        """Of the leases and of the averaging."""
        return self._servers[0].address, self._servers[1].address

    def open(
        self,
        reader: Reader,
        source: OpenSource,
        ranks: list[int],
        generation: int,
        conducting: StepCoordinator | None = None,
        meeting: Meeting = EVERYBODY,
    ) -> None:
        """Serves these rows to these trainers from now on, who average as `meeting` says; those of the generation
        before are heard no more."""
        self.records.generation = generation
        before, averaging = self.driver, self.averaging
        banned = before.clients if before else frozenset()
        self.driver = DriverService(reader, source, self.records, banned, conducting)
        self.averaging = AveragingService(ranks, averaging.clients if averaging else (), meeting)
        if averaging is not None:
            averaging.close()
        services: list[Service] = [self.driver, Served(self.averaging)]
        for server, service in zip(self._servers, services, strict=False):  # none where all roles are in this process
            server.service = service

    def give_up(self, rank: int, take_log: Callable[[], DoneLog | None] = lambda: None) -> None:
        """Gives up a trainer: its rows go to the others, but for those that its log says are done, nobody waits for
        it, and it is not listened to any more."""
        if self.driver is not None and self.averaging is not None:
            self.averaging.dead(rank)
            self.driver.ban(rank, take_log)

    def expect(self, rank: int) -> None:
        """A trainer is about to start, in place of one that was given up or as one more."""
        if self.averaging is not None:
            self.averaging.expect(rank)

    def close(self) -> None:
        """Ends the servers."""
        for server in self._servers:
            server.close()
