"""The dense part over several servers: each holds whole parameters, and steps them by itself.

`P` elements of the model's flat tensor, `P_j` of server j's, `Q` parameters of the model.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from shadowsync.aggregation.stepping import DenseGradient
from shadowsync.errors import DataError
from shadowsync.training.replica import Slot, flat_length, laid_out


@dataclass(frozen=True)
class DenseShare:
    """Parameters of one server.

    Attributes:
        indices: among the `Q`, ascending.
        slots: where they lie in the model's flat tensor.
    """

    indices: tuple[int, ...]
    slots: tuple[Slot, ...]

    @cached_property
    def own(self) -> tuple[Slot, ...]:
        """Where they lie in the server's flat tensor, as in that of a model which has no others."""
        return laid_out((slot.name, slot.shape) for slot in self.slots)

    @cached_property
    def length(self) -> int:
        """`P_j`."""
        return flat_length(self.own)

    def cut(self, flat: Tensor) -> Tensor:
        """The server's elements, `[P_j]`, of a tensor `[P]`; without a copy where they are the first ones."""
        if self.own == self.slots:
            return flat[: self.length]
        found = flat.new_zeros(self.length)
        for there, here in zip(self.slots, self.own, strict=True):
            here.view(found).copy_(there.view(flat))
        return found

    def put(self, part: Tensor, flat: Tensor) -> None:
        """Writes the server's elements `[P_j]` to their places in a tensor `[P]`.

        Raises:
            DataError: it has another number of elements.
        """
        if part.shape != (self.length,):
            raise DataError(f"{list(part.shape)} elements of the dense part are not those of {self.length} here")
        for there, here in zip(self.slots, self.own, strict=True):
            there.view(flat).copy_(here.view(part))

    def gradient(self, whole: DenseGradient) -> DenseGradient:
        """The server's part of a gradient."""
        return DenseGradient(self.cut(whole.flat), tuple(whole.used[index] for index in self.indices))

    def module(self, whole: nn.Module, buffers: bool) -> nn.Module:
        """A module that holds copies of these parameters of the model under their names, and computes nothing.

        Args:
            whole: the model.
            buffers: with copies of those that the model saves.
        """
        made, parameters = nn.Module(), dict(whole.named_parameters())
        for slot in self.slots:
            folder, leaf = _place(made, slot.name)
            folder.register_parameter(leaf, nn.Parameter(parameters[slot.name].detach().clone()))
        saved: Collection[str] = whole.state_dict().keys() if buffers else ()
        for name, buffer in whole.named_buffers():
            if name in saved:
                folder, leaf = _place(made, name)
                folder.register_buffer(leaf, buffer.detach().clone())
        return made


def divide(slots: Sequence[Slot], servers: int) -> tuple[DenseShare, ...]:
    """The parameters for each of at most so many servers; none is without any, but for a model that has none.

    The largest are given out first, each to the server with the fewest elements so far.
    """
    shares: list[list[int]] = [[] for _ in range(max(1, min(servers, len(slots))))]
    filled = [0] * len(shares)
    for index in sorted(range(len(slots)), key=lambda index: -slots[index].numel):
        least = filled.index(min(filled))
        shares[least].append(index)
        filled[least] += max(1, slots[index].numel)
    return tuple(DenseShare(tuple(sorted(share)), tuple(slots[index] for index in sorted(share))) for share in shares)


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that holds what has this name, made where it is not there, and the last word of the name."""
    *path, leaf = name.split(".")
    for word in path:
        if word not in root._modules:
            root.add_module(word, nn.Module())
        found = root._modules[word]
        assert found is not None
        root = found
    return root, leaf
