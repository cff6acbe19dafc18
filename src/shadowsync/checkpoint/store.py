"""A folder of checkpoints: each is complete or does not exist.

samples-000000001024/      named after the samples trained
    rows-00000.safetensors … dense.safetensors, random.safetensors
    manifest.json          written last; a folder without it is the remains of a save that was cut off
samples-000000002048/      may be a delta, which names its parent and holds only some of the rows
samples-000000002048-whole the same state rewritten without a parent
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import msgspec

from shadowsync.checkpoint.catalog import Catalog
from shadowsync.checkpoint.compaction import as_whole
from shadowsync.checkpoint.files import Files, open_files
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.losses import older_rows
from shadowsync.checkpoint.manifest import MANIFEST, Manifest, encode
from shadowsync.checkpoint.names import NAME, STAGED, new_name, order, plain_name, whole_name
from shadowsync.checkpoint.opening import read_manifest, standing, table_difference
from shadowsync.checkpoint.parents import ParentLost
from shadowsync.checkpoint.pins import Pins
from shadowsync.checkpoint.snapshot import DeltaOf, Snapshot
from shadowsync.checkpoint.writing import GivenUp, SnapshotWriter
from shadowsync.embedding.table import Shard
from shadowsync.errors import CheckpointError, SaveError

__all__ = ["CheckpointStore", "GivenUp", "LoadedCheckpoint", "ParentLost"]

PIECE_BYTES = 512 << 20


class CheckpointStore:
    """The checkpoints below one root. One store writes there; any number may read at the same time.

    A store may be used from several threads: a compaction runs beside saves.

    Args:
        root: a local folder or any URL that fsspec knows; made at the first save.
        keep: how many to keep that share no file (`Parents.kept`), and all that these build on.
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
        self._given_up: frozenset[str] = frozenset()  # plain names
        self._pins = Pins()
        self._impatient = 0
        self._impatient_lock = threading.Lock()
        self._catalog = Catalog(self._files, self._pins)

    def names(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        return self._catalog.names()

    def newest(self) -> str | None:
        """Name of the newest complete checkpoint; None where there is none."""
        return next(reversed(self.names()), None)

    def try_writing(self) -> None:
        """Writes something small and removes it again, so that it is not at the end that saving turns out to fail.

        Raises:
            SaveError: it cannot be written.
        """
        folder = self._files.staging(new_name(0, 0))
        with self._as_save_error("nothing can be written there", "and nothing was trained"):
            self._files.write(f"{folder}/{MANIFEST}", [b"trial"])
            self._files.remove(folder, MANIFEST)

    def save(self, snapshot: Snapshot) -> str:
        """Writes a checkpoint and returns its name; only when it is complete are the oldest removed.

        A second checkpoint of the same sample count gets a number behind its name, so nothing is ever overwritten.
        Checkpoints newer than the one that `load` gave belong to a course that was given up (damaged ones, for
        instance) and go as well.

        Raises:
            ParentLost: what a delta builds on cannot be loaded any more, or belongs to a course that was given up.
                Save a whole one then.
            SaveError: the files cannot be written, or the folder holds newer checkpoints of another run.
            GivenUp: somebody could not wait (`given_up`).

        After any of them nothing is left of the new one, and the earlier ones are as they were.
        """
        with (
            self._as_save_error("the new checkpoint could not be written", "earlier ones are as they were"),
            self._pins.writing(lambda: self._new_name(snapshot.samples)) as name,
        ):
            parent = None if snapshot.delta is None else self._parent(snapshot.delta, name)
            exact = snapshot.delta is None or (snapshot.delta.complete and parent is not None and parent.exact)
            writer = self._writer(self._files.staging(name))
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
            GivenUp: as `save`.
        """
        with (
            self._as_save_error(f"{name} could not be rewritten as a whole", "it is as it was"),
            self.held(name),
        ):
            whole = whole_name(name)
            loaded = self.open(whole if NAME.fullmatch(whole) and self._catalog.complete(whole) else name)
            if len(loaded.layers) == 1:
                return loaded.name
            with self._pins.writing(lambda: self._clear_for(whole)):
                self._rewrite(loaded, whole)
        with self._as_save_error("an old checkpoint could not be removed", f"{whole} is complete"):
            self._prune()
        return whole

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Within the block whatever is being written ends soon: with `GivenUp`, unless it is about to be complete."""
        with self._impatient_lock:
            self._impatient += 1
        try:
            yield
        finally:
            with self._impatient_lock:
                self._impatient -= 1

    def load(self, name: str | None = None) -> LoadedCheckpoint:
        """Opens a checkpoint to go on from: newer ones are given up, and go with the next save. Otherwise as `open`."""
        with self.opened(name) as loaded:
            with self._pins.lock:
                others = {*self.names(), *self._pins.written}
                newer = {plain_name(other) for other in others if order(other)[:2] > order(loaded.name)[:2]}
                self._given_up = (self._given_up | newer) - {plain_name(layer.name) for layer in loaded.layers}
            return loaded

    def open(self, name: str | None = None, shards: Sequence[Shard] | None = None) -> LoadedCheckpoint:
        """Opens a checkpoint. The store may remove it as soon as it is open: what is to be read later is `opened`.

        Args:
            name: which one; its sizes are checked at once and every byte when it is read. None takes the newest one
                whose every byte is what was written, and says in `skipped` what was lost; none that was given up.
            shards: look at nothing but the rows of these: damage elsewhere is of no matter, and the dense part is
                left out.

        Raises:
            CheckpointError: there is none, or it cannot be loaded.
        """
        with self.opened(name, shards) as loaded:
            return loaded

    @contextlib.contextmanager
    def opened(self, name: str | None = None, shards: Sequence[Shard] | None = None) -> Iterator[LoadedCheckpoint]:
        """As `open`; within the block this store removes nothing that is read of it."""
        found = self._catalog.newest(shards, self._given_up) if name is None else self._catalog.named(name, shards)
        with self._told(found) as loaded:
            yield loaded

    @contextlib.contextmanager
    def loading(
        self, shards: Sequence[Shard] | None, load: Callable[[LoadedCheckpoint], object]
    ) -> Iterator[LoadedCheckpoint]:
        """As `opened` of the newest one, in one pass over its rows: it is compared while `load` reads it.

        Args:
            shards: as in `open`.
            load: reads all rows of the shards. If that shows a defect (`DamagedCheckpoint`) it is called anew with an
                older checkpoint; nobody may see before the end what it has taken.

        Raises:
            CheckpointError: there is none that can be loaded.
        """
        with self._told(self._catalog.newest(shards, self._given_up, load)) as loaded:
            yield loaded

    @contextlib.contextmanager
    def _told(self, found: AbstractContextManager[LoadedCheckpoint]) -> Iterator[LoadedCheckpoint]:
        with found as loaded:
            yield dataclasses.replace(loaded, skipped=loaded.skipped + older_rows(loaded))

    def held(self, name: str) -> AbstractContextManager[None]:
        """Within the block this store removes neither `name` nor what it builds on."""
        return self._pins.reading(name)

    def _new_name(self, samples: int) -> str:
        self._clean()
        names = {*self.names(), *self._pins.written}
        self._given_up &= set(map(plain_name, names))  # a name that is gone may be that of a new one
        left = {name for name in names if plain_name(name) in self._given_up}
        foreign = [name for name in sorted(names - left, key=order) if order(name)[0] > samples]
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
            ParentLost: nothing can build on it any more.
        """
        parent = standing(self._files, delta.parent)
        defect = None
        if self._catalog.parents().chain(parent) is None:
            defect = "cannot be loaded any more"
        elif plain_name(parent) in self._given_up or order(parent) >= order(name):
            defect = "belongs to a course that was given up"
        if defect is not None:
            raise ParentLost(
                f"{self._files.root}: {delta.parent}, on which the new checkpoint builds, {defect}: save a whole one"
            )
        return read_manifest(self._files, parent)

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
        writer = self._writer(staged)
        exact = {"exact": loaded.exact}
        self._write(whole, lambda: msgspec.structs.replace(writer.write(as_whole(loaded), loaded.oldest), **exact))

    def _writer(self, folder: str) -> SnapshotWriter:
        return SnapshotWriter(self._files, folder, self._piece_bytes, lambda: self._impatient > 0)

    def _prune(self) -> None:
        """What builds on others goes before them, so that what is left can always be loaded."""
        with self._pins.lock:
            kept = self._catalog.parents().kept(self._keep, self._given_up, self._pins.read())
            for name in reversed(self.names()):
                if name not in kept and name not in self._pins.written:
                    self._files.remove(name, MANIFEST)

    def _clean(self) -> None:
        """Removes the remains of saves that were cut off."""
        busy = {*self._pins.written, *map(self._files.staging, self._pins.written)}
        for name in self._files.names():
            remains = STAGED.fullmatch(name) or (NAME.fullmatch(name) and not self._catalog.complete(name))
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
