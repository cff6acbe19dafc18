"""The seam between the configuration and a model: options in, a plain `nn.Module` out.

`B` samples, `N` dense columns, `D_f` width of feature f's vector, `I` inputs and `O` outputs of a tower.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from torch import nn

from shadowsync.errors import ConfigError
from shadowsync.models.layers import mlp, tower
from shadowsync.models.vectors import NO_SEQUENCES

_PENALTIES = "train.l2 is that of the layers, and embedding.l2 that of the rows"
_RATES = "train.lr is that of the layers, and embedding.lr that of the rows"
_WIDTHS = "model.embedding_dim is the width of the vectors, one number or by feature"
_DROPOUT = "it is called model.dropout"
_NORM = "set model.norm=batch, or model.norm=layer"


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

    Attributes:
        lists: how features with several ids per sample are pooled in tables made by default, unless the configuration
            says so of them; None leaves it to the source.
        extra_columns: columns that a row has in front of its vector, in tables made by default.
        several: it answers any number of labels, of which it is told as `tasks`; of more than one by logits `[B, T]`.
    """

    name: ClassVar[str]
    lists: ClassVar[Literal["sum", "mean"] | None] = None
    several: ClassVar[bool] = False
    not_options: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("l2", "weight_decay", "l2_reg_embedding", "l2_reg_linear", "l2_reg_dnn"), _PENALTIES),
        **dict.fromkeys(("embedding_regularizer", "net_regularizer", "regularizer"), _PENALTIES),
        **dict.fromkeys(("lr", "learning_rate"), _RATES),
        **dict.fromkeys(("dim", "emb_dim", "embedding_size", "embedding_dims"), _WIDTHS),
    }

    @property
    def extra_columns(self) -> int:
        return 0

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

    def as_trained(self, parameters: Collection[str], given: Collection[str]) -> Self:
        """The spec that a checkpoint with parameters of these names was trained with, as far as options were left open:
        all but those `given`. It differs from this one where a default has changed since.
        """
        del parameters, given
        return self


@dataclass(frozen=True, kw_only=True)
class TowerSpec(ModelSpec):
    """A model with towers of layers.

    Attributes:
        dropout: share of each hidden layer's outputs in the towers that are 0 in a training step, others each time,
            while the rest are scaled up to keep the mean; afterwards (validation, evaluation, prediction, export)
            nothing is left out. More keeps a model from learning its rows by heart, and slows it down.
        norm: what a hidden layer's outputs are normalised by before their ReLU. `batch`, by the samples of a training
            step, and by running statistics afterwards; `layer`, by the sample's own outputs; `none`.
    """

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    norm: Literal["none", "batch", "layer"] = "none"

    not_options: ClassVar[Mapping[str, str]] = {
        **ModelSpec.not_options,
        **dict.fromkeys(("dropout_rate", "dnn_dropout", "net_dropout", "keep_prob"), _DROPOUT),
        **dict.fromkeys(("batch_norm", "layer_norm", "use_bn", "dnn_use_bn", "batchnorm"), _NORM),
    }

    def mlp(self, inputs: int, hidden: Sequence[int]) -> nn.Sequential:
        """Hidden layers `[B, I] → [B, hidden[-1]]`."""
        return mlp(inputs, hidden, self.dropout, self.norm)

    def tower(self, inputs: int, hidden: Sequence[int], outputs: int = 1) -> nn.Sequential:
        """Hidden layers, and one more that is none, `[B, I] → [B, O]`."""
        return tower(inputs, hidden, outputs, self.dropout, self.norm)


def refuse_sequences(model: str, sequences: Mapping[str, SequenceInput]) -> None:
    """Raises `ConfigError` naming the first feature that is not pooled, for a model that takes pooled vectors only."""
    for feature in sequences:
        raise ConfigError(
            f"model.name={model} takes one vector per feature, but feature {feature} has pooling=none: set "
            f"embedding.pooling={{{feature}: mean}}, or model.name=din or dien, which take sequences"
        )


def need_features(model: str, dims: Mapping[str, int]) -> None:
    """Raises `ConfigError` if there is none."""
    if not dims:
        raise ConfigError(f"model.name={model} needs at least one categorical feature; the data has none")


def common_dim(model: str, dims: Mapping[str, int]) -> int:
    """The one width that all features have; raises `ConfigError` if two differ, or there is none."""
    need_features(model, dims)
    first, width = next(iter(dims.items()))
    for feature, other in dims.items():
        if other != width:
            raise ConfigError(
                f"model.name={model} needs vectors of one width, but feature {first} has {width} and {feature} has "
                f"{other}: give model.embedding_dim as one number and their tables the same dim, or set "
                "model.name=dcn, which takes mixed widths"
            )
    return width


def class_of(module: nn.Module) -> str:
    """What errors call a module: by its class, of a wrapped one by the user's."""
    return str(module._get_name())  # type: ignore[no-untyped-call]


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
            f"the model {class_of(module)} cannot be copied for each worker: {str(error).splitlines()[0]}"
        ) from error
