"""A job's roles, put together and connected, wherever they run: what a run starts, watches, images and ends."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shadowsync.aggregation.aggregator import Worker
from shadowsync.aggregation.counts import AggregationState
from shadowsync.assembly import make_module, make_replica, make_tables
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.written import Written
from shadowsync.choices import Choices, warmup_samples
from shadowsync.compression.codec import Codec
from shadowsync.config import Config
from shadowsync.data.reader import Reader, ReaderOptions
from shadowsync.data.source import OpenSource, Schema
from shadowsync.dense_state import DenseImage
from shadowsync.embedding.catalog import widths
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.table import Rows, RowSet, Shard, Table
from shadowsync.metrics.recorder import JobCounts, Recorder
from shadowsync.metrics.roles import About, Happening, RoleState
from shadowsync.metrics.steps import GlobalSteps
from shadowsync.metrics.toll import Toll
from shadowsync.metrics.wire import WireTotals
from shadowsync.training.kernels import Computing
from shadowsync.training.replica import Replica


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


@dataclass(frozen=True)
class Material:
    """What a session is made of.

    Attributes:
        config: of the job.
        choices: what it chose.
        own: what the user brings.
        train: the training rows.
        test: the test rows, if there are any.
        position: in the training rows, of a checkpoint; None from the start.
    """

    config: Config
    choices: Choices
    own: Own
    train: OpenSource
    test: OpenSource | None
    position: Mapping[str, Any] | None = None


class Newest(Protocol):
    """The checkpoint to go back to in mid-run, or only the rows of some shards; None where that is the very start.

    What it opens is not removed within the block.
    """

    def __call__(
        self, shards: Sequence[Shard] | None, load: Callable[[LoadedCheckpoint], None] | None = None, /
    ) -> AbstractContextManager[LoadedCheckpoint | None]:
        """Opens it.

        Args:
            shards: look at nothing but their rows; None for everything.
            load: reads all of these rows, each byte compared meanwhile, and is called anew with an older checkpoint
                if one turns out to be damaged: for rows that nobody can see yet. It is not called at the very start.
                None has everything read and compared before it is opened.

        Raises:
            CheckpointError: none can be loaded.
        """


class Happened(NamedTuple):
    """Something that happened to a role; `at` as `time.monotonic`."""

    at: float
    role: str
    event: Happening
    detail: str = ""
    about: About = ""


@dataclass(frozen=True)
class RolePlace:
    """Where a role is.

    Attributes:
        pid: of its process.
        host: name of the machine.
        incarnation: from 0; one more for each process that has taken the role's place.
        log: path of its log there; empty where it has none of its own.
    """

    pid: int
    host: str
    incarnation: int
    log: str


class ServerLoss(NamedTuple):
    """Embedding servers failed at once and are there again.

    Attributes:
        servers: which.
        samples: trained by the whole job when they failed.
        back_to: samples of the checkpoint to which everybody went back; None where only these servers did.
        loaded: name of the checkpoint; None where there was none, so that they begin with initial values.
        loaded_samples: trained when it was taken.
        restart_s: seconds until a replacement stood ready to load.
        load_s: seconds that it loaded.
    """

    servers: tuple[int, ...]
    samples: int
    back_to: int | None
    loaded: str | None
    loaded_samples: int
    restart_s: float
    load_s: float


@dataclass
class Happenings:
    """What has happened to the roles and was not told yet; any thread may add to it."""

    _waiting: list[Happened] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, role: str, event: Happening, detail: str = "", about: About = "") -> None:
        """Notes that it happens now."""
        with self._lock:
            self._waiting.append(Happened(time.monotonic(), role, event, detail, about))

    def take(self) -> list[Happened]:
        """All of them, in order; they are not given again."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken


