"""DIN and DIEN: what of a behaviour sequence concerns the candidate that it is attended with.

`B` samples, `N` dense columns, `L` behaviours of all samples, `T` steps of padded sequences, `D` width of a sequence's
vectors, `H` hidden units.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shadowsync.errors import ConfigError
from shadowsync.models.layers import Widths, linear, tower
from shadowsync.models.model import SequenceInput, TowerSpec
from shadowsync.models.vectors import NO_SEQUENCES, JaggedVectors, concatenate, sequence_of
from shadowsync.registry import nearest


@dataclass(frozen=True)
class Interest(TowerSpec):
    """A tower over the dense columns, the pooled vectors and the interest of each sequence; widths may differ.

    Attributes:
        targets: by sequence (pooling=none), the feature it is attended with. Left out: the feature with one id per
            sample that shares its table; and where nothing has pooling=none, each that shares a table so is a sequence.
        deep: hidden widths of the tower; a last layer to the logit is appended.
    """

    targets: dict[str, str] = field(default_factory=dict)
    deep: Widths = (200, 80)

    def wanted_sequences(self, histories: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(self.targets or histories)


@dataclass(frozen=True)
class Din(Interest):
    """Deep Interest Network (arXiv 1706.06978); widths of the features may differ.

    Ours differs: hidden layers have ReLUs where the paper has PReLU or Dice, whose statistics of the batch would make
    samples depend on each other; the activation unit sees difference and product of the two vectors, as in the authors'
    code, instead of their outer product; dense columns go into the tower; there is no mini-batch aware regularisation.
    As there, attention weights are not normalised, so that their sum says how strong an interest is.

    Attributes:
        attention: hidden widths of the activation unit; a last layer to the weight is appended.
    """

    name: ClassVar[str] = "din"
    attention: Widths = (80, 40)

    def build(
        self, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput] = NO_SEQUENCES
    ) -> nn.Module:
        return DinModule(self, dense_columns, dims, sequences)


@dataclass(frozen=True)
class Dien(Interest):
    """Deep Interest Evolution Network (arXiv 1809.03672); widths of the features may differ.

    A sequence is read from its first id, the oldest, to its last. Ours differs: the tower's hidden layers have ReLUs
    where the authors' code has Dice; dense columns go into the tower; of a sequence of more than `steps` ids the last
    are followed; interests are as wide as the sequence's vectors. The auxiliary loss is a mean over the steps of the
    batch, as in the authors' code, and takes as the behaviour that did not follow one that followed elsewhere in the
    batch, so that nothing has to be sampled.

    Attributes:
        steps: ids of a sequence that are followed, the last ones; more costs time.
        auxiliary: weight of the auxiliary loss, which teaches interests to tell the next behaviour from another; more
            counts it more beside the log loss.
    """

    name: ClassVar[str] = "dien"
    steps: Annotated[int, Field(ge=1, le=1000)] = 50
    auxiliary: Annotated[float, Field(ge=0, le=100)] = 0.0

    def build(
        self, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput] = NO_SEQUENCES
    ) -> nn.Module:
        return DienModule(self, dense_columns, dims, sequences)


class DinModule(nn.Module):
    """Logit = tower(dense columns, pooled vectors, the interest of each sequence)."""

    def __init__(
        self, spec: Din, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput]
    ) -> None:
        super().__init__()
        self.targets = find_targets(spec, dims, sequences)
        self.features = tuple(dims)
        self.units = nn.ModuleList(ActivationUnit(sequences[name].dim, spec.attention) for name in self.targets)
        inputs = dense_columns + sum(dims.values()) + sum(sequences[name].dim for name in self.targets)
        self.deep = spec.tower(inputs, spec.deep)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Any]) -> Tensor:
        pairs = zip(self.units, self.targets.items(), strict=True)
        interests = [unit(sequence_of(embeddings, name), embeddings[target]) for unit, (name, target) in pairs]
        columns = torch.cat([dense, concatenate(embeddings, self.features), *interests], dim=1)
        logits: Tensor = self.deep(columns).squeeze(1)
        return logits


class ActivationUnit(nn.Module):
    """The sum of a sample's behaviours, each times a learned function of itself and the target, `[B, D]`.

    Source: arXiv 1706.06978. Computed on the behaviours that there are, without padding: on a
    CPU up to twice as fast as with padded sequences of 0 to 10 behaviours, and as fast where all have 10.
    """

    def __init__(self, dim: int, hidden: Widths) -> None:
        super().__init__()
        self.weight = tower(4 * dim, hidden)

    def forward(self, sequence: JaggedVectors, target: Tensor) -> Tensor:
        vectors = sequence.values
        asked = target.index_select(0, sequence.owners)
        weights = self.weight(torch.cat([asked, vectors, asked - vectors, asked * vectors], dim=1)).squeeze(1)
        return sequence.weighted_sum(weights.to(vectors.dtype))


class DienModule(nn.Module):
    """Logit = tower(dense columns, pooled vectors, each sequence's last interest)."""

    def __init__(
        self, spec: Dien, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput]
    ) -> None:
        super().__init__()
        self.targets = find_targets(spec, dims, sequences)
        self.features = tuple(dims)
        self.steps, self.auxiliary = spec.steps, spec.auxiliary
        self.evolutions = nn.ModuleList(InterestEvolution(sequences[name].dim) for name in self.targets)
        inputs = dense_columns + sum(dims.values()) + sum(sequences[name].dim for name in self.targets)
        self.deep = spec.tower(inputs, spec.deep)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Any]) -> Tensor:
        interests, losses = [], []
        for evolution, (name, target) in zip(self.evolutions, self.targets.items(), strict=True):
            sequence, steps = sequence_of(embeddings, name), self.steps
            if not torch.compiler.is_compiling():  # else the graph is to serve any batch
                longest = int(sequence.lengths().amax()) if sequence.samples else 0
                steps = max(1, min(steps, longest))
            behaviours, mask = sequence.padded(steps)
            interest, extracted = evolution(behaviours, embeddings[target], mask)
            interests.append(interest)
            if self.training and self.auxiliary:
                losses.append(next_behaviour_loss(extracted, behaviours, mask))
        columns = torch.cat([dense, concatenate(embeddings, self.features), *interests], dim=1)
        logits: Tensor = self.deep(columns).squeeze(1)
        return with_loss(logits, self.auxiliary * torch.stack(losses).sum()) if losses else logits


