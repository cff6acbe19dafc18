"""What is complete below a root, and its opening so that this process cannot remove it meanwhile."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from shadowsync.checkpoint.blocks import guarded
from shadowsync.checkpoint.files import Files
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.losses import skipped_ones
from shadowsync.checkpoint.manifest import MANIFEST, DamagedCheckpoint
from shadowsync.checkpoint.names import NAME, order, plain_name, whole_name
from shadowsync.checkpoint.opening import open_checkpoint, read_manifest
from shadowsync.checkpoint.parents import Parents
from shadowsync.checkpoint.pins import Pins
from shadowsync.embedding.table import Shard
from shadowsync.errors import CheckpointError

_RELISTINGS = 5


@dataclass(frozen=True)
class Catalog:
    """The complete checkpoints, listed anew at each question.

    Attributes:
        files: where they are.
        pins: what is open is pinned here from before it is looked at.
    """

    files: Files
    pins: Pins

    def names(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        found = [name for name in guarded(self.files, "", self.files.names) if NAME.fullmatch(name)]
        return sorted(filter(self.complete, found), key=order)

    def complete(self, name: str) -> bool:
        """Whether there is a checkpoint of this name."""
        return guarded(self.files, f"{name}/{MANIFEST}", self.files.size) is not None

    def parents(self) -> Parents:
        """Who builds on whom among those whose manifests are whole."""
        parents = {}
        for name in self.names():
            with contextlib.suppress(DamagedCheckpoint):
                parents[name] = read_manifest(self.files, name).parent
        return Parents(parents)

    @contextlib.contextmanager
    def named(self, name: str, shards: Sequence[Shard] | None) -> Iterator[LoadedCheckpoint]:
        """Opens the checkpoint `name`, or what it was rewritten as.

        Raises:
            CheckpointError: there is none, or it cannot be loaded.
        """
        with self.pins.reading(name):
            there = (one for one in (name, whole_name(name)) if NAME.fullmatch(one) and self.complete(one))
            if (found := next(there, None)) is None:
                known = ", ".join(self.names()) or "none"
                raise CheckpointError(f"{self.files.place(name)} is not a checkpoint; {self.files.root} has {known}")
            yield open_checkpoint(self.files, found, shards)

    @contextlib.contextmanager
    def newest(
        self,
        shards: Sequence[Shard] | None,
        given_up: Collection[str],
        load: Callable[[LoadedCheckpoint], object] = LoadedCheckpoint.verify,
    ) -> Iterator[LoadedCheckpoint]:
        """Opens the newest that is whole; lists anew when another process has removed what was listed.

        Args:
            shards: as in `open_checkpoint`.
            given_up: plain names of those that are left out.
            load: reads all that is needed of it; called with older and older ones until none is found damaged.

        Raises:
            CheckpointError: there is none.
        """
        failed: dict[str, DamagedCheckpoint] = {}
        for _ in range(_RELISTINGS):
            names = self._others(given_up)
            for name in (one for one in reversed(names) if one not in failed):
                with self.pins.reading(name):
                    loaded = self._loaded(name, shards, load, failed)
                    if loaded is not None:
                        yield replace(loaded, skipped=skipped_ones(loaded, failed))
                        return
            if self._others(given_up) == names:
                break
        if not failed:
            raise CheckpointError(f"{self.files.root} holds no checkpoint: train with this folder first")
        reasons = next(iter(failed.values()))
        raise CheckpointError(f"none of the {len(failed)} checkpoints of {self.files.root} can be loaded: {reasons}")

    def _others(self, given_up: Collection[str]) -> list[str]:
        return [name for name in self.names() if plain_name(name) not in given_up]

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
                loaded = open_checkpoint(self.files, name, shards, prefer_whole=prefer_whole)
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
