"""How trainers in one process reach each other and the dense servers."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.compression.channel import Line
from shadowsync.sync.averaging_local import meeting
from shadowsync.sync.dense import DenseServer, Sent
from shadowsync.sync.elastic import CenterEnd, Crossing, ElasticExchanges
from shadowsync.sync.rendezvous import Rendezvous


def split_evenly(length: int, parts: int) -> list[tuple[int, int]]:
    """`parts` consecutive ranges that cover `0 … length − 1` and differ by at most one in size."""
    edges = [length * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


_Exchange = Callable[[DenseServer, Tensor, float, Sent], Tensor]


class DenseServers:
    """The central copy, split over its servers.

    Args:
        servers: in the order of their parts.
        line: the way there and back.
    """

    def __init__(self, servers: Sequence[DenseServer], line: Line) -> None:
        self._line, self._servers = line, servers
        self._spans = split_evenly(sum(server.length for server in servers), max(1, len(servers)))[: len(servers)]
        self._differences = ElasticExchanges(self._spans, line, self._carry)
        self._ends: dict[tuple[int, int], CenterEnd] = {}

    @classmethod
    def split(cls, center: Tensor, count: int, line: Line) -> "DenseServers":
        """So many new servers of a copy."""
        return cls([DenseServer(center[start:stop].clone()) for start, stop in split_evenly(len(center), count)], line)

    @property
    def cpu_s(self) -> float:
        """As `Group.cpu_s`: here all is done in the calling thread."""
        return 0.0

    def elastic(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.elastic` of trainer `rank`, server by server.

        Under a sparse codec differences cross in part (`ElasticExchanges`), and workers of one trainer take turns.
        """
        if self._line.codec.sparse:
            return self._differences.exchange(rank, weights, alpha)
        return self._each(DenseServer.elastic, rank, weights, alpha)

    def catch_up(self, rank: int) -> bool:
        """As `Group.catch_up` of trainer `rank`."""
        return self._differences.catch_up(rank)

    def sequential(self, rank: int, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.sequential` of trainer `rank`, server by server."""
        return self._each(DenseServer.sequential, rank, weights, alpha)

    def read(self) -> Tensor:
        """A copy of the whole, `[P]`."""
        return torch.cat([server.read() for server in self._servers])

    def write(self, center: Tensor) -> None:
        """Replaces the whole, `[P]`; trainers begin anew."""
        self._ends.clear()
        for server, (start, stop) in zip(self._servers, self._spans, strict=True):
            server.write(center[start:stop])

    def _carry(self, sent: Mapping[int, Crossing], rank: int, alpha: float) -> Mapping[int, Crossing | None]:
        return {at: self._end(rank, at).answer(self._servers[at], part, alpha) for at, part in sent.items()}

    def _end(self, rank: int, at: int) -> CenterEnd:
        found = self._ends.get((rank, at))
        if found is None:
            about = f"what dense server {at} has for trainer {rank}"
            found = self._ends[rank, at] = CenterEnd(self._line.codec, self._servers[at].length, about)
        return found

    def _each(self, exchange: _Exchange, rank: int, weights: Tensor, alpha: float) -> Tensor:
        replies = []
        for index, (server, (start, stop)) in enumerate(zip(self._servers, self._spans, strict=True)):
            there = self._line.stream(("there", rank, index), f"the replica of trainer {rank} for dense server {index}")
            back = self._line.stream(("back", rank, index), f"what dense server {index} has for trainer {rank}")
            replies.append(exchange(server, there.send(weights[start:stop]), alpha, back.send))
        return replies[0] if len(replies) == 1 else torch.cat(replies)


class Averaging:
    """The all-reduce of the trainers in one process."""

    def __init__(
        self, trainers: Sequence[int], line: Line, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._meeting = meeting(trainers, line)
        self._rendezvous: Rendezvous[Tensor, Tensor] = Rendezvous(trainers, self._meeting.mean, waiting)

    def mean(self, rank: int, weights: Tensor) -> Tensor:
        """As `Group.mean` of trainer `rank`: one tensor for all of them."""
        members = max(1, self._rendezvous.size)
        return self._rendezvous.arrive(rank, self._meeting.given(rank, weights, members))

    def missed(self, rank: int) -> bool:
        """As `Group.missed` of trainer `rank`."""
        return self._meeting.missed(rank)

    def approach(self, rank: int, weights: Tensor, target: Tensor, alpha: float) -> None:
        """As `Group.approach` of trainer `rank`."""
        self._meeting.approach(rank, weights, target, alpha)

    def forget(self) -> None:
        """Replicas are about to become others; while nobody averages."""
        self._meeting.forget()

    def join(self, rank: int) -> None:
        """Trainer `rank` is waited for again."""
        self._rendezvous.join(rank)

    def leave(self, rank: int) -> None:
        """Trainer `rank` is no longer waited for."""
        self._rendezvous.leave(rank)


@dataclass(frozen=True)
class InProcessGroup:
    """One trainer's way to the others (a `sync.method.Group`)."""

    rank: int
    averaging: Averaging
    servers: DenseServers

    def mean(self, weights: Tensor) -> Tensor:
        """As `Group.mean`."""
        return self.averaging.mean(self.rank, weights)

    def missed(self) -> bool:
        """As `Group.missed`."""
        return self.averaging.missed(self.rank)

    def approach(self, weights: Tensor, target: Tensor, alpha: float) -> None:
        """As `Group.approach`."""
        self.averaging.approach(self.rank, weights, target, alpha)

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
        self.averaging.join(self.rank)

    def leave(self) -> None:
        """As `Group.leave`."""
        self.averaging.leave(self.rank)