class InterestEvolution(nn.Module):
    """From behaviours to interests, and on to the one that the target is for (arXiv 1809.03672)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.extraction, self.evolution = Recurrence(dim), Recurrence(dim)
        self.attention = linear(dim, dim, bias=False)

    def forward(self, behaviours: Tensor, target: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The last state, `[B, D]`, and the interest after each behaviour, `[B, T, D]`.

        Given behaviours `[B, T, D]`, targets `[B, D]`, and where there is a behaviour, bool `[B, T]`; a sample without
        any gives zeros.
        """
        interests = torch.stack(self.extraction(behaviours), dim=1)
        asked = self.attention(target).to(interests.dtype)
        scores = (interests * asked[:, None]).sum(dim=2)
        # finite, so that a sample without behaviours has no NaN
        shares = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=1) * mask
        return self.evolution(interests, shares)[-1], interests


class Recurrence(nn.Module):
    """A GRU, or with attention an AUGRU, over `[B, T, D]`; gives its states, `T` of `[B, D]`.

    Source: arXiv 1809.03672, "Interest Extractor Layer" (GRU) and "Interest Evolving Layer" (AUGRU): attention scales
    the update gate, so that a step of attention 0 leaves the state as it is.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.of_input, self.of_state = linear(dim, 3 * dim), linear(dim, 3 * dim, bias=False)

    def forward(self, inputs: Tensor, attention: Tensor | None = None) -> list[Tensor]:
        samples, steps, dim = inputs.shape
        # the products with all inputs at once
        given = self.of_input(inputs.flatten(0, 1)).to(inputs.dtype).view(samples, steps, 3, dim).unbind(1)
        states = [inputs.new_zeros(samples, dim)]
        for step, from_input in enumerate(given):
            from_state = self.of_state(states[-1]).to(inputs.dtype).view(samples, 3, dim)
            update, reset = torch.sigmoid(from_input[:, :2] + from_state[:, :2]).unbind(1)
            candidate = torch.tanh(from_input[:, 2] + reset * from_state[:, 2])
            share = update if attention is None else update * attention[:, step, None]
            states.append(torch.lerp(states[-1], candidate, share))
        return states[1:]


def next_behaviour_loss(interests: Tensor, behaviours: Tensor, mask: Tensor) -> Tensor:
    """The auxiliary loss, 0-d: an interest should go with the behaviour that follows, not with another.

    Source: arXiv 1809.03672, "Interest Extractor Layer"; for how ours differs see `Dien`. Interests and behaviours are
    `[B, T, D]`, the mask says where there is a behaviour, bool `[B, T]`.
    """
    follows = mask[:, 1:]
    before, after = interests[:, :-1][follows], behaviours[:, 1:][follows]
    if not len(after):
        return interests.new_zeros(())
    elsewhere = after.roll(len(after) // 2, dims=0)
    return (F.softplus(-(before * after).sum(dim=1)) + F.softplus((before * elsewhere).sum(dim=1))).mean()


def with_loss(logits: Tensor, loss: Tensor) -> Tensor:
    """The logits as they are; whatever is differentiated through them, the gradient of `loss` (0-d) is added to it.

    So a module that returns logits only can have a loss of its own, as mixture-of-experts models do for their balance
    (arXiv 2401.06066, its authors' code). It is exact where the final loss is not scaled afterwards.
    """
    added: Tensor = _WithLoss.apply(logits, loss)  # type: ignore[no-untyped-call]
    return added


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_like = torch.ones_like(loss)
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.loss_like


def find_targets(spec: Interest, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput]) -> dict[str, str]:
    """The target of each sequence, in the order of the sequences; `dims` are the widths of the pooled features.

    Raises:
        ConfigError: there is no sequence; a name is unknown; a sequence has no such feature, or several; or target
            and sequence differ in width.
    """
    chosen = spec.targets
    if not sequences:
        pooled = f" (model.targets names {', '.join(chosen)}, which embedding.pooling pools)" if chosen else ""
        raise ConfigError(
            f"model.name={spec.name} attends over a behaviour sequence, and no feature has pooling=none: let a feature "
            "with several ids per sample share the table of the feature that it is attended with, or name both: "
            f"model.targets={{recent_items: item}}{pooled}"
        )
    for feature in chosen:
        if feature not in sequences:
            raise ConfigError(
                f"model.targets: feature {feature} is no sequence{nearest(feature, sequences)}; sequences, with "
                f"pooling=none, are {', '.join(sequences)}"
            )
    found = {}
    for name, sequence in sequences.items():
        if name not in chosen and len(sequence.partners) != 1:
            several = f"several features with one id per sample share its table: {', '.join(sequence.partners)}"
            none = "no feature with one id per sample shares its table"
            raise ConfigError(
                f"sequence {name}: {several if sequence.partners else none}; name the one it is attended with: "
                f"model.targets={{{name}: {(*sequence.partners, 'FEATURE')[0]}}}"
            )
        target = found[name] = chosen.get(name) or sequence.partners[0]
        if target not in dims:
            raise ConfigError(
                f"model.targets: {name} is attended with {target}, which is no pooled feature{nearest(target, dims)}; "
                f"there are {', '.join(dims) or 'none'}"
            )
        if dims[target] != sequence.dim:
            raise ConfigError(
                f"model.targets: vectors of {name} have {sequence.dim} columns and those of its target {target} "
                f"{dims[target]}: let them share a table, or give their tables the same dim"
            )
    return found
