"""The members that a configuration chooses, built and checked before anything starts."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from shadowsync.aggregation.aggregator import Aggregation
from shadowsync.aggregation.stragglers import parse_stragglers
from shadowsync.compression.codec import Codec, in_vain
from shadowsync.config import (
    AggregationConfig,
    ClusterConfig,
    CodecConfig,
    Config,
    DataConfig,
    EmbeddingConfig,
    ModelConfig,
    SyncConfig,
    TrainConfig,
    parse,
)
from shadowsync.data.source import Source
from shadowsync.embedding.optimizers import RowRule
from shadowsync.embedding.storage import Storage, storage_class
from shadowsync.errors import ConfigError
from shadowsync.models.model import ModelSpec
from shadowsync.recovery.settings import RecoverySettings, recovery_settings
from shadowsync.registry import build, choose, members, option_names, split_options
from shadowsync.sync.background import Background
from shadowsync.sync.method import SyncMethod
from shadowsync.sync.none import NoSync
from shadowsync.sync.schedule import Schedule
from shadowsync.training.optimizers import DenseOptimizer

WARMUP_SAMPLES, WARMUP_STEPS = 50_000, 20

T = TypeVar("T")
_CHOOSING = ("data", "model", "sync", "aggregation")
RAYS_OWN = {"CPU", "GPU", "memory", "object_store_memory"}
IN_PROCESS_KEYS = {"runtime", "dense_servers", "server_memory_gib"}
CLUSTER_KEYS: Mapping[str, set[str]] = {
    "auto": IN_PROCESS_KEYS | {"address"},
    "inprocess": IN_PROCESS_KEYS,
    "processes": IN_PROCESS_KEYS | {"readers", "min_trainers", "max_trainers", "lost_after_s"},
    "ray": set(ClusterConfig.model_fields),
}
"""Keys of `cluster` that matter, by its runtime."""


@dataclass(frozen=True)
class Choices:
    """What a configuration chose, with defaults resolved.

    Attributes:
        model: the dense part; None where the user brings a module.
        method, schedule: how replicas are merged, and when.
        codecs: by kind of traffic: `pull`, `push`, `dense`.
        optimizer: of the dense part.
        aggregation: how gradients make global steps; None where replicas are merged.
    """

    source: Source
    model: ModelSpec | None
    storage: type[Storage]
    method: SyncMethod
    schedule: Schedule
    codecs: Mapping[str, Codec]
    optimizer: DenseOptimizer
    recovery: RecoverySettings
    aggregation: "Aggregating | None" = None


@dataclass(frozen=True)
class Aggregating:
    """A gradient method and what it makes a global step of.

    Attributes:
        size: gradients in a global batch, M.
        rows_by_buffer: rows' gradients are divided by M, not by the batches that contain the row.
    """

    method: Aggregation
    size: int
    rows_by_buffer: bool

    @property
    def waits(self) -> bool:
        """Workers wait for each other in rounds, at least at the start."""
        return self.method.start(self.size).waits


def choose_all(config: Config, own_model: bool) -> Choices:
    """Builds every chosen member.

    Raises:
        ConfigError: a name or an option is unknown, or a value is out of range.
        MissingExtra: a choice needs a package that is not installed.
    """
    method, schedule = _choose_sync(config)
    _check_used(config)
    _check_cluster(config)
    _check_emulation(config)
    if own_model and (set_keys := config.model.model_fields_set - {"embedding_dim"}):
        raise ConfigError(f"model.{min(set_keys)} has no effect beside a module of your own: leave it out")
    recovery = recovery_settings(config.recovery, config.cluster.runtime)
    if recovery.schedule is not None:
        recovery.schedule.check_roles(_most_roles(config, method))
    optimizer = choose("train.optimizer", config.train.optimizer, "shadowsync.training", DenseOptimizer)
    return Choices(
        source=_choose_one("data", config.data, "shadowsync.data", Source),
        model=None if own_model else _choose_one("model", config.model, "shadowsync.models", ModelSpec),
        storage=storage_class(config.embedding.storage),
        method=method,
        schedule=schedule,
        codecs=_choose_codecs(config, method),
        optimizer=build(
            optimizer, {option: getattr(config.train, option) for option in option_names(optimizer)}, "train"
        ),
        recovery=recovery,
        aggregation=_choose_aggregation(config),
    )


def server_count(config: Config) -> int:
    """Embedding servers: as given, else two on a cluster and one on a single machine."""
    given = config.embedding.servers
    return given if given is not None else 1 if config.cluster.address is None else 2


def _most_roles(config: Config, method: SyncMethod) -> dict[str, int]:
    """How many of each kind may fail at most; servers that get no rows or no parameters drop out later."""
    cluster, trainers = config.cluster, config.train.trainers
    most = {"embedding": server_count(config), "trainer": trainers}
    if cluster.runtime in ("auto", "inprocess"):
        return most
    readers = cluster.readers or (1 if cluster.address is None else trainers)
    central = method.centralised or config.aggregation.method is not None
    return most | {"dense": cluster.dense_servers if central else 0, "reader": readers}


def without_foreign_options(values: dict[str, Any], changed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A stored configuration after overrides chose other members: options that those do not have are left out.

    Args:
        values: with the overrides laid over it.
        changed: the overrides. Options of codecs that are not among them and have no effect any more are left out too.
    """
    selectors: dict[str, Any] = {}
    for name in (name for name in _CHOOSING if name in values):
        section = values[name]  # what is no map is for `parse` to refuse
        keys = _keys_of(name)
        given = isinstance(section, Mapping)
        selectors[name] = {key: section[key] for key in section if key in keys} if given else section
    config = parse(selectors)
    kept = dict(values)
    for name, chosen in _chosen_members(config).items():
        if name in values:
            known = {*_keys_of(name), *(option for member in chosen for option in option_names(member))}
            kept[name] = {key: value for key, value in values[name].items() if key in known}
    if isinstance(codecs := values.get("compression"), Mapping):
        kept["compression"] = {kind: _own_codec_options(kind, codec) for kind, codec in codecs.items()}
    kept.pop("aggregation" if config.aggregation.method is None else "sync", None)
    if "cluster" in values:
        known_keys = CLUSTER_KEYS[parse({"cluster": values["cluster"]}).cluster.runtime]
        kept["cluster"] = {key: value for key, value in values["cluster"].items() if key in known_keys}
    if changed is None:
        return kept
    kept = _without_idle_servers(kept, changed.get("cluster") or {})
    return _without_idle_codecs(kept, changed.get("compression") or {})


