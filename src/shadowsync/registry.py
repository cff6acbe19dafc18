"""Finds the members of a seam by name, so that a new method is one new file in its folder.

A member is a dataclass that subclasses the seam's abstract class and has a class attribute `name`. Its fields are its
options: the configuration section passes what the user wrote, and unknown or invalid options become a `ConfigError`
that names the nearest known one.
"""

import dataclasses
import difflib
import functools
import importlib
import inspect
import itertools
import json
import pkgutil
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import pydantic
from pydantic_core import CoreSchema, core_schema

from shadowsync.errors import ConfigError, blamed

T = TypeVar("T")
Listed = pydantic.BeforeValidator(lambda text: text.split("+") if isinstance(text, str) else text)
"""`1+2` as its parts, where options are words."""
_checker = functools.cache(pydantic.TypeAdapter[Any])
"""Building one takes a millisecond or more."""


def members(package: str, seam: type[T]) -> dict[str, type[T]]:
    """Every concrete subclass of `seam` defined in the modules of `package`, by its `name`, in order of the names."""
    folders = tuple(importlib.import_module(package).__path__)
    found: dict[str, type[T]] = _members(package, cast("Any", seam), folders)
    return dict(found)


@functools.cache
def _members(package: str, seam: type[Any], folders: tuple[str, ...]) -> dict[str, type[Any]]:
    found: dict[str, type[Any]] = {}
    for module_info in pkgutil.iter_modules(folders, package + "."):
        module = importlib.import_module(module_info.name)
        for member in vars(module).values():
            if inspect.isclass(member) and issubclass(member, seam) and "name" in vars(member):
                found[vars(member)["name"]] = member
    return dict(sorted(found.items()))


def choose(key: str, name: str, package: str, seam: type[T]) -> type[T]:
    """The member called `name`; `key` is the configuration key that chose it, for the message."""
    known = members(package, seam)
    if name not in known:
        raise ConfigError(f"{key}={name} is not known{nearest(name, known)}; allowed: {', '.join(known)}")
    return known[name]


@dataclass(frozen=True)
class MemberOf:
    """Marks a key of the configuration that holds the name of a member of `seam` (`module:class`; members are in the
    module's folder), or one of `also`: `Annotated[str, MemberOf(…)]`.

    Members are looked for when a name is given, so that a schema imports none of them.
    """

    seam: str
    also: tuple[str, ...] = ()

    def members(self) -> dict[str, type[Any]]:
        """By name."""
        module, _, name = self.seam.partition(":")
        return members(module.rpartition(".")[0], getattr(importlib.import_module(module), name))

    def names(self) -> tuple[str, ...]:
        return (*self.also, *self.members())

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, name: str) -> str:
        if name not in (known := self.names()):
            raise ValueError(f"it is not known{nearest(name, known)}; allowed: {', '.join(known)}")
        return name


def names_code(text: str) -> bool:
    """Whether a name is to be `imported`, as `package.module:name`, perhaps with a column in brackets behind it."""
    return ":" in text.partition("(")[0]


def imported(key: str, path: str) -> Any:
    """What `package.module:name` stands for, modules of the working directory too; `ConfigError` if there is none."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"{key}={path} names nothing: write it as package.module:name")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise ConfigError(
            f"{key}={path}: there is no module {error.name or module}: pip install {package}, or start where it is"
        ) from error
    except Exception as error:  # whatever the module raises
        raise ConfigError(f"{key}={path} cannot be imported: {blamed(error)}") from error
    if name not in vars(found):
        raise ConfigError(f"{key}={path}: {module} has no {name}{nearest(name, vars(found))}")
    return vars(found)[name]


def nearest(word: str, known: Iterable[str]) -> str:
    """`, did you mean X?` or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


def option_names(member: type[Any]) -> tuple[str, ...]:
    """The names of a member's options; what it names as `internal` is for the package to set."""
    internal = getattr(member, "internal", ())
    return tuple(field.name for field in dataclasses.fields(member) if field.init and field.name not in internal)


def build(member: type[T], options: Mapping[str, Any], section: str) -> T:
    """`member(**options)`, checked by pydantic against the types and bounds of the member's fields."""
    for option, value in options.items():
        if isinstance(value, bool) and not _takes_bool(typing.get_type_hints(member).get(option, Any)):
            raise ConfigError(f"{section}.{option}={value} is not a value of it: it does not take true or false")
    try:
        built: T = _checker(cast("Any", member)).validate_python(dict(options))
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error, section)) from error
    return built


