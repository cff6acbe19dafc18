"""Options of codecs that were given and would do nothing: one table of options and conditions."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from shadowsync.compression.codec import Codec
from shadowsync.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """Options without an effect.

    Attributes:
        codecs: that have the options.
        options: their names.
        when: whether they have no effect, by the codec.
        why: what makes it so, behind "has no effect".
    """

    codecs: frozenset[str]
    options: tuple[str, ...]
    when: Callable[[Any], bool]
    why: Callable[[Any], str]


_LOW_BIT = frozenset({"int8", "int4"})
_THRESHOLD, _AUTO = frozenset({"threshold"}), frozenset({"auto"})
_ROUNDING = ("rounding", "seed", "block")
RULES = (
    Rule(
        _THRESHOLD,
        _ROUNDING,
        lambda codec: codec.values in ("fp32", "bf16"),
        lambda codec: f"with values={codec.values}: set values=int8 or int4",
    ),
    Rule(
        _AUTO,
        _ROUNDING,
        lambda codec: codec.strongest == "bf16",
        lambda _: "with strongest=bf16: set strongest=int8 or int4",
    ),
    Rule(
        _LOW_BIT | _THRESHOLD | _AUTO,
        ("seed",),
        lambda codec: codec.rounding == "nearest",
        lambda _: "with rounding=nearest: set rounding=stochastic",
    ),
    Rule(
        _THRESHOLD,
        ("refresh", "band", "correction", "scope"),
        lambda codec: codec.keep == 1,
        lambda _: "with keep=1, where everything crosses: set a smaller keep",
    ),
    Rule(
        _THRESHOLD,
        ("band", "correction"),
        lambda codec: codec.refresh == 1,
        lambda _: "with refresh=1, where every message has a threshold of its own: set a larger refresh",
    ),
    Rule(
        _THRESHOLD,
        ("feedback",),
        lambda codec: codec.everything,
        lambda _: "with keep=1 and values=fp32, where nothing is left: set a smaller keep",
    ),
    Rule(
        _AUTO,
        ("keep",),
        lambda codec: codec.strongest != "threshold",
        lambda codec: f"with strongest={codec.strongest}: set strongest=threshold",
    ),
)


def unused(codec: Codec) -> Iterator[tuple[str, str]]:
    """Options that have no effect beside the others of the codec, and why."""
    for rule in RULES:
        if codec.name in rule.codecs and rule.when(codec):
            yield from ((option, rule.why(codec)) for option in rule.options)


def in_vain(
    key: str, codec: Codec, given: Mapping[str, Any], found: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Those of the options found without effect that were given, each with a sentence; at its default one does no harm.

    Args:
        key: where the codec was chosen.
        codec: as it was built.
        given: its options by name.
        found: as `unused` has them.
    """
    defaults = {field.name: field.default for field in fields(codec)}  # type: ignore[arg-type]
    for option, why in found:
        if option in given and given[option] != defaults.get(option):
            yield option, f"{key}.{option}={given[option]} has no effect {why}, or leave it out"


def check_used(key: str, codec: Codec, given: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for the first option that was given in vain."""
    for _, told in in_vain(key, codec, given, unused(codec)):
        raise ConfigError(told)
