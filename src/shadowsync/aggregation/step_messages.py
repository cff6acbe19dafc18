"""What crosses under gradient methods between a worker and the conductor."""

from shadowsync.rpc.service import Meta

NEVER = -1
"""The version of a batch that is not to be trained any more."""


class BeginAsked(Meta, frozen=True):
    """A worker wants to compute a batch; answered when it may.

    Attributes:
        trainer: rank of its trainer.
        worker: its index there.
        number: of the batch.
        generation: of the parts that the trainer belongs to.
    """

    trainer: int
    worker: int
    number: int
    generation: int


class BeginGiven(Meta, frozen=True):
    """Answers `BeginAsked`: the least version of the parameters, or `NEVER`."""

    version: int


class ArrivedTold(Meta, frozen=True):
    """All servers hold the gradients of a batch.

    Attributes:
        number: of the batch.
        version: of the dense parameters that it was computed with.
        generation: as in `BeginAsked`.
    """

    number: int
    version: int
    generation: int


class WorkerTold(Meta, frozen=True):
    """A worker has nothing to do, or has ended; the fields are those of `BeginAsked`."""

    trainer: int
    worker: int
    generation: int
