"""What a session on a cluster does about the dense part: the seam between the two families of methods."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from shadowsync.aggregation.aggregator import Worker
from shadowsync.aggregation.conductor_service import ConductorService
from shadowsync.aggregation.counts import AggregationState
from shadowsync.cluster.staff import Member
from shadowsync.data.reader import Reader
from shadowsync.dense_state import DenseImage
from shadowsync.rpc.errors import PeerLost


class NobodyLeft(PeerLost):
    """There is nobody from whom a newcomer could go on: everybody has to go back to a checkpoint."""


class DenseSide(ABC):
    """The dense part of all trainers, wherever it is."""

    # --- a generation ------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, reader: Reader, generation: int) -> ConductorService | None:
        """A generation begins; what was under way in the one before is ended.

        Returns:
            what trainers find beside the desk.
        """

    @abstractmethod
    def fill(self) -> None:
        """Servers have fresh parts: gives them initial values.

        Raises:
            PeerLost: one of them is not there.
        """

    def look(self) -> None:  # noqa: B027 (matters to gradient methods only)
        """Called several times a second while trainers are at work."""

    @abstractmethod
    def stop(self) -> None:
        """Lets everybody go who waits for others."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads."""

    # --- deaths ------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def is_with_trainers(self) -> bool:
        """With the last trainer it is lost."""

    @property
    @abstractmethod
    def is_with_servers(self) -> bool:
        """With a dense server it is lost."""

    @abstractmethod
    def fill_server(self, server: Member) -> None:
        """A dense server has taken another's place while the others go on.

        Raises:
            NobodyLeft: it cannot go on.
        """

    @abstractmethod
    def fill_trainer(self, trainer: Member) -> None:
        """A trainer is about to start while others go on; raises as `fill_server`."""

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """What went wrong beside the trainers."""

    # --- images ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def settle(self, timeout_s: float) -> bool:
        """Waits, while trainers stand still, until nothing changes anything any more; False if it does after that."""

    def paused(self) -> AbstractContextManager[None]:
        """While inside, trainers stand still."""
        return nullcontext()

    @property
    @abstractmethod
    def copies(self) -> int:
        """Replicas that `load` needs now."""

    @abstractmethod
    def image(self) -> DenseImage:
        """As `Session.dense_image`."""

    @abstractmethod
    def load(self, image: DenseImage) -> None:
        """As `Session.load_dense`."""

    @abstractmethod
    def restart(self, before: AggregationState) -> None:
        """Counts go on from these; after `load`.

        Raises:
            PeerLost: a server is not there.
        """

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def aggregation(self) -> AggregationState | None:
        """As `Session.aggregation`, of this run and what it went on from."""

    @property
    def held_bytes(self) -> int | None:
        """As `Session._held_bytes`, as far as it was heard of."""
        return None

    def recent_step_s(self) -> Mapping[Worker, float]:
        """As `Session.recent_step_s`."""
        return {}

    def mean_step_s(self) -> Mapping[Worker, float]:
        """As `Session.mean_step_s`."""
        return {}

    @abstractmethod
    def distance(self, sketches: Sequence[Tensor]) -> float | None:
        """As `Session._replica_distance`, of the same coordinates of each trainer's replica."""
