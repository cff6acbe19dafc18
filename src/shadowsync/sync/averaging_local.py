"""How the vectors of trainers in one process are averaged, with what would cross counted.

`P` dense parameters, `n` members of an average.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from shadowsync.compression.channel import Line
from shadowsync.compression.codec import Encoded
from shadowsync.compression.differences import PublicCopy, count, longest
from shadowsync.compression.plain import Plain
from shadowsync.sync.averaging import Newest


class Meeting(Protocol):
    """What happens where trainers have come together."""

    def given(self, rank: int, weights: Tensor, members: int) -> Tensor:
        """What a trainer brings of its replica `[P]`, in its own thread, to about so many members."""
        ...

    def mean(self, vectors: Mapping[int, Tensor]) -> Tensor:
        """The average `[P]` of what members brought, by rank, ascending; two calls never overlap."""
        ...

    def missed(self, rank: int) -> bool:
        """As `Group.missed`."""
        ...

    def approach(self, rank: int, weights: Tensor, target: Tensor, alpha: float) -> None:
        """As `Group.approach`."""
        ...

    def forget(self) -> None:
        """Replicas are about to become others."""
        ...


def meeting(trainers: Sequence[int], line: Line) -> Meeting:
    """Vectors cross where they can be added up as they are encoded, else differences."""
    if line.codec.everything:
        return LocalVectors(trainers, Line(line.kind, Plain(), line.counter))
    return (LocalVectors if line.codec.ladder[0].elementwise else LocalDifferences)(trainers, line)


class LocalVectors:
    """Vectors cross.

    Traffic is counted as a ring all-reduce would cause it: each of n trainers sends 2 (n − 1) / n of its vector.
    """

    def __init__(self, trainers: Sequence[int], line: Line) -> None:
        self._line = line
        self._round = 0
        self._last_seen = dict.fromkeys(trainers, 0)
        self._missed = dict.fromkeys(trainers, False)

    def given(self, rank: int, weights: Tensor, members: int) -> Tensor:
        """As `Meeting.given`: the vector as it arrives."""
        return self._line.stream(("average", rank), f"the replica of trainer {rank}").send(
            weights, 2 * (members - 1) / members
        )

    def mean(self, vectors: Mapping[int, Tensor]) -> Tensor:
        """As `Meeting.mean`."""
        self._round += 1
        for rank in vectors:
            self._missed[rank] = self._round > self._last_seen[rank] + 1
            self._last_seen[rank] = self._round
        return mean_of(list(vectors.values()))

    def missed(self, rank: int) -> bool:
        """As `Meeting.missed`."""
        return self._missed[rank]

    def approach(self, rank: int, weights: Tensor, target: Tensor, alpha: float) -> None:
        """As `Meeting.approach`."""
        weights.lerp_(target, alpha)

    def forget(self) -> None:
        """Nothing is kept that would have to fit the replicas."""


class LocalDifferences:
    """Differences cross (`PublicCopy`)."""

    def __init__(self, trainers: Sequence[int], line: Line) -> None:
        self._trainers, self._line = trainers, line
        self._missed = dict.fromkeys(trainers, False)
        self.forget()

    def forget(self) -> None:
        """As `Meeting.forget`: the next average is of whole vectors."""
        codec = self._line.codec
        self._copies = {rank: PublicCopy(codec, f"the replica of trainer {rank}") for rank in self._trainers}
        self._newest = Newest()
        self._holds = dict.fromkeys(self._trainers, 0)

    def given(self, rank: int, weights: Tensor, members: int) -> Tensor:
        """As `Meeting.given`: the replica itself, for only all together know what crosses."""
        return weights

    def mean(self, vectors: Mapping[int, Tensor]) -> Tensor:
        """As `Meeting.mean`; workers may be writing to the replicas."""
        replicas, members = {rank: vector.clone() for rank, vector in vectors.items()}, tuple(vectors)
        ground = self._newest.ground(members, self._holds)
        encoding = ground.complete and len(members) > 1
        messages = {rank: self._copies[rank].encode(replica) for rank, replica in replicas.items() if encoding}
        room = min(map(longest, replicas.values()))
        whole = not messages or sum(message.byte_count for message in messages.values()) > room
        average = mean_of(list(replicas.values())) if whole else self._mean(messages)
        self._newest = Newest(self._newest.round + 1, members)
        for rank, replica in replicas.items():
            message = messages.get(rank)
            self._copies[rank].settle(replica, average, message, whole)
            self._holds[rank], self._missed[rank] = self._newest.round, not ground.common
            count(self._line, replica, len(members), None if whole else message)
        return average

    def missed(self, rank: int) -> bool:
        """As `Meeting.missed`."""
        return self._missed[rank]

    def approach(self, rank: int, weights: Tensor, target: Tensor, alpha: float) -> None:
        """As `Meeting.approach`."""
        self._copies[rank].approach(weights, target, alpha)

    def _mean(self, messages: Mapping[int, Encoded]) -> Tensor:
        anyone = self._copies[next(iter(messages))]  # r has the same bits everywhere
        return anyone.mean([message.frames for message in messages.values()])


def mean_of(vectors: Sequence[Tensor]) -> Tensor:
    """The mean `[P]` of vectors, added up in their order, so that every trainer would get the same result."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total.add_(vector)
    return total.div_(len(vectors))
