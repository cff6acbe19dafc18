"""A batch by the names of its columns, and how it becomes what a module of the user's is called with.

`B` samples, `N` dense columns, `F` features, `T` length of padded sequences.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadowsync.data.batch import Jagged
from shadowsync.data.source import Schema
from shadowsync.errors import ConfigError
from shadowsync.models.model import class_of
from shadowsync.registry import nearest

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class Inputs:
    """One batch; what a function given to `wrap` as `inputs` makes a module's arguments from.

    Attributes:
        schema: the names.
        dense: all dense columns, float32 `[B, N]`.
    """

    def __init__(self, schema: Schema, dense: Tensor, ids: Jagged) -> None:
        self.schema, self.dense = schema, dense
        self._ids = ids
        self._positions = {feature.name: index for index, feature in enumerate(schema.features)}

    def __getitem__(self, name: str) -> Tensor:
        """A column: of dense ones float32 `[B]`, of ids int64 `[B]`, of several ids per sample int64 `[B, T]`, with
        zeros behind them up to the longest of the batch.
        """
        if name in self.schema.dense:
            return self.dense[:, self.schema.dense.index(name)]
        position = self._position(name)
        if self.schema.features[position].multi_hot:
            return self.padded(name)
        start = position * self._ids.samples
        if self._ids.offsets is None:
            return self._ids.values[start : start + self._ids.samples]
        return self._ids.values[self._ids.offsets[start : start + self._ids.samples]]

    def columns(self, *names: str) -> dict[str, Tensor]:
        """These columns by their names, or all of them."""
        return {name: self[name] for name in names or names_of(self.schema)}

    def ids(self, *names: str) -> Tensor:
        """Features with one id per sample side by side, int64 `[B, F]`; all of them, unless they are named."""
        wanted = names or tuple(self._positions)
        return torch.stack([self[name] for name in wanted], dim=1)

    def matrix(self, *names: str) -> Tensor:
        """Columns of numbers side by side, ids as numbers too, float32 `[B, columns]`; a sequence has `T` of them."""
        wanted = (self[name] for name in names or names_of(self.schema))
        return torch.cat([(column if column.dim() > 1 else column[:, None]).float() for column in wanted], dim=1)

    def padded(self, name: str, length: int | None = None, fill: int = 0, left: bool = False) -> Tensor:
        """The ids of a feature, int64 `[B, T]`, with `fill` behind them, or in front of them (`left`).

        `length` is `T`, and of more ids the last ones are kept; None: as long as the longest.
        """
        ids, start = self._ids, self._position(name) * self._ids.samples
        offsets = ids.bag_offsets()[start : start + ids.samples + 1]
        lengths = offsets.diff()
        size = length if length is not None else _number(lengths.max()) if ids.samples else 0
        kept = lengths.clamp(max=size)[:, None]
        place = torch.arange(size, device=lengths.device) - (size - kept if left else 0)
        inside = (place >= 0) & (place < kept)
        where = torch.where(inside, offsets[1:, None] - kept + place, ids.values.shape[0])
        return F.pad(ids.values, (0, 1), value=fill)[where]

    def jagged(self, *names: str) -> Jagged:
        """The ids of these features, or of all, sample after sample of the first, then of the second …, with offsets
        (`bag_offsets()`) and weights."""
        ids, found = self._ids, [self._position(name) for name in names]
        if ids.offsets is None or not names:
            return ids.select(found) if names else ids
        bags = [ids.offsets[at * ids.samples : (at + 1) * ids.samples + 1] for at in found]
        values, weights = [], []
        for own in bags:
            first, count = _number(own[0]), _number(own[-1] - own[0])
            _known(first + count <= ids.values.shape[0])
            values.append(ids.values.narrow(0, first, count))
            weights += [] if ids.weights is None else [ids.weights.narrow(0, first, count)]
        lengths = torch.cat([own.diff() for own in bags])
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        return Jagged(torch.cat(values), offsets, torch.cat(weights) if weights else None, len(names), ids.samples)

    def kjt(self, *names: str) -> "KeyedJaggedTensor | _TracedKeys":
        """The ids of these features, or of all, as TorchRec's modules take them.

        Raises:
            ConfigError: TorchRec is not installed.
        """
        try:
            from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # noqa: PLC0415 only who has it needs it
        except ImportError as error:
            raise ConfigError("inputs: kjt needs TorchRec, which is not installed: pip install torchrec") from error
        keys = list(names or self._positions)
        if torch.compiler.is_exporting():
            return _TracedKeys({name: self.jagged(name) for name in keys})
        ids = self.jagged(*names)
        return KeyedJaggedTensor(keys, ids.values, ids.weights, offsets=ids.bag_offsets(), stride=ids.samples)

    def _position(self, name: str) -> int:
        if name not in self._positions:
            known = names_of(self.schema)
            raise ConfigError(f"inputs: there is no column {name}{nearest(name, known)}; there are {', '.join(known)}")
        return self._positions[name]


class _TracedKeys:
    """What TorchRec's collections use of a `KeyedJaggedTensor`, which `torch.export` cannot trace."""

    def __init__(self, parts: Mapping[str, Jagged]) -> None:
        self._parts = parts

    def keys(self) -> list[str]:
        return list(self._parts)

    def to_dict(self) -> "dict[str, JaggedTensor]":
        from torchrec.sparse.jagged_tensor import JaggedTensor  # noqa: PLC0415 as above

        return {
            name: JaggedTensor(ids.values, ids.weights, lengths=ids.lengths(), offsets=ids.bag_offsets())
            for name, ids in self._parts.items()
        }

    def inverse_indices_or_none(self) -> None:
        return None


