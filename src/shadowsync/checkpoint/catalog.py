"""What is complete below a root: which checkpoint builds on which, what is written or read now, how one is opened.

Manifests and sizes are compared before a row is read.
"""

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import Tensor

from shadowsync.checkpoint.files import Files
from shadowsync.checkpoint.format import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    NAME,
    DamagedCheckpoint,
    Manifest,
    Piece,
    damaged,
    decode,
    order,
    plain_name,
    whole_name,
)
from shadowsync.checkpoint.loading import BlockReader, Layer, LoadedCheckpoint
from shadowsync.embedding.table import Shard
from shadowsync.errors import CheckpointError

_RELISTINGS = 5


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


class Pins:
    """Which checkpoints threads of this process are writing (`written`) or reading, so that nobody clears them away.

    `lock` is held by whoever removes checkpoints or chooses the name of a new one.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.written: set[str] = set()
        self._read: Counter[str] = Counter()

    def read(self) -> list[str]:
        return [name for name, readers in self._read.items() if readers]

    @contextlib.contextmanager
    def writing(self, choose: Callable[[], str]) -> Iterator[str]:
        """Within the block the name that `choose` gives, asked under the lock, is the caller's."""
        with self.lock:
            name = choose()
            if name in self.written:
                raise CheckpointError(f"{name} is being written already")
            self.written.add(name)
        try:
            yield name
        finally:
            with self.lock:
                self.written.discard(name)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Within the block the checkpoint and all that it builds on stay."""
        with self.lock:
            self._read[name] += 1
        try:
            yield
        finally:
            with self.lock:
                self._read[name] -= 1


@dataclass(frozen=True)
class Catalog:
    """The complete checkpoints, listed anew at each question. What is open is pinned from before it is looked at.

    What is not as it was written is a `DamagedCheckpoint`; other `CheckpointError`s are of a newer format or of the
    file system.
    """

    files: Files
    pins: Pins

    def names(self) -> list[str]:
        found = [name for name in self.files.guarded("", self.files.names) if NAME.fullmatch(name)]
        return sorted(filter(self.complete, found), key=order)

    def complete(self, name: str) -> bool:
        return self.files.guarded(f"{name}/{MANIFEST}", self.files.size) is not None

    def standing(self, name: str, prefer_whole: bool = True) -> str:
        """Who holds the state called `name`: where it is there both as saved and rewritten as a whole, the latter."""
        names = (whole_name(name), name) if prefer_whole else (name, whole_name(name))
        return next(filter(self.complete, names), name)

    def parents(self) -> Parents:
        """Who builds on whom among those whose manifests are whole."""
        parents = {}
        for name in self.names():
            with contextlib.suppress(DamagedCheckpoint):
                parents[name] = self.manifest(name).parent
        return Parents(parents)

    def manifest(self, name: str) -> Manifest:
        path = f"{name}/{MANIFEST}"
        size = self.files.guarded(path, self.files.size)
        if size is None:
            raise damaged(self.files.place(path), "is missing")
        if size > MAX_MANIFEST_BYTES:
            raise damaged(self.files.place(path), f"has {size} bytes, more than any manifest")
        content = self.files.guarded(path, lambda where: self.files.read(where, 0, size))
        return decode(content, self.files.place(path))

    # --- opening -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def named(self, name: str, shards: Sequence[Shard] | None) -> Iterator[LoadedCheckpoint]:
        """Opens the checkpoint `name`, or what it was rewritten as."""
        with self.pins.reading(name):
            there = (one for one in (name, whole_name(name)) if NAME.fullmatch(one) and self.complete(one))
            if (found := next(there, None)) is None:
                known = ", ".join(self.names()) or "none"
                raise CheckpointError(f"{self.files.place(name)} is not a checkpoint; {self.files.root} has {known}")
            yield self._open(found, shards)

    @contextlib.contextmanager
    def newest(
        self,
        shards: Sequence[Shard] | None,
        given_up: Collection[str],
        load: Callable[[LoadedCheckpoint], object],
    ) -> Iterator[LoadedCheckpoint]:
        """Opens the newest that is whole; lists anew when another process has removed what was listed.

        `shards` and `load` as in `CheckpointStore.opened`; `given_up` are plain names of those that are left out.
        """

        def names() -> list[str]:
            return [name for name in self.names() if plain_name(name) not in given_up]

        failed: dict[str, DamagedCheckpoint] = {}
        for _ in range(_RELISTINGS):
            listed = names()
            for name in (one for one in reversed(listed) if one not in failed):
                with self.pins.reading(name):
                    loaded = self._loaded(name, shards, load, failed)
                    if loaded is not None:
                        yield replace(loaded, skipped=_skipped_ones(loaded, failed) + loaded.skipped)
                        return
            if names() == listed:
                break
        if not failed:
            raise CheckpointError(f"{self.files.root} holds no checkpoint: train with this folder first")
        reasons = next(iter(failed.values()))
        raise CheckpointError(f"none of the {len(failed)} checkpoints of {self.files.root} can be loaded: {reasons}")

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
                loaded = self._open(name, shards, prefer_whole)
                load(loaded)
            except DamagedCheckpoint as damage:
                error = damage if error is None else error
                if not any(other != plain_name(other) for other in self.names()):
                    break
            else:
                return loaded
        if error is not None and self.complete(name):
            failed[name] = error
        return None

    def _open(self, name: str, shards: Sequence[Shard] | None, prefer_whole: bool = True) -> LoadedCheckpoint:
        """Reads the manifests of a checkpoint and of what it builds on, compares all sizes, reads the small parts.

        With `shards` only what their rows need, without the dense part. `prefer_whole` as in `standing`.
        """

        def is_wanted(piece: Piece) -> bool:
            return shards is None or any(
                piece.table == shard.table.name and piece.start < shard.stop and shard.start < piece.stop
                for shard in shards
            )

        chain = list(self._manifests(name, prefer_whole))
        newest, place = chain[0][1], self.files.place(f"{name}/{MANIFEST}")
        layers, hidden = [], set[str]()
        for at, manifest in chain:
            pieces: dict[str, list[Piece]] = {}
            for piece in sorted(manifest.pieces, key=lambda piece: piece.start):
                if piece.table not in hidden and is_wanted(piece):
                    pieces.setdefault(piece.table, []).append(piece)
            if (defect := table_difference(manifest, newest, pieces)) is not None:
                raise damaged(self.files.place(f"{at}/{MANIFEST}"), f"has {defect} than what builds on it")
            hidden |= {piece.table for piece in manifest.pieces if piece.scattered is None}
            reader = self._reader(at, manifest, {piece.file for found in pieces.values() for piece in found})
            layers.append(Layer(at, manifest.samples, manifest.exact, pieces, reader))
        dense: dict[str, Tensor] = {}
        random: dict[str, Tensor] = {}
        if shards is None:
            reader = self._reader(name, newest, {newest.dense.file, newest.random.file})
            reader.check_content()
            dense, random = reader.read_group(newest.dense), reader.read_group(newest.random)
        loaded = LoadedCheckpoint(
            name=name,
            samples=newest.samples,
            config=_plain(newest.config, place),
            position=_plain(newest.position, place),
            extra=_plain(newest.extra, place),
            tables=newest.tables,
            dense=dense,
            random=random,
            skipped=(),
            layers=tuple(reversed(layers)),
            shards=None if shards is None else tuple(shards),
        )
        if loaded.exact:
            return loaded
        older = (
            f"{name} holds some rows as of its {loaded.samples} samples and others as of earlier ones, down to "
            f"{loaded.oldest}, because only part of them was saved each time: what those learned in between is lost"
        )
        return replace(loaded, skipped=(older,))

    def _manifests(self, name: str, prefer_whole: bool) -> Iterator[tuple[str, Manifest]]:
        while True:
            manifest = self.manifest(name)
            yield name, manifest
            if manifest.parent is None:
                return
            parent = self.standing(manifest.parent, prefer_whole)
            if order(parent) >= order(name):
                raise damaged(self.files.place(f"{name}/{MANIFEST}"), f"builds on {parent}, which is newer")
            name = parent

    def _reader(self, name: str, manifest: Manifest, needed: Collection[str]) -> BlockReader:
        entries = [entry for entry in manifest.files if entry.name in needed]
        reader = BlockReader(self.files, name, entries, manifest.block_bytes)
        reader.check_sizes()
        return reader


def table_difference(parent: Manifest, child: Manifest, names: Iterable[str]) -> str | None:
    """What differs in the tables `names`, as `another table X` or `other tensors in table X`; None if nothing does."""
    sizes = [{table.name: (table.rows, table.dim) for table in manifest.tables} for manifest in (parent, child)]
    firsts = [{piece.table: piece for piece in reversed(manifest.pieces)} for manifest in (parent, child)]
    for name in names:
        if sizes[0].get(name) != sizes[1].get(name):
            return f"another table {name}"
        there, here = (first[name].form if name in first else None for first in firsts)
        if there != here:
            return f"other tensors in table {name}"
    return None


def _plain(raw: msgspec.Raw, place: str) -> dict[str, Any]:
    try:
        value = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise damaged(place, f"holds what is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged(place, f"holds a {type(value).__name__} where an object belongs")
    return value


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
