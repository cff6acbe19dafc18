"""Machines that a run is to leave, as they stand in its folder: a command writes them, the job that runs reads them."""

import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from shadowsync.errors import ConfigError, DataError
from shadowsync.report.files import read_bytes, write_atomically

_FILE, _ROLES = "drain.json", "roles.json"
_MOST_BYTES = 1 << 20
LOOK_S = 0.5


class _Place(msgspec.Struct):
    host: str
    machine: str = ""


def forget(out: Path) -> None:
    """A run begins: what was wanted of the one before is over."""
    (out / _FILE).unlink(missing_ok=True)


def to_leave(out: Path) -> tuple[str, ...]:
    """Names of the machines that the run in that folder is to leave.

    Raises:
        DataError: nobody can tell, since the file is damaged.
    """
    path = out / _FILE
    if not path.exists():
        return ()
    content = read_bytes(path, "it was there a moment ago")
    try:
        if len(content) > _MOST_BYTES:
            raise msgspec.DecodeError("it is too long")
        return msgspec.json.decode(content, type=tuple[str, ...])
    except msgspec.DecodeError as error:
        raise DataError(f"{path} does not name machines to leave: {error}") from error


def ask_to_leave(out: Path, machines: Collection[str], stay: bool = False) -> tuple[str, ...]:
    """The run is to leave these machines, too, or to `stay` there after all; all that it is to leave now.

    Raises:
        ConfigError: there is no run in that folder, or none with roles on several machines, or on these.
        SaveError: it cannot be written there.
    """
    there = {name for place in _places(out).values() for name in (place.host, place.machine)}
    if not stay and (unknown := next((name for name in machines if name not in there), None)) is not None:
        raise ConfigError(f"no role of the run is on {unknown}; there are some on {', '.join(sorted(there - {''}))}")
    before = to_leave(out)
    kept = [name for name in before if not (stay and name in machines)]
    wanted = tuple(dict.fromkeys([*kept, *([] if stay else machines)]))
    write_atomically(out / _FILE, msgspec.json.encode(wanted) + b"\n")
    return wanted


def wait_until_left(out: Path, machines: Collection[str], timeout_s: float) -> list[str]:
    """Waits until the run has no role on these machines; roles that are still there after that time."""
    until = time.monotonic() + timeout_s
    while True:
        left = sorted(role for role, place in _places(out).items() if {place.host, place.machine} & set(machines))
        if not left or time.monotonic() > until:
            return left
        time.sleep(LOOK_S)


def _places(out: Path) -> dict[str, _Place]:
    """Where each role of a run is."""
    path = out / _ROLES
    if not path.exists():
        raise ConfigError(f"{out} is not the folder of a run with roles on several machines: it has no {_ROLES}")
    try:
        return msgspec.json.decode(read_bytes(path, "it was there a moment ago"), type=dict[str, _Place])
    except msgspec.DecodeError as error:
        raise DataError(f"{path} does not say where roles are: {error}") from error
