"""A dense server of gradient methods: the one copy of its parameters with their optimizer state, and its images."""

from dataclasses import dataclass, field

from torch import nn

from shadowsync.aggregation.dense_shares import DenseShare
from shadowsync.aggregation.stepper_service import StepperService
from shadowsync.aggregation.stepping import DenseStepper
from shadowsync.assembly import make_module, make_replica
from shadowsync.choices import choose_all
from shadowsync.cluster.part_images import Imaged
from shadowsync.config import Config
from shadowsync.data.source import Schema
from shadowsync.dense_state import TrainerImage, check_image, dense_tensors
from shadowsync.embedding.catalog import widths
from shadowsync.embedding.table import Table
from shadowsync.rpc.generation import Generation
from shadowsync.rpc.served import Served
from shadowsync.runtime.runtime import Home
from shadowsync.training.pieces import by_parameter


@dataclass(frozen=True)
class StepperSpec:
    """What it is made from: the fields of `TrainerSpec`, the parameters, and whether it has the module's buffers."""

    config: Config
    schema: Schema
    tables: tuple[Table, ...]
    generation: int
    model: nn.Module | None = field(repr=False)
    part: DenseShare
    first: bool


def build_stepper(spec: StepperSpec, _: Home) -> Served:
    """Makes one with the initial values."""
    choices = choose_all(spec.config, own_model=spec.model is not None)
    module = make_module(spec.config, choices, spec.schema, spec.tables, spec.model)
    own = spec.part.module(module, buffers=spec.first)
    replica = make_replica(spec.config, choices, own, widths(spec.tables))
    stepper = DenseStepper(replica, spec.config.train.clip_norm)
    codec = by_parameter(choices.codecs["dense"], replica.slots, len(replica.flat))
    workers = spec.config.train.workers
    return Served(StepperPart(stepper, codec, Generation(spec.generation), workers))


class StepperPart(StepperService, Imaged):
    """A `StepperService` of which images are taken and put back."""

    def _image(self) -> TrainerImage:
        return TrainerImage.of(self._stepper.replica, {})

    def _put_back(self, image: TrainerImage) -> None:
        replica = self._stepper.replica
        check_image(image.replica, dense_tensors(replica))
        image.put_into(replica)
        self._stepper.restart(self._stepper.newest.number)
