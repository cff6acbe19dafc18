"""A trainer as the driver has it: in a process of its own, behind connections, or in the driver's."""

import contextlib
import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from shadowsync.aggregation.stragglers import parse_stragglers
from shadowsync.assembly import codec_choice, computing_here, key_rules, make_module, row_optimizer, unique_rows
from shadowsync.checkpoint.job_state import TrainerImage
from shadowsync.choices import choose_all
from shadowsync.cluster.context import Addresses, Near, ServerAddress, TrainerSpec
from shadowsync.cluster.endpoints import DriverService
from shadowsync.cluster.read_ahead import ReadAhead
from shadowsync.cluster.records import RecordSender
from shadowsync.cluster.servers import Imaged
from shadowsync.cluster.trainer_dense import GradientWorkers, MergedReplica, WorkerContext
from shadowsync.compression.channel import Channel
from shadowsync.compression.wire import WireCounter, WireTotals
from shadowsync.config import Config
from shadowsync.data.leases import TELL_S, DoneLog, LeaseClient, Leases
from shadowsync.data.reader import Feed, LeasedBatch, Parser
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.proxy import ServerProxy
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Shard
from shadowsync.errors import RunError, ShadowSyncError
from shadowsync.memory.shared import SharedMemory
from shadowsync.models.wrapping import Wrapped
from shadowsync.recovery.settings import moving_rows, row_tracking
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.errors import GONE, Fault
from shadowsync.rpc.served import Served, ask, later, served
from shadowsync.runtime.runtime import ProcessContext, waiting_for
from shadowsync.training.gate import Gate
from shadowsync.training.kernels import Computing, processor
from shadowsync.training.worker import Driver, Trainer, TrainerContext, TrainerLost

LOOK_S = 0.05
SETTLE_S = 0.002
END_S = 30.0
SKETCH = 4096
"""Coordinates of a replica that a status brings, so that the driver knows how far apart replicas are."""


@dataclass(frozen=True)
class TrainerStatus:
    """How a trainer is.

    Attributes:
        syncs: synchronisations so far.
        ended: all its workers have ended, and the driver knows all that they did.
        lost: it died by script.
        fault: what went wrong, if anything did.
        wire: what crossed so far; in the driver's process that is counted there.
        waiting: batches parsed and not begun.
        codecs: by kind of traffic, the codec in use where the trainer chooses it.
        first, decisions: how it came to them, in sentences, from number `first` on.
        computing: how its workers compute.
        waiting_for: what it has waited for too long, as `waiting_for` says it; empty for nothing.
        sketch: at most `SKETCH` coordinates of the replica, the same of every trainer; None before any was told.
    """

    syncs: int
    ended: bool
    lost: bool
    fault: Fault | None
    wire: WireTotals
    waiting: int
    codecs: dict[str, str]
    first: int
    decisions: tuple[str, ...]
    computing: Computing | None
    waiting_for: str = ""
    sketch: Tensor | None = None


def build_trainer(spec: TrainerSpec, process: ProcessContext) -> Served:
    """Makes a trainer that stands ready; `start` starts it."""
    return Served(TrainerPart(spec, process))


def get_ready() -> None:
    """Loads what a role's process may need, the members of all seams among it."""
    importlib.import_module("shadowsync.sync.gloo")
    choose_all(Config(), own_model=False)


