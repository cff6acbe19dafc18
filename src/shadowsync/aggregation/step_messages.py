"""What crosses under gradient methods beside rows: workers and the conductor with the dense part."""

from shadowsync.rpc.service import Meta

NEVER = -1
"""The version of parameters that nobody has."""


class GradientSent(Meta, frozen=True):
    """A batch's gradient of the dense part; tensors: its frames.

    Attributes:
        number: of the batch.
        used: of each parameter, whether the loss depended on it.
        generation: of the parts that the trainer belongs to.
        codec: of the frames, by name.
    """

    number: int
    used: tuple[bool, ...]
    generation: int
    codec: str = ""


class NewerAsked(Meta, frozen=True):
    """Asks for the newest parameters if their version is above `than`.

    Attributes:
        than: the version that is there.
        stream: of the client's, one for each worker.
        codec: that the answer is to be in, by name.
        having: the serial number of the message that brought it; 0 if none did.
    """

    than: int
    stream: int
    codec: str = ""
    having: int = 0


class NewerGiven(Meta, frozen=True):
    """Answers `NewerAsked`; tensors: the frames of the parameters.

    Attributes:
        version: None, without tensors, if there is no newer.
        serial: counts the messages with tensors to this worker, from 1 on.
        whole: all of them come, and not what has changed since the version that the worker has.
        kept, refreshes, early: as in `Encoded`.
    """

    version: int | None
    serial: int = 0
    whole: bool = True
    kept: int = 0
    refreshes: int = 0
    early: int = 0


class StepAsked(Meta, frozen=True):
    """A global step, or the norm of its gradient, as `aggregation.stepping.DenseStep`; `batches` and `weights` are of
    one length."""

    step: int
    batches: tuple[int, ...]
    weights: tuple[float, ...]
    divisor: float
    lr: float
    below: int
    generation: int
    norm: float | None = None


class NormGiven(Meta, frozen=True):
    """The L2 norm of a step's gradient by the parameters of one server."""

    norm: float


class RestartAsked(Meta, frozen=True):
    """All gradients are forgotten, and the parameters have this version."""

    version: int
    generation: int
