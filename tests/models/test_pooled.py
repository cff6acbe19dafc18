"""Pooled vectors: a mapping whose values are views of one tensor."""

import pytest
import torch

from shadowsync.models.pooled import Pooled, concatenate, stack

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


def test_concatenate_and_stack_take_the_flat_tensor_without_a_copy() -> None:
    flat = torch.randn(2, 6)
    pooled = Pooled(flat, DIMS)

    assert concatenate(pooled, ("a", "b", "c")) is flat
    assert stack(pooled, ("a", "b", "c")).data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("features", [("c", "a"), ("a", "b"), ("b", "c", "a")])
def test_other_orders_and_parts_are_put_together(features: tuple[str, ...]) -> None:
    pooled = Pooled(torch.randn(2, 6), DIMS)
    expected = torch.stack([pooled[feature] for feature in features], dim=1)

    assert torch.equal(stack(pooled, features), expected)
    assert torch.equal(stack(dict(pooled), features), expected)