def build_described(key: str, text: str, words: str, chosen: Mapping[str, type[T]]) -> T:
    """As `build`, of the one member in `chosen` (`split_options`), with options in words: `option=value,option=value`.

    The words are in `text`, which the user wrote at `key`; a member's `leading` option may stand first without its
    name.
    """
    options: dict[str, str] = {}
    (member,) = chosen.values()
    leading = getattr(member, "leading", None)
    for position, word in enumerate(words.split(",") if words else ()):
        option, equals, value = (piece.strip() for piece in word.partition("="))
        if not equals and position == 0 and leading is not None:
            option, value = leading, option
        elif not equals or not value:
            raise ConfigError(f"{key}={text}: {word.strip()!r} is not an option: write option=value, joined by commas")
        if option in options:
            raise ConfigError(f"{key}={text}: {option} is given twice")
        options[option] = value
    (checked,) = split_options(key, options, chosen)
    return build(member, checked, key)


def split_options(
    section: str, options: Mapping[str, Any], chosen: Mapping[str, type[Any]], keys: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Deals the options of one section out to the members chosen in it, in their order.

    `options` is what the user wrote besides `keys`, the section's own, one of which may be meant. `chosen` has
    `selector=value` for each choice made in the section, with the member it chose.
    """
    known = {option: None for member in chosen.values() for option in option_names(member)}
    for option in options:
        if option not in known:
            # what a member says of words that look like one of its options and mean something else
            others = (getattr(member, "not_options", {}) for member in chosen.values())
            meant = next((said[option] for said in others if option in said), None)
            if meant is not None:
                raise ConfigError(f"{section}.{option} is not an option of {' '.join(chosen)}: {meant}")
            near, has = nearest(option, [*known, *keys]), f"; it has {', '.join(known) or 'none'}"
            elsewhere = "" if near else _who_has(option, chosen)
            raise ConfigError(f"{section}.{option} is not an option of {' '.join(chosen)}{near}{has}{elsewhere}")
    return [{o: options[o] for o in option_names(member) if o in options} for member in chosen.values()]


def _who_has(option: str, chosen: Mapping[str, type[Any]]) -> str:
    """`, and OPTION belongs to X or Y`, other members of the seams in which these were chosen, or an empty string."""
    found = []
    for selected, member in chosen.items():
        for seam in [base for base in reversed(member.__mro__) if inspect.isabstract(base)][:1]:
            others: dict[str, type[Any]] = members(member.__module__.rpartition(".")[0], seam)
            key = selected.partition("=")[0]
            found += [f"{key}={name}" for name, other in others.items() if option in option_names(other)]
    return f", and {option} belongs to {' or '.join(found)}" if found else ""


def explain(error: pydantic.ValidationError, section: str) -> str:
    """The first problem of a pydantic error as one sentence with its key and value."""
    first = error.errors(include_url=False)[0]
    kinds = ("int", "str", "float", "bool")  # pydantic adds the branch of a union
    located = itertools.takewhile(
        lambda part: isinstance(part, int) or part == "" or (part.isidentifier() and part not in kinds), first["loc"]
    )
    key = ".".join(str(part) for part in (section, *located) if part != "")
    if first["type"] == "missing":
        return f"{key} is required"
    alone = f", as [{first['input']}]" if isinstance(first["input"], str | int | float) else ""
    message = first["msg"].removeprefix("Value error, ").replace("a valid tuple", f"a list{alone}")
    if first["type"] in ("model_type", "dict_type"):
        message = f"it holds keys: write {key}.KEY=VALUE, or {key}: {{KEY: VALUE}} in the file"
    given = first["input"]
    shown = flow(given) if isinstance(given, dict | list) else str(given)
    value = f"={shown}" if isinstance(given, str | int | float | dict | list) and len(shown) < 80 else ""
    unspaced = isinstance(given, dict) and given and all(one is None for one in given.values())
    if first["type"] == "value_error" and not first["loc"]:  # of options together: the message names them
        value = ""
    hint = "; YAML wants a space behind each colon of a map: {a: 1, b: 2}" if unspaced else ""
    return f"{key}{value}: {message[:1].lower()}{message[1:]}{hint}"


def flow(value: object) -> str:
    """As YAML has it on one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {flow(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(flow, value))}]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _takes_bool(hint: Any) -> bool:
    return hint in (bool, Any) or any(_takes_bool(part) for part in typing.get_args(hint))


def imported_class(key: str, path: str, *kinds: type[T]) -> type[T]:
    """As `imported`, of a class that has to extend one of these; that runs the module's code, only for what the
    user's own command or program names."""
    found = imported(key, path)
    if not (isinstance(found, type) and issubclass(found, kinds)):
        wanted = " or ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
        raise ConfigError(f"{key}={path} is no subclass of {wanted}")
    return found
