"""Every key of the configuration is read, every option reaches its member, and the reference says what there is."""

import ast
import dataclasses
import runpy
import typing
from collections.abc import Iterator
from typing import Any, cast

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from repository import ROOT, SOURCE, attributes, nodes_of

from shadowsync.aggregation.aggregator import Aggregation
from shadowsync.compression.codec import Codec
from shadowsync.config import Config, parse
from shadowsync.data.columns import Kind
from shadowsync.data.source import Source
from shadowsync.embedding.optimizers import RowOptimizer
from shadowsync.errors import ConfigError
from shadowsync.models.model import ModelSpec
from shadowsync.registry import members, option_names
from shadowsync.sync.method import SyncMethod
from shadowsync.sync.schedule import Schedule
from shadowsync.training.optimizers import DenseOptimizer

SEAMS: dict[type[Any], str] = {
    Source: "shadowsync.data",
    Kind: "shadowsync.data",
    ModelSpec: "shadowsync.models",
    Codec: "shadowsync.compression",
    DenseOptimizer: "shadowsync.training",
    Aggregation: "shadowsync.aggregation",
    SyncMethod: "shadowsync.sync",
    Schedule: "shadowsync.sync",
}
MEMBERS = {
    f"{seam.__name__}: {name}": member
    for seam, package in SEAMS.items()
    for name, member in members(package, seam).items()
}
OPTIMIZER_OPTIONS = {
    (section, option)
    for section, package, seam in (
        ("train", "shadowsync.training", DenseOptimizer),
        ("embedding", "shadowsync.embedding", RowOptimizer),
    )
    for member in members(package, cast("type[Any]", seam)).values()
    for option in option_names(member)
}
READ_AS_A_WHOLE = {"compression"}
"""Sections whose keys are gone through in a loop."""


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        yield name, field.annotation


def has_a_choice(field: FieldInfo) -> bool:
    """A key that allows a single value has nothing to change yet."""
    return typing.get_origin(field.annotation) is not typing.Literal or len(typing.get_args(field.annotation)) > 1


KEYS = [
    (section, key)
    for section, schema in sections()
    if section not in READ_AS_A_WHOLE
    for key, field in schema.model_fields.items()
    if has_a_choice(field)
]


def read_in_source() -> set[tuple[str, str]]:
    """`(owner, name)` of all attributes read outside the schema itself."""
    modules = (path for path in SOURCE.rglob("*.py") if path.name != "config.py")
    return {pair for module in modules for pair in attributes(module)}


READ = read_in_source()


def test_every_key_is_read() -> None:
    """As `section.key`, through a parameter called `config` or `given`, or as an option of an optimizer."""
    unread = [
        f"{section}.{key}"
        for section, key in KEYS
        if not READ & {(owner, key) for owner in (section, "config", "given")}
        and (section, key) not in OPTIMIZER_OPTIONS
    ]
    assert unread == []


def test_every_codec_key_is_asked_for() -> None:
    kinds = set(Config.model_fields["compression"].annotation.model_fields)  # type: ignore[union-attr]
    literals = {
        node.value
        for module in SOURCE.rglob("*.py")
        if module.name != "config.py"
        for node in nodes_of(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert kinds <= literals


def test_every_option_of_a_member_is_read() -> None:
    assert all(dataclasses.is_dataclass(member) for member in MEMBERS.values())
    names = {name for _, name in READ}
    assert [
        f"{title}.{name}" for title, member in MEMBERS.items() for name in option_names(member) if name not in names
    ] == []


def test_every_key_says_what_it_means() -> None:
    keys = [(f"{section}.{key}", field) for section, schema in sections() for key, field in schema.model_fields.items()]
    assert [key for key, field in keys if not field.description] == []


def test_no_duration_is_longer_than_the_timers_take() -> None:
    durations = [pair for pair in KEYS if pair[1].endswith(("_s", "_ms"))]
    assert durations
    for section, key in durations:
        with pytest.raises(ConfigError, match=rf"{section}\.{key}=.*less than or equal to"):
            parse({section: {key: 1e10 if key.endswith("_s") else 1e13}})


def test_the_reference_is_what_the_schema_says() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))["reference"]()
    kept = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert kept == made, "run make docs and commit docs/configuration.md"
