"""The parts of one run in one process, put together and connected."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shadowsync.assembly import (
    Embeddings,
    connect,
    make_embeddings,
    make_module,
    make_replica,
    make_tables,
)
from shadowsync.choices import Choices
from shadowsync.config import Config
from shadowsync.data.reader import Feed, LeasedBatch, Reader, ReaderOptions
from shadowsync.data.source import OpenSource
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.table import Table
from shadowsync.metrics.recorder import JobCounts, Recorder
from shadowsync.metrics.roles import RoleState
from shadowsync.metrics.wire import WireCounter
from shadowsync.runtime.group import Averaging, DenseServers, InProcessGroup
from shadowsync.runtime.lines import Line
from shadowsync.sync.schedule import Synchronisation
from shadowsync.training.gate import Gate
from shadowsync.training.rates import Rates
from shadowsync.training.replica import Replica
from shadowsync.training.trainer import Trainer
from shadowsync.training.update import LocalUpdate
from shadowsync.training.worker import Hooks, StepSettings, Worker, WorkerParts

WARMUP_SAMPLES = 50_000


def no_failures(trainer_rank: int, iteration: int) -> None:
    """The script in which nobody dies."""


@dataclass(frozen=True)
class Own:
    """What a user brings instead of configuration.

    Attributes:
        model: `forward(dense [B, N], {feature: [B, D]}) → logits [B]`, or None for the configured one.
        tables: the tables, or None.
        failures: called with a trainer's rank and iteration before each step; raises `TrainerLost` to script a death.
    """

    model: nn.Module | None = None
    tables: Sequence[Table] | None = None
    failures: Callable[[int, int], None] = no_failures


class Session:
    """All roles of a run in one process."""

    def __init__(
        self,
        config: Config,
        choices: Choices,
        own: Own,
        sources: tuple[OpenSource, OpenSource | None],
        position: Mapping[str, Any] | None,
    ) -> None:
        self.config = config
        self.choices = choices
        self.train_source, self.test_source = sources
        self.schema = self.train_source.schema
        self.wire = WireCounter()
        self.gate = Gate()
        self.ended = threading.Event()
        self.stopping = False
        self.recorder = Recorder(config.train.trainers, config.report.window)
        self.embeddings = self._make_embeddings(own)
        self.replicas = self._make_replicas(own)
        self.dense_servers, self.synchronisations = self._make_synchronisations()
        self.reader = _make_reader(config, self.train_source, position)
        self.trainers = [self._make_trainer(rank, own) for rank in range(config.train.trainers)]
        self._wire_before: dict[str, dict[str, int]] = {"bytes": {}, "raw_bytes": {}}
        self._syncs_before = 0

    def go_on(self, syncs: int, wire: dict[str, dict[str, int]]) -> None:
        """Counts on from a checkpoint's synchronisations and bytes."""
        self._syncs_before, self._wire_before = syncs, wire

    def _make_embeddings(self, own: Own) -> Embeddings:
        tables = make_tables(self.config, self.schema, own.tables)
        return make_embeddings(self.config, self.choices, self.schema, tables, self.train_source)

    def _make_replicas(self, own: Own) -> list[Replica]:
        module = make_module(self.config, self.choices, self.schema, self.embeddings.dims, own.model)
        count = self.config.train.trainers
        return [make_replica(self.config, self.choices, module, self.embeddings.dims) for _ in range(count)]

    def _make_synchronisations(self) -> tuple[DenseServers, list[Synchronisation]]:
        line = Line("dense", self.choices.codecs["dense"], self.wire)
        start = self.replicas[0].flat.detach()
        servers = DenseServers(start, self.config.cluster.dense_servers, line)
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

    def _make_trainer(self, rank: int, own: Own) -> Trainer:
        replica, driver = self.replicas[rank], self.choices.schedule.drive(self.synchronisations[rank])
        trainer = Trainer(rank, replica, driver, self.gate)
        hooks = Hooks(
            record=self.recorder.record,
            trained=lambda: self.reader.trained,
            stopping=lambda: self.stopping or trainer.error is not None,
            before_step=own.failures,
            place=self._place,
            ended=self.ended.set,
        )
        feed = self.reader.feed(rank)
        for index in range(self.config.train.workers):
            client = connect(self.embeddings, self.schema, self.choices, self.wire)
            parts = WorkerParts(
                rank,
                index,
                replica.worker_module(self.config.train.precision, self.config.train.clip_norm),
                feed,
                client,
                driver,
                self.gate,
                self._step_settings(),
                hooks,
            )
            trainer.add(Worker(parts, self._local_update(client, feed)))
        return trainer

    def _step_settings(self) -> StepSettings:
        train = self.config.train
        rates = Rates(self.warmup_samples, train.decay, train.final_lr, self.total_samples)
        emulated = train.emulate_step_ms
        return StepSettings(rates, train.prefetch, None if emulated is None else emulated / 1e3)

    def _local_update(self, client: EmbeddingClient, feed: Feed) -> LocalUpdate:
        return LocalUpdate(client, feed, self.config.train.lr, self.config.embedding.lr)

    def _place(self, leased: LeasedBatch) -> str:
        part = self.reader.slices[leased.lease.slice]
        return f"a batch of the {part.rows} rows from {self.train_source.place(part, 0)} on"

    @property
    def total_samples(self) -> int:
        """Samples to be trained in all."""
        return self.train_source.rows * self.config.data.epochs

    @property
    def warmup_samples(self) -> int:
        """Samples over which the learning rates rise; Adagrad's first steps are long and kill ReLUs otherwise."""
        given = self.config.train.warmup_samples
        return given if given is not None else min(WARMUP_SAMPLES, self.total_samples // 20)

    @property
    def sync_count(self) -> int:
        """Synchronisations so far, all trainers, those before a resume included."""
        return self._syncs_before + sum(part.count for part in self.synchronisations)

    def wire_totals(self) -> dict[str, dict[str, int]]:
        """Bytes so far, as sent and raw, those before a resume included."""
        totals, before = self.wire.totals(), self._wire_before
        return {
            "bytes": _added(before["bytes"], totals.bytes),
            "raw_bytes": _added(before["raw_bytes"], totals.raw_bytes),
        }

    def counts(self, saves: int) -> JobCounts:
        """What the recorder does not know by itself."""
        wire = self.wire_totals()
        return JobCounts(
            total_samples=self.total_samples,
            sync_count=self.sync_count,
            wire_bytes=wire["bytes"],
            saves=saves,
            replica_distance=self._replica_distance(),
            wire_raw_bytes=wire["raw_bytes"],
            failures=self.failures,
            roles=self.role_states(),
            queue_depth={f"trainer-{trainer.rank}": self.reader.waiting(trainer.rank) for trainer in self.trainers},
            emulated_step_ms=self.config.train.emulate_step_ms,
        )

    def role_states(self) -> dict[str, RoleState]:
        """The state of each role that can die by itself."""
        return {f"trainer-{trainer.rank}": "dead" if trainer.lost else "alive" for trainer in self.trainers}

    def _replica_distance(self) -> float | None:
        if len(self.replicas) < 2:
            return None
        stacked = torch.stack([replica.flat for replica in self.replicas])
        mean = stacked.mean(0)
        return float((stacked - mean).norm(dim=1).mean() / mean.norm().clamp_min(1e-12))

    def final_weights(self) -> Tensor:
        """The dense parameters that the method would evaluate now, `[P]`; replicas of dead trainers do not count."""
        center = self.dense_servers.read() if self.choices.method.centralised else None
        weights = [self.replicas[rank].flat for rank in self.living()]
        return self.choices.method.final(weights, center)

    def living(self) -> list[int]:
        """Ranks of the trainers that have not died; all of them where none is left."""
        return [trainer.rank for trainer in self.trainers if not trainer.lost] or list(range(len(self.trainers)))

    @property
    def failures(self) -> int:
        """Trainers that died since the start."""
        return sum(trainer.lost for trainer in self.trainers)

    def evaluation_replica(self) -> Replica:
        """A replica with the final weights, apart from those that train."""
        replica = Replica(
            self.replicas[self.living()[0]].module,
            self.choices.optimizer,
            self.embeddings.dims,
            self.config.train.device,
        )
        replica.load(self.final_weights())
        return replica

    # --- running -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts every trainer."""
        for trainer in self.trainers:
            trainer.start()

    def alive(self) -> bool:
        """Somebody is still training."""
        return any(trainer.alive() for trainer in self.trainers)

    def reap(self) -> None:
        """Gives the leases of trainers that died to the others, and stops everybody if something failed."""
        for trainer in self.trainers:
            if trainer.error is not None and not trainer.stepping() and not trainer.finished:
                self.reader.abandon(trainer.rank)  # first: its other workers may be waiting for these very rows
                trainer.finish()
        if any(trainer.failed for trainer in self.trainers):
            self.stop()

    def stop(self) -> None:
        """Asks every worker to end at its next step boundary."""
        self.stopping = True
        self.reader.close()

    def finish(self) -> None:
        """Waits for everybody; raises what ended the job early."""
        for trainer in self.trainers:
            trainer.finish()
        failed = [trainer.error for trainer in self.trainers if trainer.failed]
        if failed and failed[0] is not None:
            raise failed[0]

    def close(self) -> None:
        """Stops the reader's threads."""
        self.reader.close()


def _make_reader(config: Config, source: OpenSource, position: Mapping[str, Any] | None) -> Reader:
    data, batch_size = config.data, config.train.batch_size
    options = ReaderOptions(
        batch_size=batch_size,
        slice_rows=max(batch_size, data.slice_rows // batch_size * batch_size),
        epochs=data.epochs,
        shuffle=data.shuffle,
        seed=config.train.seed,
        readers=data.readers,
        prefetch=data.prefetch,
    )
    return Reader(source, options, position)


def _added(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {kind: before.get(kind, 0) + now.get(kind, 0) for kind in {**before, **now}}
