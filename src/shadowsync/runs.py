"""The folder of a run: what is where in it, and which folders may be used."""

import contextlib
import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from shadowsync.config import read_yaml
from shadowsync.errors import CheckpointError, ConfigError
from shadowsync.recovery.changes import changed_rows
from shadowsync.recovery.checkpoints import CheckpointStore
from shadowsync.recovery.delta_files import DeltaList, write_delta
from shadowsync.recovery.loading import LoadedCheckpoint
from shadowsync.report.files import save_errors, write_atomically

CONFIG_FILE = "config.yaml"
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
    if out != resume and any((out / name).exists() for name in _TRACES):
        begun = any((out / "checkpoints").glob("samples-*"))
        advice = f"go on with --resume {out}" if begun else "remove it, as it has no checkpoint to go on from"
        raise ConfigError(f"{out} holds a run already: {advice}, or give another --out")


def make_folder(folder: Path, given: Mapping[str, Any]) -> None:
    """Makes the run's folder and writes the configuration into it as the user gave it.

    Raises:
        SaveError: it cannot be written.
    """
    with save_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(dict(given))).encode())


def checkpoint_root(folder: Path, checkpoint_dir: str | None) -> str:
    """Where the checkpoints of the run in `folder` are."""
    return checkpoint_dir or str(folder / "checkpoints")


def open_store(folder: Path) -> CheckpointStore:
    """The checkpoints of the run in `folder`, to be read.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; give the folder of a run")
    given = read_yaml(folder / CONFIG_FILE) if (folder / CONFIG_FILE).exists() else {}
    return CheckpointStore(checkpoint_root(folder, given.get("train", {}).get("checkpoint_dir")))


def export_changes(folder: Path, since: str, out: str) -> DeltaList:
    """Writes the embedding rows that changed from one checkpoint of a run to its newest, to be laid over the former.

    Raises:
        ConfigError: there is no such folder.
        CheckpointError: one of them cannot be loaded.
        SaveError: `out` cannot be written, or something is there.
    """
    store = open_store(folder)
    until = store.open().name
    return write_delta(out, since, until, changed_rows(store, since, until))


def load_checkpoint(folder: Path, verify: bool = True) -> LoadedCheckpoint:
    """The newest checkpoint of the run in `folder` that is whole.

    Args:
        folder: of the run.
        verify: read every byte now; without, sizes are checked and the rest when it is read.

    Raises:
        ConfigError: there is no such folder.
        CheckpointError: it has no checkpoint that can be loaded.
    """
    store = open_store(folder)
    if not verify and (newest := store.newest()) is not None:
        with contextlib.suppress(CheckpointError):
            return store.load(newest)
    return store.load()
