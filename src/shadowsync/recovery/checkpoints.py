"""A folder of checkpoints: each is complete or does not exist.

samples-000000001024/      named after the samples trained
    rows-00000.safetensors … dense.safetensors, random.safetensors
    manifest.json          written last; a folder without it is the remains of a save that was cut off
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator

from shadowsync.errors import CheckpointError, SaveError
from shadowsync.recovery.files import Files, open_files
from shadowsync.recovery.loading import LoadedCheckpoint, guarded, open_checkpoint
from shadowsync.recovery.manifest import MANIFEST, DamagedCheckpoint, encode
from shadowsync.recovery.snapshot import Snapshot
from shadowsync.recovery.writing import SnapshotWriter

__all__ = ["CheckpointStore", "LoadedCheckpoint"]

PIECE_BYTES = 512 << 20
_NAME = re.compile(r"samples-(\d{12,18})(?:-([1-9]\d{0,5}))?")
_STAGED = re.compile(rf"\.{_NAME.pattern}\.part")
_RELISTINGS = 5


class CheckpointStore:
    """The checkpoints below one root. One process writes there; any number may read at the same time.

    Args:
        root: a local folder or any URL that fsspec knows; made at the first save.
        keep: how many of the newest to keep.
        files: in place of what `root` says (tests hand in file systems that fail).
        piece_bytes: no file of rows grows beyond this.

    Raises:
        ConfigError: fsspec does not know the URL.
    """

    def __init__(self, root: str, keep: int = 2, *, files: Files | None = None, piece_bytes: int = PIECE_BYTES) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must be kept")
        self._files = files if files is not None else open_files(root)
        self._keep = keep
        self._piece_bytes = piece_bytes
        self._given_up: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        found = [name for name in self._folders() if self._complete(name)]
        return sorted(found, key=_order)

    def newest(self) -> str | None:
        """Name of the newest complete checkpoint; None where there is none."""
        return next(reversed(self.names()), None)

    def save(self, snapshot: Snapshot) -> str:
        """Writes a checkpoint and returns its name; only when it is complete are the oldest removed.

        A second checkpoint of the same sample count gets a number behind its name, so nothing is ever overwritten.
        Checkpoints newer than the one that `load` gave belong to a course that was given up (damaged ones, for
        instance) and go as well.

        Raises:
            SaveError: the files cannot be written, or the folder holds newer checkpoints of another run. Nothing is
                left of the new one then, and the earlier ones are as they were.
        """
        with self._as_save_error("the new checkpoint could not be written", "earlier ones are as they were"):
            self._clean()
            name = self._new_name(snapshot.samples)
            self._write(name, snapshot)
        with self._as_save_error("an old checkpoint could not be removed", f"{name} is complete"):
            self._prune()
        return name

    def load(self, name: str | None = None) -> LoadedCheckpoint:
        """Opens a checkpoint.

        Args:
            name: which one; its sizes are checked at once and every byte when it is read. None takes the newest one
                whose every byte is what was written, and says in `skipped` what was lost.

        Raises:
            CheckpointError: there is none, or it cannot be loaded.
        """
        loaded = self._load_newest() if name is None else self._load_named(name)
        self._given_up = frozenset(other for other in self.names() if _order(other) > _order(loaded.name))
        return loaded

    def _load_named(self, name: str) -> LoadedCheckpoint:
        if not _NAME.fullmatch(name) or not self._complete(name):
            known = ", ".join(self.names()) or "none"
            raise CheckpointError(f"{self._files.place(name)} is not a checkpoint; {self._files.root} has {known}")
        return open_checkpoint(self._files, name)

    def _load_newest(self) -> LoadedCheckpoint:
        """Tries from the newest on, and lists anew when another process has meanwhile removed what was listed."""
        failed: dict[str, DamagedCheckpoint] = {}
        for _ in range(_RELISTINGS):
            names = self.names()
            for name in reversed(names):
                if name not in failed and (loaded := self._verified(name, failed)):
                    return dataclasses.replace(loaded, skipped=_losses(loaded, failed))
            if self.names() == names:
                break
        if not failed:
            raise CheckpointError(f"{self._files.root} holds no checkpoint: train with this folder first")
        reasons = next(iter(failed.values()))
        raise CheckpointError(f"none of the {len(failed)} checkpoints of {self._files.root} can be loaded: {reasons}")

    def _verified(self, name: str, failed: dict[str, DamagedCheckpoint]) -> LoadedCheckpoint | None:
        try:
            loaded = open_checkpoint(self._files, name)
            loaded.verify()
        except DamagedCheckpoint as error:
            if self._complete(name):
                failed[name] = error
            return None
        return loaded

    def _folders(self) -> list[str]:
        return [name for name in guarded(self._files, "", self._files.names) if _NAME.fullmatch(name)]

    def _complete(self, name: str) -> bool:
        return guarded(self._files, f"{name}/{MANIFEST}", self._files.size) is not None

    def _new_name(self, samples: int) -> str:
        names = self.names()
        foreign = [name for name in names if _order(name)[0] > samples and name not in self._given_up]
        if foreign:
            raise SaveError(
                f"{self._files.root} holds {foreign[-1]}, which is newer than the {samples} samples to be saved, so it "
                "is another run's: resume from it, or set train.checkpoint_dir to another place"
            )
        number = max((number for count, number in map(_order, names) if count == samples), default=-1) + 1
        return f"samples-{samples:012d}" + (f"-{number}" if number else "")

    def _write(self, name: str, snapshot: Snapshot) -> None:
        staged = self._files.staging(name)
        try:
            manifest = SnapshotWriter(self._files, staged, self._piece_bytes).write(snapshot)
            self._files.publish(name, MANIFEST, encode(manifest))
        except BaseException:
            for folder in {staged, name}:  # it may already have its name and not be durable
                with contextlib.suppress(OSError):
                    self._files.remove(folder, MANIFEST)
            raise

    def _prune(self) -> None:
        names = self.names()
        kept = [name for name in names if name not in self._given_up][-self._keep :]
        for name in names:
            if name not in kept:
                self._files.remove(name, MANIFEST)

    def _clean(self) -> None:
        """Removes the remains of saves that were cut off."""
        for name in self._files.names():
            if _STAGED.fullmatch(name) or (_NAME.fullmatch(name) and not self._complete(name)):
                self._files.remove(name, MANIFEST)

    @contextlib.contextmanager
    def _as_save_error(self, failed: str, intact: str) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise SaveError(
                f"{self._files.root}: {failed} ({reason}), {intact}: make room, or set train.checkpoint_dir to another "
                "place"
            ) from error


def _order(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _losses(loaded: LoadedCheckpoint, failed: dict[str, DamagedCheckpoint]) -> tuple[str, ...]:
    return tuple(
        f"{name} cannot be loaded, so the {_order(name)[0] - loaded.samples} samples trained after {loaded.name} are "
        f"lost: {error}"
        for name, error in failed.items()
    )
