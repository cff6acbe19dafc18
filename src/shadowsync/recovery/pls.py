"""The account of PLS, the portion of lost samples: a pure state machine that is told of saves and failures."""

from collections.abc import Collection, Sequence


class PlsAccount:
    """Adds up what failures have cost in samples (CPR, arXiv 2011.02999, section 3.2).

    A failure at sample S of server j, last saved whole at sample S_j, adds `(S − S_j)/S_total · share_j`, where the
    share is 1/N unless the servers' shares of the rows are given. As in the paper

    - rows saved by priority in between do not count: S_j is the end of the last whole round, so with priority saving
      this is an upper bound, the same for every priority, and the target sets the same interval for all of them;
    - a second failure since the same save counts from that save again, although part of it was lost already.

    Where everybody goes back (full recovery), nothing is lost: say `went_back` then, and not `failed`.

    Args:
        total_samples: of the whole job, all epochs.
        shares: of the rows, by server; they add up to 1.
        begun: samples trained when the job began. Up to there nothing can be lost: initial values can be made again.

    Attributes:
        pls: so far.
        saved_at: samples trained at each server's last whole save.
    """

    def __init__(self, total_samples: int, shares: Sequence[float], begun: int = 0) -> None:
        self.total_samples = total_samples
        self.shares = shares
        self.saved_at = [begun] * len(shares)
        self.pls = 0.0

    def saved(self, server: int, samples: int) -> None:
        """A server's rows are all saved as they were when so many samples had been trained.

        Saves may be told of in any order, as they end; an older one changes nothing.
        """
        self.saved_at[server] = max(self.saved_at[server], samples)

    def failed(self, servers: Collection[int], samples: int, loaded: int | None = None) -> None:
        """These servers died at once after so many samples, and their replacements load their last saves.

        Where that may be an older checkpoint, `loaded` are its samples.
        """
        for server in set(servers):
            if loaded is not None:
                self.saved_at[server] = min(self.saved_at[server], loaded)
            self.pls += max(samples - self.saved_at[server], 0) * self.shares[server] / self.total_samples

    def went_back(self, samples: int) -> None:
        """After a failure everybody went back to a checkpoint taken at so many samples, and trains on from there."""
        self.saved_at = [samples] * len(self.shares)
