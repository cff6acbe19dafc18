"""The driver's two doors: the desk with the records, and the averaging at which trainers wait for each other."""

import threading
from collections.abc import Callable

from shadowsync.aggregation.conductor_service import ConductorService
from shadowsync.cluster.records import RecordTaker
from shadowsync.data.desk_service import DeskService
from shadowsync.data.reader import Reader
from shadowsync.data.source import OpenSource
from shadowsync.errors import DataError, RunError
from shadowsync.rpc.clients import Limits
from shadowsync.rpc.keys import JobKeys
from shadowsync.rpc.served import Client, Served, served
from shadowsync.rpc.server import ServerOptions, WireServer
from shadowsync.rpc.service import Method, Outcome, Request
from shadowsync.runtime.host import Switch
from shadowsync.sync.averaging_service import AveragingService

MOST_SEATS = 32


class FrontDesk:
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
        conducting: ConductorService | None = None,
    ) -> None:
        self._reader, self._source, self._conducting = reader, source, conducting
        self._clients: dict[int, set[str]] = {}
        self._banned = set(banned)
        self._heard: set[str] = set()
        self._lock = threading.Lock()
        desk = Served(DeskService(reader.desk, self._give_back, self._leasing))
        methods = {**desk.methods, **Served(records).methods, **Served(self).methods}
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

    def ban(self, rank: int) -> None:
        """Gives up a trainer: its leases go to the others, and its connections are not listened to any more."""
        with self._lock:
            self._banned |= self._clients.pop(rank, set())
        self._give_back(rank)

    def _give_back(self, rank: int) -> None:
        """What a trainer has leased goes to the others."""
        self._forget_batches(rank)  # first: what it has sent and not seen stepped is not to be trained again
        self._reader.desk.abandon(rank)
        self._forget_batches(rank)  # it may just have claimed one more

    def _forget_batches(self, rank: int) -> None:
        if self._conducting is not None:
            self._conducting.abandoned(rank)

    def _leasing(self, rank: int, client: Client) -> None:
        with self._lock:
            self._clients.setdefault(rank, set()).add(client)

    def _guarded(self, handle: Callable[[Request], Outcome]) -> Callable[[Request], Outcome]:
        def guarded(request: Request) -> Outcome:
            if request.client in self._banned:
                raise RunError("this trainer was given up")
            if request.client not in self._heard:
                with self._lock:
                    self._heard.add(request.client)
            return handle(request)

        return guarded


class Doors:
    """The servers of the driver.

    Attributes:
        desk: what the first door serves now; None before `open`.
        averaging: what the second one does; likewise.
        records: takes the records of the present generation.
    """

    def __init__(self, keys: JobKeys, host: str, records: RecordTaker, trainers: int, forget_s: float) -> None:
        self.records = records
        self._seats = min(MOST_SEATS, trainers)
        self.desk: FrontDesk | None = None
        self.averaging: AveragingService | None = None
        self._desk_switch, self._averaging_switch = Switch(), Switch()
        limits = Limits(forget_client_after_s=forget_s)
        self._servers = [
            WireServer(switch, keys, ServerOptions(host=host, threads=threads, limits=limits))
            for switch, threads in ((self._desk_switch, 4), (self._averaging_switch, self._seats + 1))
        ]
        for server in self._servers:
            server.start()

    @property
    def addresses(self) -> tuple[str, str]:
        """Of the desk and of the averaging."""
        return self._servers[0].address, self._servers[1].address

    def open(
        self,
        reader: Reader,
        source: OpenSource,
        ranks: list[int],
        generation: int,
        conducting: ConductorService | None = None,
    ) -> None:
        """Serves these rows to these trainers from now on; those of the generation before are heard no more."""
        self.records.generation = generation
        before, averaging = self.desk, self.averaging
        banned = before.clients if before else frozenset()
        self.desk = FrontDesk(reader, source, self.records, banned, conducting)
        self.averaging = AveragingService(ranks, self._seats, banned=averaging.clients if averaging else ())
        self._desk_switch.part = self.desk
        self._averaging_switch.part = Served(self.averaging)

    def give_up(self, rank: int) -> None:
        """Gives up a trainer: its rows go to the others, nobody waits for it, and it is not listened to any more."""
        if self.desk is not None and self.averaging is not None:
            self.desk.ban(rank)
            self.averaging.dead(rank)

    def expect(self, rank: int) -> None:
        """A trainer is about to start, in place of one that was given up or as one more."""
        if self.averaging is not None:
            self.averaging.expect(rank)

    def close(self) -> None:
        """Ends the servers."""
        for server in self._servers:
            server.close()
