"""The interaction's hand-written backward pass. `B` samples, `V` vectors of width `D`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowsync.models.dlrm import DotInteraction


def naive(flat: Tensor, vectors: int) -> Tensor:
    stacked = flat.unflatten(1, (vectors, -1))
    row, column = torch.tril_indices(vectors, vectors, offset=-1)
    return torch.einsum("bid,bjd->bij", stacked, stacked)[:, row, column]


@given(samples=st.integers(1, 5), vectors=st.integers(2, 9), dim=st.integers(1, 5))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_output_and_gradient_equal_the_naive_formula(samples: int, vectors: int, dim: int) -> None:
    flat = torch.randn(samples, vectors * dim, dtype=torch.float64, requires_grad=True)
    module = DotInteraction(vectors)
    output, expected = module(flat), naive(flat, vectors)
    upstream = torch.randn_like(output)

    assert output.shape == (samples, module.pairs) == (samples, vectors * (vectors - 1) // 2)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(
        torch.autograd.grad(output, flat, upstream)[0], torch.autograd.grad(expected, flat, upstream)[0]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_autocast_the_gradient_has_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    flat = torch.randn(4, 12).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = DotInteraction(3)(flat)
    expected = naive(flat, 3)
    upstream = torch.randn(4, 3)

    (gradient,) = torch.autograd.grad(output, flat, upstream.to(output.dtype))

    assert gradient.dtype == dtype
    (wanted,) = torch.autograd.grad(expected, flat, upstream.to(dtype))
    torch.testing.assert_close(gradient.float(), wanted.float(), rtol=0.05, atol=0.1)


def test_without_gradients_the_output_is_the_same() -> None:
    flat = torch.randn(3, 12)
    with torch.no_grad():
        plain = DotInteraction(4)(flat)

    assert torch.equal(plain, DotInteraction(4)(flat.requires_grad_()))


def test_a_second_derivative_is_refused_instead_of_wrong() -> None:
    flat = torch.randn(2, 6, requires_grad=True)
    (first,) = torch.autograd.grad(DotInteraction(3)(flat).square().sum(), flat, create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_its_index_tables_are_no_part_of_the_state() -> None:
    assert DotInteraction(4).state_dict() == {}
