"""The members that a configuration chooses, built and checked before anything starts."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from shadowsync.aggregation.aggregator import Aggregation
from shadowsync.aggregation.stragglers import parse_stragglers
from shadowsync.compression.codec import Codec, in_vain
from shadowsync.config import (
    ClusterConfig,
    CodecConfig,
    Config,
    SyncConfig,
    TrainConfig,
    merge,
    parse,
    source_called_like,
)
from shadowsync.data.labels import Task
from shadowsync.data.source import Source
from shadowsync.embedding.mapped_storage import MappedStorage
from shadowsync.embedding.optimizers import RowOptimizer
from shadowsync.embedding.storage import Storage, storage_class
from shadowsync.errors import ConfigError, blamed
from shadowsync.metrics.named import wanted
from shadowsync.models.model import ModelSpec
from shadowsync.models.wrapping import wrap
from shadowsync.recovery.settings import RecoverySettings, recovery_settings
from shadowsync.registry import build, choose, imported_class, members, names_code, option_names, split_options
from shadowsync.sync.background import Background
from shadowsync.sync.method import SyncMethod
from shadowsync.sync.none import NoSync
from shadowsync.sync.schedule import Schedule
from shadowsync.training.optimizers import DenseOptimizer

WARMUP_SAMPLES, WARMUP_STEPS = 50_000, 20
_IN_PROCESS_KEYS = {"runtime", "dense_servers", "server_memory_gib"}
_CLUSTER_KEYS: Mapping[str, set[str]] = {
    "auto": _IN_PROCESS_KEYS | {"address"},
    "inprocess": _IN_PROCESS_KEYS,
    "processes": _IN_PROCESS_KEYS | {"readers", "min_trainers", "max_trainers", "lost_after_s"},
    "ray": set(ClusterConfig.model_fields),
}
"""Keys of `cluster` that matter, by its runtime."""


@dataclass(frozen=True)
class Aggregating:
    """A gradient method and what it makes a global step of.

    Attributes:
        size: gradients in a global batch, M.
        rows_by_buffer: rows' gradients are divided by a step's divisor, not by the batches that contain the row.
    """

    method: Aggregation
    size: int
    rows_by_buffer: bool

    @property
    def waits(self) -> bool:
        """Workers wait for each other in rounds, at least at the start."""
        return self.method.start(self.size).waits


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
    aggregation: Aggregating | None = None


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
    _check_validation(config)
    if (
        own_model
        and not names_code(config.model.name)
        and (set_keys := config.model.model_fields_set - {"embedding_dim"})
    ):
        raise ConfigError(f"model.{min(set_keys)} has no effect beside a module of your own: leave it out")
    recovery = recovery_settings(config.recovery, config.cluster.runtime)
    for failures in recovery.schedules:
        failures.check_roles(_most_roles(config, method))
    optimizer = choose("train.optimizer", config.train.optimizer, "shadowsync.training", DenseOptimizer)
    chosen = _chosen_members(config)
    source = _built("data", config, chosen)[0]
    wanted(config.train, source.tasks)
    members = [] if own_model else _built("model", config, chosen)  # none either where the name is of code
    return Choices(
        source=source,
        model=_answering(members[0], source.tasks) if members else None,
        storage=storage_class(config.embedding.storage),
        method=method,
        schedule=schedule,
        codecs=_choose_codecs(config, method),
        optimizer=build(
            optimizer, {option: getattr(config.train, option) for option in option_names(optimizer)}, "train"
        ),
        recovery=recovery,
        aggregation=_choose_aggregation(config, chosen),
    )


def server_count(config: Config) -> int:
    """Embedding servers: as given, else two on a cluster and one on a single machine."""
    given = config.embedding.servers
    return given if given is not None else 1 if config.cluster.address is None else 2


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
    step = global_batch(config) * config.train.accumulate
    return max(share, min(WARMUP_STEPS * step, total_samples // 4))


def as_trained(choices: Choices, config: Config, parameters: Collection[str]) -> Choices:
    """The choices for a checkpoint with dense parameters of these names: what the configuration leaves open is as it
    was there, though a default may have changed since."""
    if choices.model is None:
        return choices
    return replace(choices, model=choices.model.as_trained(parameters, config.model.options))


# --- going on from a stored configuration ----------------------------------------------------------------------------


def resumed(stored: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration with what is given now laid over it.

    Where that chooses other members, stored options that those do not have are left out, and so are stored codecs,
    options of codecs, a number of dense servers and one of batches to accumulate that have no effect any more. What is
    given now all stays, so that it is refused where it has no effect.
    """
    changed = _with_format(stored, changed)
    kept = _without_foreign_options(merge(_without_old_labels(stored, changed), changed, []))
    if kept.get("aggregation") and "accumulate" in kept.get("train", {}):
        kept = {**kept, "train": {key: value for key, value in kept["train"].items() if key != "accumulate"}}
    given = changed.get("cluster")
    if "dense_servers" not in (given if isinstance(given, Mapping) else {}) and _one_dense_server(parse(kept)):
        kept = {**kept, "cluster": {k: v for k, v in (kept.get("cluster") or {}).items() if k != "dense_servers"}}
    return merge(_without_idle_codecs(kept, changed.get("compression")), changed, [])


