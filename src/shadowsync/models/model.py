"""The seam between the configuration and a model: options in, a plain `nn.Module` out.

`B` samples, `N` dense columns, `D_f` width of feature f's vector.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn

from shadowsync.errors import ConfigError

Widths = tuple[Annotated[int, Field(gt=0, le=65_536)], ...]
"""Hidden widths of a tower of layers; more and larger ones cost time and memory and fit more."""


class ModelSpec(ABC):
    """A kind of model with its options (the dataclass fields of the member).

    What `build` returns is called as `module(dense [B, N], {feature: [B, D_f]}) → logits [B]` and knows nothing of
    distribution; a user's own module is called in the same way.
    """

    name: ClassVar[str]

    @abstractmethod
    def build(self, dense_columns: int, dims: Mapping[str, int]) -> nn.Module:
        """A freshly initialised module; its values depend on torch's random state only.

        Args:
            dense_columns: `N`, may be 0.
            dims: the width of each feature's vector, in the order of the configuration.

        Raises:
            ConfigError: the model cannot work on these columns.
        """


def common_dim(model: str, dims: Mapping[str, int]) -> int:
    """The one width that all features have.

    Raises:
        ConfigError: there is no feature, or two features differ.
    """
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
