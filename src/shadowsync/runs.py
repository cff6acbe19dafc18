"""The folder of a run: what is where in it, and which folders may be used."""

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import yaml
from omegaconf import OmegaConf

from shadowsync.checkpoint.deltas import changed_rows, write_delta
from shadowsync.checkpoint.format import plain_name
from shadowsync.checkpoint.job_state import course_of
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.errors import CheckpointError, ConfigError, save_errors
from shadowsync.places import advice, is_foreign
from shadowsync.report.files import write_atomically

CONFIG_FILE = "config.yaml"
LOCK_FILE = ".in-use"
_TRACES = ("result.json", "metrics.jsonl", "checkpoints")


def new_folder() -> Path:
    """A folder in `runs/`, named after the time and a random number, so that two jobs of one second differ."""
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def check_folder(out: Path, resume: Path | None) -> None:
    """Raises `ConfigError` if results cannot go to `out`, or nothing can be resumed from `resume`."""
    if resume is not None and not resume.is_dir():
        raise ConfigError(f"--resume {resume}: there is no such folder")
    try:
        exists = out.exists()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    if exists and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder")


def check_unused(out: Path) -> None:
    """Raises `ConfigError` if there is a run in `out`."""
    if any((out / name).exists() for name in _TRACES):
        begun = any((out / "checkpoints").glob("samples-*"))
        advice = f"go on with --resume {out}" if begun else "remove it, as it has no checkpoint to go on from"
        raise ConfigError(f"{out} holds a run already: {advice}, or give another --out")


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Within the block nobody else is in such a block with this folder, in this process, another, or on another host
    that shares the file system. The folder is made, and removed at the end if nothing was put into it.

    The lock is the system's, so it goes with whoever holds it, also when that is killed. Where a file system has none,
    there is no protection.

    Raises:
        ConfigError: somebody else is; says who.
        SaveError: the folder cannot be made, or not be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / LOCK_FILE
    with save_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = _locked(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock is let go: whoever takes it then sees that the file is gone
        file.close()
        with contextlib.suppress(OSError):  # something is in it now
            for empty in made:
                empty.rmdir()


def is_written(folder: Path) -> bool:
    """Somebody is in a block of `only_writer` with this folder; where a file system has no locks, perhaps."""
    try:
        with (folder / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        return error.errno in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)
    return False


def _locked(path: Path) -> IO[str]:
    """The lock file, held and with its holder written into it; a run's folder may come from anybody, so that nothing
    is written through a link."""
    while True:
        try:
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644), "r+")
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR):
                raise ConfigError(f"{path} is no file of a run: remove it") from error
            raise
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise ConfigError(f"{path} is no file of a run: remove it")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            file.close()
            raise ConfigError(
                f"{path.parent} is in use by {holder}: wait until that has ended, or give another folder"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                file.close()
                raise
        with contextlib.suppress(FileNotFoundError):  # its last holder has removed it meanwhile
            if os.path.samestat(path.lstat(), os.fstat(file.fileno())):
                break
        file.close()
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def make_folder(folder: Path, given: Mapping[str, Any]) -> None:
    """Makes the run's folder and writes the configuration into it as the user gave it, or raises `SaveError`."""
    with save_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(dict(given))).encode())


def checkpoint_root(folder: Path, checkpoint_dir: str | None) -> str:
    """Where the checkpoints of the run in `folder` are."""
    return checkpoint_dir or str(folder / "checkpoints")


def open_store(folder: Path, place: str | None = None) -> CheckpointStore:
    """The checkpoints of the run in `folder`, to be read: at the `place` that the user gives, or where the folder says.

    The folder may come from anybody: it is not followed to another machine.

    Raises:
        ConfigError: there is no such folder, or it names a place that is not followed.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; give the folder of a run")
    if place is not None:
        return CheckpointStore(place)
    stored = _stored_place(folder / CONFIG_FILE)
    if stored is not None and is_foreign(stored):
        key = advice({"train.checkpoint_dir": stored})
        raise ConfigError(
            f"{folder}: its checkpoints are said to be at {stored}, and a stored place on another machine is not "
            f"followed: if they are yours add {key} to --resume, or --checkpoints to evaluate, predict and export; for "
            f"--from copy them to {folder / 'checkpoints'} and take train.checkpoint_dir out of {folder / CONFIG_FILE}"
        )
    return CheckpointStore(checkpoint_root(folder, stored))


def _stored_place(path: Path) -> str | None:
    """`train.checkpoint_dir` in a stored configuration; None if it names none, `ConfigError` if it is none."""
    try:  # no OmegaConf, which writes every alias out: a file of a few lines would fill the memory
        stored: Any = yaml.safe_load(path.read_bytes())  # type: ignore[no-untyped-call]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a YAML file: {str(error).splitlines()[0]}") from error
    section = stored.get("train") if isinstance(stored, dict) else stored
    if not isinstance(section, dict | None):
        raise ConfigError(f"{path}: {'train' if isinstance(stored, dict) else 'the top level'} must hold keys")
    place = None if section is None else section.get("checkpoint_dir")
    if not isinstance(place, str | None):
        raise ConfigError(f"{path}: train.checkpoint_dir must be text, or null for {path.parent / 'checkpoints'}")
    return place


def export_changes(folder: Path, since: str, out: str, place: str | None = None) -> dict[str, Any]:
    """Writes into the folder `out` the embedding rows that changed from the checkpoint `since` of a run to its newest,
    to be laid over the former; returns what `delta.json` says. `folder` and `place` as in `open_store`.

    Raises:
        ConfigError: as `open_store`.
        CheckpointError: one of them cannot be loaded.
        SaveError: `out` cannot be written, or something is there.
    """
    store = open_store(folder, place)
    until = store.open().name
    return write_delta(out, since, until, changed_rows(store, since, until))


def load_to_resume(folder: Path, place: str | None) -> LoadedCheckpoint:
    """The newest checkpoint that the run in `folder` goes on from in the same folder, not read yet.

    `place` is where the user has checkpoints go on; they are read from there if there are any. Raises as
    `load_checkpoint`.
    """
    moved = place is not None and folder.is_dir() and CheckpointStore(place).newest() is not None
    return load_checkpoint(folder, verify=False, place=place if moved else None)


def load_trained(folder: Path, place: str | None = None, newest: bool = False) -> LoadedCheckpoint:
    """The best checkpoint of the run in `folder`, by its validations, if there were any; else, or if that cannot be
    loaded, the newest that is whole. `folder` and `place` as in `open_store`; raises as `load_checkpoint`."""
    store, found = open_store(folder, place), None
    with contextlib.suppress(CheckpointError):
        found = store.open(store.newest())
    best = None if found is None or newest else course_of(found).checkpoint
    if found is None or not best or best == plain_name(found.name):
        return store.load()
    try:
        loaded = store.open(best)
        loaded.verify()
    except CheckpointError as error:
        loaded = store.load()
        lost = f"the best checkpoint cannot be loaded, so {loaded.name} takes its place: {error}"
        return replace(loaded, skipped=(*loaded.skipped, lost))
    return loaded


def load_checkpoint(folder: Path, verify: bool = True, place: str | None = None) -> LoadedCheckpoint:
    """The newest checkpoint of the run in `folder` that is whole; `folder` and `place` as in `open_store`.

    `verify`: read every byte now; without, sizes are checked and the rest when it is read.

    Raises:
        ConfigError: as `open_store`.
        CheckpointError: it has no checkpoint that can be loaded.
    """
    store = open_store(folder, place)
    if not verify and (newest := store.newest()) is not None:
        with contextlib.suppress(CheckpointError):
            return store.load(newest)
    return store.load()