class Session(ABC):
    """All roles of a run.

    Attributes:
        config, choices: of the job.
        train_source, test_source: the rows.
        schema: of the training rows.
        tables: the embedding tables, in the job's order.
        template: a replica with the initial values, which nobody trains.
        reader: who trains what, and how far it is.
        recorder: gathers what workers did.
        ended: set when something may have ended.
        happenings: what happened to roles.
        given_up: why the job cannot go on, once it cannot.
        goes_back: when an embedding server fails everybody goes back to the last checkpoint, not only its replacement.
        most_held_bytes: memory that gradients took at most while they waited for their global steps, as far as it was
            looked at; None where that is not known.
    """

    reader: Reader

    def __init__(self, material: Material) -> None:
        self.config, self.choices = material.config, material.choices
        self.train_source, self.test_source = material.train, material.test
        self.schema: Schema = material.train.schema
        self.tables = make_tables(self.config, self.schema, material.own.tables, self.choices.model)
        self.dims = widths(self.tables)
        module = make_module(self.config, self.choices, self.schema, self.tables, material.own.model)
        self.template = make_replica(self.config, self.choices, module, self.dims)
        self.recorder = Recorder(self.config.train.trainers, self.config.report.window)
        self.ended = threading.Event()
        self.happenings = Happenings()
        self.given_up: str | None = None
        self.goes_back = False
        self.most_held_bytes: int | None = None
        self._wire_before: dict[str, dict[str, int]] = WireTotals().by_name()
        self._syncs_before = 0

    # --- life --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Starts every trainer."""

    @abstractmethod
    def alive(self) -> bool:
        """Somebody is still training, or will be."""

    @abstractmethod
    def reap(self) -> None:
        """Sees to roles that died, and stops everybody if something failed.

        Raises:
            RunError: the job cannot go on.
        """

    def settle(self) -> None:  # noqa: B027 (matters only where roles may die by themselves)
        """Waits until whoever died was replaced.

        Raises:
            RunError: the job cannot go on.
        """

    @abstractmethod
    def strikable(self) -> Mapping[str, int]:
        """How many roles of each kind `strike` can make fail."""

    @abstractmethod
    def strike(self, kind: str, indices: Sequence[int]) -> None:
        """Makes these roles of a kind fail now, as by script; those that are down already are left alone."""

    @abstractmethod
    def stop(self) -> None:
        """Asks every worker to end at its next step boundary."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for everybody; raises what ended the job early."""

    @abstractmethod
    def close(self) -> None:
        """Ends all roles."""

    # --- images ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def standing_still(self) -> AbstractContextManager[None]:
        """Inside, nobody changes anything.

        Raises:
            PeerLost: somebody died before everybody stood still.
        """

    @abstractmethod
    def rows(self) -> tuple[Rows, ...]:
        """Copies of all rows with their optimizer state."""

    @abstractmethod
    def changed_rows(self, end_of_round: bool) -> tuple[Rows | RowSet, ...]:
        """The rows that are to be saved now, copied when they are read, while everybody goes on.

        Of each row everything is as of one moment between this call and its reading, which needs the memory of a few
        chunks and of the optimizer's state for the rows that are read together. Whoever reads hears of a server that
        is not there as whoever calls this.

        A save begins with this or with `rows_beside` and ends with `rows_saved`; they come from one thread at a time,
        which may be any. One that is never reported as saved comes up again in the next one.

        Args:
            end_of_round: tables that are not saved by priority are due too.

        Returns:
            As `Snapshot.tables` of a delta: of each shard of a table that is saved by priority those of its rows that
            are most worth it (under `recovery.priority=all` every row that changed), of others all or none.

        Raises:
            PeerLost: a server is not there.
        """

    @abstractmethod
    def rows_beside(self) -> tuple[Rows, ...]:
        """All rows, copied when they are read, while everybody goes on; otherwise as `changed_rows`."""

    @abstractmethod
    def rows_saved(self, rows: Sequence[Rows | RowSet], written: Written) -> float:
        """What the last `changed_rows` or `rows_beside` gave is safely written.

        Rows that were copied otherwise, or for an earlier save, may be given and change nothing: what was saved of
        them comes up once more.

        Args:
            rows: as given.
            written: their weights; asked for only where later ones will be compared with them.

        Returns:
            Seconds by which the save held training up in other processes (those of the processor, as a share of a
            machine's cores); what the threads of this one spent is not in it.

        Raises:
            PeerLost: a server is not there.
            CheckpointError: what was written cannot be read. What was not told by then comes up once more.
        """

    @abstractmethod
    def row_shares(self) -> tuple[float, ...]:
        """The share of all rows that each embedding server holds; they add up to 1."""

    @abstractmethod
    def load_rows(self, saved: LoadedCheckpoint) -> None:
        """Fills all rows.

        Raises:
            CheckpointError: it has other tables, another optimizer, or is damaged.
        """

    @abstractmethod
    def dense_image(self) -> DenseImage:
        """Copies of the dense part of every living trainer (one that died, where none lives), and the central one."""

    @abstractmethod
    def load_dense(self, image: DenseImage) -> None:
        """Fills the dense part of every trainer and the dense servers."""

    @abstractmethod
    def predicting_client(self) -> EmbeddingClient:
        """Pulls rows as they are, for predictions."""

    @property
    def dense_copies(self) -> int:
        """Replicas of the dense part in an image: one for each trainer, or the one that global steps move."""
        return self.config.train.trainers if self.choices.aggregation is None else 1

    @property
    def aggregation(self) -> AggregationState | None:
        """What a gradient method has done, before a resume too; None where replicas are merged."""
        return None

    def recent_step_s(self) -> Mapping[Worker, float]:
        """How long each worker of a gradient method takes for a batch now; nobody where replicas are merged."""
        return {}

    def mean_step_s(self) -> Mapping[Worker, float]:
        """How long each worker of a gradient method took for a batch, on average since the start."""
        return {}

    def _held_bytes(self) -> int | None:
        """Memory of the gradients that wait for a global step, all servers; None where that is not known."""
        return None

    def go_on(self, syncs: int, wire: dict[str, dict[str, int]], aggregation: AggregationState) -> None:
        """Counts on from a checkpoint's synchronisations, bytes and global steps."""
        self._syncs_before, self._wire_before = syncs, wire

    def final_weights(self, image: DenseImage) -> Tensor:
        """The dense parameters that the method would evaluate, `[P]`."""
        return self.choices.method.final([trainer.replica["weight"] for trainer in image.trainers], image.center)

    def evaluation_replica(self) -> Replica:
        """A replica with the final weights, apart from those that train; buffers are the first living trainer's."""
        image = self.dense_image()
        replica = Replica(self.template.module, self.choices.optimizer, self.dims, self.config.train.device)
        image.trainers[0].put_into(replica)
        replica.load(self.final_weights(image))
        return replica

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def failures(self) -> int:
        """Roles that died since the start."""

    @abstractmethod
    def losses(self) -> list[ServerLoss]:
        """Failures of embedding servers that are over and were not told yet, in order."""

    @abstractmethod
    def _syncs_now(self) -> int:
        """Synchronisations since the start."""

    @abstractmethod
    def _wire_now(self) -> dict[str, dict[str, int]]:
        """What crossed since the start, as `WireTotals.by_name`."""

    def _codecs_now(self) -> Mapping[str, Sequence[str]]:
        """By kind of traffic, the codecs that trainers have chosen, as far as they do."""
        return {}

    @abstractmethod
    def computing(self) -> list[Computing]:
        """How workers compute, each way once; nothing as long as no trainer has said so."""

    @abstractmethod
    def _replica_distance(self) -> float | None:
        """Mean over trainers of ‖w_i − mean w‖ / ‖mean w‖, or None."""

    @abstractmethod
    def role_states(self) -> dict[str, RoleState]:
        """The state of each role that can die by itself."""

    @abstractmethod
    def _queue_depths(self) -> dict[str, int]:
        """Batches that wait at each trainer."""

    def places(self) -> dict[str, RolePlace]:
        """Where each role is that has a process of its own, by name."""
        return {}

    @property
    def total_samples(self) -> int:
        """Samples to be trained in all."""
        return self.train_source.rows * self.config.data.epochs

    @property
    def warmup_samples(self) -> int:
        """Samples over which the learning rates rise; Adagrad's first steps are long and kill ReLUs otherwise."""
        given = self.config.train.warmup_samples
        return given if given is not None else warmup_samples(self.config, self.total_samples)

    @property
    def sync_count(self) -> int:
        """Synchronisations so far, all trainers, those before a resume included."""
        return self._syncs_before + self._syncs_now()

    def wire_totals(self) -> dict[str, dict[str, int]]:
        """What crossed so far, as `WireTotals.by_name`, before a resume too."""
        return {name: added(self._wire_before.get(name, {}), now) for name, now in self._wire_now().items()}

    def codecs(self, only_chosen: bool = False) -> dict[str, str]:
        """By kind of traffic, the codec in use; where trainers have chosen several, all of them."""
        given, now = self.choices.codecs, self._codecs_now()
        kinds = [kind for kind, codec in given.items() if not only_chosen or len(codec.ladder) > 1]
        return {kind: _in_order(given[kind], now.get(kind, ())) for kind in kinds}

    def counts(self, saves: int, toll: Toll) -> JobCounts:
        """What the recorder does not know by itself, beside checkpoints and what failures have cost."""
        wire = self.wire_totals()
        return JobCounts(
            total_samples=self.total_samples,
            sync_count=self.sync_count,
            wire_bytes=wire["bytes"],
            saves=saves,
            replica_distance=self._replica_distance(),
            wire_raw_bytes=wire["raw_bytes"],
            wire_codecs=self.codecs(only_chosen=True),
            wire_elements=wire["elements"],
            wire_kept=wire["kept"],
            wire_refreshes=wire["refreshes"],
            failures=self.failures,
            roles=self.role_states(),
            queue_depth=self._queue_depths(),
            emulated_step_ms=self.config.train.emulate_step_ms,
            toll=toll,
            steps=self._global_steps(),
        )

    def _global_steps(self) -> GlobalSteps | None:
        if (done := self.aggregation) is None:
            return None
        held = self._held_bytes()
        if held is not None:
            self.most_held_bytes = max(self.most_held_bytes or 0, held)
        return GlobalSteps(
            mode=done.mode,
            count=done.global_steps,
            dropped=done.dropped,
            applied=done.applied,
            staleness_sum=done.staleness_sum,
            step_seconds=by_name(self.recent_step_s()),
            held_bytes=held,
        )


