"""One trainer's way to the others and to the dense servers when they are in other processes."""

from dataclasses import dataclass

from torch import Tensor

from shadowsync.sync.averaging_remote import RemoteAveraging
from shadowsync.sync.dense_remote import DenseRemote
from shadowsync.sync.group import DenseServers
from shadowsync.sync.schedule import Rest


@dataclass(frozen=True)
class RemoteGroup:
    """As `sync.group.InProcessGroup` (a `sync.method.Group`).

    A pause for a checkpoint does not wait for an average, which depends on other processes: nothing changes here
    until it has come. It does wait for an exchange with the dense servers, which would be half done.
    """

    rank: int
    averaging: RemoteAveraging
    servers: DenseServers | DenseRemote
    gate: Rest

    def mean(self, weights: Tensor) -> Tensor:
        """As `Group.mean`; called by a member of the gate."""
        with self.gate.resting():
            return self.averaging.mean(weights)

    def missed(self) -> bool:
        """As `Group.missed`."""
        return self.averaging.missed()

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        """As `Group.approach`."""
        self.averaging.approach(weights, target, alpha)

    def elastic(self, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.elastic`."""
        return self.servers.elastic(self.rank, weights, alpha)

    def catch_up(self) -> bool:
        """As `Group.catch_up`."""
        return self.servers.catch_up(self.rank)

    def sequential(self, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.sequential`."""
        return self.servers.sequential(self.rank, weights, alpha)

    def cpu_s(self) -> float:
        """As `Group.cpu_s`."""
        return self.servers.cpu_s

    def join(self) -> None:
        """As `Group.join`."""
        self.averaging.join()

    def leave(self) -> None:
        """As `Group.leave`."""
        self.averaging.leave()
