"""Writes docs/configuration.md from the schema and from the options of every member: `make docs`."""

import dataclasses
import inspect
import itertools
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shadowsync.aggregation.aggregator import Aggregation
from shadowsync.compression.codec import Codec
from shadowsync.config import CodecConfig, Config
from shadowsync.data.source import Source
from shadowsync.embedding.storage import Storage
from shadowsync.models.model import ModelSpec
from shadowsync.recovery.failures import FailureTimes
from shadowsync.registry import MemberOf, members
from shadowsync.sync.method import SyncMethod
from shadowsync.sync.schedule import Schedule

TARGET = Path(__file__).parent / "configuration.md"
HEAD = """# Configuration

Made from the schema by `make docs`; do not edit. Give keys as YAML sections in a file or as `section.key=value` on the
command line. Unknown keys are errors. `data.name`, `model.name`, `sync.method`, `sync.schedule` and
`aggregation.method` choose a member, whose own options stand in the same section; those of `recovery.inject` stand
behind its name ([how](recovery.md#scripted-failures)).
"""
SEAMS: dict[str, list[tuple[str, str, type[Any]]]] = {
    "data": [("data.name", "shadowsync.data", Source)],
    "model": [("model.name", "shadowsync.models", ModelSpec)],
    "sync": [("sync.method", "shadowsync.sync", SyncMethod), ("sync.schedule", "shadowsync.sync", Schedule)],
    "aggregation": [("aggregation.method", "shadowsync.aggregation", Aggregation)],
    "embedding": [("embedding.storage", "shadowsync.embedding", Storage)],
    "recovery": [("recovery.inject", "shadowsync.recovery", FailureTimes)],
    "compression": [("compression.pull|push|dense", "shadowsync.compression", Codec)],
}


def reference() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for name in Config.model_fields for line in _section(name))])


def _section(name: str) -> Iterator[str]:
    section = Config.model_fields[name].annotation
    assert isinstance(section, type)
    assert issubclass(section, BaseModel)
    yield f"## {name}\n\n{_first_paragraph(section)}\n"
    yield from _table((key, field, _kind(field)) for key, field in section.model_fields.items())
    if name == "embedding":
        table = typing.get_args(typing.get_args(section.model_fields["tables"].annotation)[0])[0]
        yield "Keys of an entry of `embedding.tables`:\n"
        yield from _table((key, field, field.annotation) for key, field in table.model_fields.items())
    for key, package, seam in SEAMS.get(name, []):
        for member_name, member in members(package, seam).items():
            yield from _member(f"{key}={member_name}", member)


def _member(title: str, member: type[Any]) -> Iterator[str]:
    yield f"### {title}\n\n{_first_paragraph(member)}\n"
    if dataclasses.is_dataclass(member):
        hints = typing.get_type_hints(member, include_extras=True)
        fields = [field for field in dataclasses.fields(member) if field.init]
        known = _attributes(member)
        rows = [(field.name, _described(hints[field.name], field, known), _bare(hints[field.name])) for field in fields]
        yield from _table(iter(rows))


def _described(hint: Any, field: dataclasses.Field[Any], attributes: dict[str, str]) -> FieldInfo:
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


def _table(rows: Iterator[tuple[str, FieldInfo, Any]]) -> Iterator[str]:
    lines = [
        f"| `{key}` | {_type(kind)} | {_default(field)} | {(field.description or '').rstrip('.')} |"
        for key, field, kind in rows
    ]
    if lines:
        yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *lines, ""])


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return f"`{'null' if field.default is None else _plain(field.default)}`"


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
    if typing.get_origin(kind) is dict:
        return f"map to {_type(typing.get_args(kind)[1])}"
    return getattr(kind, "__name__", str(kind))


def _first_paragraph(documented: type[Any]) -> str:
    return " ".join((documented.__doc__ or "").split("\n\n")[0].split())


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