def reader_options(config: Config) -> ReaderOptions:
    """How the training rows are read."""
    data, batch_size = config.data, config.train.batch_size
    return ReaderOptions(
        batch_size=batch_size,
        slice_rows=max(batch_size, data.slice_rows // batch_size * batch_size),
        epochs=data.epochs,
        shuffle=data.shuffle,
        seed=config.train.seed,
        readers=data.readers,
        prefetch=data.prefetch,
    )


def by_name(step_s: Mapping[Worker, float]) -> dict[str, float]:
    """Seconds by `trainer.worker`, in their order, to the microsecond."""
    known = {worker if isinstance(worker, tuple) else (worker,): seconds for worker, seconds in step_s.items()}
    return {".".join(map(str, worker)): round(seconds, 6) for worker, seconds in sorted(known.items())}


def added(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """The sums of two counts by name."""
    return {kind: before.get(kind, 0) + now.get(kind, 0) for kind in {**before, **now}}


def distance(replicas: Sequence[Tensor]) -> float | None:
    """Mean of ‖w_i − mean w‖ / ‖mean w‖ over replicas `[P]`, or over the same coordinates of each; None for one."""
    if len(replicas) < 2:
        return None
    stacked = torch.stack(list(replicas))
    mean = stacked.mean(0)
    return float((stacked - mean).norm(dim=1).mean() / mean.norm().clamp_min(1e-12))


def _in_order(codec: Codec, names: Collection[str]) -> str:
    """These codecs of the ladder, the weakest first; its first one where there are none."""
    chosen = [rung.name for rung in codec.ladder if rung.name in names]
    return ", ".join(chosen) or codec.ladder[0].name
