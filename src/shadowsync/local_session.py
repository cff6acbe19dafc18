"""The session whose roles are all in this process."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from shadowsync.aggregation.aggregator import Worker
from shadowsync.aggregation.counts import AggregationState
from shadowsync.assembly import TrainerKit, computing_here, connect, make_embeddings, restore_tables, unique_rows
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.written import Written
from shadowsync.data.reader import LeasedBatch, Reader
from shadowsync.dense_state import DenseImage
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.table import Rows, RowSet
from shadowsync.local_dense import DenseMaterial, LocalDense, LocalGradients, LocalReplicas
from shadowsync.local_rows import LocalRows
from shadowsync.metrics.roles import RoleState
from shadowsync.metrics.wire import WireCounter
from shadowsync.recovery.tracking import row_tracking
from shadowsync.session import Material, Newest, ServerLoss, Session, reader_options
from shadowsync.training.gate import Gate
from shadowsync.training.kernels import Computing
from shadowsync.training.trainer import Trainer
from shadowsync.training.worker import Hooks, TrainerLost


class LocalSession(Session):
    """All roles of a run in one process; trainers that died by script stay dead, and the others train their rows.

    An embedding server that fails by script loses its rows: they become those of the last checkpoint, while the others
    go on. Where everybody would go back (`goes_back`), nothing is done but to account for it: the course of the job
    would be the same once more (as in CPR's emulation, arXiv 2011.02999, section 5.1).

    Args:
        material: what it is made of.
        newest: opens the checkpoint from which failed servers go on.
    """

    def __init__(self, material: Material, newest: Newest) -> None:
        super().__init__(material)
        self._newest = newest
        self._struck: set[int] = set()
        self._lost: list[ServerLoss] = []
        self._server_failures = 0
        self._script = material.own.failures
        config, choices = self.config, self.choices
        self.wire = WireCounter()
        self.gate = Gate()
        self.stopping = False
        tracking = row_tracking(choices.recovery, config.train.seed)
        self.embeddings = make_embeddings(config, choices, self.schema, self.tables, self.train_source, tracking)
        self._rows = LocalRows(self.embeddings.servers)
        self.reader = Reader(self.train_source, reader_options(config), material.position)
        self._computing = computing_here(config, self.template.module)
        kit = TrainerKit(config, choices, self.warmup_samples, self.total_samples, self._before_step, self._computing)
        self.dense = self._make_dense(DenseMaterial(config, choices, self.template, self.gate, self.wire, kit))
        self.trainers = [self._make_trainer(rank) for rank in range(config.train.trainers)]
        self._told: dict[str, RoleState] = {}

    def _make_dense(self, material: DenseMaterial) -> LocalDense:
        aggregating = self.choices.aggregation
        if aggregating is None:
            return LocalReplicas(material)
        return LocalGradients(material, aggregating, self.embeddings.servers, self.reader.desk)

    def _make_trainer(self, rank: int) -> Trainer:
        clients = [
            connect(self.embeddings, self.schema, self.choices, self.wire, unique_rows(self.config, self.choices))
            for _ in range(self.config.train.workers)
        ]
        return self.dense.trainer(rank, clients, self.reader.feed(rank), self._hooks)

    def _hooks(self, trainer: Trainer) -> Hooks:
        return Hooks(
            record=self.recorder.record,
            trained=lambda: self.reader.trained,
            stopping=lambda: self.stopping or trainer.error is not None,
            before_step=self._before_step,
            place=self._place,
            ended=self.ended.set,
        )

    def _place(self, leased: LeasedBatch) -> str:
        part = self.reader.slices[leased.lease.slice]
        return f"a batch of the {part.rows} rows from {self.train_source.place(part, 0)} on"

    def _before_step(self, rank: int, iteration: int) -> None:
        if rank in self._struck:
            raise TrainerLost(f"trainer {rank} was struck at its iteration {iteration}")
        self._script(rank, iteration)

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
                self.dense.abandoned(trainer.rank)
                self.reader.abandon(trainer.rank)  # before `finish`: its workers may be waiting for these very rows
                trainer.finish()
        if any(trainer.failed for trainer in self.trainers):
            self.stop()
        self.dense.look()
        self._notice()

    def _notice(self) -> None:
        for role, state in self.role_states().items():
            if state != self._told.get(role):
                self._told[role] = state
                self.happenings.add(role, "dead" if state == "dead" else "alive")

    def strikable(self) -> Mapping[str, int]:
        return {"embedding": len(self.embeddings.servers), "trainer": len(self.trainers)}

    def strike(self, kind: str, indices: Sequence[int]) -> None:
        strikes: dict[str, Callable[[Sequence[int]], None]] = {
            "embedding": self._strike_servers,
            "trainer": self._struck.update,
        }
        strikes[kind](indices)

    def _strike_servers(self, indices: Sequence[int]) -> None:
        samples, began = self.reader.trained, time.monotonic()
        shards = [shard for index in indices for shard in self.embeddings.servers[index].shards]
        with self._newest(shards) as saved:
            name, loaded_samples = (None, 0) if saved is None else (saved.name, saved.samples)
            if not self.goes_back:
                self.lose(indices, saved)
        self._server_failures += len(indices)
        for index in indices:
            self.happenings.add(f"embedding-{index}", "dead", "its rows are lost, by script")
            self.happenings.add(f"embedding-{index}", "restored")
        back_to = loaded_samples if self.goes_back else None
        load_s = time.monotonic() - began
        self._lost.append(ServerLoss(tuple(indices), samples, back_to, name, loaded_samples, 0.0, load_s))

    def losses(self) -> list[ServerLoss]:
        taken, self._lost = self._lost, []
        return taken

    def stop(self) -> None:
        self.dense.stop()  # first: the last worker to leave would otherwise complete a step with what there is
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

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        with self.gate.pause(), self.dense.paused():
            self.dense.settle(self._living())
            yield

    def rows(self) -> tuple[Rows, ...]:
        return tuple(
            Rows(rows.table, rows.start, {name: tensor.clone() for name, tensor in rows.tensors.items()})
            for server in self.embeddings.servers
            for rows in server.state()
        )

    def changed_rows(self, end_of_round: bool) -> tuple[Rows | RowSet, ...]:
        return self._rows.changed(end_of_round)

    def rows_beside(self) -> tuple[Rows, ...]:
        return self._rows.beside()

    def rows_saved(self, rows: Sequence[Rows | RowSet], written: Written) -> float:
        self._rows.saved(rows, written)
        return 0.0

    def row_shares(self) -> tuple[float, ...]:
        return self._rows.shares()

    def lose(self, servers: Collection[int], saved: LoadedCheckpoint | None) -> None:
        """Those embedding servers fail: their rows become what the checkpoint holds, without one the initial values.

        Only pushes to them wait until that is done, as they would for a replacement; any thread may call it.

        Raises:
            CheckpointError: it has other tables, another optimizer, or is damaged.
        """
        self._rows.lose(servers, saved)

    def load_rows(self, saved: LoadedCheckpoint) -> None:
        restore_tables(self.embeddings, saved)

    def dense_image(self) -> DenseImage:
        return self.dense.image(self._living())

    def load_dense(self, image: DenseImage) -> None:
        self.dense.load(image)

    def go_on(self, syncs: int, wire: dict[str, dict[str, int]], aggregation: AggregationState) -> None:
        super().go_on(syncs, wire, aggregation)
        self.dense.restart(aggregation)

    @property
    def aggregation(self) -> AggregationState | None:
        return self.dense.aggregation

    def recent_step_s(self) -> Mapping[Worker, float]:
        return self.dense.recent_step_s()

    def mean_step_s(self) -> Mapping[Worker, float]:
        return self.dense.mean_step_s()

    def _held_bytes(self) -> int | None:
        return self.dense.held_bytes

    def predicting_client(self) -> EmbeddingClient:
        return self.embeddings.client

    # --- figures -----------------------------------------------------------------------------------------------------

    def _living(self) -> list[int]:
        """Ranks of the trainers that have not died; all of them where none is left."""
        return [trainer.rank for trainer in self.trainers if not trainer.lost] or list(range(len(self.trainers)))

    @property
    def failures(self) -> int:
        return sum(trainer.lost for trainer in self.trainers) + self._server_failures

    def _syncs_now(self) -> int:
        return self.dense.syncs

    def _wire_now(self) -> dict[str, dict[str, int]]:
        return self.wire.totals().by_name()

    def computing(self) -> list[Computing]:
        return [self._computing]

    def _replica_distance(self) -> float | None:
        return self.dense.distance()

    def role_states(self) -> dict[str, RoleState]:
        return {f"trainer-{trainer.rank}": "dead" if trainer.lost else "alive" for trainer in self.trainers}

    def _queue_depths(self) -> dict[str, int]:
        return {f"trainer-{trainer.rank}": self.reader.waiting(trainer.rank) for trainer in self.trainers}
