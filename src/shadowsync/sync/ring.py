"""The seam between averaging and what moves the vectors.

`P` dense parameters.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shadowsync.errors import RunError


class RingBroken(RunError):
    """A ring is void: a member of it died, could not be reached or has given it up."""


class Ring(Protocol):
    """A way to reduce among the members of one epoch (`gloo.GlooRing`)."""

    def mean(self, vector: Tensor) -> Future[Tensor]:
        """The mean of the members' `[P]` vectors, float32, the same bits for all; they move in the vector's type."""
        ...

    def gather(self, message: Tensor, most: int) -> Future[tuple[Tensor, ...] | None]:
        """The members' messages (bytes) in their order, for all; None for all if they are more than `most` together."""
        ...

    def close(self) -> None:
        """Ends what is under way, here and so at the other members; returns at once."""
        ...


class Board(Protocol):
    """How the members of a ring tell each other where they listen."""

    def pin(self, key: str, value: bytes) -> None:
        """Tells the others."""
        ...

    def read(self, keys: Sequence[str]) -> tuple[bytes, ...]:
        """Waits until all of these have been told.

        Raises:
            RingBroken: the ring is void.
        """
        ...


@dataclass(frozen=True)
class Seat:
    """One member's place in a ring.

    Attributes:
        epoch: of the ring.
        position: of this member, from 0.
        size: members.
        board: the way to the others while it is built.
    """

    epoch: int
    position: int
    size: int
    board: Board


MakeRing = Callable[[Seat], Ring]