def _without_idle_servers(values: dict[str, Any], changed: Any) -> dict[str, Any]:
    """Without a stored number of dense servers that has no effect any more, where nobody gave it now."""
    stored = values.get("cluster") or {}
    if "dense_servers" not in stored or "dense_servers" in changed or not _one_dense_server(parse(values)):
        return values
    return {**values, "cluster": {key: value for key, value in stored.items() if key != "dense_servers"}}


def _without_idle_codecs(values: dict[str, Any], changed: Any) -> dict[str, Any]:
    """Without stored codecs and options of them that have no effect any more, where nobody gave them now."""
    config = parse(values)
    stored = {kind: dict(codec) for kind, codec in (values.get("compression") or {}).items()}
    method, _ = _choose_sync(config)
    if config.aggregation.method is None and not method.active and not _given(changed, "dense", "name"):
        stored.pop("dense", None)
    codecs = _codecs(config, method)
    for kind, option, _ in list(_idle(config, codecs, method)):
        if not _given(changed, kind, option) and kind in stored:
            stored[kind].pop(option, None)
    return {**values, "compression": stored} if stored or "compression" in values else values


def _given(changed: Any, kind: str, option: str) -> bool:
    return isinstance(changed, Mapping) and option in (changed.get(kind) or {})


def _own_codec_options(kind: str, codec: Any) -> Any:
    if not isinstance(codec, Mapping):
        return codec  # a name alone, or for `parse` to refuse
    member = choose(f"compression.{kind}", codec.get("name", "plain"), "shadowsync.compression", Codec)
    known = {*CodecConfig.model_fields, *option_names(member)}
    return {key: value for key, value in codec.items() if key in known}


