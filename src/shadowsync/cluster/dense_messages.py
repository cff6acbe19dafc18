"""Images of the dense part as they cross."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shadowsync.cluster.trainer_messages import ImageNames
from shadowsync.dense_state import TrainerImage
from shadowsync.errors import DataError
from shadowsync.rpc.service import Reply


def image_reply(image: TrainerImage) -> Reply:
    """An image as it crosses."""
    tensors = [*image.replica.values(), *image.method.values()]
    names = ImageNames(tuple(image.replica), tuple(image.method))
    return Reply(names, tuple(tensor.detach().cpu().contiguous() for tensor in tensors))


def read_image(names: ImageNames, tensors: Sequence[Tensor]) -> TrainerImage:
    """An image from what crossed.

    Raises:
        DataError: names and tensors are not of the same number.
    """
    if len(names.replica) + len(names.method) != len(tensors):
        raise DataError(f"an image of {len(names.replica) + len(names.method)} names came with {len(tensors)} tensors")
    split = len(names.replica)
    replica = dict(zip(names.replica, tensors[:split], strict=True))
    return TrainerImage(replica, dict(zip(names.method, tensors[split:], strict=True)))


def check_image(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Compares the tensors of an image with those that it is to be put into.

    Raises:
        DataError: names, types or sizes differ.
    """

    def described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, int]]:
        return {name: (tensor.dtype, tensor.numel()) for name, tensor in tensors.items()}

    if described(given) != described(own):
        names = sorted({*given, *own})
        wrong = next((n for n in names if described(given).get(n) != described(own).get(n)), "nothing")
        raise DataError(f"an image with another {wrong} does not fit this role")
