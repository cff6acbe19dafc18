"""What a model is called with: views of one tensor, and sequences, and what is said to a model that confuses them."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shadowsync.errors import ConfigError
from shadowsync.models.vectors import JaggedVectors, Pooled, VectorGradients, concatenate, sequence_of

few = settings(deadline=None, max_examples=60, derandomize=True)
LENGTHS = st.lists(st.one_of(st.integers(0, 4), st.just(40)), max_size=8)
"""Of empty, short and very long sequences, in any order; also of no sample at all, and of nothing but empty ones."""


def make_vectors(lengths: list[int], dim: int = 3) -> JaggedVectors:
    values = torch.randn(sum(lengths), dim, dtype=torch.float64)
    return JaggedVectors("seen", values, torch.tensor([0, *lengths]).cumsum(0))


def pieces(vectors: JaggedVectors) -> list[Tensor]:
    """Each sample's vectors."""
    edges = vectors.offsets.tolist()
    return [vectors.values[start:stop] for start, stop in pairwise(edges)]


@few
@given(LENGTHS)
def test_owners_and_lengths_say_whose_a_vector_is(lengths: list[int]) -> None:
    vectors = make_vectors(lengths)
    assert vectors.samples == len(lengths)
    assert vectors.lengths().tolist() == lengths
    assert vectors.owners.tolist() == [sample for sample, length in enumerate(lengths) for _ in range(length)]


@few
@given(LENGTHS)
def test_a_weighted_sum_is_that_of_each_sample_with_its_gradients(lengths: list[int]) -> None:
    vectors = make_vectors(lengths).leaf()
    weights = torch.randn(len(vectors.values), dtype=torch.float64).requires_grad_()
    parts = zip(pieces(vectors), weights.split(lengths), strict=True)
    expected = torch.stack([(w[:, None] * v).sum(0) for v, w in parts] or [torch.zeros(3)])[: len(lengths)]
    found = vectors.weighted_sum(weights)
    torch.testing.assert_close(found, expected, check_dtype=False)
    torch.testing.assert_close(vectors.weighted_sum(), vectors.weighted_sum(torch.ones_like(weights)))
    if vectors.values.numel():
        factor = torch.randn_like(found)
        gradients = [
            torch.autograd.grad((summed * factor).sum(), [vectors.values, weights]) for summed in (found, expected)
        ]
        torch.testing.assert_close(*gradients)


@few
@given(LENGTHS, st.one_of(st.none(), st.integers(0, 6)))
def test_padding_keeps_the_last_vectors_in_their_order(lengths: list[int], steps: int | None) -> None:
    vectors = make_vectors(lengths)
    padded, mask = vectors.padded(steps)
    wanted_steps = max(lengths, default=0) if steps is None else steps
    assert padded.shape == (len(lengths), wanted_steps, 3)
    assert mask.shape == (len(lengths), wanted_steps)
    for row, here, vectors_of_sample in zip(padded, mask, pieces(vectors), strict=True):
        kept = vectors_of_sample[max(0, len(vectors_of_sample) - wanted_steps) :]
        assert torch.equal(row[here], kept)
        assert here.tolist() == [step < len(kept) for step in range(wanted_steps)]
        assert not row[~here].any()


def test_the_gradient_of_a_padded_sequence_reaches_what_was_kept_only() -> None:
    vectors = make_vectors([5, 0, 2]).leaf()
    padded, _ = vectors.padded(3)
    (gradient,) = torch.autograd.grad((padded * torch.arange(1.0, 4.0)[:, None]).sum(), vectors.values)
    assert gradient[:, 0].tolist() == [0, 0, 1, 2, 3, 1, 2]


class Own(nn.Module):
    """A user's module that knows nothing of sequences."""

    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return torch.cat([dense, *embeddings.values()], dim=1).sum(1)


MISUSES = {
    "concatenated": lambda s, t: torch.cat([t, s], dim=1),
    "stacked": lambda s, t: torch.stack([t, s]),
    "in a dict": lambda s, t: Own()(t, {"user": t, "seen": s}),
    "in a layer": lambda s, t: nn.Linear(3, 1)(s),
    "added from the left": lambda s, t: s + t,
    "added from the right": lambda s, t: t + s,
    "scaled": lambda s, t: s * 2,
    "indexed": lambda s, t: s[0],
    "shape": lambda s, t: s.shape,
    "mean": lambda s, t: s.mean(1),
    "unpacked": lambda s, t: [*s],
}


@pytest.mark.parametrize("use", MISUSES.values(), ids=MISUSES)
def test_who_takes_a_sequence_for_a_vector_is_told_the_feature_and_what_to_do(use) -> None:
    message = r"^feature seen has pooling=none, .*padded\(\) or weighted_sum\(\), .*embedding.pooling=\{seen: mean\}"
    with pytest.raises(ConfigError, match=message):
        use(make_vectors([1, 2]), torch.ones(2, 3, dtype=torch.float64))


def test_it_is_an_ordinary_object_otherwise() -> None:
    vectors = make_vectors([1, 2])
    assert not hasattr(vectors, "colour")
    assert torch.equal(copy.deepcopy(vectors).values, vectors.values)
    assert vectors.to(torch.device("cpu")).feature == "seen"


def test_a_pooled_feature_is_no_sequence() -> None:
    vectors = make_vectors([1, 2])
    assert sequence_of({"seen": vectors}, "seen") is vectors
    message = r"feature user is pooled to one vector: set embedding.pooling=\{user: none\}"
    with pytest.raises(ConfigError, match=message):
        sequence_of({"user": torch.ones(2, 3)}, "user")


def test_they_stand_behind_the_pooled_features_of_a_mapping() -> None:
    vectors, flat = make_vectors([1, 2]), torch.randn(2, 5)
    both = Pooled(flat, {"a": 2, "b": 3}, {"seen": vectors})
    assert list(both) == ["a", "b", "seen"]
    assert len(both) == 3
    assert both["seen"] is vectors
    assert concatenate(both, ("a", "b")) is flat


def test_zero_gradients_have_the_shapes_of_what_was_given() -> None:
    zeros = VectorGradients.zeros(torch.ones(2, 5), {"seen": make_vectors([1, 2])})
    assert zeros.pooled.shape == (2, 5)
    assert zeros.sequences["seen"].shape == (3, 3)
    assert not zeros.pooled.any()
    assert not zeros.sequences["seen"].any()


DIMS = {"a": 2, "b": 2, "c": 2}


def test_it_is_a_mapping_of_views() -> None:
    flat = torch.arange(12.0).view(2, 6)
    pooled = Pooled(flat, DIMS)

    assert list(pooled) == ["a", "b", "c"]
    assert len(pooled) == 3
    assert torch.equal(pooled["b"], flat[:, 2:4])
    assert pooled["c"].data_ptr() == flat[:, 4:].data_ptr()
    assert dict(pooled).keys() == DIMS.keys()
    assert "b" in pooled
    assert "d" not in pooled


def test_an_unknown_feature_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="d"):
        Pooled(torch.zeros(2, 6), DIMS)["d"]


@pytest.mark.parametrize("features", [("c", "a"), ("a", "b"), ("b", "c", "a")])
def test_other_orders_and_parts_are_put_together(features: tuple[str, ...]) -> None:
    pooled = Pooled(torch.randn(2, 6), DIMS)
    expected = torch.cat([pooled[feature] for feature in features], dim=1)

    assert torch.equal(concatenate(pooled, features), expected)
    assert torch.equal(concatenate(dict(pooled), features), expected)
