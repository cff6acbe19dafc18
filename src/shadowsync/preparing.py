"""What becomes of a job's columns before it begins: inferred where nobody says it, learnt of the training rows, or as
the checkpoint has it that the job goes on from."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from shadowsync.checkpoint.job_state import column_difference, learnt_of
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.choices import Choices, choose_all, chosen_source
from shadowsync.config import Config, DataConfig, merge, parse, read_given, with_data
from shadowsync.data.columns import Kind, Kinds
from shadowsync.data.fitting import learn
from shadowsync.data.frame import TableOptions
from shadowsync.data.looking import ROLES, Looks, look
from shadowsync.data.source import Feature, Schema, Source
from shadowsync.data.splits import Selected, open_parts
from shadowsync.data.tables import OpenTable
from shadowsync.data.values import shown_type
from shadowsync.data.writer import as_yaml, replacing
from shadowsync.errors import CheckpointError, ConfigError, DataError
from shadowsync.registry import flow


def prepared(
    config: Config, choices: Choices, saved: LoadedCheckpoint | None, tell: Callable[[str], None]
) -> tuple[Config, Choices]:
    """The job with its columns declared, and its source with what was learnt. `tell` takes sentences for the user.

    Raises:
        DataError: the training rows cannot be read, or nothing can be inferred of them.
        CheckpointError: the checkpoint was trained on columns that are declared otherwise.
    """
    source, own_model = choices.source, choices.model is None
    if not isinstance(source, TableOptions):
        return config, choices
    if saved is not None:
        if source.undeclared:
            named = {*_LABELS} & config.data.options.keys()
            config = with_data(config, **inherited(saved.config.get("data") or {}, _OF_COLUMNS, named))
            choices = choose_all(config, own_model)
        return config, replace(choices, source=_as_trained(saved, config, choices))
    if source.undeclared:
        with contextlib.closing(_opened(choices.source, config.data)) as opened:
            looks = look(opened, source.label, source.answers)
        config = with_data(config, columns=looks.declared, **({"label": looks.label} if looks.label else {}))
        choices = choose_all(config, own_model)
        source = choices.source
        assert isinstance(source, TableOptions)
        tell(looks.sentence)
    with contextlib.closing(_opened(choices.source, config.data)) as opened:
        learnt = learn(source.kinds, source.tables, opened)
        if sentence := learnt.sentence(opened.rows):
            tell(sentence)
    return config, replace(choices, source=source.with_learnt(learnt))


def trained_source(saved: LoadedCheckpoint, choices: Choices) -> Choices:
    """Choices whose source turns columns into what the model of a checkpoint was trained on."""
    source = choices.source
    if not isinstance(source, TableOptions):
        return choices
    return replace(choices, source=source.with_learnt(learnt_of(saved)))


_OF_COLUMNS = ("columns", "label", "categorical", "dense")
_LABELS = ("label", "labels")
_DECLARING = ("columns", "categorical", "dense", "rows", "hash_size", "weights", "tables", "pooling")
"""Keys that say what becomes of columns."""


def inherited(before: Mapping[str, Any], names: Iterable[str], given: Collection[str]) -> dict[str, Any]:
    """Those options of a run's data that nothing is said of now; who names a label, one way or the other, names all."""
    said = {*given, *(() if {*_LABELS}.isdisjoint(given) else _LABELS)}
    return {name: before[name] for name in names if name in before and name not in said}


def _opened(source: Source, data: DataConfig) -> OpenTable | Selected:
    """The training rows, without those that are kept for validation and test."""
    opened = open_parts(source, data, "train")["train"]
    assert isinstance(opened, OpenTable | Selected)
    return opened


def _as_trained(saved: LoadedCheckpoint, config: Config, choices: Choices) -> Any:
    """The source with what the checkpoint's model had learnt; raises `CheckpointError` if it is declared otherwise."""
    source, learnt = choices.source, learnt_of(saved)
    there = parse(saved.config)
    before = chosen_source(there) if there.data.name == config.data.name else None
    assert isinstance(source, TableOptions)
    if learnt is None:
        if "standardise" in config.data.options and "standardise" not in there.data.options and source.standardise:
            raise ConfigError(
                f"data.standardise=true: {saved.name} was trained by a version that did not standardise, so that its "
                "columns stay as they are: leave it out, or start anew"
            )
    elif isinstance(before, TableOptions):
        if (difference := column_difference(_names(before.kinds), _names(source.kinds))) is not None:
            raise CheckpointError(f"{saved.name} was trained on {difference}: give the same columns in the same order")
        for (name, kind), (_, was) in zip(source.kinds.all(), before.kinds.all(), strict=True):
            if kind != was:
                raise CheckpointError(
                    f"data.columns.{name}: {saved.name} was trained with {_told(was)}, this job declares "
                    f"{_told(kind)}: declare it as it was, or begin another run with its rows: --from"
                )
        if (was := _asked(before)) != (now := _asked(source)):
            raise CheckpointError(
                f"{saved.name} was trained on {was}, this job has {now}: give the same labels (data.labels)"
            )
    return source.with_learnt(learnt)