class TrainerPart(Imaged):
    """What a trainer offers to the driver."""

    def __init__(self, spec: TrainerSpec, process: ProcessContext) -> None:
        self._spec, self._process = spec, process
        self._near = spec.others if isinstance(spec.others, Near) else None
        self._connections: dict[tuple[str, int], Connection] = {}
        self._stopping = self._dying = self._ended = False
        self._released = 0
        self._pause, self._wake = threading.Event(), threading.Event()
        job, codecs = spec.job, spec.job.choices.codecs
        if isinstance(near := spec.others, Near):
            codecs = {kind: codec.levels[0] for kind, codec in codecs.items()}  # nothing can be measured
            self._counter, self._gate, module, self._computing = near.counter, near.gate, near.module, job.computing
            self._feed = near.reader.feed(spec.rank)
        else:
            self._counter, self._gate = WireCounter(), Gate()
            module = make_module(job.config, job.choices, job.schema, job.tables, job.model)
            alike = job.config.train.device == "cpu" and job.processor == processor()
            self._computing = job.computing if alike else computing_here(job.config, module)
            self._reach_driver(near)
        self._codecs = codec_choice(job.config, job.choices, codecs)
        line, connect = self._codecs.channel("dense", self._counter), self._measured
        clients, counter, gate = self._make_clients(), self._counter, self._gate
        context = WorkerContext(
            spec,
            module,
            self._computing,
            process.host,
            connect,
            line,
            counter,
            gate,
            clients,
            self._feed,
            self._stepping,
            lambda: self._course.scale * job.rates.factor(self._course.trained),
        )
        self._dense = (MergedReplica if job.choices.aggregation is None else GradientWorkers)(context)
        self._trainer = self._dense.trainer
        self._read_ahead = self._begin_read_ahead()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def close(self) -> None:
        """Ends the workers, whatever they wait for."""
        self._end_feed()
        for connection in self._connections.values():
            connection.close()
        if self._read_ahead is not None:  # which waits for a server that is gone no longer than its connection is open
            self._read_ahead.close()
        self._gate.release()
        self._pause.set()
        self._wake.set()
        if self._near is None:
            if self._watcher.is_alive():
                self._watcher.join(END_S)
            self._records.close()
        elif self._ended:  # a model may hang, and its threads end with this process
            self._watcher.join(END_S)

    # --- parts -------------------------------------------------------------------------------------------------------

    def _reach_driver(self, addresses: Addresses) -> None:
        driver, path = self._connect("driver", 0, addresses.driver), self._spec.log
        log = None if path is None else DoneLog(SharedMemory.open(path).take(*DoneLog.PARTS[0]))
        self._leases = LeaseClient(driver, log, ahead=self._spec.job.choices.aggregation is None)
        parse = partial(later, self._connect("reader", 0, addresses.reader), Parser.parse)
        self._feed = Feed(self._spec.rank, self._leases, parse, self._spec.job.config.data.prefetch)
        self._records = RecordSender(
            driver, self._spec.rank, self._spec.generation, self._spec.job.choices.source.tasks[0].clicks
        )

    def _connect(self, kind: str, index: int, address: str) -> Connection:
        """The connection to a role, the same one each time."""
        known = self._connections.get((kind, index))
        if known is None:
            known = self._connections[kind, index] = self._process.connector.connect(address)
        return known

    def _measured(self, kind: str, index: int, address: str) -> Connection:
        """As `_connect`; what crosses to servers is measured."""
        return self._codecs.measured(self._connect(kind, index, address))

    @property
    def _course(self) -> Leases:
        """Which knows how far the job has come."""
        return self._leases if self._near is None else self._near.reader.leases

    def _stepping(self, trainer: Trainer, driver: Driver) -> TrainerContext:
        near, job, leases = self._near, self._spec.job, self._course

        def ended() -> None:
            self._wake.set()
            if near is not None:
                near.news()

        train, emulated = job.config.train, job.config.train.emulate_step_ms
        context = TrainerContext(
            rank=trainer.rank,
            feed=self._feed,
            driver=driver,
            gate=self._gate,
            rates=job.rates,
            prefetch=job.prefetch,
            record=self._records.record if near is None else near.recorder.record,
            trained=lambda: leases.trained,
            scale=lambda: leases.scale,
            stopping=lambda: self._stopping or trainer.error is not None,
            before_step=self._spec.job.failures if near is None else self._before_step,
            place=self._place,
            ended=ended,
            stepped=self._codecs.stepped,
            emulate_step_s=None if emulated is None else emulated / 1e3,
            compute=train.emulate_compute,
        )
        if train.stragglers is None:
            return context
        return replace(context, slowness=parse_stragglers(train.stragglers).factor)

    def _before_step(self, rank: int, iteration: int) -> None:
        if self._dying:
            raise TrainerLost(f"trainer {rank} died at its iteration {iteration}")
        self._spec.job.failures(rank, iteration)

    def _make_clients(self) -> list[EmbeddingClient]:
        """One for each worker; servers whose memory is this process's or machine's are reached there."""
        job, others = self._spec.job, self._spec.others
        reach: list[Callable[[int], ServerProxy | EmbeddingServer]]
        if isinstance(others, Near):
            reach = [self._line(server, index) for index, server in enumerate(others.embedding)]
        else:
            self._places = list(others.embedding)
            reach = [self._server(*given) for given in enumerate(self._places)]
        unique = unique_rows(job.config, job.choices)
        ways = [[way(stream) for way in reach] for stream in range(job.config.train.workers)]
        self._first_ways = ways[0]
        clients = [EmbeddingClient(job.tables, job.features, servers, unique, admits=True) for servers in ways]
        self._clients = list(enumerate(clients))  # by worker
        return clients

    def _begin_read_ahead(self) -> ReadAhead | None:
        """Where rows are on disk; what a wrapped module looks up is known only when it is called."""
        job = self._spec.job
        others = self._spec.others
        near = isinstance(others, Near) or any(address.memory is not None for address, _ in others.embedding)
        if job.disk is None or isinstance(job.model, Wrapped) or not near:
            return None
        client = EmbeddingClient(job.tables, job.features, self._first_ways)
        self._clients.append((0, client))
        ahead = ReadAhead(client)
        self._feed.opened = ahead.opened
        return ahead

    def _server(
        self, position: int, place: tuple[ServerAddress, tuple[Shard, ...]]
    ) -> Callable[[int], ServerProxy | EmbeddingServer]:
        """The way of each worker, by its number, to an embedding server."""
        (address, shards), spec, choices = place, self._spec, self._spec.job.choices
        if address.memory is not None:
            memory, optimizer = SharedMemory.open(address.memory), row_optimizer(spec.job.config.embedding)
            seed = spec.job.config.train.seed
            tracking = row_tracking(choices.recovery, seed)
            told = tracking if tracking is not None and tracking.priority.sees else None
            rules, moving = key_rules(spec.job.config, choices), moving_rows(spec.job.config.cluster, seed)
            there = told, memory, None, rules, spec.job.disk, moving
            server = EmbeddingServer(shards, choices.storage, optimizer, None, *there)
            if spec.job.config.cluster.address is not None:  # what does not cross the network needs no codec
                return lambda _: server
            return self._line(server, position)
        pulls, pushes = (self._codecs.channel(kind, self._counter) for kind in ("pull", "push"))
        connection = self._measured("embedding", position, address.wire)
        return lambda stream: ServerProxy(connection, shards, position, pulls, pushes, stream, spec.generation)

    def _line(self, server: EmbeddingServer, position: int) -> Callable[[int], ServerProxy]:
        """As `_server`, without a wire."""
        codecs = self._spec.job.choices.codecs
        pulls, pushes = (Channel(kind, codecs[kind].levels[0], self._counter) for kind in ("pull", "push"))
        return lambda stream: ServerProxy.near(server, position, pulls, pushes, stream)

    def _place(self, leased: LeasedBatch) -> str:
        """The driver knows the files."""
        part = leased.lease.slice
        if self._near is not None:
            return f"a batch of {self._near.place(part)}"
        return f"a batch of {ask(self._connections['driver', 0], DriverService.place, part)}"

    # --- life --------------------------------------------------------------------------------------------------------

    @served()
    def start(self) -> None:
        self._trainer.start()
        self._watcher.start()

    def _watch(self) -> None:
        """Sees the workers to their end, tells the driver the last of what they did, and leaves the group."""
        trainer, near = self._trainer, self._near
        try:
            while trainer.alive() and not (trainer.error is not None and not trainer.stepping()):
                self._wake.wait(LOOK_S)
                self._wake.clear()
                if near is None:
                    self._leases.tell(TELL_S)
            if trainer.error is not None:
                if near is not None:
                    self._tell_error(near)
                    near.give_back(trainer.rank)
                self._feed.close()  # first: its other workers may be waiting for these very rows
            trainer.finish()
            if near is None:
                self._catch_up()
                self._leases.settle(END_S)
                self._records.flush(END_S)
        except BaseException as error:  # the driver hears of it with the next status
            trainer.error = trainer.error or error
        finally:
            self._ended = True
            if near is not None:
                self._tell_error(near)
                near.news()

    def _tell_error(self, near: Near) -> None:
        if self._trainer.failed and self._trainer.error is not None:
            near.fail(self._trainer.error)

    def _catch_up(self) -> None:
        """Nobody trains any more: what has not crossed does so now, and the driver hears of the bytes."""
        if self._trainer.error is not None:
            return
        self._gate.join()
        try:
            with contextlib.suppress(*GONE):  # a pause tries again
                self._dense.settle()
        finally:
            self._gate.leave()

    def _end_feed(self) -> None:
        self._stopping = True
        self._feed.closed = True
        if self._near is None:
            self._leases.close()
            self._connections["reader", 0].redirect(None)  # whoever waits for rows hears that there are none

    @served()
    def stop(self) -> None:
        """Its workers end at their next step."""
        self._end_feed()

    @served()
    def die(self) -> None:
        """It dies at its next step, as by script: a thread cannot be killed."""
        self._dying = True

    @served(once=False)
    def hold(self, number: int, patience_s: float) -> bool:
        """Stands still for pause `number`: answered as soon as that is so, or after `patience_s` at the latest.

        Returns:
            Whether it does, and all that it did is where it belongs.
        """
        if number <= self._released:
            return False  # it was sent again, and the pause is over
        patience_s = min(patience_s, 1.0)
        still = self._gate.hold(patience_s) and self._settle(patience_s)
        if number <= self._released:
            self._gate.release()
        return still

    def _settle(self, patience_s: float) -> bool:
        """Waits until all that was pushed, done and recorded has arrived; a resting worker may have some under way."""
        until = time.monotonic() + patience_s
        while not self._trainer.quiet:
            if self._pause.wait(SETTLE_S) or time.monotonic() > until:
                return False
        try:
            self._dense.settle()
        except GONE:
            return False
        return self._near is not None or (self._leases.settle(patience_s) and self._records.flush(patience_s))

    @served()
    def release(self, number: int) -> None:
        """Pause `number` and all before it have ended, also for a `hold` that comes later."""
        self._released = max(self._released, number)
        self._gate.release()

    @served()
    def moved(self, kind: str, index: int, address: str) -> None:
        """A server was replaced and is reached at another address.

        Args:
            kind: of the server: `embedding`, `dense` or `reader`.
            index: of the server; for `reader` 0, since a trainer knows one.
            address: the new one.
        """
        connection = self._connections.get((kind, index))
        if connection is not None:  # else what it serves is reached without it
            connection.redirect(address)

    @served()
    def reach(self, position: int, address: ServerAddress) -> None:
        """An embedding server is on another machine from now on; asked for while this trainer stands still."""
        self.moved("embedding", position, address.wire)
        known, shards = self._places[position]
        if address.memory == known.memory:
            return
        self._places[position] = address, shards
        way = self._server(position, self._places[position])
        for stream, client in self._clients:
            client.reach(position, way(stream))

    # --- state -------------------------------------------------------------------------------------------------------

    @served(once=False)
    def status(self, heard: int) -> TrainerStatus:
        """How it is; `heard` sentences are known already."""
        trainer, heard = self._trainer, max(0, heard)
        flat = trainer.replica.flat
        sketch = flat[:: max(1, -(-len(flat) // SKETCH))].detach().cpu().clone()
        named = sorted(self._connections.items(), key=lambda item: item[0][0] == "driver")
        return TrainerStatus(
            self._dense.syncs,
            self._ended,
            trainer.lost,
            self._fault(),
            self._counter.totals() if self._near is None else WireTotals(),
            self._feed.depth,
            self._codecs.names,
            heard,
            self._codecs.decisions[heard:],
            self._computing,
            waiting_for([(kind if kind == "driver" else f"{kind}-{index}", peer) for (kind, index), peer in named]),
            sketch,
        )

    def _fault(self) -> Fault | None:
        """What went wrong, if anything did; the driver's own process hears of it as it is."""
        error = self._trainer.error
        if error is None or self._near is not None or not self._trainer.failed:
            return None
        if isinstance(error, ShadowSyncError):
            return Fault.of(error)
        reason = str(error).partition("\n")[0]
        return Fault.of(RunError(f"a trainer failed with {type(error).__name__}: {reason}"))

    def _image(self) -> TrainerImage:
        return self._dense.image()

    def _put_back(self, image: TrainerImage) -> None:
        self._dense.restore(image)
