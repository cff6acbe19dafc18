"""The session whose roles are all in this process."""

from contextlib import AbstractContextManager

from shadowsync.assembly import (
    TrainerKit,
    connect,
    make_embeddings,
    make_replica,
    make_trainer,
    restore_tables,
    unique_rows,
)
from shadowsync.data.reader import LeasedBatch, Reader
from shadowsync.dense_state import DenseImage, TrainerImage
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.table import Rows
from shadowsync.metrics.roles import RoleState
from shadowsync.metrics.wire import WireCounter
from shadowsync.recovery.loading import LoadedCheckpoint
from shadowsync.runtime.group import Averaging, DenseServers, InProcessGroup
from shadowsync.runtime.lines import Line
from shadowsync.session import Material, Session, distance, reader_options
from shadowsync.sync.schedule import Synchronisation
from shadowsync.training.gate import Gate
from shadowsync.training.trainer import Trainer
from shadowsync.training.worker import Hooks


class LocalSession(Session):
    """All roles of a run in one process; trainers that died by script stay dead, and the others train their rows."""

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        config, choices = self.config, self.choices
        self.wire = WireCounter()
        self.gate = Gate()
        self.stopping = False
        self.embeddings = make_embeddings(config, choices, self.schema, self.tables, self.train_source)
        ranks = range(config.train.trainers)
        self.replicas = [make_replica(config, choices, self.template.module, self.dims) for _ in ranks]
        self.dense_servers, self.synchronisations = self._make_synchronisations()
        self.reader = Reader(self.train_source, reader_options(config), material.position)
        kit = TrainerKit(config, choices, self.warmup_samples, self.total_samples, material.own.failures)
        self.trainers = [self._make_trainer(rank, kit) for rank in ranks]
        self._told: dict[str, RoleState] = {}

    def _make_synchronisations(self) -> tuple[DenseServers, list[Synchronisation]]:
        line = Line("dense", self.choices.codecs["dense"], self.wire)
        servers = DenseServers(self.template.flat.detach(), self.config.cluster.dense_servers, line)
        averaging = Averaging(range(len(self.replicas)), line, self.gate.waiting)
        method = self.choices.method
        return servers, [
            Synchronisation(
                method,
                replica.flat,
                InProcessGroup(rank, averaging, servers),
                self.config.train.workers,
                self.gate,
                method.init(replica.flat),
            )
            for rank, replica in enumerate(self.replicas)
        ]

    def _make_trainer(self, rank: int, kit: TrainerKit) -> Trainer:
        replica, driver = self.replicas[rank], self.choices.schedule.drive(self.synchronisations[rank])
        trainer = Trainer(rank, replica, driver, self.gate)
        hooks = Hooks(
            record=self.recorder.record,
            trained=lambda: self.reader.trained,
            stopping=lambda: self.stopping or trainer.error is not None,
            before_step=kit.failures,
            place=self._place,
            ended=self.ended.set,
        )
        clients = [
            connect(self.embeddings, self.schema, self.choices, self.wire, unique_rows(self.config, self.choices))
            for _ in range(self.config.train.workers)
        ]
        return make_trainer(kit, trainer, driver, clients, self.reader.feed(rank), hooks)

    def _place(self, leased: LeasedBatch) -> str:
        part = self.reader.slices[leased.lease.slice]
        return f"a batch of the {part.rows} rows from {self.train_source.place(part, 0)} on"

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for trainer in self.trainers:
            trainer.start()
        self._notice()

    def alive(self) -> bool:
        return any(trainer.alive() for trainer in self.trainers)

    def reap(self) -> None:
        for trainer in self.trainers:
            if trainer.error is not None and not trainer.stepping() and not trainer.finished:
                self.reader.abandon(trainer.rank)  # first: its other workers may be waiting for these very rows
                trainer.finish()
        if any(trainer.failed for trainer in self.trainers):
            self.stop()
        self._notice()

    def _notice(self) -> None:
        for role, state in self.role_states().items():
            if state != self._told.get(role):
                self._told[role] = state
                self.happenings.add(role, "dead" if state == "dead" else "alive")

    def stop(self) -> None:
        self.stopping = True
        self.reader.close()

    def finish(self) -> None:
        for trainer in self.trainers:
            trainer.finish()
        self._notice()
        failed = [trainer.error for trainer in self.trainers if trainer.failed]
        if failed and failed[0] is not None:
            raise failed[0]

    def close(self) -> None:
        self.reader.close()

    # --- images ------------------------------------------------------------------------------------------------------

    def standing_still(self) -> AbstractContextManager[None]:
        return self.gate.pause()

    def rows(self) -> tuple[Rows, ...]:
        return tuple(
            Rows(rows.table, rows.start, {name: tensor.clone() for name, tensor in rows.tensors.items()})
            for server in self.embeddings.servers
            for rows in server.state()
        )

    def load_rows(self, saved: LoadedCheckpoint) -> None:
        restore_tables(self.embeddings, saved)

    def dense_image(self) -> DenseImage:
        images = (TrainerImage.of(self.replicas[rank], self.synchronisations[rank].state) for rank in self._living())
        center = self.dense_servers.read() if self.choices.method.centralised else None
        return DenseImage(tuple(images), center)

    def load_dense(self, image: DenseImage) -> None:
        for rank, trainer in enumerate(image.trainers):
            trainer.put_into(self.replicas[rank])
            self.synchronisations[rank].state = trainer.method
        if image.center is not None:
            self.dense_servers.write(image.center)

    def predicting_client(self) -> EmbeddingClient:
        return self.embeddings.client

    # --- figures -----------------------------------------------------------------------------------------------------

    def _living(self) -> list[int]:
        """Ranks of the trainers that have not died; all of them where none is left."""
        return [trainer.rank for trainer in self.trainers if not trainer.lost] or list(range(len(self.trainers)))

    @property
    def failures(self) -> int:
        return sum(trainer.lost for trainer in self.trainers)

    def _syncs_now(self) -> int:
        return sum(part.count for part in self.synchronisations)

    def _wire_now(self) -> dict[str, dict[str, int]]:
        totals = self.wire.totals()
        return {"bytes": totals.bytes, "raw_bytes": totals.raw_bytes}

    def _replica_distance(self) -> float | None:
        return distance([replica.flat for replica in self.replicas])

    def role_states(self) -> dict[str, RoleState]:
        return {f"trainer-{trainer.rank}": "dead" if trainer.lost else "alive" for trainer in self.trainers}

    def _queue_depths(self) -> dict[str, int]:
        return {f"trainer-{trainer.rank}": self.reader.waiting(trainer.rank) for trainer in self.trainers}
