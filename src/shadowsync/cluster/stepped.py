"""Gradient methods on a cluster: the conductor is the driver's, the dense part the dense servers'."""

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from shadowsync.aggregation.aggregator import Aggregation, Worker
from shadowsync.aggregation.conductor import Conductor, StepRule
from shadowsync.aggregation.conductor_service import ConductorService
from shadowsync.aggregation.counts import AggregationState
from shadowsync.aggregation.step_times import Paces
from shadowsync.aggregation.stepper_remote import StepperRemote
from shadowsync.aggregation.stepping import DenseStep
from shadowsync.cluster.crew import Crew
from shadowsync.cluster.dense_side import DenseSide, NobodyLeft
from shadowsync.cluster.images import Images
from shadowsync.cluster.part_images import PartImages
from shadowsync.cluster.staff import Member
from shadowsync.compression.channel import Line
from shadowsync.compression.plain import Plain
from shadowsync.data.reader import Reader
from shadowsync.dense_state import DenseImage, TrainerImage
from shadowsync.embedding.holding import RowStep
from shadowsync.embedding.remote import EmbeddingRemote, Remote
from shadowsync.metrics.wire import WireCounter
from shadowsync.rpc.errors import GONE, PeerLost
from shadowsync.rpc.generation import Generation
from shadowsync.rpc.pending import Pending

T = TypeVar("T")


