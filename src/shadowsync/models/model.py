"""The seam between the configuration and a model: options in, a plain `nn.Module` out.

`B` samples, `N` dense columns, `D_f` width of feature f's vector, `I` inputs and `O` outputs of a layer.
"""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from shadowsync.errors import ConfigError
from shadowsync.models.vectors import NO_SEQUENCES

Widths = tuple[Annotated[int, Field(gt=0, le=65_536)], ...]
"""Hidden widths of a tower of layers; more and larger ones cost time and memory and fit more."""


@dataclass(frozen=True)
class SequenceInput:
    """A feature with `pooling=none`, of which a model is given `JaggedVectors`.

    Attributes:
        dim: width of a vector.
        partners: the pooled features with one id per sample that look rows up in the same table.
    """

    dim: int
    partners: tuple[str, ...] = ()


class ModelSpec(ABC):
    """A kind of model with its options (the dataclass fields of the member).

    What `build` returns is called as `module(dense [B, N], {feature: [B, D_f]}) → logits [B]` and knows nothing of
    distribution; a user's own module is called in the same way. Under a feature with `pooling=none` stand
    `JaggedVectors`.
    """

    name: ClassVar[str]

    @abstractmethod
    def build(
        self, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput] = NO_SEQUENCES
    ) -> nn.Module:
        """A freshly initialised module for `N` dense columns, which may be none; depends on torch's random state only.

        It is called once more before, with torch's meta device as the default, to know how large the module gets.
        `dims` are the widths of the pooled features' vectors, in the order of the configuration; `sequences` are the
        features that are not pooled. Raises `ConfigError` if the model cannot work on these columns.
        """

    def wanted_sequences(self, histories: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """The features that are to come as sequences, although the configuration does not say so of them.

        `histories` are those with several ids per sample, each with the features with one id per sample that share its
        table; it is empty where the configuration says of any feature that it is a sequence.
        """
        del histories
        return ()


def refuse_sequences(model: str, sequences: Mapping[str, SequenceInput]) -> None:
    """Raises `ConfigError` naming the first feature that is not pooled, for a model that takes pooled vectors only."""
    for feature in sequences:
        raise ConfigError(
            f"model.name={model} takes one vector per feature, but feature {feature} has pooling=none: set "
            f"embedding.pooling={{{feature}: mean}}, or model.name=din or dien, which take sequences"
        )


def common_dim(model: str, dims: Mapping[str, int]) -> int:
    """The one width that all features have; raises `ConfigError` if two differ, or there is none."""
    if not dims:
        raise ConfigError(f"model.name={model} needs at least one categorical feature; the data has none")
    first, width = next(iter(dims.items()))
    for feature, other in dims.items():
        if other != width:
            raise ConfigError(
                f"model.name={model} needs vectors of one width, but feature {first} has {width} and {feature} has "
                f"{other}: give their tables the same dim, or set model.name=dcn, which takes mixed widths"
            )
    return width


def draw(weights: Tensor, std: float) -> None:
    """Draws `weights ~ N(0, std²)`. Where only shapes are asked for (meta), torch would load its compiler for that."""
    if not weights.is_meta:
        nn.init.normal_(weights, std=std)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A layer `[B, I] → [B, O]` with weights ~ N(0, 2/(I+O)) and biases of zero.

    Source: the weights of the DLRM reference (arXiv 1906.00091, its authors' code). Ours differ in the biases, which
    are ~ N(0, 1/O) there: in a narrow layer some of them keep a ReLU at zero for every sample from the first step on.
    """
    layer = nn.Linear(inputs, outputs, bias)
    draw(layer.weight, (2 / (inputs + outputs)) ** 0.5)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, hidden: Sequence[int]) -> nn.Sequential:
    """Layers `[B, I] → [B, hidden[-1]]`, each with a ReLU behind it; no layers at all pass their input on."""
    layers = []
    for left, right in itertools.pairwise((inputs, *hidden)):
        layers += [linear(left, right), nn.ReLU()]
    return nn.Sequential(*layers)


def tower(inputs: int, hidden: Sequence[int]) -> nn.Sequential:
    """`mlp` with one more layer to a single number, `[B, I] → [B, 1]`."""
    return mlp(inputs, hidden).append(linear(hidden[-1] if hidden else inputs, 1))


def check_module(module: nn.Module) -> None:
    """Raises `ConfigError` for what is no module."""
    if not isinstance(module, nn.Module):
        shown = module.__name__ if isinstance(module, type) else repr(module)
        raise ConfigError(f"the model must be an instance of torch.nn.Module, not {shown}")


def copy_module(module: nn.Module, instead: Mapping[int, Any] | None = None) -> nn.Module:
    """A copy of a user's module, with parameters of its own; `instead` of some, by their `id`, it has others.

    Raises:
        ConfigError: it is no module, or cannot be copied.
    """
    check_module(module)
    try:
        return copy.deepcopy(module, dict(instead or {}))
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"the model {type(module).__name__} cannot be copied for each worker: {str(error).splitlines()[0]}"
        ) from error
