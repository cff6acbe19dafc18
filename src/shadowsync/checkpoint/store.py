"""A folder of checkpoints: each is complete or does not exist.

samples-000000001024/      named after the samples trained
    rows-00000.safetensors … dense.safetensors, random.safetensors
    manifest.json          written last; a folder without it is the remains of a save that was cut off
samples-000000002048/      may be a delta, which names its parent and holds only some of the rows
samples-000000002048-whole the same state rewritten without a parent
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from shadowsync.checkpoint.catalog import Catalog, Pins, table_difference
from shadowsync.checkpoint.files import Files, open_files
from shadowsync.checkpoint.format import (
    DTYPES,
    MANIFEST,
    NAME,
    STAGED,
    Manifest,
    encode,
    new_name,
    order,
    plain_name,
    whole_name,
)
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.snapshot import Snapshot, write_snapshot
from shadowsync.embedding.table import Rows, Shard, Table
from shadowsync.errors import CheckpointError, SaveError

PIECE_BYTES = 512 << 20


class ParentLost(SaveError):
    """What a delta builds on cannot be built on any more; a whole checkpoint can be saved all the same."""


class CheckpointStore:
    """The checkpoints below one root. One store writes, from several threads; any number may read at the same time.

    `root` is a local folder or any URL that fsspec knows (else `ConfigError`), made at the first save; `keep` says how
    many to keep that share no file (`Parents.kept`), beside all that these build on. `files` are in place of what
    `root` says (tests hand in file systems that fail). No file of rows grows beyond `piece_bytes`.
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
        return self._catalog.names()

    def newest(self) -> str | None:
        return next(reversed(self.names()), None)

    def try_writing(self) -> None:
        """Raises `SaveError` if nothing can be written, so that it is not at the end that saving turns out to fail."""
        folder = self._files.staging(new_name(0, 0))
        with self._as_save_error("nothing can be written there", "and nothing was trained"):
            self._files.write(f"{folder}/{MANIFEST}", [b"trial"])
            self._files.remove(folder, MANIFEST)

    def save(self, snapshot: Snapshot) -> str:
        """Writes a checkpoint and returns its name; only when it is complete are the oldest removed.

        A second checkpoint of the same sample count gets a number behind its name, so nothing is ever overwritten.
        Checkpoints newer than the one that `load` gave belong to a course that was given up (damaged ones, for
        instance) and go as well. After an error nothing is left of the new one, and the earlier ones are as they were.

        Raises:
            ParentLost: what a delta builds on cannot be loaded any more, or belongs to a course that was given up.
                Save a whole one then.
            SaveError: the files cannot be written, or the folder holds newer checkpoints of another run.
            GivenUp: somebody could not wait (`given_up`).
        """
        with (
            self._as_save_error("the new checkpoint could not be written", "earlier ones are as they were"),
            self._pins.writing(lambda: self._new_name(snapshot.samples)) as name,
        ):
            parent = None if snapshot.delta is None else self._parent(snapshot.delta.parent, name)
            exact = snapshot.delta is None or (snapshot.delta.complete and parent is not None and parent.exact)
            self._write(name, snapshot, snapshot.samples, exact, parent)
        with self._as_save_error("an old checkpoint could not be removed", f"{name} is complete"):
            self._prune()
        return name

    def compact(self, name: str) -> str:
        """Rewrites a delta with all that it builds on as a whole checkpoint, and removes what that makes superfluous.

        Takes the memory of a few chunks of rows, whatever the size of the tables. May run in a thread of its own
        while others save: deltas saved meanwhile, or later, on `name` stand on what it is rewritten as. Returns the
        whole one's name; one that is whole already stays as it is. After a `SaveError` or `GivenUp` all is as it was.
        """
        with (
            self._as_save_error(f"{name} could not be rewritten as a whole", "it is as it was"),
            self._pins.reading(name),
        ):
            whole = whole_name(name)
            loaded = self.open(whole if NAME.fullmatch(whole) and self._catalog.complete(whole) else name)
            if len(loaded.layers) == 1:
                return loaded.name

            def choose() -> str:
                self._clean()
                return whole

            with self._pins.writing(choose):
                self._write(whole, as_whole(loaded), loaded.oldest, loaded.exact)
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
        """As `opened`, but the store may remove it as soon as it is open."""
        with self.opened(name, shards) as loaded:
            return loaded

    def opened(
        self,
        name: str | None = None,
        shards: Sequence[Shard] | None = None,
        load: Callable[[LoadedCheckpoint], object] = LoadedCheckpoint.verify,
    ) -> AbstractContextManager[LoadedCheckpoint]:
        """Opens a checkpoint; within the block this store removes nothing that is read of it.

        Args:
            name: which one; its sizes are checked at once and every byte when it is read. None takes the newest one
                whose every byte is what was written, and says in `skipped` what was lost; none that was given up.
            shards: look at nothing but the rows of these: damage elsewhere is of no matter, and the dense part is
                left out.
            load: of the newest one, reads all rows of the shards, so that they are compared and taken in one pass. If
                that shows a defect (`DamagedCheckpoint`) it is called anew with an older checkpoint; nobody may see
                before the end what it has taken.

        Raises:
            CheckpointError: there is none, or it cannot be loaded.
        """
        if name is None:
            return self._catalog.newest(shards, self._given_up, load)
        return self._catalog.named(name, shards)

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

    def _write(self, name: str, snapshot: Snapshot, version: int, exact: bool, parent: Manifest | None = None) -> None:
        """Writes all of a snapshot, whose rows were copied after `version` samples, or nothing."""
        staged = self._files.staging(name)
        try:
            manifest = write_snapshot(
                self._files, staged, snapshot, version, self._piece_bytes, lambda: self._impatient > 0
            )
            manifest = msgspec.structs.replace(manifest, exact=exact)
            scattered = {piece.table for piece in manifest.pieces if piece.scattered is not None}
            if parent is not None and (defect := table_difference(parent, manifest, scattered)) is not None:
                raise ValueError(f"the checkpoint that a delta builds on has {defect} than the delta")
            self._files.publish(name, MANIFEST, encode(manifest))
        except BaseException:
            for folder in {staged, name}:  # it may already have its name and not be durable
                with contextlib.suppress(OSError):
                    self._files.remove(folder, MANIFEST)
            raise

    def _parent(self, saved_as: str, name: str) -> Manifest:
        """The manifest of what the delta `name` builds on, or `ParentLost`."""
        parent = self._catalog.standing(saved_as)
        defect = None
        if self._catalog.parents().chain(parent) is None:
            defect = "cannot be loaded any more"
        elif plain_name(parent) in self._given_up or order(parent) >= order(name):
            defect = "belongs to a course that was given up"
        if defect is not None:
            raise ParentLost(
                f"{self._files.root}: {saved_as}, on which the new checkpoint builds, {defect}: save a whole one"
            )
        return self._catalog.manifest(parent)

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


