"""The parts of one run, put together and connected; what they hold can be taken out as a snapshot and put back."""

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
    restore_tables,
)
from shadowsync.choices import Choices
from shadowsync.config import Config
from shadowsync.data.reader import LeasedBatch, Reader, ReaderOptions
from shadowsync.data.source import OpenSource, Schema
from shadowsync.dense_state import dense_tensors, layout, restore_dense
from shadowsync.embedding.table import Rows, Table
from shadowsync.errors import CheckpointError
from shadowsync.job_state import JobState, job_state
from shadowsync.metrics.recorder import JobCounts, Recorder
from shadowsync.metrics.wire import WireCounter
from shadowsync.recovery.checkpoints import LoadedCheckpoint
from shadowsync.recovery.snapshot import Snapshot
from shadowsync.runtime.group import Averaging, DenseServers, InProcessGroup
from shadowsync.runtime.lines import Line
from shadowsync.sync.schedule import Synchronisation
from shadowsync.training.gate import Gate
from shadowsync.training.rates import Rates
from shadowsync.training.replica import Replica
from shadowsync.training.trainer import Trainer
from shadowsync.training.worker import Hooks, StepSettings, Worker, WorkerParts


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
        saved: LoadedCheckpoint | None,
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
        self.reader = _make_reader(config, self.train_source, saved.position if saved is not None else None)
        self.embeddings = self._make_embeddings(own)
        self.replicas = self._make_replicas(own)
        self.dense_servers, self.synchronisations = self._make_synchronisations()
        self.trainers = [self._make_trainer(rank, own) for rank in range(config.train.trainers)]
        self._wire_before: dict[str, dict[str, int]] = {"bytes": {}, "raw_bytes": {}}
        self._syncs_before = 0
        if saved is not None:
            self._restore(saved)

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
            trainer.add(Worker(parts))
        return trainer

    def _step_settings(self) -> StepSettings:
        train = self.config.train
        rates = Rates(train.warmup_samples, train.decay, train.final_lr, self.total_samples)
        return StepSettings(train.lr, self.config.embedding.lr, rates, train.prefetch)

    def _place(self, leased: LeasedBatch) -> str:
        part = self.reader.slices[leased.lease.slice]
        return f"a batch of the {part.rows} rows from {self.train_source.place(part, 0)} on"

    @property
    def total_samples(self) -> int:
        """Samples to be trained in all."""
        return self.train_source.rows * self.config.data.epochs

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
        wire = self.wire_totals()["bytes"]
        return JobCounts(self.total_samples, self.sync_count, wire, saves, self._replica_distance())

    def _replica_distance(self) -> float | None:
        if len(self.replicas) < 2:
            return None
        stacked = torch.stack([replica.flat for replica in self.replicas])
        mean = stacked.mean(0)
        return float((stacked - mean).norm(dim=1).mean() / mean.norm().clamp_min(1e-12))

    def final_weights(self) -> Tensor:
        """The dense parameters that the method would evaluate now, `[P]`; replicas of dead trainers do not count."""
        center = self.dense_servers.read() if self.choices.method.centralised else None
        ranks = [trainer.rank for trainer in self.trainers if not trainer.lost] or range(len(self.trainers))
        weights = [self.replicas[rank].flat for rank in ranks]
        return self.choices.method.final(weights, center, [self.synchronisations[rank].state for rank in ranks])

    def evaluation_replica(self) -> Replica:
        """A replica with the final weights, apart from those that train."""
        replica = Replica(
            self.replicas[0].module, self.choices.optimizer, self.embeddings.dims, self.config.train.device
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
        """Stops the reader's threads and closes the files."""
        self.reader.close()
        for source in (self.train_source, self.test_source):
            if source is not None:
                source.close()

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self, given: Mapping[str, Any]) -> Snapshot:
        """A copy of everything that moves; everybody must stand still. `given` is the configuration as given."""
        dense = {"final": self.final_weights().clone()}
        if self.choices.method.centralised:
            dense["center"] = self.dense_servers.read()
        for rank, (replica, part) in enumerate(zip(self.replicas, self.synchronisations, strict=True)):
            dense |= {f"replica.{rank}.{name}": tensor.clone() for name, tensor in dense_tensors(replica).items()}
            dense |= {f"sync.{rank}.{name}": tensor.clone() for name, tensor in part.state.items()}
        return Snapshot(
            config=dict(given),
            samples=self.reader.trained,
            tables=tuple(
                Rows(rows.table, rows.start, {name: tensor.clone() for name, tensor in rows.tensors.items()})
                for server in self.embeddings.servers
                for rows in server.state()
            ),
            dense=dense,
            position=self.reader.state(),
            random={"torch": torch.get_rng_state()},
            extra=self._state().builtins(),
        )

    def _state(self) -> JobState:
        return JobState(
            recorder=self.recorder.state(),
            syncs=self.sync_count,
            wire=self.wire_totals(),
            schema=self.schema,
            tables=[table.name for table in self.embeddings.tables],
            trainers=len(self.replicas),
            layout=layout(self.replicas[0]),
            own_model=self.choices.model is None,
        )

    def _restore(self, saved: LoadedCheckpoint) -> None:
        """Puts a checkpoint back: rows, replicas, the reader's position, counts.

        Raises:
            CheckpointError: it is of another model, other tables, another optimizer or other data.
        """
        state = job_state(saved)
        _check_columns(saved.name, state.schema, self.schema)
        restore_tables(self.embeddings, saved)
        center = restore_dense(saved, self.choices.method, self.replicas, self.synchronisations)
        self.dense_servers.write(center)
        self._syncs_before, self._wire_before = state.syncs, state.wire
        try:
            torch.set_rng_state(saved.random["torch"])
            self.recorder.restore(state.recorder)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{saved.name}: its counts or random state are not those of a job: {error}"
            ) from error


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


def _check_columns(checkpoint: str, there: Schema, here: Schema) -> None:
    """Raises `CheckpointError` for data whose columns have other names, or another order, than those trained on."""
    kinds = {"dense": (there.dense, here.dense), "categorical": (_names(there), _names(here))}
    for kind, (trained, given) in kinds.items():
        if trained != given:
            raise CheckpointError(
                f"{checkpoint} was trained on the {kind} columns {', '.join(trained) or 'none'}, this data has "
                f"{', '.join(given) or 'none'}: give the same ones in the same order"
            )


def _names(schema: Schema) -> tuple[str, ...]:
    return tuple(feature.name for feature in schema.features)


def _added(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {kind: before.get(kind, 0) + now.get(kind, 0) for kind in {**before, **now}}
