"""How trainers in one process reach each other and the dense servers."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.runtime.lines import Line
from shadowsync.sync.dense import DenseServer
from shadowsync.sync.rendezvous import Rendezvous


def split_evenly(length: int, parts: int) -> list[tuple[int, int]]:
    """`parts` consecutive ranges that cover `0 … length − 1` and differ by at most one in size."""
    edges = [length * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


class DenseServers:
    """The central copy, split over its servers."""

    def __init__(self, center: Tensor, count: int, line: Line) -> None:
        self._line = line
        self._spans = split_evenly(len(center), count)
        self._servers = [DenseServer(center[start:stop].clone(), line.send) for start, stop in self._spans]

    def elastic(self, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.elastic`, server by server."""
        return self._each(lambda server, part: server.elastic(part, alpha), weights)

    def sequential(self, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.sequential`, server by server."""
        return self._each(lambda server, part: server.sequential(part, alpha), weights)

    def read(self) -> Tensor:
        """A copy of the whole, `[P]`."""
        return torch.cat([server.read() for server in self._servers])

    def write(self, center: Tensor) -> None:
        """Replaces the whole, `[P]`."""
        for server, (start, stop) in zip(self._servers, self._spans, strict=True):
            server.write(center[start:stop])

    def _each(self, exchange: Callable[[DenseServer, Tensor], Tensor], weights: Tensor) -> Tensor:
        sent = self._line.send(weights)
        replies = [
            exchange(server, sent[start:stop]) for server, (start, stop) in zip(self._servers, self._spans, strict=True)
        ]
        return replies[0] if len(replies) == 1 else torch.cat(replies)


class Averaging:
    """The all-reduce of the trainers in one process.

    Traffic is counted as a ring all-reduce would cause it: each of n trainers sends 2 (n − 1) / n of its vector.
    """

    def __init__(
        self, trainers: Sequence[int], line: Line, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._line = line
        self._rendezvous: Rendezvous[Tensor, Tensor] = Rendezvous(trainers, self._average, waiting)

    def mean(self, rank: int, weights: Tensor) -> Tensor:
        """The average of the vectors of all trainers present: one tensor for all of them, not to be changed."""
        members = max(1, self._rendezvous.size)
        return self._rendezvous.arrive(rank, self._line.send(weights, 2 * (members - 1) / members))

    def join(self, rank: int) -> None:
        """Trainer `rank` is waited for again."""
        self._rendezvous.join(rank)

    def leave(self, rank: int) -> None:
        """Trainer `rank` is no longer waited for."""
        self._rendezvous.leave(rank)

    @staticmethod
    def _average(vectors: Mapping[int, Tensor]) -> Tensor:
        # The vectors may be live replicas; a running sum in a fixed order gives every trainer the same result.
        ordered = list(vectors.values())
        total = ordered[0].clone()
        for vector in ordered[1:]:
            total.add_(vector)
        return total.div_(len(ordered))


@dataclass(frozen=True)
class InProcessGroup:
    """One trainer's way to the others (a `sync.method.Group`)."""

    rank: int
    averaging: Averaging
    servers: DenseServers

    def mean(self, weights: Tensor) -> Tensor:
        """As `Group.mean`."""
        return self.averaging.mean(self.rank, weights)

    def elastic(self, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.elastic`."""
        return self.servers.elastic(weights, alpha)

    def sequential(self, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.sequential`."""
        return self.servers.sequential(weights, alpha)

    def join(self) -> None:
        """As `Group.join`."""
        self.averaging.join(self.rank)

    def leave(self) -> None:
        """As `Group.leave`."""
        self.averaging.leave(self.rank)
