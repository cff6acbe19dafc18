"""What a session does about the dense part: the seam between the two families of methods, and the replica methods."""
# ruff: noqa: B027 - what replica methods need not do

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from shadowsync.aggregation.aggregator import Worker
from shadowsync.aggregation.coordinator import StepCoordinator
from shadowsync.aggregation.counts import AggregationState
from shadowsync.checkpoint.job_state import DenseImage, TrainerImage
from shadowsync.cluster.context import Merging, Stepping
from shadowsync.cluster.images import Images
from shadowsync.cluster.manager import ClusterManager
from shadowsync.cluster.supervisor import Member, NobodyLeft
from shadowsync.cluster.trainer_dense import averaged_codec
from shadowsync.compression.channel import Channel
from shadowsync.compression.wire import WireCounter
from shadowsync.data.reader import Reader
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.sync.all_reduce import LocalAverages
from shadowsync.training.gate import Gate


class DenseSide(ABC):
    """The dense part of all trainers, wherever it is; what replica methods need not do does nothing here.

    Attributes:
        is_with_trainers: it is lost with the last trainer.
        is_with_servers: it is lost with a dense server.
        error: what went wrong beside the trainers.
        aggregation: as `Session.aggregation`, of this run and what it went on from.
        held_bytes: memory of the gradients that wait for a global step, all servers; None where that is not known.
    """

    is_with_trainers: ClassVar[bool]
    is_with_servers: ClassVar[bool]

    def __init__(self, manager: ClusterManager, images: Images) -> None:
        self._manager, self._images = manager, images

    # --- a generation ------------------------------------------------------------------------------------------------

    def open(self, reader: Reader, generation: int) -> StepCoordinator | None:
        """A generation begins; what was under way in the one before is ended.

        Returns:
            what trainers find beside the lease service.
        """

    @abstractmethod
    def near(
        self, servers: Sequence[Any], rows: Sequence[EmbeddingServer], gate: Gate, counter: WireCounter
    ) -> Merging | Stepping:
        """What trainers in this process use, where all roles are here.

        Args:
            servers: what the dense servers serve.
            rows: the embedding servers.
            gate: of all trainers.
            counter: of what would cross.
        """

    def fill(self) -> None:
        """Servers have fresh parts: gives them initial values, unless they have made them themselves.

        Raises:
            PeerLost: one of them is not there.
        """

    def look(self) -> None:
        """Called several times a second while trainers are at work."""

    def stop(self) -> None:
        """Lets everybody go who waits for others."""

    def close(self) -> None:
        """Ends threads."""

    @abstractmethod
    def fill_server(self, server: Member) -> None:
        """A dense server has taken another's place while the others go on.

        Raises:
            NobodyLeft: it cannot go on.
        """

    def fill_trainer(self, trainer: Member) -> None:
        """A trainer is about to start while others go on; raises as `fill_server`."""

    # --- images ------------------------------------------------------------------------------------------------------

    def settle(self, timeout_s: float) -> bool:
        """Waits, while trainers stand still, until nothing changes anything any more; False if it does after that."""
        return True

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

    def restart(self, before: AggregationState) -> None:
        """Counts go on from these; after `load`.

        Raises:
            PeerLost: a server is not there.
        """

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        return None

    @property
    def aggregation(self) -> AggregationState | None:
        return None

    @property
    def held_bytes(self) -> int | None:
        return None

    def recent_step_s(self) -> Mapping[Worker, float]:
        """How long each worker of a gradient method takes for a batch now."""
        return {}

    def mean_step_s(self) -> Mapping[Worker, float]:
        """How long each worker of a gradient method took for a batch, on average since the start."""
        return {}

    def distance(self, sketches: Sequence[Tensor]) -> float | None:
        """Mean of ‖w_i − mean w‖ / ‖mean w‖ over the same coordinates of each trainer's replica; None for one."""
        return None


class Merged(DenseSide):
    """Replica methods: each trainer has its own dense part, and dense servers may keep a central one."""

    is_with_trainers = True
    is_with_servers = False

    def near(
        self, servers: Sequence[Any], rows: Sequence[EmbeddingServer], gate: Gate, counter: WireCounter
    ) -> Merging:
        spec = self._manager.spec
        codec, collective = spec.job.choices.codecs["dense"].levels[0], spec.job.choices.method.collective
        averaged = Channel("dense", averaged_codec(codec, collective, spec.template), counter)
        return Merging(LocalAverages(range(spec.trainers), averaged, gate.waiting), tuple(servers))

    def fill(self) -> None:
        self._images.write_center(self._manager.spec.template.flat.detach().cpu())

    def fill_server(self, server: Member) -> None:
        """Its part of the central copy is the mean of the replicas."""
        images = self._images.of(self._manager.statuses.at_work())
        if not images:
            raise NobodyLeft(f"no trainer is left from which {server.role} could go on")
        weights = [image.replica["weight"] for image in images]
        self._images.write_part(server, sum(weights[1:], weights[0]) / len(weights))

    def fill_trainer(self, trainer: Member) -> None:
        """It goes on from a peer, under a centralised method from the central copy; its optimizer is the peer's."""
        peers, method = self._manager.statuses.at_work()[:1], self._manager.spec.job.choices.method
        if not peers:
            raise NobodyLeft(f"no trainer is left from which {trainer.role} could go on")
        (image,) = self._images.of(peers)
        if method.centralised:
            center = self._images.read_center()
            image = TrainerImage({**image.replica, "weight": center}, method.init(center))
        self._images.restore(trainer, image)

    @property
    def copies(self) -> int:
        return len(self._manager.statuses.at_work())

    def image(self) -> DenseImage:
        return self._images.dense()

    def load(self, image: DenseImage) -> None:
        self._images.load_dense(image)

    def distance(self, sketches: Sequence[Tensor]) -> float | None:
        if len(sketches) < 2:
            return None
        stacked = torch.stack(list(sketches))
        mean = stacked.mean(0)
        return float((stacked - mean).norm(dim=1).mean() / mean.norm().clamp_min(1e-12))