@dataclass(frozen=True)
class _Stored:
    """The rows of a table from `start` on, as the checkpoint holds them (`RowSource`)."""

    loaded: LoadedCheckpoint
    table: str
    start: int

    def read(self, first: int, last: int, name: str) -> Iterator[Tensor]:
        for start, stop in self.loaded.chunks(self.table, self.start + first, self.start + last):
            yield self.loaded.rows(self.table, start, stop, {name})[name]


def as_whole(loaded: LoadedCheckpoint) -> Snapshot:
    """A checkpoint with all that it builds on, without a parent; its rows are read tensor by tensor, when written."""

    def runs(table: Table) -> Iterator[Rows]:
        """The rows cut wherever a piece ends, as each piece has its own tensors of the table as a whole."""
        pieces = [piece for layer in loaded.layers for piece in layer.pieces.get(table.name, ())]
        first = next(piece for piece in pieces if piece.scattered is None)
        for start, stop in pairwise(sorted({0, *(piece.stop for piece in pieces)})):
            forms = {
                tensor.name: torch.empty((stop - start, *tensor.shape[1:]), dtype=DTYPES[tensor.dtype], device="meta")
                for tensor in first.tensors
            }
            wide = {tensor.name for tensor in first.wide}
            in_memory = loaded.rows(table.name, start, stop, wide) if wide else {}
            yield Rows(table, start, forms | in_memory, _Stored(loaded, table.name, start))

    return Snapshot(
        config=loaded.config,
        samples=loaded.samples,
        tables=tuple(rows for table in loaded.tables for rows in runs(table)),
        dense=loaded.dense,
        position=loaded.position,
        random=loaded.random,
        extra=loaded.extra,
    )
