"""What a user has lost with the checkpoint that was loaded, in a sentence each."""

from collections.abc import Mapping, Sequence

from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.manifest import DamagedCheckpoint
from shadowsync.checkpoint.names import order


def skipped_ones(loaded: LoadedCheckpoint, failed: Mapping[str, DamagedCheckpoint]) -> tuple[str, ...]:
    """A sentence for each defect because of which newer checkpoints could not be loaded; it names the newest of them.

    Args:
        loaded: what is loaded in their place.
        failed: what is wrong with each, from the newest on.
    """
    alike: dict[str, list[str]] = {}
    for name, error in failed.items():
        alike.setdefault(str(error), []).append(name)
    return tuple(
        f"{_listed(names)} cannot be loaded, so {_lost(loaded, names[0])}: {error}" for error, names in alike.items()
    )


def older_rows(loaded: LoadedCheckpoint) -> tuple[str, ...]:
    """A sentence if some rows are older than the checkpoint."""
    if loaded.exact:
        return ()
    return (
        f"{loaded.name} holds some rows as of its {loaded.samples} samples and others as of earlier ones, down to "
        f"{loaded.oldest}, because only part of them was saved each time: what those learned in between is lost",
    )


def _listed(names: Sequence[str]) -> str:
    newest, *others = names
    return f"{newest}, like {len(others)} before it," if others else newest


def _lost(loaded: LoadedCheckpoint, name: str) -> str:
    samples = order(name)[0] - loaded.samples
    if not samples:
        return f"{loaded.name}, of as many samples, takes its place"
    return f"the {samples} samples trained after {loaded.name} are lost"
