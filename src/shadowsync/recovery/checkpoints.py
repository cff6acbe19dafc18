"""A folder of checkpoints: each is complete or does not exist.

samples-000000001024/      named after the samples trained
    rows-00000.safetensors … dense.safetensors, random.safetensors
    manifest.json          written last; a folder without it is the remains of a save that was cut off
samples-000000002048/      may be a delta, which names its parent and holds only some of the rows
samples-000000002048-whole the same state rewritten without a parent
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import msgspec

from shadowsync.embedding.table import Shard
from shadowsync.errors import CheckpointError, SaveError
from shadowsync.recovery.blocks import guarded
from shadowsync.recovery.claims import Claims
from shadowsync.recovery.compaction import as_whole, rows_from
from shadowsync.recovery.files import Files, open_files
from shadowsync.recovery.lineage import Lineage
from shadowsync.recovery.loading import LoadedCheckpoint
from shadowsync.recovery.losses import older_rows, skipped_ones
from shadowsync.recovery.manifest import MANIFEST, DamagedCheckpoint, Manifest, encode
from shadowsync.recovery.names import NAME, STAGED, new_name, order, plain_name, whole_name
from shadowsync.recovery.opening import open_checkpoint, read_manifest, standing, table_difference
from shadowsync.recovery.snapshot import DeltaOf, Snapshot
from shadowsync.recovery.writing import SnapshotWriter

__all__ = ["CheckpointStore", "LoadedCheckpoint"]

PIECE_BYTES = 512 << 20
_RELISTINGS = 5


class CheckpointStore:
    """The checkpoints below one root. One store writes there; any number may read at the same time.

    A store may be used from several threads: a compaction runs beside saves.

    Args:
        root: a local folder or any URL that fsspec knows; made at the first save.
        keep: how many of the newest that can be loaded to keep, and all that these build on.
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
        self._claims = Claims()

    def names(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        found = [name for name in self._folders() if self._complete(name)]
        return sorted(found, key=order)

    def newest(self) -> str | None:
        """Name of the newest complete checkpoint; None where there is none."""
        return next(reversed(self.names()), None)

    def save(self, snapshot: Snapshot) -> str:
        """Writes a checkpoint and returns its name; only when it is complete are the oldest removed.

        A second checkpoint of the same sample count gets a number behind its name, so nothing is ever overwritten.
        Checkpoints newer than the one that `load` gave belong to a course that was given up (damaged ones, for
        instance) and go as well.

        Raises:
            SaveError: the files cannot be written, the folder holds newer checkpoints of another run, or the parent
                of a delta cannot be loaded any more (save a whole one then). Nothing is left of the new one, and the
                earlier ones are as they were.
        """
        with (
            self._as_save_error("the new checkpoint could not be written", "earlier ones are as they were"),
            self._claims.writing(lambda: self._new_name(snapshot.samples)) as name,
        ):
            parent = None if snapshot.delta is None else self._parent(snapshot.delta, name)
            exact = snapshot.delta is None or (snapshot.delta.complete and parent is not None and parent.exact)
            writer = SnapshotWriter(self._files, self._files.staging(name), self._piece_bytes)
            self._write(name, lambda: _fitting(msgspec.structs.replace(writer.write(snapshot), exact=exact), parent))
        with self._as_save_error("an old checkpoint could not be removed", f"{name} is complete"):
            self._prune()
        return name

    def compact(self, name: str) -> str:
        """Rewrites a delta with all that it builds on as a whole checkpoint, and removes what that makes superfluous.

        Takes the memory of a few chunks of rows, whatever the size of the tables. May run in a thread of its own
        while others save: deltas saved meanwhile, or later, on `name` stand on what it is rewritten as.

        Args:
            name: of a complete checkpoint; one that is whole already stays as it is.

        Returns:
            the whole one's name.

        Raises:
            SaveError: it cannot be read or written. Everything is as it was.
        """
        with (
            self._as_save_error(f"{name} could not be rewritten as a whole", "it is as it was"),
            self.held(name),
        ):
            whole = whole_name(name)
            loaded = self.open(whole if NAME.fullmatch(whole) and self._complete(whole) else name)
            if len(loaded.layers) == 1:
                return loaded.name
            with self._claims.writing(lambda: self._clear_for(whole)):
                self._rewrite(loaded, whole)
        with self._as_save_error("an old checkpoint could not be removed", f"{whole} is complete"):
            self._prune()
        return whole

    def load(self, name: str | None = None) -> LoadedCheckpoint:
        """Opens a checkpoint to go on from: newer ones are given up with the next save. Otherwise as `open`."""
        loaded = self.open(name)
        self._given_up = frozenset(other for other in self.names() if order(other)[:2] > order(loaded.name)[:2])
        return loaded

    def open(self, name: str | None = None, shards: Sequence[Shard] | None = None) -> LoadedCheckpoint:
        """Opens a checkpoint.

        Args:
            name: which one; its sizes are checked at once and every byte when it is read. None takes the newest one
                whose every byte is what was written, and says in `skipped` what was lost.
            shards: look at nothing but the rows of these: damage elsewhere is of no matter, and the dense part is
                left out.

        Raises:
            CheckpointError: there is none, or it cannot be loaded.
        """
        loaded = self._open_newest(shards) if name is None else self._open_named(name, shards)
        return dataclasses.replace(loaded, skipped=loaded.skipped + older_rows(loaded))

    def held(self, name: str) -> AbstractContextManager[None]:
        """Within the block this store removes neither `name` nor what it builds on."""
        return self._claims.reading(name)

    def _open_named(self, name: str, shards: Sequence[Shard] | None) -> LoadedCheckpoint:
        there = (one for one in (name, whole_name(name)) if NAME.fullmatch(one) and self._complete(one))
        if (found := next(there, None)) is None:
            known = ", ".join(self.names()) or "none"
            raise CheckpointError(f"{self._files.place(name)} is not a checkpoint; {self._files.root} has {known}")
        return open_checkpoint(self._files, found, shards)

    def _open_newest(self, shards: Sequence[Shard] | None) -> LoadedCheckpoint:
        """Tries from the newest on, and lists anew when another process has meanwhile removed what was listed."""
        failed: dict[str, DamagedCheckpoint] = {}
        for _ in range(_RELISTINGS):
            names = self.names()
            for name in reversed(names):
                if name not in failed and (loaded := self._verified(name, shards, failed)):
                    return dataclasses.replace(loaded, skipped=skipped_ones(loaded, failed))
            if self.names() == names:
                break
        if not failed:
            raise CheckpointError(f"{self._files.root} holds no checkpoint: train with this folder first")
        reasons = next(iter(failed.values()))
        raise CheckpointError(f"none of the {len(failed)} checkpoints of {self._files.root} can be loaded: {reasons}")

    def _verified(
        self, name: str, shards: Sequence[Shard] | None, failed: dict[str, DamagedCheckpoint]
    ) -> LoadedCheckpoint | None:
        """The checkpoint if every byte is right; where a part of it is there twice, one of both is enough."""
        error = None
        for prefer_whole in (True, False):
            try:
                loaded = open_checkpoint(self._files, name, shards, prefer_whole=prefer_whole)
                loaded.verify()
            except DamagedCheckpoint as damage:
                error = damage if error is None else error
                if not any(other != plain_name(other) for other in self.names()):
                    break
            else:
                return loaded
        if error is not None and self._complete(name):
            failed[name] = error
        return None

    def _folders(self) -> list[str]:
        return [name for name in guarded(self._files, "", self._files.names) if NAME.fullmatch(name)]

    def _complete(self, name: str) -> bool:
        return guarded(self._files, f"{name}/{MANIFEST}", self._files.size) is not None

    def _new_name(self, samples: int) -> str:
        self._clean()
        names = {*self.names(), *self._claims.written}
        foreign = [name for name in sorted(names, key=order) if order(name)[0] > samples and name not in self._given_up]
        if foreign:
            raise SaveError(
                f"{self._files.root} holds {foreign[-1]}, which is newer than the {samples} samples to be saved, so it "
                "is another run's: resume from it, or set train.checkpoint_dir to another place"
            )
        number = max((order(name)[1] for name in names if order(name)[0] == samples), default=-1) + 1
        return new_name(samples, number)

    def _clear_for(self, name: str) -> str:
        self._clean()
        return name

    def _parent(self, delta: DeltaOf, name: str) -> Manifest:
        """The manifest of what a delta builds on.

        Raises:
            SaveError: it cannot be loaded any more.
        """
        parent = standing(self._files, delta.parent)
        if self._lineage().chain(parent) is None:
            raise SaveError(
                f"{self._files.root}: {delta.parent}, on which the new checkpoint builds, cannot be loaded any more: "
                "save a whole one"
            )
        if order(parent) >= order(name):
            raise ValueError(f"{name} cannot build on {delta.parent}, which is newer")
        return read_manifest(self._files, parent)

    def _lineage(self) -> Lineage:
        """Who builds on whom among those whose manifests are whole."""
        parents = {}
        for name in self.names():
            with contextlib.suppress(DamagedCheckpoint):
                parents[name] = read_manifest(self._files, name).parent
        return Lineage(parents)

    def _write(self, name: str, write: Callable[[], Manifest]) -> None:
        try:
            self._files.publish(name, MANIFEST, encode(write()))
        except BaseException:
            for folder in {self._files.staging(name), name}:  # it may already have its name and not be durable
                with contextlib.suppress(OSError):
                    self._files.remove(folder, MANIFEST)
            raise

    def _rewrite(self, loaded: LoadedCheckpoint, whole: str) -> None:
        staged = self._files.staging(whole)
        writer = SnapshotWriter(self._files, staged, self._piece_bytes, lambda cut, name: rows_from(loaded, cut, name))
        exact = {"exact": loaded.exact}
        self._write(whole, lambda: msgspec.structs.replace(writer.write(as_whole(loaded), loaded.oldest), **exact))

    def _prune(self) -> None:
        """What builds on others goes before them, so that what is left can always be loaded."""
        with self._claims.lock:
            kept = self._lineage().kept(self._keep, self._given_up, self._claims.read())
            for name in reversed(self.names()):
                if name not in kept and name not in self._claims.written:
                    self._files.remove(name, MANIFEST)

    def _clean(self) -> None:
        """Removes the remains of saves that were cut off."""
        busy = {*self._claims.written, *map(self._files.staging, self._claims.written)}
        for name in self._files.names():
            remains = STAGED.fullmatch(name) or (NAME.fullmatch(name) and not self._complete(name))
            if remains and name not in busy:
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


def _fitting(manifest: Manifest, parent: Manifest | None) -> Manifest:
    """The manifest, whose single rows fit those of the parent."""
    scattered = {piece.table for piece in manifest.pieces if piece.scattered is not None}
    if parent is not None and (defect := table_difference(parent, manifest, scattered)) is not None:
        raise ValueError(f"the checkpoint that a delta builds on has {defect} than the delta")
    return manifest
