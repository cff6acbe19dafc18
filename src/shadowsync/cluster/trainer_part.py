"""A trainer in a process of its own: the same parts as in one process, behind connections."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from shadowsync.assembly import TrainerKit, codec_situation, computing_here, make_module, row_optimizer, unique_rows
from shadowsync.choices import choose_all
from shadowsync.cluster.front import FrontDesk
from shadowsync.cluster.part_images import Imaged
from shadowsync.cluster.records import RecordSender
from shadowsync.cluster.trainer_dense import GradientWorkers, MergedReplica, TrainerDense, TrainerMaterial
from shadowsync.cluster.trainer_spec import ServerAddress, TrainerSpec
from shadowsync.compression.channel import Line
from shadowsync.compression.codec_choice import CodecChoice
from shadowsync.data.desk_remote import DeskRemote
from shadowsync.data.feed import Feed, LeasedBatch
from shadowsync.data.parsing import ReaderRemote
from shadowsync.dense_state import TrainerImage
from shadowsync.embedding.client import EmbeddingClient, Server
from shadowsync.embedding.line import EmbeddingLine
from shadowsync.embedding.remote import EmbeddingRemote, Remote
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Shard
from shadowsync.errors import RunError, ShadowSyncError
from shadowsync.memory.shared import SharedMemory
from shadowsync.metrics.wire import WireCounter
from shadowsync.recovery.tracking import row_tracking
from shadowsync.rpc.client import WireConnection
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.errors import GONE, Fault
from shadowsync.rpc.served import Served, ask, served
from shadowsync.rpc.service import Method
from shadowsync.runtime.host import waiting_for
from shadowsync.runtime.runtime import Home
from shadowsync.training.gate import Gate
from shadowsync.training.kernels import Computing
from shadowsync.training.trainer import Trainer
from shadowsync.training.worker import Hooks

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
        wire: what crossed so far, as `metrics.wire.WireTotals.by_name`.
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
    wire: dict[str, dict[str, int]]
    waiting: int
    codecs: dict[str, str]
    first: int
    decisions: tuple[str, ...]
    computing: Computing | None
    waiting_for: str = ""
    sketch: Tensor | None = None


def build_trainer(spec: TrainerSpec, home: Home) -> "TrainerPart":
    """Makes a trainer that stands ready; `start` starts it."""
    return TrainerPart(spec, home)


class TrainerPart(Imaged):
    """Serves one trainer to the driver (a `runtime.Part`)."""

    def __init__(self, spec: TrainerSpec, home: Home) -> None:
        self._spec, self._home = spec, home
        self._connections: dict[tuple[str, int], WireConnection] = {}
        self._counter = WireCounter()
        self._gate = Gate()
        self._stopping = False
        self._ended = False
        self._released = 0
        self._pause = threading.Event()
        self._wake = threading.Event()
        choices = choose_all(spec.config, own_model=spec.model is not None)
        self._module = make_module(spec.config, choices, spec.schema, spec.tables, spec.model)
        self._kit = TrainerKit(
            spec.config,
            choices,
            spec.warmup_samples,
            spec.total_samples,
            spec.failures,
            computing_here(spec.config, self._module),
        )
        self._codecs = CodecChoice(self._kit.choices.codecs, codec_situation(spec.config, self._kit.choices))
        self._desk = DeskRemote(self._connect("driver", 0, spec.addresses.driver))
        parse = ReaderRemote(self._connect("reader", 0, spec.addresses.reader)).parse
        self._feed = Feed(spec.rank, self._desk, parse, spec.config.data.prefetch)
        self._records = RecordSender(self._connections["driver", 0], spec.rank, spec.generation)
        self._dense = self._make_dense()
        self._trainer = self._dense.trainer
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self.methods: Mapping[str, Method] = Served(self).methods

    def client_gone(self, client: str) -> None:
        """The trainer goes on: Ray ends it with its driver."""

    def close(self) -> None:
        """Ends the workers, whatever they wait for."""
        self._end_feed()
        for connection in self._connections.values():
            connection.close()
        self._gate.release()
        self._pause.set()
        self._wake.set()
        if self._watcher.is_alive():
            self._watcher.join(END_S)
        self._records.close()

    def _connect(self, kind: str, index: int, address: str) -> WireConnection:
        """The connection to a role, the same one each time."""
        known = self._connections.get((kind, index))
        if known is None:
            known = self._connections[kind, index] = self._home.courier.connect(address)
        return known

    def _measured(self, kind: str, index: int, address: str) -> Connection:
        """As `_connect`; what crosses to servers is measured."""
        return self._codecs.measured(self._connect(kind, index, address))

    # --- parts -------------------------------------------------------------------------------------------------------

    def _make_dense(self) -> TrainerDense:
        material = TrainerMaterial(
            self._spec,
            self._module,
            self._kit,
            self._home.host,
            self._measured,
            self._codecs.line("dense", self._counter),
            self._counter,
            self._gate,
            self._make_clients(),
            self._feed,
            self._hooks,
        )
        return MergedReplica(material) if self._kit.choices.aggregation is None else GradientWorkers(material)

    def _hooks(self, trainer: Trainer) -> Hooks:
        return Hooks(
            record=self._records.record,
            trained=lambda: self._desk.trained,
            stopping=lambda: self._stopping or trainer.error is not None,
            before_step=self._spec.failures,
            place=self._place,
            ended=self._wake.set,
            stepped=self._codecs.stepped,
        )

    def _make_clients(self) -> list[EmbeddingClient]:
        """One for each worker; servers whose memory is this machine's are reached there."""
        spec, choices = self._spec, self._kit.choices
        reach = [self._server(*given) for given in enumerate(spec.addresses.embedding)]
        names = [feature.name for feature in spec.schema.features]
        unique = unique_rows(spec.config, choices)
        streams = range(spec.config.train.workers)
        return [EmbeddingClient(spec.tables, names, [way(stream) for way in reach], unique) for stream in streams]

    def _server(self, position: int, place: tuple[ServerAddress, tuple[Shard, ...]]) -> Callable[[int], Server]:
        """The way of each worker, by its number, to an embedding server."""
        (address, shards), spec, choices = place, self._spec, self._kit.choices
        if address.memory is not None:
            memory, optimizer = SharedMemory.open(address.memory), row_optimizer(spec.config.embedding)
            tracking = row_tracking(choices.recovery, spec.config.train.seed)
            told = tracking if tracking is not None and tracking.sees else None
            server = EmbeddingServer(shards, choices.storage, optimizer, None, told, memory)
            pulled, pushed = (Line(kind, choices.codecs[kind], self._counter) for kind in ("pull", "push"))
            return lambda _: EmbeddingLine(server, position, pulled, pushed)
        pulls, pushes = (self._codecs.line(kind, self._counter) for kind in ("pull", "push"))
        connection = self._measured("embedding", position, address.wire)
        return lambda stream: EmbeddingRemote(
            Remote(connection, shards, position, stream, generation=spec.generation), pulls, pushes
        )

    def _place(self, leased: LeasedBatch) -> str:
        """The driver knows the files."""
        return f"a batch of {ask(self._connections['driver', 0], FrontDesk.place, leased.lease.slice)}"

    # --- life --------------------------------------------------------------------------------------------------------

    @served()
    def start(self) -> None:
        """Sets its workers going."""
        self._trainer.start()
        self._watcher.start()

    def _watch(self) -> None:
        """Sees the workers to their end, tells the driver the last of what they did, and leaves the group."""
        trainer = self._trainer
        try:
            while trainer.alive() and not (trainer.error is not None and not trainer.stepping()):
                self._wake.wait(LOOK_S)
                self._wake.clear()
                self._desk.tell()
            if trainer.error is not None:
                self._feed.close()  # first: its other workers may be waiting for these very rows
            trainer.finish()
            self._catch_up()
            self._desk.settle(END_S)
            self._records.flush(END_S)
        except BaseException as error:  # the driver hears of it with the next status
            trainer.error = trainer.error or error
        finally:
            self._ended = True

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
        self._desk.close()
        self._connections["reader", 0].redirect(None)  # whoever waits for rows hears that there are none

    @served()
    def stop(self) -> None:
        """Its workers end at their next step."""
        self._end_feed()

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
        return self._desk.settle(patience_s) and self._records.flush(patience_s)

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

    # --- state -------------------------------------------------------------------------------------------------------

    @served(once=False)
    def status(self, heard: int) -> TrainerStatus:
        """How it is; `heard` sentences are known already."""
        trainer, heard = self._trainer, max(0, heard)
        fault = Fault.of(_known(trainer.error)) if trainer.failed and trainer.error is not None else None
        flat = trainer.replica.flat
        sketch = flat[:: max(1, -(-len(flat) // SKETCH))].detach().cpu().clone()
        return TrainerStatus(
            self._dense.syncs,
            self._ended,
            trainer.lost,
            fault,
            self._counter.totals().by_name(),
            self._feed.depth,
            self._codecs.names,
            heard,
            self._codecs.decisions[heard:],
            self._kit.computing,
            self._waiting_for(),
            sketch,
        )

    def _waiting_for(self) -> str:
        named = [(f"{kind}-{index}", peer) for (kind, index), peer in self._connections.items() if kind != "driver"]
        return waiting_for([*named, ("driver", self._connections["driver", 0])])

    def _image(self) -> TrainerImage:
        return self._dense.image()

    def _put_back(self, image: TrainerImage) -> None:
        self._dense.restore(image)


def _known(error: BaseException) -> ShadowSyncError:
    if isinstance(error, ShadowSyncError):
        return error
    reason = str(error).partition("\n")[0]
    return RunError(f"a trainer failed with {type(error).__name__}: {reason}")
