"""Machines that a run is to leave, as they stand in its folder: a command writes them, the job that runs reads them."""

import fcntl
import time
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import msgspec

from shadowsync.config import load
from shadowsync.errors import ConfigError, DataError
from shadowsync.report.files import read_bytes, write_atomically
from shadowsync.runs import CONFIG_FILE, is_written

T = TypeVar("T")

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
    return _decoded(path, tuple[str, ...], "does not name machines to leave")


def ask_to_leave(out: Path, machines: Collection[str], stay: bool = False) -> tuple[str, ...]:
    """The run is to leave these machines, too, or to `stay` there after all; all that it is to leave now.

    Raises:
        ConfigError: no run is going on in that folder, or none whose roles move, or none with roles on these machines.
        SaveError: it cannot be written there.
    """
    _check_goes_on(out)
    with (out / CONFIG_FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # others may ask for other machines at this moment
        return _asked(out, machines, stay)


def _asked(out: Path, machines: Collection[str], stay: bool) -> tuple[str, ...]:
    places = _places(out).values()
    there = {name for place in places for name in (place.host, place.machine)} - {""}
    if not stay and (unknown := next((name for name in machines if name not in there), None)) is not None:
        raise ConfigError(f"no role of the run is on {unknown}; there are some on {', '.join(sorted(there))}")
    alike = {
        name for place in places if {place.host, place.machine} & set(machines) for name in (place.host, place.machine)
    }
    kept = [name for name in to_leave(out) if not (stay and name in alike | set(machines))]
    wanted = tuple(dict.fromkeys([*kept, *([] if stay else machines)]))
    write_atomically(out / _FILE, msgspec.json.encode(wanted) + b"\n")
    return wanted


def wait_until_left(out: Path, machines: Collection[str], timeout_s: float) -> list[str]:
    """Waits until the run has no role on these machines; roles that are still there after that time.

    Raises:
        ConfigError: the run is over.
    """
    until = time.monotonic() + timeout_s
    while True:
        _check_goes_on(out)
        left = sorted(role for role, place in _places(out).items() if {place.host, place.machine} & set(machines))
        if not left or time.monotonic() > until:
            return left
        time.sleep(LOOK_S)


def _check_goes_on(out: Path) -> None:
    """Raises `ConfigError` unless a job with servers that move is writing into the folder."""
    if not (out / CONFIG_FILE).exists():
        raise ConfigError(f"{out} is not the folder of a run")
    if load(out / CONFIG_FILE, []).cluster.max_servers is None:
        raise ConfigError(f"the servers of the run in {out} stay where they are, as cluster.max_servers is not set")
    if not is_written(out):
        raise ConfigError(f"no run is going on in {out}")


def _places(out: Path) -> dict[str, _Place]:
    """Where each role of a run is."""
    path = out / _ROLES
    if not path.exists():
        raise ConfigError(f"{out} is not the folder of a run with roles on several machines: it has no {_ROLES}")
    return _decoded(path, dict[str, _Place], "does not say where roles are")


def _decoded(path: Path, kind: type[T], but: str) -> T:
    """What stands in a small file of the run's folder, which may come from anybody."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise msgspec.DecodeError("it is too long")
        return msgspec.json.decode(read_bytes(path, "it was there a moment ago"), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path} {but}: {error}") from error
