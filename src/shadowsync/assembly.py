"""Builds the parts that a job, an evaluation and an export share, from a configuration."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir

import torch
from torch import Tensor, nn

from shadowsync.choices import Choices, server_count
from shadowsync.compression.channel import pulled_and_pushed_bytes
from shadowsync.compression.choice import CodecChoice
from shadowsync.compression.codec import Codec
from shadowsync.config import Config, EmbeddingConfig, TableConfig
from shadowsync.data.source import Dynamic, OpenSource, Schema
from shadowsync.embedding.keys import KeyRules
from shadowsync.embedding.mapped_storage import MappedStorage
from shadowsync.embedding.optimizers import RowOptimizer
from shadowsync.embedding.placement import Cost, measure_costs, place, row_wise
from shadowsync.embedding.routing import NEVER, UniqueRows
from shadowsync.embedding.storage import AUTO, storage_class
from shadowsync.embedding.table import (
    Shard,
    Table,
    check_rows,
    check_tables,
    default_tables,
    histories,
    pool,
    sequence_inputs,
    whole_sets,
    widths,
    with_pooling,
)
from shadowsync.errors import ConfigError
from shadowsync.memory.pages import memory_bytes
from shadowsync.memory.room import Disk
from shadowsync.memory.shared import can_share
from shadowsync.models.model import ModelSpec, copy_module
from shadowsync.models.wrapping import Wrapped, features_of
from shadowsync.registry import choose, option_names
from shadowsync.sync.background import Background
from shadowsync.training.kernels import Computing, choose_computing

GIB = 1 << 30
PREFETCH = 2
PROFILED_ROWS = 2048
PROFILED_SLICES = 4
_SEEDING = threading.Lock()
"""torch has one generator for all threads, and roles of one process may be made at the same time."""


def make_tables(
    config: Config,
    schema: Schema,
    own: Sequence[Table] | None = None,
    model: ModelSpec | None = None,
    module: nn.Module | None = None,
) -> tuple[Table, ...]:
    """The job's tables: those of a wrapped `module`, the user's, the configuration's, or one for each feature, checked
    against the source.

    What `embedding.pooling` says of a feature counts most, then what the model wants as sequences, then the tables. How
    a model wants lists pooled counts where nobody says anything.

    Raises:
        ConfigError: tables and features do not fit each other.
    """
    if isinstance(module, Wrapped):
        return _tables_of(module, config, own)
    given, dim = config.embedding.pooling, config.model.embedding_dim
    tables = tuple(own or ()) or tuple(_table(table) for table in config.embedding.tables or ())
    if tables and not isinstance(dim, int):
        raise ConfigError(
            f"model.embedding_dim={dim} has no effect beside embedding.tables, of which each has a dim of its own: "
            "leave one of them out"
        )
    if not tables:
        tables = default_tables(schema, dim, 0 if model is None else model.extra_columns)
        if model is not None and model.lists is not None:
            said = config.data.options.get("pooling") or ()
            lists = [feature.name for feature in schema.features if feature.multi_hot and feature.name not in said]
            tables = with_pooling(tables, dict.fromkeys(lists, model.lists), "model.name")
    check_tables(tables, [feature.name for feature in schema.features])
    check_rows(tables, schema)
    _check_time(tables, config.data.options.get("time"))
    tables = with_pooling(tables, given, "embedding.pooling")
    if model is None:
        return tables
    found = {} if any(table.sequences for table in tables) else histories(tables, schema)
    wanted = [feature for feature in model.wanted_sequences(found) if feature not in given]
    return with_pooling(tables, dict.fromkeys(wanted, "none"), "model.targets")


def _tables_of(module: Wrapped, config: Config, own: Sequence[Table] | None) -> tuple[Table, ...]:
    given = {
        "tables": own is not None,
        "embedding.tables": bool(config.embedding.tables),
        "embedding.pooling": bool(config.embedding.pooling),
        "model.embedding_dim": "embedding_dim" in config.model.model_fields_set,
    }
    if useless := next((key for key, holds in given.items() if holds), None):
        raise ConfigError(f"{useless} has no effect beside a wrapped model, which has its own tables: leave it out")
    found = []
    for name, (rows, dim) in module.tables.items():
        poolings = {feature: site.pooling for site in module.sites if site.table == name for feature in site.features}
        if poolings:  # else it is looked up never
            found.append(pool(Table(name, rows, dim, tuple(poolings)), poolings))
    check_tables(found, module.features)
    return tuple(found)


def planned(module: nn.Module | None, choices: Choices, schema: Schema) -> nn.Module | None:
    """A user's module for rows of this schema; only a wrapped one has to be prepared."""
    if not isinstance(module, Wrapped):
        return module
    if (keyed := next((feature.name for feature in schema.features if feature.ids is not None), None)) is not None:
        raise ConfigError(
            f"a wrapped model has tables of so many rows each, and {keyed} is dynamic: declare it otherwise, for "
            f"instance data.columns.{keyed}.kind=hash"
        )
    return module.planned(schema, weighted=bool(getattr(choices.source, "weights", None)))


