"""Images of dense parts as roles give and take them, and one image of the whole for any number of dense servers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from shadowsync.aggregation.dense_shares import DenseShare
from shadowsync.dense_state import TrainerImage, is_buffer
from shadowsync.errors import DataError
from shadowsync.rpc.served import served
from shadowsync.training.replica import Replica

IMAGE_S = 20.0
"""Deadline of a pause and of each message of an image: rather no checkpoint than one for which all wait so long."""


class Imaged(ABC):
    """A role with a dense part, of which images are taken and put back."""

    @served(once=False, timeout_s=IMAGE_S)
    def snapshot(self) -> TrainerImage:
        """A copy, which may cross."""
        return self._image().in_main_memory()

    @served()
    def restore(self, image: TrainerImage) -> None:
        """Puts a copy back.

        Raises:
            DataError: it does not fit.
        """
        self._put_back(image)

    @abstractmethod
    def _image(self) -> TrainerImage: ...

    @abstractmethod
    def _put_back(self, image: TrainerImage) -> None: ...


class PartImages:
    """Divides images among the servers, and puts theirs together.

    Args:
        parts: of the servers, in their order; the first has the module's buffers.
        template: a replica of the whole; it is left as it is.
    """

    def __init__(self, parts: Sequence[DenseShare], template: Replica) -> None:
        self._parts = parts
        self._scalars = set(template.optimizer.per_parameter)
        self._length, self._count = len(template.flat), len(template.slots)

    def join(self, images: Sequence[TrainerImage]) -> TrainerImage:
        """The image of the whole, of one from each server.

        Raises:
            DataError: they do not belong together.
        """
        if len(images) == 1:
            return images[0]
        first = images[0].replica
        buffers = {name: tensor for name, tensor in first.items() if is_buffer(name)}
        return TrainerImage({name: self._joined(name, images) for name in first if name not in buffers} | buffers, {})

    def split(self, image: TrainerImage) -> list[TrainerImage]:
        """The image for each server."""
        if len(self._parts) == 1:
            return [image]
        return [
            TrainerImage(
                {
                    name: tensor if is_buffer(name) else self._cut(name, part, tensor)
                    for name, tensor in image.replica.items()
                    if part is self._parts[0] or not is_buffer(name)
                },
                {},
            )
            for part in self._parts
        ]

    def _cut(self, name: str, part: DenseShare, tensor: Tensor) -> Tensor:
        flat = tensor.view(-1)
        return flat[list(part.indices)] if name in self._scalars else part.cut(flat)

    def _joined(self, name: str, images: Sequence[TrainerImage]) -> Tensor:
        pairs = [(part, self._tensor(name, image)) for part, image in zip(self._parts, images, strict=True)]
        whole = pairs[0][1].new_zeros(self._count if name in self._scalars else self._length)
        for part, tensor in pairs:
            if name in self._scalars:
                whole[list(part.indices)] = tensor
            else:
                part.put(tensor, whole)
        return whole

    def _tensor(self, name: str, image: TrainerImage) -> Tensor:
        found = image.replica.get(name)
        if found is None:
            raise DataError(f"a dense server keeps no {name} for its parameters")
        return found
