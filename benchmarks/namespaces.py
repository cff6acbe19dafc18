"""What testbeds are made of: network namespaces, shaped links, and their removal, whatever became of the owner.

A testbed has a folder `ssPIDnNUMBER` among the temporary files, whose name begins the names of its namespaces, and a
lock in it that is held as long as the owner lives. `python benchmarks/namespaces.py NAME` removes one when its input
ends: every owner keeps such a process at its side. Only the standard library is used.
"""

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

QUEUE_MS = 50  # what a link holds back before it drops, like the buffer of a switch's port
DIED_S = 10.0
_NAME = re.compile(r"ss(\d+)n\d+")
_NAMESPACE = re.compile(r"(ss\d+n\d+)(?:sw|h\d+)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class TestbedError(Exception):
    """What keeps a testbed from being made or changed, in one sentence."""

    __test__: ClassVar[bool] = False  # pytest would take the class for a test


def check_machine() -> None:
    """Raises `TestbedError` if no testbed can be made here."""
    if os.geteuid() != 0:
        raise TestbedError("a testbed needs root rights, for network namespaces: run this as root")
    missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if missing:
        raise TestbedError(f"a testbed needs {' and '.join(missing)}: install iproute2 and util-linux")


def claim() -> tuple[Path, int]:
    """A folder whose name no other testbed has, and the lock that says that its owner lives."""
    root = Path(tempfile.gettempdir())
    for number in itertools.count():
        folder = root / f"ss{os.getpid()}n{number}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            break
    lock = os.open(folder / "lock.new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "lock.new").rename(folder / "lock")  # so that nobody ever sees it free
    return folder, lock


def sweep() -> list[str]:
    """Removes the testbeds whose owners are gone; their names."""
    there = {path.name for path in Path(tempfile.gettempdir()).iterdir() if _NAME.fullmatch(path.name)}
    there |= {found[1] for name in _namespaces() if (found := _NAMESPACE.fullmatch(name))}
    gone = sorted(name for name in there if not _is_owned(Path(tempfile.gettempdir()) / name))
    for name in gone:
        remove(name)
        shutil.rmtree(Path(tempfile.gettempdir()) / name, ignore_errors=True)
    return gone


def _is_owned(folder: Path) -> bool:
    """Its lock is held, or has not been made yet."""
    try:
        with (folder / "lock").open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        owner = _NAME.fullmatch(folder.name)
        return folder.is_dir() and owner is not None and Path(f"/proc/{owner[1]}").exists()
    except BlockingIOError:
        return True
    return False


def start_reaper(folder: Path) -> "subprocess.Popen[bytes]":
    """A process that removes the testbed when this one is gone, which it sees by the end of its input."""
    command = [sys.executable, "-S", __file__, folder.name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _reap(name: str) -> None:
    sys.stdin.read()
    remove(name)
    shutil.rmtree(Path(tempfile.gettempdir()) / name, ignore_errors=True)


def bits_per_second(rate: str) -> float:
    """Of a number with kbit, mbit or gbit.

    Raises:
        TestbedError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if found is None or float(found[1]) == 0:
        raise TestbedError(f"{rate!r} is not a rate: write a number and kbit, mbit or gbit, for instance 100mbit")
    return float(found[1]) * _BITS[found[2]]


def shape(namespace: str, device: str, rate: str | None) -> None:
    """Holds what a device sends to a rate; None leaves it as fast as it goes."""
    if rate is None:
        with contextlib.suppress(TestbedError):  # there was none
            _call(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"])
        return
    # A millisecond's worth at once, and not less than ten packets: more would hide the link from short exchanges.
    burst = max(int(bits_per_second(rate) / 8e3), 15_140)
    bucket = ["tbf", "rate", rate, "burst", str(burst), "latency", f"{QUEUE_MS}ms"]
    _call(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket])


def remove(name: str) -> None:
    """Every namespace of a testbed, with what runs there; some may be gone already."""
    for namespace in _namespaces():
        if (found := _NAMESPACE.fullmatch(namespace)) and found[1] == name:
            kill_all(namespace)
            remove_namespace(namespace)


def remove_namespace(namespace: str) -> None:
    """Its devices go with it, and the other ends of their cables."""
    with contextlib.suppress(TestbedError):  # another may have been quicker
        ip("netns", "del", namespace)


def _namespaces() -> list[str]:
    """The namespaces of all testbeds."""
    here = Path("/run/netns")
    return sorted(path.name for path in here.iterdir() if _NAMESPACE.fullmatch(path.name)) if here.is_dir() else []


def kill_all(namespace: str) -> None:
    """Kills until nothing is left: a process may start another meanwhile."""
    for _ in _until(DIED_S):
        pids = _pids(namespace)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    raise TestbedError(f"processes {_pids(namespace)} in {namespace} did not end after SIGKILL")


def _pids(namespace: str) -> list[int]:
    """Its processes; those that are dead and only not yet waited for have no namespace any more."""
    try:
        return [int(pid) for pid in ip("netns", "pids", namespace).split()]
    except TestbedError:
        return []


def _until(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.01)


def ip(*arguments: str) -> str:
    """What `ip` prints.

    Raises:
        TestbedError: it fails.
    """
    return _call(["ip", *arguments])


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TestbedError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


if __name__ == "__main__":
    _reap(sys.argv[1])