def _keys_of(section: str) -> Mapping[str, Any]:
    """The keys that a section has whatever is chosen in it."""
    fields: Mapping[str, Any] = Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
    return fields


def _chosen_members(config: Config) -> dict[str, list[type[Any]]]:
    """The members whose options stand in a section, by the section."""
    method = choose("sync.method", config.sync.method, "shadowsync.sync", SyncMethod)
    schedule = choose("sync.schedule", config.sync.schedule, "shadowsync.sync", Schedule)
    gradients, package = config.aggregation.method, "shadowsync.aggregation"
    return {
        "data": [choose("data.name", config.data.name, "shadowsync.data", Source)],
        "model": [choose("model.name", config.model.name, "shadowsync.models", ModelSpec)],
        "sync": [method, schedule] if method.active else [method],
        "aggregation": [] if gradients is None else [choose("aggregation.method", gradients, package, Aggregation)],
    }


def _choose_one(section: str, given: DataConfig | ModelConfig, package: str, seam: type[T]) -> T:
    name, options = given.name, given.options
    member = choose(f"{section}.name", name, package, seam)
    (own,) = split_options(section, options, {f"{section}.name={name}": member}, _keys_of(section))
    return build(member, own, section)


def _choose_codecs(config: Config, method: SyncMethod) -> dict[str, Codec]:
    merged = config.aggregation.method is None
    codecs = _codecs(config, method)
    if merged and not method.active and config.compression.dense.name != "plain":
        raise ConfigError(
            f"compression.dense={config.compression.dense.name} has no effect with sync.method={method.name}, which "
            "sends nothing of the dense part: leave it out"
        )
    if codecs["dense"].sparse and merged and not method.takes_differences:
        raise ConfigError(
            f"compression.dense={codecs['dense'].name} goes with aggregation.method, and with sync.method=ma, bmuf, or "
            "easgd in sync.form=elastic: all else sends parameters, most of which would read as zero; set one of them, "
            "or compression.dense=int8"
        )
    for _, _, told in _idle(config, codecs, method):
        raise ConfigError(told)
    return codecs


def _idle(config: Config, codecs: Mapping[str, Codec], method: SyncMethod) -> Iterator[tuple[str, str, str]]:
    """Options of codecs that were given and would do nothing: the kind of traffic, the option, and a sentence."""
    for kind, codec in codecs.items():
        found = (*codec.unused(), *_unused_here(kind, codec, config, codecs["pull"], method))
        given = getattr(config.compression, kind).options
        yield from ((kind, *idle) for idle in in_vain(f"compression.{kind}", codec, given, found))


def _unused_here(kind: str, codec: Codec, config: Config, pull: Codec, method: SyncMethod) -> Iterator[tuple[str, str]]:
    """Options that have no effect beside other sections and other kinds, and why."""
    if kind == "push" and pull.sparse:
        mask = f"beside compression.pull={pull.name}, whose mask says which elements of the gradient cross"
        yield from ((option, f"{mask}: set another codec for pulls") for option in sorted(codec.selecting))
        if codec.levels[-1].sparse and not codec.sparse:
            yield from ((option, f"{mask}: set another codec for pulls") for option in ("strongest", "keep"))
    if kind != "dense" and getattr(codec, "scope", "tensor") == "group" and config.embedding.unique_rows == "always":
        why = "with embedding.unique_rows=always, where rows cross whose columns are no features"
        yield "scope", f"{why}: set embedding.unique_rows=never"
    if kind == "dense" and codec.sparse and config.aggregation.method is None:
        yield (
            "feedback",
            f"with sync.method={method.name}, where what is left out stays in the differences: set aggregation.method",
        )