@dataclass
class RemoteSteps:
    """Carries global steps out on all servers at once (a `Carrier`), for one generation.

    An embedding server that dies meanwhile is left out: whoever takes its place holds none of the step's gradients.
    Without a dense server there is no step, and everybody is about to go back to a checkpoint.

    Attributes:
        crew: whose servers.
        generation: of the parts.
        trained: samples of the job so far.
        held_bytes: memory of the gradients that waited on all servers when the last step came.
    """

    crew: Crew
    generation: int
    trained: Callable[[], int]
    held_bytes: int = field(default=0, init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    _rows: dict[Member, EmbeddingRemote] = field(default_factory=dict, init=False, repr=False)
    _dense: dict[Member, StepperRemote] = field(default_factory=dict, init=False, repr=False)

    def carry_out(self, dense: DenseStep, rows: RowStep) -> None:
        """As `Carrier.carry_out`.

        Raises:
            PeerLost: the generation is over.
        """
        sent = [self._of_rows(member).commit(rows) for member in self.crew.serving("embedding")]
        try:
            held_bytes = self._step_dense(dense)
        except GONE:
            self._over.wait()
            raise
        self.held_bytes = held_bytes + sum(_unless_gone(answer, 0) for answer in sent)

    def _step_dense(self, step: DenseStep) -> int:
        """Has all dense servers make a step; the bytes of the gradients that waited there."""
        steppers = self._steppers()
        clipped = self.crew.blueprint.config.train.clip_norm is not None
        if clipped and len(steppers) > 1:  # each has only some of the parameters
            norms = [answer.result() for answer in [stepper.norm(step) for stepper in steppers]]
            step = replace(step, norm=math.hypot(*norms))
        return sum(answer.result() for answer in [stepper.commit(step) for stepper in steppers])

    def restart(self, steps: int) -> None:
        """So many steps were made before, and no gradient waits anywhere.

        Raises:
            PeerLost: a server is not there.
        """
        sent = [self._of_rows(member).forget_held(steps - 1) for member in self.crew.row_servers()]
        sent += [stepper.restart(steps) for stepper in self._steppers()]
        for answer in sent:
            answer.result()

    def _steppers(self) -> list[StepperRemote]:
        return [self._of_dense(member) for member in self.crew.dense_servers()]

    def end(self) -> None:
        """The generation is over."""
        self._over.set()

    def _of_dense(self, member: Member) -> StepperRemote:
        found = self._dense.get(member)
        if found is None:
            made = StepperRemote(member.connection, _line("dense"), 0, generation=self.generation)
            found = self._dense[member] = made
        return found

    def _of_rows(self, member: Member) -> EmbeddingRemote:
        found = self._rows.get(member)
        if found is None:
            shards = self.crew.blueprint.shards[member.index]
            remote = Remote(member.connection, shards, member.index, generation=self.generation)
            found = self._rows[member] = EmbeddingRemote(remote, _line("pull"), _line("push"))
        return found


def _unless_gone(answer: Pending[T], otherwise: T) -> T:
    with contextlib.suppress(*GONE):  # the staff has found out, or will
        return answer.result()
    return otherwise


def _line(kind: str) -> Line:
    return Line(kind, Plain(), WireCounter())


class _Generation:
    """The conductor of a generation, with the thread that carries its steps out."""

    def __init__(self, method: Aggregation, rule: StepRule, steps: RemoteSteps, paces: Paces) -> None:
        self.steps = steps
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self.conductor = Conductor(method, rule, steps, run=self._pool.submit, paces=paces)

    def end(self) -> None:
        self.conductor.stop()
        self.steps.end()
        self._pool.shutdown(wait=False, cancel_futures=True)  # it may wait for a server that is silent


class Stepped(DenseSide):
    """One copy, on the dense servers, moved by the global steps of a conductor beside the desk.

    Args:
        method: says what goes into which step.
        rule: how steps are made.
        crew, images: of the session.
    """

    def __init__(self, method: Aggregation, rule: StepRule, crew: Crew, images: Images) -> None:
        self._method, self._rule, self._crew, self._images = method, rule, crew, images
        self._now: _Generation | None = None
        self._before: AggregationState | None = None

    # --- a generation ------------------------------------------------------------------------------------------------

    def open(self, reader: Reader, generation: int) -> ConductorService:
        self.close()
        self._before = None if self._now is None else self.aggregation
        desk = reader.desk
        steps = RemoteSteps(self._crew, generation, lambda: desk.trained)
        paces = Paces() if self._now is None else self._now.conductor.paces
        self._now = _Generation(self._method, self._rule, steps, paces)
        return ConductorService(self._now.conductor, desk, Generation(generation))

    def fill(self) -> None:
        """The servers have made them themselves."""

    def look(self) -> None:
        if self._now is not None:
            self._now.conductor.look()

    def stop(self) -> None:
        if self._now is not None:
            self._now.conductor.stop()

    def close(self) -> None:
        if self._now is not None:
            self._now.end()

    # --- deaths ------------------------------------------------------------------------------------------------------

    @property
    def is_with_trainers(self) -> bool:
        return False

    @property
    def is_with_servers(self) -> bool:
        return True

    def fill_server(self, server: Member) -> None:
        raise NobodyLeft(f"the dense part was lost with the {server.role} before")

    def fill_trainer(self, trainer: Member) -> None:
        """Its workers pull the parameters before their first batch."""

    @property
    def error(self) -> BaseException | None:
        error = None if self._now is None else self._now.conductor.error
        return None if isinstance(error, GONE) else error

    # --- images ------------------------------------------------------------------------------------------------------

    def settle(self, timeout_s: float) -> bool:
        return self._now is None or self._now.conductor.settle(timeout_s)

    def paused(self) -> AbstractContextManager[None]:
        return super().paused() if self._now is None else self._now.conductor.paused()

    @property
    def copies(self) -> int:
        return 1

    def image(self) -> DenseImage:
        return DenseImage((self._parts.join(self._images.of(self._crew.dense_servers())),), None, self._feedback())

    def load(self, image: DenseImage) -> None:
        for server, own in zip(self._crew.dense_servers(), self._parts.split(image.trainers[0]), strict=True):
            self._images.restore(server, own)
        for member in self._with_feedback():
            self._images.restore(member, TrainerImage({}, image.feedback_of(member.index)))

    @property
    def _parts(self) -> PartImages:
        blueprint = self._crew.blueprint
        return PartImages(blueprint.parts, blueprint.session.template)

    def _feedback(self) -> dict[str, Tensor]:
        """What the trainers' workers have not sent of their gradients."""
        trainers = self._with_feedback()
        pairs = zip(trainers, self._images.of(trainers), strict=True)
        return {f"{member.index}.{name}": tensor for member, image in pairs for name, tensor in image.method.items()}

    def _with_feedback(self) -> list[Member]:
        """Trainers that keep something of their gradients, if only what they rounded them with."""
        whole = self._crew.blueprint.choices.codecs["dense"].everything
        return [] if whole else self._crew.statuses.at_work()

    def restart(self, before: AggregationState) -> None:
        if self._now is None:
            raise PeerLost("no generation has begun")
        self._now.conductor.restart(before)
        self._before = None
        self._now.steps.restart(before.global_steps)

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def aggregation(self) -> AggregationState:
        """While everybody goes back to a checkpoint, until `restart` says to which counts, those of the end before."""
        if (before := self._before) is not None:
            return before
        return AggregationState() if self._now is None else self._now.conductor.state

    @property
    def held_bytes(self) -> int:
        return 0 if self._now is None else self._now.steps.held_bytes

    def recent_step_s(self) -> Mapping[Worker, float]:
        return {} if self._now is None else self._now.conductor.recent_step_s()

    def mean_step_s(self) -> Mapping[Worker, float]:
        return {} if self._now is None else self._now.conductor.mean_step_s()

    def distance(self, sketches: Sequence[Tensor]) -> None:
        """Workers' copies are of different steps; how far they are behind is the staleness."""
