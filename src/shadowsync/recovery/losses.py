"""What a user has lost with the checkpoint that was loaded, in a sentence each."""

from collections.abc import Mapping

from shadowsync.recovery.loading import LoadedCheckpoint
from shadowsync.recovery.manifest import DamagedCheckpoint
from shadowsync.recovery.names import order


def skipped_ones(loaded: LoadedCheckpoint, failed: Mapping[str, DamagedCheckpoint]) -> tuple[str, ...]:
    """A sentence for each newer checkpoint that could not be loaded."""
    return tuple(f"{name} cannot be loaded, so {_lost(loaded, name)}: {error}" for name, error in failed.items())


def older_rows(loaded: LoadedCheckpoint) -> tuple[str, ...]:
    """A sentence if some rows are older than the checkpoint."""
    if loaded.exact:
        return ()
    return (
        f"{loaded.name} holds some rows as of its {loaded.samples} samples and others as of earlier ones, down to "
        f"{loaded.oldest}, because only part of them was saved each time: what those learned in between is lost",
    )


def _lost(loaded: LoadedCheckpoint, name: str) -> str:
    samples = order(name)[0] - loaded.samples
    if not samples:
        return f"{loaded.name}, of as many samples, takes its place"
    return f"the {samples} samples trained after {loaded.name} are lost"
