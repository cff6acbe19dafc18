"""Replica methods on a cluster: each trainer has its own dense part, and dense servers may keep a central one."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shadowsync.aggregation.counts import AggregationState
from shadowsync.cluster.dense_side import DenseSide, NobodyLeft
from shadowsync.cluster.images import Images
from shadowsync.cluster.staff import Member
from shadowsync.cluster.statuses import Statuses
from shadowsync.data.reader import Reader
from shadowsync.dense_state import DenseImage, TrainerImage
from shadowsync.session import distance
from shadowsync.sync.method import SyncMethod


@dataclass(frozen=True)
class Merged(DenseSide):
    """A replica for each trainer.

    Attributes:
        method: of synchronisation.
        images, statuses: of the crew.
        initial: the central copy at the start, `[P]`.
    """

    method: SyncMethod
    images: Images
    statuses: Statuses
    initial: Tensor

    def open(self, reader: Reader, generation: int) -> None:
        """Trainers find the averaging behind a door of its own."""

    def fill(self) -> None:
        self.images.write_center(self.initial)

    def stop(self) -> None:
        """Whoever ends leaves the group, so that nobody waits for it."""

    def close(self) -> None:
        """There are no threads here."""

    @property
    def is_with_trainers(self) -> bool:
        return True

    @property
    def is_with_servers(self) -> bool:
        return False

    def fill_server(self, server: Member) -> None:
        """Its part of the central copy is the mean of the replicas."""
        images = self.images.of(self.statuses.at_work())
        if not images:
            raise NobodyLeft(f"no trainer is left from which {server.role} could go on")
        weights = [image.replica["weight"] for image in images]
        self.images.write_part(server, sum(weights[1:], weights[0]) / len(weights))

    def fill_trainer(self, trainer: Member) -> None:
        """It goes on from a peer, under a centralised method from the central copy; its optimizer is the peer's."""
        peers = self.statuses.at_work()[:1]
        if not peers:
            raise NobodyLeft(f"no trainer is left from which {trainer.role} could go on")
        (image,) = self.images.of(peers)
        if self.method.centralised:
            center = self.images.read_center()
            image = TrainerImage({**image.replica, "weight": center}, self.method.init(center))
        self.images.restore(trainer, image)

    @property
    def error(self) -> None:
        return None

    def settle(self, timeout_s: float) -> bool:
        return True

    @property
    def copies(self) -> int:
        return len(self.statuses.at_work())

    def image(self) -> DenseImage:
        return self.images.dense()

    def load(self, image: DenseImage) -> None:
        self.images.load_dense(image)

    def restart(self, before: AggregationState) -> None:
        """There are no global steps."""

    @property
    def aggregation(self) -> None:
        return None

    def distance(self, sketches: Sequence[Tensor]) -> float | None:
        return distance(sketches)
