"""Dead units: those of a ReLU that are 0 for every sample, so that what lies in front of them says nothing.

`B` samples, `U` units of a layer: the last dimension of a ReLU's output, or one where it is `[B]`.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shadowsync.training.kernels import FastTower


class Units(msgspec.Struct, frozen=True, kw_only=True):
    """What the units of a model's ReLUs did on so many `rows` of the test set: by layer, in the order in which they are
    called, `U`, and the share of units that were 0 on all of these rows.
    """

    rows: int
    sizes: dict[str, int]
    dead: dict[str, float]


class UnitActivity:
    """Notes which units of a module's `nn.ReLU`s are ever above 0.

    A ReLU that a module applies as a function (`torch.relu`) has no name and is not seen; other activations do not die.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._rows = 0
        self._called_last = ""
        # by the names of the ReLU and of the layer with weights called before it, and the units: one `nn.ReLU` may
        # stand behind several layers; in a loop it is the same layer again
        self._active: dict[tuple[str, str, int], Tensor] = {}

    @contextmanager
    def watching(self, rows: int) -> Iterator[None]:
        """Inside, the module is called with `rows` samples that are to be looked at; it must not be accelerated there.

        Towers that are fast already compute their layers once more, one by one.
        """
        hooks = []
        for name, child in self._module.named_modules():
            if isinstance(child, nn.ReLU):
                hooks.append(child.register_forward_hook(partial(self._note, name)))
            elif isinstance(child, FastTower):
                hooks.append(child.register_forward_pre_hook(_one_by_one))
            elif next(child.parameters(recurse=False), None) is not None:
                hooks.append(child.register_forward_hook(partial(self._pass, name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._rows += rows

    def units(self) -> Units | None:
        """Of the rows so far; None where no ReLU was called."""
        if not self._active:
            return None
        uses, named = Counter(relu for relu, _, _ in self._active), {}
        for (relu, behind, size), seen in self._active.items():
            after = f" after {behind or 'the input'} ({size})" if uses[relu] > 1 else ""
            named[f"{relu or 'relu'}{after}"] = seen
        return Units(
            rows=self._rows,
            sizes={name: len(seen) for name, seen in named.items()},
            dead={name: 1 - int(seen.sum()) / len(seen) for name, seen in named.items()},
        )

    def _pass(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._called_last = name

    def _note(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.numel() == 0:
            return
        by_unit = output.detach().reshape(-1, output.shape[-1] if output.dim() > 1 else 1)
        active = by_unit.amax(dim=0).cpu() > 0
        layer = (name, self._called_last, len(active))
        before = self._active.get(layer)
        self._active[layer] = active if before is None else torch.logical_or(before, active)


def _one_by_one(tower: FastTower, inputs: tuple[Tensor]) -> None:
    nn.Sequential.forward(tower, *inputs)  # type: ignore[no-untyped-call]
