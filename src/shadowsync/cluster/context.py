"""What the roles of a job are made from, and what a session tells of them."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor, nn

from shadowsync.aggregation.coordinator import StepCoordinator
from shadowsync.aggregation.stepping import DenseStepper
from shadowsync.assembly import disk_of, prefetch
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.choices import Choices
from shadowsync.compression.wire import WireCounter
from shadowsync.config import Config
from shadowsync.data.labels import Loss
from shadowsync.data.reader import Reader
from shadowsync.data.source import Schema
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Shard, Table, widths
from shadowsync.memory.room import Disk
from shadowsync.metrics.history import About, Event, RoleEvent
from shadowsync.metrics.recorder import Recorder
from shadowsync.models.wrapping import features_of
from shadowsync.sync.all_reduce import LocalAverages
from shadowsync.sync.dense import DenseServer
from shadowsync.training.gate import Gate
from shadowsync.training.kernels import IN_FP32, Computing
from shadowsync.training.losses import objective
from shadowsync.training.optimizers import Rates
from shadowsync.training.replica import Replica


def no_failures(trainer_rank: int, iteration: int) -> None:
    """The script in which nobody dies."""


@dataclass(frozen=True)
class Own:
    """What a user brings instead of configuration.

    Attributes:
        model: `forward(dense [B, N], {feature: [B, D]}) → logits [B]`, or a wrapped module; None for the
            configured one.
        tables: the tables, or None.
        failures: called with a trainer's rank and iteration before each step; raises `TrainerLost` to script a death.
        loss: in place of the configured one, or a map of such by label.
    """

    model: nn.Module | None = None
    tables: Sequence[Table] | None = None
    failures: Callable[[int, int], None] = no_failures
    loss: Loss | Mapping[str, Loss] | None = None


@dataclass(frozen=True)
class JobContext:
    """What every role of a job is made from, as it travels to the role's machine.

    Attributes:
        schema: of the training rows.
        rows: of them, an epoch.
        tables: in the job's order.
        warmup_samples, total_samples: of the job.
        model: the user's own module, or None; also None for roles without a dense part.
        failures: the script of deaths.
        losses: in place of the configured ones, by label.
        computing: how workers compute on this `processor`, found out by the driver, alone and before trainers start:
            those who find out side by side may differ.
    """

    config: Config
    choices: Choices
    schema: Schema
    rows: int
    tables: tuple[Table, ...]
    warmup_samples: int
    total_samples: int
    model: nn.Module | None = field(repr=False)
    failures: Callable[[int, int], None] = field(repr=False)
    losses: Mapping[str, Loss] = field(default_factory=dict, repr=False)
    computing: Computing = IN_FP32
    processor: str = ""

    @property
    def features(self) -> tuple[str, ...]:
        """What embedding servers are asked for, in the order of the ids."""
        return features_of(self.model, self.schema)

    @property
    def disk(self) -> Disk | None:
        """Of a storage that has rows on disk."""
        return disk_of(self.config)

    @property
    def without_model(self) -> "JobContext":
        """For roles that need none."""
        return replace(self, model=None, failures=no_failures, losses={})

    @property
    def rates(self) -> Rates:
        train = self.config.train
        return Rates(self.warmup_samples, train.decay, train.final_lr, self.total_samples)

    @property
    def prefetch(self) -> int:
        return prefetch(self.config, self.choices)

    def replica(self, module: nn.Module, memory: Tensor | None = None) -> Replica:
        train, loss = self.config.train, objective(self.choices.source.tasks, self.losses)
        dims, chosen = widths(self.tables), self.choices.optimizer
        return Replica(module, chosen, dims, train.device, memory, train.accumulate, loss)


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is.

    Attributes:
        wire: its address.
        memory: path of the memory in which what it holds lies (`memory.shared`); None where the trainer is on another
            machine, or nothing is shared.
    """

    wire: str
    memory: str | None = None


@dataclass(frozen=True)
class Addresses:
    """Where the others are.

    Attributes:
        driver: the leases, the records.
        averaging: the driver's other endpoint, at which trainers wait for each other.
        reader: of this trainer.
        embedding: each server's, with what it holds.
        dense: each server's, in the order of their parts.
    """

    driver: str
    averaging: str
    reader: str
    embedding: tuple[tuple[ServerAddress, tuple[Shard, ...]], ...]
    dense: tuple[ServerAddress, ...]


@dataclass(frozen=True)
class Merging:
    """How trainers of one process merge their replicas: by `averages` and by the servers of a central copy."""

    averages: LocalAverages
    servers: tuple[DenseServer, ...]


@dataclass(frozen=True)
class Stepping:
    """Who moves the one copy of trainers of one process, and when."""

    stepper: DenseStepper
    coordinator: StepCoordinator


@dataclass(frozen=True)
class Near:
    """The others, as they stand in the driver's own process; all its trainers have these in common.

    Attributes:
        module: with the initial values.
        counter: of what would cross.
        place: says where a slice of the training rows comes from.
        give_back: has a trainer's rows given to the others.
        news: called when a worker has ended.
        fail: is told what went wrong in a trainer.
    """

    module: nn.Module
    reader: Reader
    recorder: Recorder
    gate: Gate
    counter: WireCounter
    embedding: tuple[EmbeddingServer, ...]
    dense: Merging | Stepping
    place: Callable[[int], str]
    give_back: Callable[[int], None]
    news: Callable[[], None]
    fail: Callable[[BaseException], None]


@dataclass(frozen=True)
class TrainerSpec:
    """What a trainer is made from.

    Attributes:
        rank: among the trainers.
        generation: of the job's parts.
        others: where it finds them.
        log: path of memory for its `data.leases.DoneLog`, or None.
        replica: path and `P` of its `sync.machine.ReplicaMemory`, or None.
    """

    job: JobContext
    rank: int
    generation: int
    others: Addresses | Near
    log: str | None = None
    replica: tuple[str, int] | None = None


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


@dataclass
class EventLog:
    """What has happened to the roles and was not told yet; any thread may add to it."""

    _waiting: list[tuple[float, str, Event, str, About]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, role: str, event: Event, detail: str = "", about: About = "") -> None:
        with self._lock:
            self._waiting.append((time.monotonic(), role, event, detail, about))

    def take(self, began: float = 0.0) -> list[RoleEvent]:
        """All of them, in order, by the seconds since `began` (`time.monotonic`); they are not given again."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        return [RoleEvent(max(0.0, at - began), role, event, detail, about) for at, role, event, detail, about in taken]