def _codecs(config: Config, method: SyncMethod) -> dict[str, Codec]:
    """By kind; a method that merges replicas has defaults of its own for them."""
    own = {"dense": method.codec_options} if config.aggregation.method is None else {}
    return {kind: _choose_codec(kind, given, own.get(kind, {})) for kind, given in config.compression}


def _choose_codec(kind: str, given: CodecConfig, defaults: Mapping[str, Any]) -> Codec:
    key = f"compression.{kind}"
    member = choose(key, given.name, "shadowsync.compression", Codec)
    (own,) = split_options(key, given.options, {f"{key}={given.name}": member}, CodecConfig.model_fields)
    return build(member, {**(defaults if member.sparse else {}), **own}, key).resolved(key)


def _check_used(config: Config) -> None:
    """Raises `ConfigError` for an option that was given and that the chosen optimizer or decay has no use for."""
    rows, dense = members("shadowsync.embedding", RowRule), members("shadowsync.training", DenseOptimizer)
    _check_optimizer("embedding", config.embedding, rows[config.embedding.optimizer].options)
    _check_optimizer("train", config.train, option_names(dense[config.train.optimizer]))
    if config.train.decay == "none" and "final_lr" in config.train.model_fields_set:
        raise ConfigError("train.final_lr has no effect with train.decay=none: set train.decay=linear or cosine")
    if config.embedding.sharding == "row_wise" and config.embedding.split_rows is not None:
        raise ConfigError("embedding.split_rows has no effect with embedding.sharding=row_wise: leave one of them out")


def _check_cluster(config: Config) -> None:
    """Raises `ConfigError` for what has no effect or cannot be met."""
    cluster, train = config.cluster, config.train
    for key in sorted(cluster.model_fields_set - CLUSTER_KEYS[cluster.runtime]):
        where = "on one machine" if cluster.runtime == "processes" else "in one process"
        able = " or ".join(runtime for runtime, keys in CLUSTER_KEYS.items() if key in keys and runtime != "auto")
        raise ConfigError(f"cluster.{key} has no effect {where}: set cluster.runtime={able}, or leave it out")
    for key in ("trainer_resource", "server_resource"):
        if (name := getattr(cluster, key)) in RAYS_OWN:
            raise ConfigError(f"cluster.{key}={name} is Ray's own: name one that ray start --resources gave")
    most = cluster.max_trainers
    if most is not None and most < train.trainers:
        raise ConfigError(f"cluster.max_trainers={most} is below train.trainers={train.trainers}")
    if cluster.min_trainers > train.trainers:
        raise ConfigError(f"cluster.min_trainers={cluster.min_trainers} is above train.trainers={train.trainers}")


def _check_emulation(config: Config) -> None:
    """Raises `ConfigError` for emulated machines of which nobody says how fast they are, or that are not there."""
    train = config.train
    if train.stragglers is not None:
        named = (part.index or () for part in parse_stragglers(train.stragglers, "train.stragglers").parts)
        highest = max(itertools.chain(*named), default=0)
        if highest >= (most := (config.cluster.max_trainers or train.trainers) * train.workers):
            raise ConfigError(
                f"train.stragglers={train.stragglers}: there is no worker {highest} that could be slow; this job has "
                f"{most}, counted from 0"
            )
        if train.emulate_step_ms is None:
            raise ConfigError("train.stragglers needs train.emulate_step_ms: how long a step takes of who is not slow")
    if not train.emulate_compute and train.emulate_step_ms is None:
        raise ConfigError("train.emulate_compute=false needs train.emulate_step_ms: how long the machine would compute")


