"""The account of PLS, the portion of lost samples: a pure state machine that is told of saves and failures."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass
class PlsAccount:
    """Adds up what failures have cost in samples (CPR, arXiv 2011.02999, section 3.2).

    A failure at sample S of server j, last saved whole at sample S_j, adds `(S − S_j)/S_total · share_j`, where the
    share is 1/N unless the servers' shares of the rows are given. As in the paper

    - rows saved by priority in between do not count: S_j is the end of the last whole round, so with priority saving
      this is an upper bound, the same for every priority, and the target sets the same interval for all of them;
    - a second failure since the same save counts from that save again, although part of it was lost already.

    Where everybody goes back (full recovery), nothing is lost: say `went_back` then, and not `failed`.

    Attributes:
        total_samples: of the whole job, all epochs.
        shares: of the rows, by server; they add up to 1.
        saved_at: samples trained at each server's last whole save. 0 is right for a job that begins: initial values can
            be made again.
        pls: so far.
        failures: so far; several servers at once are one.
    """

    total_samples: int
    shares: Sequence[float]
    saved_at: list[int] = field(default_factory=list)
    pls: float = 0.0
    failures: int = 0

    def __post_init__(self) -> None:
        if self.total_samples < 1 or abs(sum(self.shares) - 1) > 1e-6 or min(self.shares) < 0:
            raise ValueError(f"total_samples={self.total_samples}, shares={self.shares}: shares must add up to 1")
        self.saved_at = self.saved_at or [0] * len(self.shares)
        if len(self.saved_at) != len(self.shares):
            raise ValueError(f"{len(self.saved_at)} servers have saved, and {len(self.shares)} have shares")

    @classmethod
    def even(cls, total_samples: int, servers: int) -> "PlsAccount":
        """For servers that hold equal shares of the rows, at the beginning of a job."""
        return cls(total_samples, [1 / servers] * servers)

    def saved(self, server: int, samples: int) -> None:
        """A server's rows are all saved as they were when so many samples had been trained.

        Saves may be told of in any order, as they end; an older one changes nothing.
        """
        self.saved_at[server] = max(self.saved_at[server], samples)

    def failed(self, servers: Collection[int], samples: int, loaded: int | None = None) -> float:
        """These servers died at once after so many samples, and their replacements load their last saves.

        Args:
            servers: which.
            samples: trained when they died.
            loaded: samples of the checkpoint that was loaded, where that may be an older one; None: their last save.

        Returns:
            What this adds to the PLS.
        """
        if loaded is not None:
            for server in servers:
                self.saved_at[server] = min(self.saved_at[server], loaded)
        lost = sum(self.lost_samples(server, samples) * self.shares[server] for server in set(servers))
        self.pls += lost / self.total_samples
        self.failures += 1
        return lost / self.total_samples

    def lost_samples(self, server: int, samples: int) -> int:
        """How far behind its last save would put this server now."""
        return max(samples - self.saved_at[server], 0)

    def went_back(self, samples: int) -> None:
        """After a failure everybody went back to a checkpoint taken at so many samples, and trains on from there."""
        self.failures += 1
        self.saved_at = [samples] * len(self.shares)