def _number(tensor: Tensor) -> int:
    """What a tensor of one element holds, not negative; a symbol to what traces this."""
    found: int = tensor.item()  # type: ignore[assignment]
    _known(found >= 0)
    return found


def _known(condition: bool) -> None:
    """So it is, and whatever traces this may rely on it."""
    torch._check(condition)  # type: ignore[no-untyped-call]


Given = Callable[[Inputs], Any] | Mapping[str, "str | Sequence[str] | Callable[[Inputs], Any]"] | None
"""What is given to `wrap` as `inputs`."""
Binding = Callable[[nn.Module, Inputs], Any]
"""Calls a module with a batch."""
_GROUPS: Mapping[str, Callable[[Inputs], Any]] = {
    "dense": lambda batch: batch.dense,
    "dense_features": lambda batch: batch.dense,
    "kjt": lambda batch: batch.kjt(),
    "sparse_features": lambda batch: batch.kjt(),
    "columns": lambda batch: batch.columns(),
    "inputs": lambda batch: batch.columns(),
    "matrix": lambda batch: batch.matrix(),
    "X": lambda batch: batch.matrix(),
}
"""Names that stand for more than one column, unless a column is called so."""


def names_of(schema: Schema) -> tuple[str, ...]:
    """Of all columns."""
    return *schema.dense, *(feature.name for feature in schema.features)


def binding(model: nn.Module, given: Given, schema: Schema) -> Binding:
    """How the module is called.

    Raises:
        ConfigError: a parameter of its forward, or what is given for it, is no column.
    """
    if callable(given):

        def call(module: nn.Module, batch: Inputs) -> Any:
            arguments = given(batch)
            return module(*arguments) if isinstance(arguments, tuple) else module(arguments)

        return call
    if given:
        parameters = inspect.signature(model.forward).parameters
        open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        for name in [] if open_ended else given:
            if name not in parameters:
                raise ConfigError(
                    f"inputs: {name} is no parameter of the forward of {class_of(model)}{nearest(name, parameters)}; "
                    f"it has {', '.join(parameters) or 'none'}"
                )
    wanted = {name: _value(name, spec, schema) for name, spec in given.items()} if given else _by_name(model, schema)
    return lambda module, batch: module(**{name: value(batch) for name, value in wanted.items()})


def _value(
    parameter: str, spec: str | Sequence[str] | Callable[[Inputs], Any], schema: Schema
) -> Callable[[Inputs], Any]:
    if callable(spec):
        return spec
    known = names_of(schema)
    for name in [spec] if isinstance(spec, str) else spec:
        if name not in known and not (isinstance(spec, str) and name in _GROUPS):
            raise ConfigError(
                f"inputs: {parameter} is to be column {name}, which there is not{nearest(name, known)}; there are "
                f"{', '.join(known)}, and {', '.join(_GROUPS)} for several of them"
            )
    if not isinstance(spec, str):
        return lambda batch: batch.ids(*spec)
    return _GROUPS[spec] if spec not in known else lambda batch: batch[spec]


def _by_name(model: nn.Module, schema: Schema) -> dict[str, Callable[[Inputs], Any]]:
    """Each parameter of the module's forward is the column, or the group of columns, of its name."""
    found: dict[str, Callable[[Inputs], Any]] = {}
    known = names_of(schema)
    for name, parameter in inspect.signature(model.forward).parameters.items():
        group = "kjt" if "KeyedJaggedTensor" in str(parameter.annotation) else name
        if name in known or group in _GROUPS:
            found[name] = _value(name, name if name in known else group, schema)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise ConfigError(
                f"the model {type(model).__name__} is called with {name}, and no column has that name"
                f"{nearest(name, known)}: say what it is with shadowsync.wrap(model, inputs=lambda batch: …), for "
                f"instance (batch.dense, batch.ids()); there are {', '.join(itertools.islice(known, 20))}"
            )
    return found