def _check_optimizer(section: str, given: EmbeddingConfig | TrainConfig, used: tuple[str, ...]) -> None:
    for option in ("eps", "beta1", "beta2"):
        if option in given.model_fields_set and option not in used:
            raise ConfigError(f"{section}.{option} is not an option of {section}.optimizer={given.optimizer}")


def _choose_aggregation(config: Config) -> Aggregating | None:
    given, train = config.aggregation, config.train
    if given.method is None:
        if unused := sorted({*given.model_fields_set, *given.options} - {"method"}):
            raise ConfigError(
                f"aggregation.{unused[0]} has no effect without aggregation.method: set it, or leave it out"
            )
        return None
    if config.sync.model_fields_set or config.sync.options:
        key = min({*config.sync.model_fields_set, *config.sync.options})
        raise ConfigError(
            f"sync.{key} has no effect with aggregation.method={given.method}, which merges no replicas: leave it "
            "out, or set aggregation.method=null to merge them"
        )
    member = choose("aggregation.method", given.method, "shadowsync.aggregation", Aggregation)
    (own,) = split_options(
        "aggregation", given.options, {f"aggregation.method={given.method}": member}, AggregationConfig.model_fields
    )
    whole = global_batch(config)
    size, rest = divmod(whole, train.batch_size)
    if rest or not size:
        raise ConfigError(
            f"aggregation.global_batch={whole} is not a multiple of train.batch_size={train.batch_size}: a global step "
            "is made of whole batches"
        )
    method = build(member, own, "aggregation")
    method.start(size)  # what does not fit is found before anything starts
    return Aggregating(method, size, given.rows == "buffer")


def global_batch(config: Config) -> int:
    """Samples of a global step; where there are none, of a step of every worker."""
    train = config.train
    return config.aggregation.global_batch or train.batch_size * train.trainers * train.workers


def warmup_samples(config: Config, total_samples: int) -> int:
    """Samples of a job of `total_samples` over which the learning rates rise, if the configuration leaves it open.

    Adagrad's first steps are as long as the rate in every coordinate however small a gradient is, so there are some
    steps at least, which in a short job are more than the twentieth of it that a long one takes.
    """
    share = min(WARMUP_SAMPLES, total_samples // 20)
    return max(share, min(WARMUP_STEPS * global_batch(config), total_samples // 4))


def _check_dense_servers(config: Config) -> None:
    servers = config.cluster.dense_servers
    if servers > 1 and (why := _one_dense_server(config)):
        raise ConfigError(f"cluster.dense_servers={servers} has no effect with {why}: set it to 1")


def _one_dense_server(config: Config) -> str | None:
    """With what more than one would have no effect; None if they have one."""
    if config.aggregation.method is not None:
        near = config.cluster.runtime in ("auto", "inprocess")
        return f"aggregation.method={config.aggregation.method} in one process" if near else None
    method = choose("sync.method", config.sync.method, "shadowsync.sync", SyncMethod)
    return None if method.centralised else f"sync.method={config.sync.method}, which keeps no central copy"


def _choose_sync(config: Config) -> tuple[SyncMethod, Schedule]:
    if config.aggregation.method is not None:
        _check_dense_servers(config)
        return NoSync(), Background()
    sync = config.sync
    method = choose("sync.method", sync.method, "shadowsync.sync", SyncMethod)
    schedule = choose("sync.schedule", sync.schedule, "shadowsync.sync", Schedule)
    chosen: dict[str, type[Any]] = {f"sync.method={sync.method}": method, f"sync.schedule={sync.schedule}": schedule}
    own = split_options("sync", sync.options, chosen, SyncConfig.model_fields)
    if own[1] and not method.active:
        raise ConfigError(f"sync.{next(iter(own[1]))} has no effect with sync.method={sync.method}: leave it out")
    _check_dense_servers(config)
    built: SyncMethod = build(method, own[0], "sync")
    timed: Schedule = build(schedule, own[1], "sync")
    return built.resolved(config.train.trainers, timed.foreground), timed
