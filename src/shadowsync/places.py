"""Places that a configuration names: what of them is stored with a run, and which stored ones are followed.

A run's folder may come from anybody. So nothing stored in it is looked up in the environment, reaches another machine,
or chooses where files are made: such a place counts only where the user's own command names it. Files of this machine
are read where the folder says they are.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shadowsync.registry import flow, names_code

HIDDEN = "***"
"""Stands for a secret, and for what was looked up in the environment where the text as written is not known."""

_SECTIONS_OF_PLACES = {"data": None, "train": ("checkpoint_dir",), "cluster": ("address",)}
"""The keys that name places; of `data` any, as every source has its own."""
_CODE = (("model", "name"), ("data", "labels"), ("train", "measures"), ("train", "best_by"), ("report", "callbacks"))
_PATHS = ("path", "test_path", "cache", "valid", "test")
_WEB = ("http", "https")
_WEB_QUERY, _QUERY = re.compile(r"[?#]"), re.compile(r"\?(?=[^?]*=)")
"""What comes behind the path of a URL; a `?` without a `=` behind it is a glob's, unless a web server is asked."""
_PASSWORD = re.compile(r"[^:]*:(?!\d*$)")
"""The start of an authority whose colon is not a port's."""
_LOCAL = re.compile(r"(?:file|local)://")


def is_remote(text: str) -> bool:
    """Whether `text` may lead to another machine, or through other file systems: a URL, a chain of them."""
    return "::" in text or "://" in _LOCAL.sub("", text, count=1) or text.startswith("data:")


def local_path(text: str) -> Path | None:
    """The place on this machine that `text` names; None if it leads elsewhere."""
    return None if is_remote(text) else Path(_LOCAL.sub("", text, count=1))


def redacted(text: str) -> str:
    """A URL without passwords, tokens and signatures; other text as it is."""
    return "::".join(_redacted_link(link) for link in text.split("::")) if "://" in text else text


def _redacted_link(link: str) -> str:
    """Without what may be a secret. A name alone is none, unless it is a token for a web server: Azure's is a
    container, that of SSH a user."""
    scheme, given, rest = link.partition("://")
    if not given:
        return link
    web = scheme.lower() in _WEB
    query = (_WEB_QUERY if web else _QUERY).search(rest)
    place = rest if query is None else rest[: query.start()]
    authority = place.partition("/")[0]
    user, at, _ = authority.rpartition("@")
    if at:
        place = f"{HIDDEN}{place[len(user) :]}" if web or ":" in user else place
    elif _PASSWORD.match(authority):
        _, at, behind = place.rpartition("@")  # a password with a slash
        place = f"{HIDDEN}@{behind}" if at else HIDDEN
    return f"{scheme}://{place}{'' if query is None else rest[query.start()] + HIDDEN}"


def written_places(values: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """The places among nested `values` whose text has interpolations, by section and key, as they were written."""
    return {
        (section, key): value
        for section, key, value in _places(values)
        if "${" in str(value) and (section != "data" or key in _PATHS)
    }


def as_stored(values: Mapping[str, Any], written: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """A configuration as it may be written down: interpolated places as they were written, URLs without secrets."""
    stored = dict(values)
    for section, key, value in _places(values):
        stored[section] = {**stored[section], key: written.get((section, key), _redacted_in(value))}
    return stored


def unfollowed(stored: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """What in a stored configuration only the user's own command can name, by dotted key: places, and code to be run.

    Args:
        stored: nested values.
        folder: the run's, in which files may be made.
    """
    found = {}
    for section, key, value in _places(stored):
        inside = isinstance(value, str) and Path(value).resolve().is_relative_to(folder.resolve())
        outside = (section, key) == ("train", "checkpoint_dir") and not inside
        elsewhere = (section, key) == ("cluster", "address") and value != "auto"
        looks = is_foreign if section != "data" or key in _PATHS else lambda text: "://" in text
        if outside or elsewhere or any(looks(text) for text in _texts(value)):
            found[f"{section}.{key}"] = str(value)
    return found | _code(stored)


def _code(stored: Mapping[str, Any]) -> dict[str, str]:
    """Classes and functions beside this package."""
    found = {}
    for section, key in _CODE:
        held = stored.get(section)
        value = held.get(key) if isinstance(held, Mapping) else None
        if any(names_code(text) for text in _texts(value)):
            found[f"{section}.{key}"] = flow(value)
    return found


def is_foreign(text: str) -> bool:
    """Whether a stored text is none that may be followed: remote, to be looked up, or with something left out."""
    return is_remote(text) or "${" in text or HIDDEN in text


def without(values: Mapping[str, Any], section: str, key: str) -> dict[str, Any]:
    """Nested values without one key."""
    held = values.get(section)
    if not isinstance(held, Mapping):
        return dict(values)
    return {**values, section: {name: value for name, value in held.items() if name != key}}


def advice(places: Mapping[str, str]) -> str:
    """`key=value …` as a user may add them to a command, without values that cannot or should not be given again."""

    def plain(value: str) -> bool:
        return len(value) <= 200 and not any(part in value for part in ("::", "${", HIDDEN)) and value.isprintable()

    return " ".join(shlex.quote(f"{key}={value}") if plain(value) else f"{key}=…" for key, value in places.items())


def _places(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for section, keys in _SECTIONS_OF_PLACES.items():
        held = values.get(section)
        if isinstance(held, Mapping):
            for key, value in held.items():
                if value is not None and (keys is None or key in keys):
                    yield section, str(key), value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _redacted_in(value: Any) -> Any:
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: _redacted_in(part) for key, part in value.items()}
    return [_redacted_in(part) for part in value] if isinstance(value, list | tuple) else value
