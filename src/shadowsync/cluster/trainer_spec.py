"""What a trainer is made from, as it travels to its machine."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from shadowsync.config import Config
from shadowsync.data.source import Schema
from shadowsync.embedding.table import Shard, Table


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is.

    Attributes:
        wire: its address.
        memory: path of the memory in which what it holds lies (`memory.shared`); None where trainers cannot open it.
    """

    wire: str
    memory: str | None = None


@dataclass(frozen=True)
class Addresses:
    """Where the others are.

    Attributes:
        driver: the desk, the records.
        averaging: the driver's other door, at which trainers wait for each other.
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
class TrainerSpec:
    """What a trainer is made from.

    Attributes:
        rank: among the trainers.
        generation: of the job's parts.
        config: of the job.
        schema: of the rows.
        tables: of the job, in their order.
        warmup_samples, total_samples: of the job.
        addresses: of the others.
        model: the user's own module, or None.
        failures: the script of deaths.
    """

    rank: int
    generation: int
    config: Config
    schema: Schema
    tables: tuple[Table, ...]
    warmup_samples: int
    total_samples: int
    addresses: Addresses
    model: nn.Module | None = field(repr=False)
    failures: Callable[[int, int], None] = field(repr=False)
