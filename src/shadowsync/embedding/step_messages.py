"""What a server of rows and one of the dense part have in common when a global step is carried out."""

import math

from shadowsync.errors import DataError
from shadowsync.rpc.service import Meta, Payload


class Committed(Meta, frozen=True):
    """Answers a global step.

    Attributes:
        held_bytes: memory of the gradients that waited at the server when the step came, those of the step with them.
    """

    held_bytes: int


def held_bytes(answer: Payload) -> int:
    """Decodes the answer to a global step."""
    return answer.read(Committed).held_bytes


def checked_weights(
    batches: tuple[int, ...], weights: tuple[float, ...], divisor: float | None, lr: float
) -> dict[int, float]:
    """The weight of each batch of a global step; without a divisor each row has its own.

    Raises:
        DataError: this is no global step.
    """
    finite = all(map(math.isfinite, (lr, divisor or 0.0, *weights)))
    if not finite or not (divisor is None or divisor > 0) or len(batches) != len(weights):
        raise DataError(
            f"{len(batches)} batches with {len(weights)} weights, divisor {divisor} and learning rate {lr} make no "
            "global step"
        )
    return dict(zip(batches, weights, strict=True))


def check_batch(number: int) -> None:
    """Raises `DataError` for a number that no batch has under which a gradient is to be held."""
    if number < 0:
        raise DataError(f"a gradient came for batch {number}: they count from 0")
