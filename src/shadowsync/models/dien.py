"""DIEN: a recurrent network extracts interests from the behaviour sequence, another follows those near the candidate.

`B` samples, `N` dense columns, `D` width of a sequence's vectors, `T` steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shadowsync.models.model import ModelSpec, SequenceInput, Widths, find_targets, linear, tower
from shadowsync.models.vectors import NO_SEQUENCES, JaggedVectors, concatenate, sequence_of


@dataclass(frozen=True)
class Dien(ModelSpec):
    """Deep Interest Evolution Network (arXiv 1809.03672); widths of the features may differ.

    A sequence is read from its first id, the oldest, to its last. Ours differs: the tower's hidden layers have ReLUs
    where the authors' code has Dice; dense columns go into the tower; of a sequence of more than `steps` ids the last
    are followed; interests are as wide as the sequence's vectors. The auxiliary loss is a mean over the steps of the
    batch, as in the authors' code, and takes as the behaviour that did not follow one that followed elsewhere in the
    batch, so that nothing has to be sampled.

    Attributes:
        targets: by sequence (pooling=none), the feature it is attended with. Left out: the feature with one id per
            sample that shares its table; and where nothing has pooling=none, each that shares a table so is a sequence.
        steps: ids of a sequence that are followed, the last ones; more costs time.
        auxiliary: weight of the auxiliary loss, which teaches interests to tell the next behaviour from another; more
            counts it more beside the log loss.
        deep: hidden widths of the tower; a last layer to the logit is appended.
    """

    name: ClassVar[str] = "dien"
    targets: dict[str, str] = field(default_factory=dict)
    steps: Annotated[int, Field(ge=1, le=1000)] = 50
    auxiliary: Annotated[float, Field(ge=0, le=100)] = 0.0
    deep: Widths = (200, 80)

    def build(
        self, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput] = NO_SEQUENCES
    ) -> nn.Module:
        return DienModule(self, dense_columns, dims, sequences)

    def wanted_sequences(self, histories: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(self.targets or histories)


class DienModule(nn.Module):
    """The model as `Dien` describes it: logit = tower(dense columns, pooled vectors, each sequence's last interest)."""

    def __init__(
        self, spec: Dien, dense_columns: int, dims: Mapping[str, int], sequences: Mapping[str, SequenceInput]
    ) -> None:
        super().__init__()
        self.targets = find_targets(spec.name, spec.targets, dims, sequences)
        self.features = tuple(dims)
        self.steps, self.auxiliary = spec.steps, spec.auxiliary
        self.evolutions = nn.ModuleList(InterestEvolution(sequences[name].dim) for name in self.targets)
        inputs = dense_columns + sum(dims.values()) + sum(sequences[name].dim for name in self.targets)
        self.deep = tower(inputs, spec.deep)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Any]) -> Tensor:
        interests, losses = [], []
        for evolution, (name, target) in zip(self.evolutions, self.targets.items(), strict=True):
            behaviours, mask = _padded(sequence_of(embeddings, name), self.steps)
            interest, extracted = evolution(behaviours, embeddings[target], mask)
            interests.append(interest)
            if self.training and self.auxiliary:
                losses.append(next_behaviour_loss(extracted, behaviours, mask))
        columns = torch.cat([dense, concatenate(embeddings, self.features), *interests], dim=1)
        logits: Tensor = self.deep(columns).squeeze(1)
        return with_loss(logits, self.auxiliary * torch.stack(losses).sum()) if losses else logits


def _padded(sequence: JaggedVectors, most: int) -> tuple[Tensor, Tensor]:
    """At least one step, and no more than the longest has; always `most` where the graph is to serve any batch."""
    if torch.compiler.is_compiling():
        return sequence.padded(most)
    longest = int(sequence.lengths().amax()) if sequence.samples else 0
    return sequence.padded(max(1, min(most, longest)))


class InterestEvolution(nn.Module):
    """From behaviours to interests, and on to the one that the target is for (arXiv 1809.03672)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.extraction, self.evolution = Recurrence(dim), Recurrence(dim)
        self.attention = linear(dim, dim, bias=False)

    def forward(self, behaviours: Tensor, target: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Follows the interests as far as they concern the target.

        Args:
            behaviours: `[B, T, D]`.
            target: `[B, D]`.
            mask: where there is a behaviour, bool `[B, T]`; a sample without any gives zeros.

        Returns:
            the last state, `[B, D]`, and the interest after each behaviour, `[B, T, D]`.
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

    Source: arXiv 1809.03672, "Interest Extractor Layer"; for how ours differs see `Dien`.

    Args:
        interests: `[B, T, D]`.
        behaviours: `[B, T, D]`.
        mask: where there is a behaviour, bool `[B, T]`.
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
