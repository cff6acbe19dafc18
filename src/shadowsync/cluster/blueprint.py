"""What a job's roles are made from: how many there are, what each holds, and the specification of each part."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from shadowsync.aggregation.dense_shares import DenseShare, divide
from shadowsync.assembly import place_tables, row_optimizer, shares_center, shares_rows
from shadowsync.choices import Choices, server_count
from shadowsync.cluster.parts import DenseSpec, EmbeddingSpec, ReaderSpec, build_dense
from shadowsync.cluster.places import Need
from shadowsync.cluster.stepper_part import StepperSpec, build_stepper
from shadowsync.cluster.trainer_spec import Addresses, TrainerSpec
from shadowsync.config import Config
from shadowsync.data.parsing import ReaderOptions
from shadowsync.embedding.memory import parts_of
from shadowsync.embedding.optimizers import rule_class
from shadowsync.embedding.table import Shard
from shadowsync.memory.shared import bytes_of
from shadowsync.recovery.tracking import row_tracking
from shadowsync.runtime.runtime import Builder
from shadowsync.session import Material, Session
from shadowsync.sync.group import split_evenly

THREADS = 4
FORGET_S = 120.0


@dataclass(frozen=True)
class Blueprint:
    """The plan of a session's roles.

    Attributes:
        material: of the session.
        session: what it knows of tables, schema and samples.
        config: for the roles: the storage is the one that the driver chose.
        shards: what each embedding server holds.
        spans: what each dense server holds of the central copy; empty where the method keeps none.
        parts: what each dense server steps under a gradient method; empty where replicas are merged.
    """

    material: Material
    session: Session
    config: Config
    shards: tuple[tuple[Shard, ...], ...]
    spans: tuple[tuple[int, int], ...]
    parts: tuple[DenseShare, ...]

    @classmethod
    def of(cls, material: Material, session: Session) -> "Blueprint":
        """Places the tables.

        Raises:
            ConfigError: they do not fit the servers.
        """
        config, choices = material.config, material.choices
        shards = place_tables(config, choices, session.schema, session.tables, material.train)
        servers, template = config.cluster.dense_servers, session.template
        spans = split_evenly(len(template.flat), servers) if choices.method.centralised else []
        parts = divide(template.slots, servers) if choices.aggregation is not None else ()
        chosen = config.embedding.model_copy(update={"storage": choices.storage.name})
        return cls(material, session, config.model_copy(update={"embedding": chosen}), shards, tuple(spans), parts)

    @property
    def choices(self) -> Choices:
        """Of the job."""
        return self.material.choices

    @property
    def dense_servers(self) -> int:
        """How many there are."""
        return len(self.spans) or len(self.parts)

    @property
    def trainers(self) -> int:
        """Most trainers at a time."""
        return self.config.cluster.max_trainers or self.config.train.trainers

    @property
    def threads(self) -> int:
        """That answer requests in a role's process."""
        return max(THREADS, self.config.data.readers)

    @property
    def forget_s(self) -> float:
        """Silence after which a server forgets a client: later than the driver gives up a role."""
        return max(FORGET_S, 2 * self.config.cluster.lost_after_s)

    @cached_property
    def _bytes(self) -> list[int]:
        rule = rule_class(row_optimizer(self.config.embedding).name)
        return [sum(shard.rows * rule.row_bytes(shard.table.dim) for shard in shards) for shards in self.shards]

    @cached_property
    def shared_bytes(self) -> Mapping[str, int]:
        """By role, the memory of what trainers of this machine reach without its server, should that be possible."""
        rule = rule_class(row_optimizer(self.config.embedding).name)
        found: dict[str, int] = {}
        if shares_rows(self.config, self.choices):
            tracking = row_tracking(self.choices.recovery, self.config.train.seed)
            for index, shards in enumerate(self.shards):
                followed = [] if tracking is None else [part for shard in shards for part in tracking.parts(shard)]
                found[f"embedding-{index}"] = bytes_of([*parts_of(shards, rule), *followed])
        if shares_center(self.config, self.choices):
            lengths = enumerate(stop - start for start, stop in self.spans)
            found |= {f"dense-{index}": bytes_of([(length, torch.float32)]) for index, length in lengths}
        return found

    def need(self, role: str) -> Need:
        """What a role needs of its machine."""
        kind, _, index = role.rpartition("-")
        return Need(role, self._bytes[int(index)] if kind == "embedding" else 0)

    def servers(self) -> list[Need]:
        """The servers of rows, the largest first, and of the dense part."""
        rows = [self.need(f"embedding-{index}") for index in range(len(self.shards))]
        dense = [self.need(f"dense-{index}") for index in range(self.dense_servers)]
        return sorted(rows, key=lambda need: -need.bytes) + dense

    # --- specifications ----------------------------------------------------------------------------------------------

    def embedding(self, index: int, generation: int, filled: bool, memory: str | None, inherits: bool) -> EmbeddingSpec:
        """Of an embedding server."""
        return EmbeddingSpec(self.config, self._own_model, self.shards[index], generation, filled, memory, inherits)

    def dense(self, index: int, generation: int, memory: str | None) -> tuple[Builder, DenseSpec | StepperSpec]:
        """Of a dense server, with what makes it."""
        session = self.session
        if self.choices.aggregation is not None:
            model, part = self.material.own.model, self.parts[index]
            given = self.config, session.schema, session.tables, generation, model, part, index == 0
            return build_stepper, StepperSpec(*given)
        start, stop = self.spans[index]
        return build_dense, DenseSpec(self.choices.codecs["dense"], stop - start, generation, memory)

    def reader(self, options: ReaderOptions) -> ReaderSpec:
        """Of any reader."""
        return ReaderSpec(self.config, self._own_model, options, self.material.train.rows)

    def trainer(self, rank: int, generation: int, addresses: Addresses) -> TrainerSpec:
        """Of a trainer."""
        session, own = self.session, self.material.own
        return TrainerSpec(
            rank,
            generation,
            self.config,
            session.schema,
            session.tables,
            session.warmup_samples,
            session.total_samples,
            addresses,
            own.model,
            own.failures,
        )

    @property
    def _own_model(self) -> bool:
        return self.material.own.model is not None


def cpus_needed(config: Config) -> float:
    """CPUs that a cluster of one machine has to offer for everybody to have room."""
    cluster = config.cluster
    trainers = cluster.max_trainers or config.train.trainers
    servers = server_count(config) + cluster.dense_servers
    return math.ceil(trainers * cluster.trainer_cpus + servers * cluster.server_cpus)


def resources_needed(config: Config) -> Mapping[str, float]:
    """Custom resources that it has to offer."""
    named = (config.cluster.trainer_resource, config.cluster.server_resource)
    return {name: 1.0 for name in named if name is not None}
