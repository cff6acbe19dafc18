"""DIN and DIEN against their papers' equations, and which feature they attend with."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shadowsync.errors import ConfigError
from shadowsync.models.interest import (
    ActivationUnit,
    Dien,
    Din,
    InterestEvolution,
    Recurrence,
    next_behaviour_loss,
    with_loss,
)
from shadowsync.models.model import ModelSpec, SequenceInput
from shadowsync.models.vectors import JaggedVectors, Pooled
from shadowsync.registry import build

DIMS = {"user": 4, "item": 4, "shop": 4, "day": 2}
SEEN = SequenceInput(4, ("item",))
both_members = pytest.mark.parametrize("member", [Din, Dien])


def make_sequence(lengths: list[int], dim: int = 4) -> JaggedVectors:
    return JaggedVectors("seen", torch.randn(sum(lengths), dim), torch.tensor([0, *lengths]).cumsum(0))


def test_the_activation_unit_is_the_papers_sum_sample_by_sample() -> None:
    unit, sequence, target = ActivationUnit(4, (8,)), make_sequence([2, 0, 3]), torch.randn(3, 4)
    expected = torch.zeros(3, 4)
    for sample in range(3):
        for behaviour in sequence.values[sequence.offsets[sample] : sequence.offsets[sample + 1]]:
            asked = target[sample]
            pair = torch.cat([asked, behaviour, asked - behaviour, asked * behaviour])
            expected[sample] += unit.weight(pair) * behaviour
    torch.testing.assert_close(unit(sequence, target), expected)


def gru_states(recurrence: Recurrence, inputs: Tensor, attention: Tensor | None) -> Tensor:
    """The paper's equations of a GRU, and with attention those of an AUGRU, for one sample: `[T, D]`."""
    dim = inputs.shape[1]
    w_u, w_r, w_h = recurrence.of_input.weight.split(dim)
    b_u, b_r, b_h = recurrence.of_input.bias.split(dim)
    u_u, u_r, u_h = recurrence.of_state.weight.split(dim)
    state, states = torch.zeros(dim), []
    for step, given in enumerate(inputs):
        update = torch.sigmoid(w_u @ given + u_u @ state + b_u)
        reset = torch.sigmoid(w_r @ given + u_r @ state + b_r)
        candidate = torch.tanh(w_h @ given + reset * (u_h @ state) + b_h)
        update = update if attention is None else attention[step] * update
        state = (1 - update) * state + update * candidate
        states.append(state)
    return torch.stack(states)


@pytest.mark.parametrize("attended", [False, True])
def test_a_recurrence_is_the_papers_gru_and_augru(attended: bool) -> None:
    recurrence, inputs = Recurrence(4), torch.randn(3, 5, 4)
    attention = torch.rand(3, 5) if attended else None
    found = torch.stack(recurrence(inputs, attention), dim=1)
    for sample in range(3):
        alone = gru_states(recurrence, inputs[sample], None if attention is None else attention[sample])
        torch.testing.assert_close(found[sample], alone)


def test_interests_evolve_over_the_behaviours_that_there_are() -> None:
    evolution, sequence, target = InterestEvolution(4), make_sequence([3, 1, 0, 2]), torch.randn(4, 4)
    behaviours, mask = sequence.padded(5)
    found, _ = evolution(behaviours, target, mask)
    for sample, length in enumerate(sequence.lengths().tolist()):
        own = behaviours[sample, :length]
        if length:
            interests = gru_states(evolution.extraction, own, None)
            shares = (interests @ evolution.attention.weight @ target[sample]).softmax(0)
            torch.testing.assert_close(found[sample], gru_states(evolution.evolution, interests, shares)[-1])
        else:
            assert not found[sample].any()


def test_only_the_last_steps_of_a_long_history_are_followed() -> None:
    module = Dien(steps=3, deep=()).build(0, DIMS, {"seen": SEEN})
    sequence, flat = make_sequence([6, 2]), torch.randn(2, 14)
    last = JaggedVectors("seen", sequence.values[3:], torch.tensor([0, 3, 5]))
    answers = [module(torch.zeros(2, 0), Pooled(flat, DIMS, {"seen": given})) for given in (sequence, last)]
    assert torch.equal(*answers)


