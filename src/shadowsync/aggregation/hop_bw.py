"""Backup workers: synchronous rounds that do not wait for the slowest."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from shadowsync.aggregation.aggregator import Aggregation, Aggregator, Begun, Commit
from shadowsync.errors import ConfigError


@dataclass(frozen=True)
class HopBw(Aggregation):
    """Rounds as in `sync`, but the first M − `backups` gradients are the step and the later ones of the round are
    dropped (Hop, Luo et al., arXiv 1902.01064, after Chen et al., arXiv 1604.00981; a baseline of GBA, arXiv
    2205.11048).

    Chen et al. add backups to the N workers that a step needs; here, as in GBA, they come off the M of a round, so a
    step's batch is smaller than the global batch. A gradient that comes late is held until the next commit, which names
    it with weight 0; so all servers forget the same ones.
    """

    name: ClassVar[str] = "hop_bw"

    backups: Annotated[
        int, Field(ge=0, description="batches of a round that are not waited for; more waits less and drops more")
    ] = 1

    def start(self, size: int, step: int = 0) -> Aggregator:
        if self.backups >= size:
            raise ConfigError(
                f"aggregation.backups={self.backups}: a step has {size} batches (global batch / local batch), "
                f"of which one at least is waited for: at most {size - 1}"
            )
        return _BackedRounds(self, size, step)


class _BackedRounds(Aggregator):
    """Rounds that end when all but the backups are there."""

    def __init__(self, options: HopBw, size: int, step: int) -> None:
        super().__init__(options.name, size, step, waits=True)
        self._needed = size - options.backups
        self._late: set[int] = set()

    def _taken(self) -> int:
        return sum(number not in self._late for number in self.in_flight) + self._on_time()

    def _is_full(self) -> bool:
        return self._on_time() >= self._needed

    def _on_time(self) -> int:
        return sum(batch.number not in self._late for batch in self.held)

    def _weight(self, batch: Begun) -> float:
        return 0.0 if batch.number in self._late else 1.0

    def _commit(self, flushed: bool = False) -> Commit:
        commit = super()._commit(flushed)
        self._late = set(self.in_flight)
        return commit
