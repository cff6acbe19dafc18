"""A folder of checkpoints: each is complete or does not exist.

samples-000000001024/      named after the samples trained
    rows-00000.safetensors … dense.safetensors, random.safetensors
    manifest.json          written last; a folder without it is the remains of a save that was cut off
samples-000000002048/      may be a delta, which names its parent and holds only some of the rows
samples-000000002048-whole the same state rewritten without a parent
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from shadowsync.checkpoint.files import Files, open_files
from shadowsync.checkpoint.format import (
    DTYPES,
    MANIFEST,
    NAME,
    STAGED,
    DamagedCheckpoint,
    Manifest,
    encode,
    new_name,
    order,
    plain_name,
    whole_name,
)
from shadowsync.checkpoint.loading import (
    LoadedCheckpoint,
    is_complete,
    open_checkpoint,
    read_manifest,
    standing,
    table_difference,
)
from shadowsync.checkpoint.snapshot import Snapshot, write_snapshot
from shadowsync.checkpoint.values import RowValues
from shadowsync.embedding.table import Rows, Shard, Table
from shadowsync.errors import CheckpointError, SaveError

PIECE_BYTES = 512 << 20
_RELISTINGS = 5


class ParentLost(SaveError):
    """What a delta builds on cannot be built on any more; a whole checkpoint can be saved all the same."""


@dataclass(frozen=True)
class Parents:
    """The complete checkpoints of a folder: by name what each builds on, None for a whole one. Pure bookkeeping."""

    parents: Mapping[str, str | None]

    def resolve(self, name: str) -> str | None:
        """Who holds the state called `name`: it as a whole if there is that, else itself; None if both are gone."""
        return next((found for found in (whole_name(name), name) if found in self.parents), None)

    def chain(self, name: str) -> tuple[str, ...] | None:
        """What must be read to load `name`, from the whole one on; None if something is missing."""
        found: list[str] = []
        at: str | None = name
        while at is not None:
            if at not in self.parents:
                return None
            found.append(at)
            parent = self.parents[at]
            at = None if parent is None else self.resolve(parent) or parent
        return tuple(reversed(found))

    def restorable(self) -> list[str]:
        """Those that can be loaded, oldest first; of one that was rewritten as a whole only the rewritten one."""
        names = sorted(self.parents, key=order)
        return [name for name in names if self.chain(name) is not None and self.resolve(name) == name]

    def kept(self, keep: int, given_up: Collection[str], in_use: Collection[str]) -> set[str]:
        """The newest that can be loaded of each of `keep` families, those in use, and what all of these need.

        A family is a whole checkpoint with all that builds on it. Two share no file, so that one wrong byte ends one
        of them at most. The newest of a family needs nearly all the rest of it, so little is on the disk beyond it:
        at most `keep` times a whole checkpoint with the deltas up to the next one, that next one while it is being
        written, and what is in use. `given_up` are plain names of checkpoints of a course that was left, not counted;
        `in_use` are names whose chains somebody reads.
        """
        newest: dict[str, tuple[str, ...]] = {}
        for name in reversed(self.restorable()):
            chain = self.chain(name) or ()
            if plain_name(name) not in given_up:
                newest.setdefault(chain[0], chain)
        found = {link for chain in list(newest.values())[:keep] for link in chain}
        return found.union(*map(self.readable, in_use))

    def readable(self, name: str) -> set[str]:
        """What somebody who opened `name` may read: where a state is there twice, both."""
        found: set[str] = set()
        ahead = [name]
        while ahead:
            at = ahead.pop()
            there = {one for one in (plain_name(at), whole_name(at)) if one in self.parents} - found
            found |= there
            ahead += [parent for one in there if (parent := self.parents[one]) is not None]
        return found


class CheckpointStore:
    """The checkpoints below one root. One store writes, from several threads; any number may read at the same time.

    `root` is a local folder or any URL that fsspec knows (else `ConfigError`), made at the first save; `keep` says how
    many to keep that share no file (`Parents.kept`), beside all that these build on. `values` is what rows are written
    in, None for float32 as they are; whatever they were written in is read. `files` are in place of what `root` says
    (tests hand in file systems that fail). No file of rows grows beyond `piece_bytes`.

    Attributes:
        best: a checkpoint that is kept whatever `keep` says, with what it builds on; None for none.
    """

    def __init__(
        self,
        root: str,
        keep: int = 2,
        values: RowValues | None = None,
        *,
        files: Files | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must be kept")
        self._files = files if files is not None else open_files(root)
        self._keep = keep
        self.best: str | None = None
        self._values, self._piece_bytes = values, piece_bytes
        self._given_up: frozenset[str] = frozenset()  # plain names
        self._lock = threading.Lock()  # held by whoever removes checkpoints or chooses the name of a new one
        # what threads of this process write now, and how many of them read what: nobody clears it away
        self._written: set[str] = set()
        self._read: Counter[str] = Counter()
        self._impatient = 0
        self._impatient_lock = threading.Lock()

    def names(self) -> list[str]:
        """The complete ones, oldest first, listed anew at each question."""
        found = [name for name in self._files.guarded("", self._files.names) if NAME.fullmatch(name)]
        return sorted((name for name in found if is_complete(self._files, name)), key=order)

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
            self._writing(lambda: self._new_name(snapshot.samples)) as name,
        ):
            parent = None if snapshot.parent is None else self._parent(snapshot.parent, name)
            exact = snapshot.complete and (parent is None or parent.exact)
            self._write(name, snapshot, snapshot.samples, exact, parent)
        with self._as_save_error("an old checkpoint could not be removed", f"{name} is complete"):
            self._prune()
        return name

    def compact(self, name: str) -> str:
        """Rewrites a delta with all that it builds on as a whole checkpoint, and removes what that makes superfluous.

        Rows in the store's `values` stay as they are to the bit; others are rounded to them. Takes the memory of a few
        chunks of rows, whatever the size of the tables. May run in a thread of its own while others save: deltas saved
        meanwhile, or later, on `name` stand on what it is rewritten as. Returns the whole one's name; one that is whole
        already stays as it is. After a `SaveError` or `GivenUp` all is as it was.
        """
        with (
            self._as_save_error(f"{name} could not be rewritten as a whole", "it is as it was"),
            self._reading(name),
        ):
            whole = whole_name(name)
            loaded = self.open(whole if NAME.fullmatch(whole) and is_complete(self._files, whole) else name)
            if len(loaded.layers) == 1:
                return loaded.name

            def choose() -> str:
                self._clean()
                return whole

            with self._writing(choose):
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
            with self._lock:
                others = {*self.names(), *self._written}
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
        return self._newest(shards, load) if name is None else self._named(name, shards)

    @contextlib.contextmanager
    def _named(self, name: str, shards: Sequence[Shard] | None) -> Iterator[LoadedCheckpoint]:
        """Opens the checkpoint `name`, or what it was rewritten as."""
        with self._reading(name):
            there = (one for one in (name, whole_name(name)) if NAME.fullmatch(one) and is_complete(self._files, one))
            if (found := next(there, None)) is None:
                known = ", ".join(self.names()) or "none"
                raise CheckpointError(f"{self._files.place(name)} is not a checkpoint; {self._files.root} has {known}")
            yield open_checkpoint(self._files, found, shards)

    @contextlib.contextmanager
    def _newest(
        self, shards: Sequence[Shard] | None, load: Callable[[LoadedCheckpoint], object]
    ) -> Iterator[LoadedCheckpoint]:
        """Opens the newest that is whole; lists anew when another process has removed what was listed."""

        def names() -> list[str]:
            return [name for name in self.names() if plain_name(name) not in self._given_up]

        failed: dict[str, DamagedCheckpoint] = {}
        for _ in range(_RELISTINGS):
            listed = names()
            for name in (one for one in reversed(listed) if one not in failed):
                with self._reading(name):
                    loaded = self._loaded(name, shards, load, failed)
                    if loaded is not None:
                        yield replace(loaded, skipped=_skipped_ones(loaded, failed) + loaded.skipped)
                        return
            if names() == listed:
                break
        if not failed:
            raise CheckpointError(f"{self._files.root} holds no checkpoint: train with this folder first")
        reasons = next(iter(failed.values()))
        raise CheckpointError(f"none of the {len(failed)} checkpoints of {self._files.root} can be loaded: {reasons}")

    def _loaded(
        self,
        name: str,
        shards: Sequence[Shard] | None,
        load: Callable[[LoadedCheckpoint], object],
        failed: dict[str, DamagedCheckpoint],
    ) -> LoadedCheckpoint | None:
        """The checkpoint if every byte is right; where a part of it is there twice, one of both is enough."""
        error = None
        for prefer_whole in (True, False):
            try:
                loaded = open_checkpoint(self._files, name, shards, prefer_whole)
                load(loaded)
            except DamagedCheckpoint as damage:
                error = damage if error is None else error
                if not any(other != plain_name(other) for other in self.names()):
                    break
            else:
                return loaded
        if error is not None and is_complete(self._files, name):
            failed[name] = error
        return None

    def _parents(self) -> Parents:
        """Who builds on whom among those whose manifests are whole."""
        parents = {}
        for name in self.names():
            with contextlib.suppress(DamagedCheckpoint):
                parents[name] = read_manifest(self._files, name).parent
        return Parents(parents)

    @contextlib.contextmanager
    def _writing(self, choose: Callable[[], str]) -> Iterator[str]:
        """Within the block the name that `choose` gives, asked under the lock, is the caller's."""
        with self._lock:
            name = choose()
            if name in self._written:
                raise CheckpointError(f"{name} is being written already")
            self._written.add(name)
        try:
            yield name
        finally:
            with self._lock:
                self._written.discard(name)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Within the block this store removes neither the checkpoint nor what it builds on."""
        with self._lock:
            self._read[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._read[name] -= 1

    def _new_name(self, samples: int) -> str:
        self._clean()
        names = {*self.names(), *self._written}
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
                self._files, staged, snapshot, version, self._piece_bytes, lambda: self._impatient > 0, self._values
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
        parent = standing(self._files, saved_as)
        defect = None
        if self._parents().chain(parent) is None:
            defect = "cannot be loaded any more"
        elif plain_name(parent) in self._given_up or order(parent) >= order(name):
            defect = "belongs to a course that was given up"
        if defect is not None:
            raise ParentLost(
                f"{self._files.root}: {saved_as}, on which the new checkpoint builds, {defect}: save a whole one"
            )
        return read_manifest(self._files, parent)

    def _prune(self) -> None:
        """What builds on others goes before them, so that what is left can always be loaded."""
        with self._lock:
            in_use = [name for name, readers in self._read.items() if readers]
            in_use += [] if self.best is None else [self.best]
            kept = self._parents().kept(self._keep, self._given_up, in_use)
            for name in reversed(self.names()):
                if name not in kept and name not in self._written:
                    self._files.remove(name, MANIFEST)

    def _clean(self) -> None:
        """Removes the remains of saves that were cut off."""
        busy = {*self._written, *map(self._files.staging, self._written)}
        for name in self._files.names():
            remains = STAGED.fullmatch(name) or (NAME.fullmatch(name) and not is_complete(self._files, name))
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


def _skipped_ones(loaded: LoadedCheckpoint, failed: dict[str, DamagedCheckpoint]) -> tuple[str, ...]:
    """A sentence for each defect because of which newer checkpoints, from the newest on, could not be loaded."""
    alike: dict[str, list[str]] = {}
    for name, error in failed.items():
        alike.setdefault(str(error), []).append(name)
    sentences = []
    for defect, (newest, *others) in alike.items():
        listed = f"{newest}, like {len(others)} before it," if others else newest
        samples = order(newest)[0] - loaded.samples
        lost = f"the {samples} samples trained after {loaded.name} are lost"
        lost = lost if samples else f"{loaded.name}, of as many samples, takes its place"
        sentences.append(f"{listed} cannot be loaded, so {lost}: {defect}")
    return tuple(sentences)


def as_whole(loaded: LoadedCheckpoint) -> Snapshot:
    """A checkpoint with all that it builds on, without a parent; its rows are read tensor by tensor, when written."""

    def read(table: str, start: int, first: int, last: int, name: str) -> Iterator[Tensor]:
        for begin, end in loaded.chunks(table, start + first, start + last):
            yield loaded.rows(table, begin, end, {name})[name]

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
            yield Rows(table, start, forms | in_memory, partial(read, table.name, start))

    return Snapshot(
        config=loaded.config,
        samples=loaded.samples,
        tables=tuple(rows for table in loaded.tables for rows in runs(table)),
        dense=loaded.dense,
        position=loaded.position,
        random=loaded.random,
        extra=loaded.extra,
    )