def test_the_auxiliary_loss_is_the_papers_with_others_from_the_batch() -> None:
    interests, behaviours = torch.randn(3, 3, 4), torch.randn(3, 3, 4)
    mask = torch.tensor([[True, True, True], [False] * 3, [True, True, False]])
    pairs = [(0, 0), (0, 1), (2, 0)]
    followed = [behaviours[sample, step + 1].double() for sample, step in pairs]
    terms = [
        -(interests[pair].double() @ followed[at]).sigmoid().log()
        - (1 - (interests[pair].double() @ followed[(at - 1) % 3]).sigmoid()).log()
        for at, pair in enumerate(pairs)
    ]
    loss = next_behaviour_loss(interests, behaviours, mask)
    torch.testing.assert_close(loss, torch.stack(terms).mean().float())


@pytest.mark.parametrize("mask", [torch.zeros(2, 3, dtype=torch.bool), torch.tensor([[True, False, False]] * 2)])
def test_nothing_follows_where_no_sample_has_two_behaviours(mask: Tensor) -> None:
    assert next_behaviour_loss(torch.randn(2, 3, 4), torch.randn(2, 3, 4), mask) == 0


def test_a_further_loss_adds_its_gradient_and_leaves_the_logits() -> None:
    weight = torch.randn(4, requires_grad=True)
    logits, labels = weight * torch.arange(4.0), torch.tensor([0.0, 1, 1, 0])
    log_loss = torch.nn.functional.binary_cross_entropy_with_logits
    expected = torch.autograd.grad(log_loss(logits, labels) + 0.5 * weight.square().sum(), weight)
    added = with_loss(weight * torch.arange(4.0), 0.5 * weight.square().sum())
    assert torch.equal(added, logits)
    torch.testing.assert_close(torch.autograd.grad(log_loss(added, labels), weight), expected)


def test_the_auxiliary_loss_is_for_training_only() -> None:
    torch.manual_seed(2)
    module = Dien(auxiliary=1.0, deep=()).build(0, DIMS, {"seen": SEEN})
    sequence, flat = make_sequence([3, 4]).leaf(), torch.randn(2, 14)

    def gradient() -> Tensor:
        logits = module(torch.zeros(2, 0), Pooled(flat, DIMS, {"seen": sequence}))
        return torch.autograd.grad(logits.sum(), sequence.values)[0]

    with_auxiliary, without = gradient(), module.eval() and gradient()
    module.train().auxiliary = 0.0
    assert torch.equal(gradient(), without)
    assert not torch.allclose(with_auxiliary, without)


@both_members
@pytest.mark.parametrize(
    ("targets", "sequences", "message"),
    [
        ({}, {}, r"attends over a behaviour sequence, and no feature has pooling=none: .*model.targets="),
        ({"seen": "item"}, {}, r"\(model.targets names seen, which embedding.pooling pools\)"),
        ({"sene": "item"}, {"seen": SEEN}, r"feature sene is no sequence, did you mean seen\?; .*are seen$"),
        ({"seen": "itme"}, {"seen": SEEN}, r"attended with itme, which is no pooled feature, did you mean item\?"),
        ({"seen": "day"}, {"seen": SEEN}, r"vectors of seen have 4 columns and those of its target day 2: let them"),
        ({}, {"seen": SequenceInput(4)}, r"sequence seen: no feature with one id per sample shares its table; name"),
        (
            {},
            {"seen": SequenceInput(4, ("item", "shop"))},
            r"several features .* share its table: item, shop; name the one",
        ),
    ],
)
def test_a_target_that_cannot_be_found_is_named(
    member: type[ModelSpec], targets: dict[str, str], sequences: dict[str, SequenceInput], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(member, {"targets": targets}, "model").build(2, DIMS, sequences)


@both_members
def test_targets_are_found_or_named(member: type[ModelSpec]) -> None:
    sequences = {"seen": SEEN, "visited": SequenceInput(4, ("item", "shop"))}
    module = build(member, {"targets": {"visited": "shop"}}, "model").build(2, DIMS, sequences)
    assert module.targets == {"seen": "item", "visited": "shop"}


@both_members
def test_a_model_wants_histories_as_sequences_or_those_it_was_told(member: type[Any]) -> None:
    assert member().wanted_sequences({"seen": ("item",), "visited": ("shop",)}) == ("seen", "visited")
    assert member(targets={"tags": "tag"}).wanted_sequences({"seen": ("item",)}) == ("tags",)