def initial_rows(module: nn.Module | None, shards: Sequence[Shard], here: bool) -> dict[str, Tensor]:
    """Those that a wrapped module brings for these shards, by their keys; copies unless they are used `here`."""
    if not isinstance(module, Wrapped):
        return {}
    mine = [shard for shard in shards if shard.table.name in module.initial]
    rows = {shard.key: module.initial[shard.table.name][shard.start : shard.stop] for shard in mine}
    return rows if here else {key: part.clone() for key, part in rows.items()}


def disk_of(config: Config, here: bool = True) -> Disk | None:
    """Of a storage that has rows on disk; None for others. `here`: in the folder that the configuration names."""
    given = config.embedding
    if given.storage != MappedStorage.name:
        return None
    folder = Path(given.folder if given.folder is not None and here else gettempdir())
    memory = given.memory_gib
    return Disk(folder, (memory_bytes() or GIB) // 2 // server_count(config) if memory is None else int(memory * GIB))


def place_tables(
    config: Config,
    choices: Choices,
    schema: Schema,
    tables: tuple[Table, ...],
    source: OpenSource | None,
    module: nn.Module | None = None,
) -> tuple[tuple[Shard, ...], ...]:
    """What each embedding server holds; servers left without rows drop out. Costs are profiled on the first rows of the
    source; None where speed does not matter.

    Raises:
        ConfigError: the tables do not fit the servers' memory.
    """
    memory = config.cluster.server_memory_gib
    capacity = None if memory is None else int(memory * GIB)
    count, optimizer, disk = server_count(config), row_optimizer(config.embedding), disk_of(config)
    if disk is not None and capacity is not None:
        if disk.memory_bytes > capacity:
            raise ConfigError(
                f"embedding.memory_gib={disk.memory_bytes / GIB:.3g} is more than "
                f"cluster.server_memory_gib={memory:.3g}: lower it"
            )
        capacity = None  # the rows are not in memory
    if config.embedding.sharding == "row_wise":
        placed = row_wise(tables, optimizer, count, capacity)
    else:
        costs = _costs(config, choices, schema, tables, source, module)
        apart = config.cluster.address is not None and config.embedding.split_rows is None
        placed = place(tables, costs, optimizer, count, capacity, config.embedding.split_rows, cut_costly=apart)
    return tuple(shards for shards in placed if shards)


def _costs(
    config: Config,
    choices: Choices,
    schema: Schema,
    tables: tuple[Table, ...],
    source: OpenSource | None,
    module: nn.Module | None,
) -> Mapping[str, Cost]:
    """Of each table by name, measured with the first ids that can be used; alike where there are none among the first
    few thousand rows, or nothing to choose."""
    batch = None
    if server_count(config) > 1 and source is not None:
        parts = (source.read(part) for part in source.slices(PROFILED_ROWS)[:PROFILED_SLICES])
        batch = next((batch for batch in parts if len(batch)), None)
    if batch is None:
        return {table.name: Cost(1.0) for table in tables}
    ids = module.ask(batch, training=True)[0] if isinstance(module, Wrapped) else batch.ids
    storage = storage_class(AUTO) if choices.storage.on_disk else choices.storage
    return measure_costs(tables, features_of(module, schema), [ids], storage, row_optimizer(config.embedding))


def unique_rows(config: Config, choices: Choices) -> UniqueRows:
    """Where trainers have duplicates removed before rows and gradients cross; `auto` does it where a network is.

    On one machine bytes cost less than the search for duplicates.
    """
    mode = config.embedding.unique_rows
    if mode == "auto" and config.cluster.address is None:
        return NEVER
    return UniqueRows(mode, pulled_and_pushed_bytes(choices.codecs["pull"], choices.codecs["push"]))


def key_rules(config: Config, choices: Choices) -> KeyRules:
    """Keys keep their rows while batches may be under way: looked up, and with gradients that were not applied yet."""
    workers = (config.cluster.max_trainers or config.train.trainers) * config.train.workers
    held = 0 if choices.aggregation is None else choices.aggregation.size
    return KeyRules(config.train.seed, workers * (prefetch(config, choices) + 2) + held)


def prefetch(config: Config, choices: Choices) -> int:
    """Pulls under way per worker: as given, else as many as hide a network where there is one.

    Where workers wait for each other in rounds none are: whoever is quick would take the places of the others.
    """
    given = config.train.prefetch
    if given is not None:
        return given
    in_rounds = choices.aggregation is not None and choices.aggregation.waits
    one_machine = config.cluster.address is None
    near = config.cluster.runtime == "inprocess" or (one_machine and shares_rows(config, choices))
    return 0 if in_rounds or near else PREFETCH


def shares_rows(config: Config, choices: Choices) -> bool:
    """Trainers reach the rows of their machine in memory that they have in common with its embedding servers.

    Not under gradient methods, whose gradients somebody holds for a step.
    """
    return _shares_memory(config) and choices.aggregation is None


def shares_center(config: Config, choices: Choices) -> bool:
    """As `shares_rows`, of the central dense copy; not under codecs of which either end has to remember something."""
    sparse = any(codec.sparse for codec in choices.codecs["dense"].levels)
    merged = choices.aggregation is None and choices.method.centralised
    return _shares_memory(config) and merged and not sparse


def shares_averages(config: Config, choices: Choices) -> bool:
    """As `shares_rows`, of the averages of replicas; not where a codec's work on one machine is to be seen."""
    merged = choices.aggregation is None and choices.method.collective
    as_they_are = config.cluster.address is not None or choices.codecs["dense"].everything
    return _shares_memory(config) and merged and as_they_are


def _shares_memory(config: Config) -> bool:
    """The job has processes, and machines let theirs have memory in common."""
    return config.cluster.runtime != "inprocess" and can_share()


def make_module(
    config: Config, choices: Choices, schema: Schema, tables: Sequence[Table], own: nn.Module | None
) -> nn.Module:
    """The dense part with its initial values, which depend on the seed only.

    Raises:
        ConfigError: it does not fit this machine's memory together with its gradients.
    """
    if own is not None:
        return copy_module(own)
    assert choices.model is not None
    inputs = len(schema.dense), widths(tables), sequence_inputs(tables, schema)
    with torch.device("meta"):
        needed = 2 * sum(p.numel() * p.itemsize for p in choices.model.build(*inputs).parameters())
    here = memory_bytes()
    if here is not None and needed > here:
        raise ConfigError(
            f"the dense part and its gradients take {needed / GIB:,.1f} GiB, more than the {here / GIB:,.1f} GiB of "
            "this machine: lower the widths of the model's layers (model.top, model.bottom, model.deep)"
        )
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        return choices.model.build(*inputs)


def computing_here(config: Config, module: nn.Module) -> Computing:
    """How workers on this machine compute the forward and the backward pass of this module."""
    train, precision = config.train, config.train.precision
    if isinstance(module, Wrapped) and module.output == "probability":
        if precision == "bf16":
            raise ConfigError(
                "train.precision=bf16: a wrapped model that returns a probability computes in fp32, as bf16 has two "
                "digits of one: set train.precision=fp32, or have the model return logits"
            )
        precision = "fp32"
    return choose_computing(precision, train.kernels, train.device, module, train.batch_size)


def row_optimizer(config: EmbeddingConfig) -> RowOptimizer:
    """The optimizer of the rows."""
    member = choose("embedding.optimizer", config.optimizer, "shadowsync.embedding", RowOptimizer)
    return member(**{option: getattr(config, option) for option in option_names(member)})


def _check_time(tables: Sequence[Table], column: str | None) -> None:
    """Raises `ConfigError` unless there is a column of times where, and only where, a table has a ttl of time."""
    ttls = {table.name: table.ids.ttl for table in tables if table.ids is not None and isinstance(table.ids.ttl, str)}
    if ttls and not column:
        name, ttl = next(iter(ttls.items()))
        raise ConfigError(
            f"table {name} has ttl={ttl}, in the data's own time: give ttl in samples or name the column that says "
            "when a row was, as data.time=timestamp"
        )
    if column and not ttls:
        raise ConfigError(f"data.time={column} has no effect where no ttl is one of time, as 7d: leave it out")


def _table(given: TableConfig) -> Table:
    table = Table(given.name, given.rows or whole_sets(given.capacity or 0), given.dim, given.features)
    if given.ids == "dynamic":
        options = {name: getattr(given, name) for name in option_names(Dynamic)}
        table = replace(table, ids=Dynamic(**{name: value for name, value in options.items() if value is not None}))
    if isinstance(given.pooling, dict):
        return with_pooling([table], given.pooling, f"embedding.tables: pooling of {given.name}")[0]
    return replace(table, pooling=given.pooling)


def codec_choice(config: Config, choices: Choices, codecs: Mapping[str, Codec]) -> CodecChoice:
    """What chooses among the levels of a trainer's codecs; what is averaged all trainers send in one."""
    merged = choices.aggregation is None
    if merged and choices.method.collective:
        codecs = {**codecs, "dense": codecs["dense"].levels[0]}
    overlapped, elastic = prefetch(config, choices) > 0, merged and not choices.schedule.foreground
    return CodecChoice(codecs, config.train.workers, overlapped, elastic)


def codec_remarks(config: Config, choices: Choices) -> Iterator[str]:
    """What would surprise a user: `auto` where nothing can be chosen, encoding that takes up the shadow's time."""
    dense, schedule = choices.codecs["dense"], choices.schedule
    merged = choices.aggregation is None and choices.method.active
    if merged and dense.sparse and isinstance(schedule, Background) and schedule.max_share == Background.max_share:
        yield (
            f"compression.dense={dense.name}: encoding takes much of sync.max_share={schedule.max_share:g} of a core, "
            "so that replicas are synchronised less often and drift apart; sync.max_share=0.15 keeps them together"
        )
    for kind, codec in choices.codecs.items():
        if len(codec.levels) == 1:
            continue
        if config.cluster.runtime == "inprocess":
            why = "in one process nothing is sent"
        elif kind == "dense" and choices.aggregation is None and choices.method.collective:
            why = f"all trainers have to send alike to be averaged by sync.method={choices.method.name}"
        else:
            continue
        yield f"compression.{kind}=auto is {codec.levels[0].name}, because {why}"