def _asked(source: TableOptions) -> str:
    """The labels, of which a single one may be called otherwise in other rows."""
    several = len(source.tasks) > 1
    return ", ".join(f"{task.name} ({task.kind})" if several else f"one label of {task.kind}" for task in source.tasks)


def _names(kinds: Kinds) -> Schema:
    return Schema(tuple(kinds.dense), tuple(Feature(name, 1) for name in kinds.ids))


def _told(kind: Kind) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in kind.described().items()) + "}"


# --- shadowsync data inspect -----------------------------------------------------------------------------------------


def inspected(path: str, overrides: Sequence[str]) -> tuple[Table, str]:
    """What the columns of the rows at `path` look like and what becomes of them, and a configuration that trains on
    them so: as the overrides say, and of columns of which they say nothing as these look.

    The source is the one of such files, the model of several labels one that answers them, unless the overrides say
    another.

    Raises:
        ConfigError: an override cannot be used.
        DataError: the rows cannot be read, lack a column, or nothing of them could be trained.
    """
    given = merge({}, read_given(None, overrides), [])
    config = parse(given)
    if (other := config.data.options.get("path")) is not None:
        raise ConfigError(f"data.path={flow(other)} has no effect: {path} is what is inspected; leave one of them out")
    config = with_data(config, path=path)
    undeclared = {key: value for key, value in given.get("data", {}).items() if key not in _DECLARING}
    source = chosen_source(with_data(parse({"data": undeclared}), path=path))
    if not isinstance(source, TableOptions):
        raise ConfigError(
            f"data.name={config.data.name} has columns of its own: inspect is for files of named columns, as parquet"
        )
    with contextlib.closing(_opened(source, config.data)) as opened:
        looks = look(opened, source.label, source.answers)
    config = _completed(config, looks)
    if [one.why for one in looks.columns].count("label") > 1:
        given["model"] = {"name": "mmoe", **given.get("model", {})}
    data = config.data.model_dump(mode="json", exclude_unset=True, by_alias=True)
    written = {"data": {}} | given | {"data": data}
    source = choose_all(parse(written), own_model=False).source
    assert isinstance(source, TableOptions)
    if source.undeclared:
        raise DataError(
            "no column looks as if it had ids, which a model needs: declare one, for instance "
            "data.columns.NAME={kind: buckets, count: 20}"
        )
    if (opened_so := source.open("train", config.data.on_bad_row)) is not None:  # which looks at types
        opened_so.close()
    return _table(looks, source), as_yaml(written)


def _completed(config: Config, looks: Looks) -> Config:
    """The configuration with what it leaves open of the columns."""
    options = config.data.options
    weights = options.get("weights")
    listed = [options.get(key) for key in ("columns", "categorical", "dense")]
    listed += [weights.values()] if isinstance(weights, Mapping) else []
    said = {str(name) for names in listed if isinstance(names, Collection) for name in names}
    columns: Any = {name: becomes for name, becomes in looks.declared.items() if name not in said}
    declared = options.get("columns") or {}
    columns = {**columns, **declared} if isinstance(declared, Mapping) else declared  # what is no map is refused
    found = {"label": looks.label, "columns": columns}
    return with_data(config, **{key: value for key, value in found.items() if value})


def write_yaml(lines: str, path: Path) -> None:
    """Raises `SaveError` if it cannot be written."""
    with replacing(path) as temporary:
        temporary.write_text(lines, encoding="utf-8")


def _table(looks: Looks, source: TableOptions) -> Table:
    shown = Table(title=f"{looks.looked_at:,} of {looks.rows:,} rows", title_justify="left")
    for heading in ("column", "type", "distinct", "nulls", "min", "max", "becomes"):
        number = heading in ("distinct", "nulls")
        shown.add_column(heading, justify="right" if number else "left", overflow="fold")
    for one in looks.columns:
        distinct = "" if one.distinct is None else f"{one.distinct:,}"
        bounds = ["" if bound is None else _short(bound) for bound in (one.low, one.high)]
        becomes = _declared(one.name, source) or (f"the {one.why}" if one.why in ROLES else f"left out: {one.why}")
        # column names are the data's: what looks like markup in them is none
        shown.add_row(*map(Text, (one.name, shown_type(one.type), distinct, f"{one.nulls:,}", *bounds, becomes)))
    for name in source.kinds.ids:  # crosses are no columns of the rows
        if all(name != one.name for one in looks.columns):
            shown.add_row(*map(Text, (name, "", "", "", "", "", _declared(name, source))))
    return shown


def _declared(name: str, source: TableOptions) -> str:
    """What becomes of a column, in the words of `data.columns`; nothing where it is left out."""
    told = [source.columns.get(name, kind.described()) for column, kind in source.kinds.all() if column == name]
    told += [f"the weights of {column}" for column, weights in source.weights.items() if weights == name]
    return " and ".join(
        one if isinstance(one, str) else " ".join(v if k == "kind" else f"{k}={flow(v)}" for k, v in one.items())
        for one in told
    )


def _short(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"