def _with_format(stored: Mapping[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """With `data.name` where that is left open and files are given whose names say that they are of another format."""
    data, now = stored.get("data"), changed.get("data")
    if not (isinstance(data, Mapping) and isinstance(now, Mapping)) or "name" in now:
        return changed
    path, sources = now.get("path"), members("shadowsync.data", Source)
    first = path[0] if isinstance(path, list) and path else path
    found = source_called_like(first, sources) if isinstance(first, str) else None
    if found is None or not getattr(sources.get(str(data.get("name"))), "endings", ()):  # or it reads files of any name
        return changed
    return {**changed, "data": {**now, "name": found}}


def _without_old_labels(stored: dict[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Without stored labels in whose place others are given; options of some of them are laid over those of all."""
    data, now = stored.get("data"), changed.get("data")
    if not (isinstance(data, Mapping) and isinstance(now, Mapping)):
        return stored
    labels = now.get("labels")
    gone = {"labels"} if "label" in now else set()
    if isinstance(labels, Mapping) and labels:
        gone.add("label")
        if labels.keys().isdisjoint(data.get("labels") or ()):
            gone.add("labels")
    return {**stored, "data": {key: value for key, value in data.items() if key not in gone}}


def _without_foreign_options(values: dict[str, Any]) -> dict[str, Any]:
    """Without the options of members that are not chosen any more."""
    selectors: dict[str, Any] = {}
    for name in ("data", "model", "sync", "aggregation"):
        if name in values:
            section = values[name]  # what is no map is for `parse` to refuse
            own = _own_keys(name)
            selectors[name] = (
                {key: section[key] for key in section if key in own} if isinstance(section, Mapping) else section
            )
    config = parse(selectors)
    kept = dict(values)
    for name, chosen in _chosen_members(config).items():
        if name in values and (chosen or name != "model"):  # what a class of the user's takes, it says itself
            known = {*_own_keys(name), *(option for member in chosen.values() for option in option_names(member))}
            kept[name] = {key: value for key, value in values[name].items() if key in known}
    if isinstance(codecs := values.get("compression"), Mapping):
        kept["compression"] = dict(codecs)
        for kind, codec in codecs.items():
            if isinstance(codec, Mapping):  # else a name alone, or for `parse` to refuse
                name = codec.get("name", "plain")
                member = choose(f"compression.{kind}", name, "shadowsync.compression", Codec)
                known = {*CodecConfig.model_fields, *option_names(member)}
                kept["compression"][kind] = {key: value for key, value in codec.items() if key in known}
    kept.pop("aggregation" if config.aggregation.method is None else "sync", None)
    if "cluster" in values:
        known_keys = _CLUSTER_KEYS[parse({"cluster": values["cluster"]}).cluster.runtime]
        kept["cluster"] = {key: value for key, value in values["cluster"].items() if key in known_keys}
    return kept


def _without_idle_codecs(values: dict[str, Any], changed: Any) -> dict[str, Any]:
    """Without stored codecs and options of them that have no effect any more, where nobody gave them now."""

    def given(kind: str, option: str) -> bool:
        return isinstance(changed, Mapping) and option in (changed.get(kind) or {})

    config = parse(values)
    stored = {kind: dict(codec) for kind, codec in (values.get("compression") or {}).items()}
    method, _ = _choose_sync(config)
    if config.aggregation.method is None and not method.active and not given("dense", "name"):
        stored.pop("dense", None)
    for kind, option, _ in list(_idle(config, _codecs(config, method), method)):
        if not given(kind, option) and kind in stored:
            stored[kind].pop(option, None)
    return {**values, "compression": stored} if stored or "compression" in values else values


def named_module(config: Config) -> nn.Module | None:
    """The module whose class `model.name` names, made with the other keys of `model` and wrapped if it holds
    embeddings that can be served; None where that names none.

    Raises:
        ConfigError: there is no such class, or it cannot be made.
    """
    name, options = config.model.name, config.model.options
    if not names_code(name) or _of_model(name):
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        try:
            module: nn.Module = imported_class("model.name", name, nn.Module)(**options)
        except Exception as error:  # whatever it raises
            raise ConfigError(
                f"model.name={name} cannot be made with {', '.join(options) or 'no options'}: {blamed(error)}"
            ) from error
    inside = any(
        isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.weight.requires_grad for child in module.modules()
    )
    return wrap(module) if inside else module


def chosen_source(config: Config) -> Source:
    """The source alone."""
    name = config.data.name
    chosen = {f"data.name={name}": choose("data.name", name, "shadowsync.data", Source)}
    found: Source = _built("data", config, {"data": chosen})[0]
    return found


# --- members of sections ----------------------------------------------------------------------------------------------


def _own_keys(section: str) -> Mapping[str, Any]:
    """The keys that a section has whatever is chosen in it."""
    fields: Mapping[str, Any] = Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
    return fields


def _chosen_members(config: Config) -> dict[str, dict[str, type[Any]]]:
    """The members whose options stand in a section, by the section and `key=name`."""

    def chosen(key: str, package: str, seam: type[Any]) -> dict[str, type[Any]]:
        section, _, selector = key.partition(".")
        name = getattr(getattr(config, section), selector)
        return {f"{key}={name}": choose(key, name, f"shadowsync.{package}", seam)}

    method, schedule = chosen("sync.method", "sync", SyncMethod), chosen("sync.schedule", "sync", Schedule)
    steps = config.aggregation.method is not None
    model = config.model.name
    return {
        "data": chosen("data.name", "data", Source),
        "model": _of_model(model) if names_code(model) else chosen("model.name", "models", ModelSpec),
        "sync": method | schedule if all(member.active for member in method.values()) else method,
        "aggregation": chosen("aggregation.method", "aggregation", Aggregation) if steps else {},
    }


def _of_model(name: str) -> dict[str, type[Any]]:
    """The `ModelSpec` of the user's that `model.name` names by its class; a module has no options that are known."""
    named = imported_class("model.name", name, ModelSpec, nn.Module)
    return {f"model.name={name}": named} if issubclass(named, ModelSpec) else {}


def _built(section: str, config: Config, chosen: Mapping[str, Mapping[str, type[Any]]]) -> list[Any]:
    """The members chosen in a section, each with its options."""
    options = split_options(section, getattr(config, section).options, chosen[section], _own_keys(section))
    return [build(member, own, section) for member, own in zip(chosen[section].values(), options, strict=True)]


def _answering(model: Any, tasks: Sequence[Task]) -> ModelSpec:
    """The model for so many labels; raises `ConfigError` if it answers one only."""
    if len(tasks) > 1 and not model.several:
        raise ConfigError(
            f"data.labels names {len(tasks)} labels and model.name={model.name} gives one logit: set model.name=mmoe, "
            f"bring a module of your own that returns [B, {len(tasks)}], or name one label"
        )
    return cast("ModelSpec", replace(model, tasks=len(tasks)) if model.several else model)


def _choose_sync(config: Config) -> tuple[SyncMethod, Schedule]:
    servers = config.cluster.dense_servers
    if servers > 1 and (why := _one_dense_server(config)):
        raise ConfigError(f"cluster.dense_servers={servers} has no effect with {why}: set it to 1")
    if config.aggregation.method is not None:
        return NoSync(), Background()
    sync = config.sync
    method = choose("sync.method", sync.method, "shadowsync.sync", SyncMethod)
    schedule = choose("sync.schedule", sync.schedule, "shadowsync.sync", Schedule)
    chosen: dict[str, type[Any]] = {f"sync.method={sync.method}": method, f"sync.schedule={sync.schedule}": schedule}
    own = split_options("sync", sync.options, chosen, SyncConfig.model_fields)
    if own[1] and not method.active:
        raise ConfigError(f"sync.{next(iter(own[1]))} has no effect with sync.method={sync.method}: leave it out")
    built: SyncMethod = build(method, own[0], "sync")
    timed: Schedule = build(schedule, own[1], "sync")
    return built.resolved(config.train.trainers), timed


def _choose_aggregation(config: Config, chosen: Mapping[str, Mapping[str, type[Any]]]) -> Aggregating | None:
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
    if train.accumulate > 1:
        raise ConfigError(
            f"train.accumulate={train.accumulate} has no effect with aggregation.method={given.method}, whose global "
            "step is made of several batches already: leave it out, and set aggregation.global_batch to the samples of "
            "a step"
        )
    whole = global_batch(config)
    size, rest = divmod(whole, train.batch_size)
    if rest or not size:
        raise ConfigError(
            f"aggregation.global_batch={whole} is not a multiple of train.batch_size={train.batch_size}: a global step "
            "is made of whole batches"
        )
    (method,) = _built("aggregation", config, chosen)
    method.start(size)  # what does not fit is found before anything starts
    return Aggregating(method, size, given.rows == "buffer")


def _choose_codecs(config: Config, method: SyncMethod) -> dict[str, Codec]:
    merged = config.aggregation.method is None
    codecs = _codecs(config, method)
    if merged and not method.active and config.compression.dense.name != "plain":
        raise ConfigError(
            f"compression.dense={config.compression.dense.name} has no effect with sync.method={method.name}, which "
            "sends nothing of the dense part: leave it out"
        )
    whole = all(level.everything or level.elementwise for level in codecs["dense"].levels)
    if merged and not method.meeting().together and not whole:
        raise ConfigError(
            f"compression.dense={codecs['dense'].name} would hardly save bytes with sync.method={method.name}: it "
            "sends differences from an average that all have, and groups change; set compression.dense=bf16, or "
            "leave it out"
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
    if kind == "dense" and codec.by_known and config.aggregation.method is not None:
        yield (
            "select",
            f"with aggregation.method={config.aggregation.method}, which sends gradients: set sync.method in its place",
        )
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


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_used(config: Config) -> None:
    """Raises `ConfigError` for an option that was given and that the chosen optimizer or decay has no use for."""
    rows, dense = members("shadowsync.embedding", RowOptimizer), members("shadowsync.training", DenseOptimizer)
    for section, given, used in (
        ("embedding", config.embedding, option_names(rows[config.embedding.optimizer])),
        ("train", config.train, option_names(dense[config.train.optimizer])),
    ):
        for option in ("eps", "beta1", "beta2"):
            if option in given.model_fields_set and option not in used:
                raise ConfigError(f"{section}.{option} is not an option of {section}.optimizer={given.optimizer}")
    if config.train.decay == "none" and "final_lr" in config.train.model_fields_set:
        raise ConfigError("train.final_lr has no effect with train.decay=none: set train.decay=linear or cosine")
    for option in ("memory_gib", "folder"):
        if getattr(config.embedding, option) is not None and config.embedding.storage != MappedStorage.name:
            raise ConfigError(
                f"embedding.{option} has no effect with embedding.storage={config.embedding.storage}: set "
                f"embedding.storage={MappedStorage.name}, or leave it out"
            )
    if config.embedding.sharding == "row_wise" and config.embedding.split_rows is not None:
        raise ConfigError("embedding.split_rows has no effect with embedding.sharding=row_wise: leave one of them out")


def _check_cluster(config: Config) -> None:
    """Raises `ConfigError` for what has no effect or cannot be met."""
    cluster, train = config.cluster, config.train
    for key in sorted(cluster.model_fields_set - _CLUSTER_KEYS[cluster.runtime]):
        where = "on one machine" if cluster.runtime == "processes" else "in one process"
        able = " or ".join(runtime for runtime, keys in _CLUSTER_KEYS.items() if key in keys and runtime != "auto")
        raise ConfigError(f"cluster.{key} has no effect {where}: set cluster.runtime={able}, or leave it out")
    for key in ("trainer_resource", "server_resource"):
        if (name := getattr(cluster, key)) in ("CPU", "GPU", "memory", "object_store_memory"):
            raise ConfigError(f"cluster.{key}={name} is Ray's own: name one that ray start --resources gave")
    most = cluster.max_trainers
    if most is not None and most < train.trainers:
        raise ConfigError(f"cluster.max_trainers={most} is below train.trainers={train.trainers}")
    if cluster.min_trainers > train.trainers:
        raise ConfigError(f"cluster.min_trainers={cluster.min_trainers} is above train.trainers={train.trainers}")
    servers = server_count(config)
    for key, machines in (("max_servers", cluster.max_servers), ("min_servers", cluster.min_servers)):
        if machines is not None and machines > servers:
            raise ConfigError(
                f"cluster.{key}={machines} is above embedding.servers={servers}, and each of them is on one machine: "
                "raise embedding.servers"
            )
    if cluster.max_servers is not None and cluster.max_servers < cluster.min_servers:
        raise ConfigError(
            f"cluster.max_servers={cluster.max_servers} is below cluster.min_servers={cluster.min_servers}"
        )


def _check_emulation(config: Config) -> None:
    """Raises `ConfigError` for emulated machines of which nobody says how fast they are, or that are not there."""
    train = config.train
    if train.stragglers is not None:
        named = (part.index or () for part in parse_stragglers(train.stragglers).parts)
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


def _check_validation(config: Config) -> None:
    """Raises `ConfigError` for what follows from validations that there are none of."""
    train = config.train
    keys = ("validate_every", "best_by", "min_delta", "patience", "plateau_patience", "plateau_factor")
    given = [key for key in keys if getattr(train, key) != TrainConfig.model_fields[key].default]
    if config.data.valid is None and given:
        raise ConfigError(
            f"train.{given[0]} has no effect without rows to validate on: give data.valid, for instance "
            "data.valid.fraction=0.1, or leave it out"
        )
    if train.plateau_patience is None and "plateau_factor" in given:
        raise ConfigError("train.plateau_factor has no effect without train.plateau_patience: give both")


def _one_dense_server(config: Config) -> str | None:
    """With what more than one would have no effect; None if they have one."""
    if config.aggregation.method is not None:
        near = config.cluster.runtime in ("auto", "inprocess")
        return f"aggregation.method={config.aggregation.method} in one process" if near else None
    method = choose("sync.method", config.sync.method, "shadowsync.sync", SyncMethod)
    return None if method.centralised else f"sync.method={config.sync.method}, which keeps no central copy"


def _most_roles(config: Config, method: SyncMethod) -> dict[str, int]:
    """How many of each kind may fail at most; servers that get no rows or no parameters drop out later."""
    cluster, trainers = config.cluster, config.train.trainers
    most = {"embedding": server_count(config), "trainer": trainers}
    if cluster.runtime in ("auto", "inprocess"):
        return most
    readers = cluster.readers or (1 if cluster.address is None else trainers)
    central = method.centralised or config.aggregation.method is not None
    return most | {"dense": cluster.dense_servers if central else 0, "reader": readers}
