"""What can be configured: every key of the schema and every option of every member, with its default and meaning.

The command line lists it, and `docs/configuration.md` is made from it.
"""

import dataclasses
import inspect
import itertools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shadowsync.aggregation.aggregator import Aggregation
from shadowsync.compression.codec import Codec
from shadowsync.config import CodecConfig, Config, SplitConfig, TableConfig
from shadowsync.data.columns import Kind
from shadowsync.data.source import Source
from shadowsync.embedding.storage import Storage
from shadowsync.errors import ConfigError
from shadowsync.models.model import ModelSpec
from shadowsync.recovery.failures import FailureTimes
from shadowsync.registry import MemberOf, members, nearest, option_names
from shadowsync.sync.method import SyncMethod
from shadowsync.sync.schedule import Schedule

SEAMS: Mapping[str, tuple[str, type[Any]]] = {
    "data.name": ("shadowsync.data", Source),
    "data.columns.NAME.kind": ("shadowsync.data", Kind),
    "model.name": ("shadowsync.models", ModelSpec),
    "embedding.storage": ("shadowsync.embedding", Storage),
    "sync.method": ("shadowsync.sync", SyncMethod),
    "sync.schedule": ("shadowsync.sync", Schedule),
    "aggregation.method": ("shadowsync.aggregation", Aggregation),
    "compression.pull|push|dense": ("shadowsync.compression", Codec),
    "recovery.inject": ("shadowsync.recovery", FailureTimes),
}
"""The keys that choose a member which has options of its own: its folder and abstract class."""
METHODS = ("sync.method", "sync.schedule", "aggregation.method")


@dataclass(frozen=True)
class Option:
    """One key: its name within the section, its type, default and meaning in words."""

    name: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Group:
    """Keys that stand together: those of a section (`data`), or the options of a member (`data.name=parquet`)."""

    title: str
    says: str
    options: tuple[Option, ...]

    @property
    def section(self) -> str:
        """The section of the configuration that holds them."""
        return self.title.partition(".")[0]


def groups() -> Iterator[Group]:
    """Everything, section by section, each with its members behind it."""
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        yield Group(name, first_paragraph(section), _of_schema(section))
        if name == "data":
            says = "Keys of `data.valid` and of `data.test`; one of path, fraction, last and from is given."
            yield Group("data.valid", says, _of_schema(SplitConfig))
        if name == "embedding":
            yield Group("embedding.tables", "Keys of an entry.", _of_schema(TableConfig))
        for key in SEAMS:
            if key.startswith(f"{name}."):
                yield from members_of(key)


def members_of(key: str) -> Iterator[Group]:
    """The members that a key chooses among, by their names."""
    for name, member in members(*SEAMS[key]).items():
        yield Group(f"{key}={name}", first_paragraph(member), _of_member(member))


def groups_at(path: str) -> list[Group]:
    """What there is at `data`, `train.lr`, `model.name=dcn` or `model.cross`; everything at an empty path.

    Raises:
        ConfigError: nothing is there; the nearest is named.
    """
    everything = list(groups())
    section, _, key = path.partition(".")
    within = [group for group in everything if not section or group.section == section]
    if not key and within:
        return within
    whole = [group for group in within if group.title == path or group.title.startswith(f"{path}=")]
    named = [
        dataclasses.replace(group, options=tuple(option for option in group.options if option.name == key))
        for group in within
    ]
    found = [group for group in named if group.options] + whole
    if not found:
        keys = [f"{group.section}.{option.name}" for group in everything for option in group.options]
        titles = [group.title for group in everything]
        hint = nearest(path, titles if "=" in path else [*keys, *titles])
        raise ConfigError(f"{path}: there is no such section or key{hint}; sections: {', '.join(Config.model_fields)}")
    return found


def first_paragraph(documented: type[Any]) -> str:
    """Of a class's docstring, on one line."""
    return " ".join((documented.__doc__ or "").split("\n\n")[0].split())


def _of_schema(section: type[BaseModel]) -> tuple[Option, ...]:
    return tuple(_option(field.alias or key, field, _kind(field)) for key, field in section.model_fields.items())


def _of_member(member: type[Any]) -> tuple[Option, ...]:
    if not dataclasses.is_dataclass(member):
        return ()
    hints = typing.get_type_hints(member, include_extras=True)
    known = _attributes(member)
    fields = [field for field in dataclasses.fields(member) if field.name in option_names(member)]
    return tuple(_option(f.name, _described(hints[f.name], f, known), _bare(hints[f.name])) for f in fields)


def _option(name: str, field: FieldInfo, kind: Any) -> Option:
    return Option(name, _type(kind), _default(field), " ".join((field.description or "").split()).rstrip("."))


def _described(hint: Any, field: dataclasses.Field[Any], attributes: Mapping[str, str]) -> FieldInfo:
    default = PydanticUndefined if field.default is dataclasses.MISSING else field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    described = next((extra for extra in typing.get_args(hint)[1:] if isinstance(extra, FieldInfo)), FieldInfo())
    description = described.description or attributes.get(field.name)
    return FieldInfo(default=default, description=description, annotation=_bare(hint))


def _attributes(member: type[Any]) -> dict[str, str]:
    """The entries of `Attributes:` in the docstrings of a class and those it extends, by name."""
    found: dict[str, str] = {}
    for documented in reversed(member.__mro__):
        found |= _entries(documented)
    return found


def _entries(documented: type[Any]) -> dict[str, str]:
    lines = inspect.cleandoc(documented.__doc__ or "").partition("Attributes:\n")[2].splitlines()
    found: dict[str, str] = {}
    for line in itertools.takewhile(lambda line: line.startswith("    "), lines):
        if not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            found[name] = text
        else:
            found[name] += f" {line.strip()}"
    return found


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "null" if field.default is None else _plain(field.default)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, CodecConfig):
        return value.name
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _kind(field: FieldInfo) -> Any:
    """Its type, and which names it takes, which pydantic keeps beside it."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _type(kind: Any) -> str:
    named = next((part for part in typing.get_args(kind) if isinstance(part, MemberOf)), None)
    if named is not None:
        return " or ".join(f"`{name}`" for name in named.names())
    kind = _bare(kind)
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join("null" if part is types.NoneType else _type(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) in (tuple, list):
        return f"list of {_type(typing.get_args(kind)[0])}"
    if kind is CodecConfig:
        return "name, or map of name and options"
    if kind is SplitConfig:
        return "map"
    if typing.get_origin(kind) is dict:
        return f"map to {_type(typing.get_args(kind)[1])}"
    return getattr(kind, "__name__", str(kind))
