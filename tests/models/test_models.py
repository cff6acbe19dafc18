"""One conformance test that every model passes, and what is particular to each. `B` samples, `N` dense columns."""

import pytest
import torch
from torch import Tensor, nn

from shadowsync.errors import ConfigError
from shadowsync.models.dcn import CrossLayer, Dcn
from shadowsync.models.deepfm import DeepFm
from shadowsync.models.dlrm import Dlrm
from shadowsync.models.model import ModelSpec
from shadowsync.models.pooled import Pooled
from shadowsync.registry import build, members

EQUAL_DIMS = {"user": 4, "item": 4, "shop": 4}
MIXED_DIMS = {"user": 4, "item": 2, "shop": 3}

SPECS = {
    "dlrm": Dlrm(bottom=(32,), top=(16,)),
    "dlrm without hidden layers": Dlrm(bottom=(), top=()),
    "deepfm": DeepFm(deep=(8, 8)),
    "dcn stacked": Dcn(cross=2, deep=(8,)),
    "dcn parallel": Dcn(cross=2, deep=(8,), structure="parallel"),
    "dcn low rank": Dcn(cross=2, low_rank=2, deep=(8,)),
    "dcn without a tower": Dcn(cross=1, deep=()),
}

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_width = pytest.mark.parametrize("dense_columns", [0, 1, 3])


def make_inputs(samples: int, dense_columns: int, dims: dict[str, int]) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, dense_columns), torch.randn(samples, sum(dims.values()))


def as_dict(flat: Tensor, dims: dict[str, int]) -> dict[str, Tensor]:
    return {name: part.clone() for name, part in Pooled(flat, dims).items()}


def test_every_member_of_the_registry_is_tested_here() -> None:
    assert {type(spec) for spec in SPECS.values()} == set(members("shadowsync.models", ModelSpec).values())


@every_spec
@every_width
def test_one_logit_per_sample_and_gradients_everywhere(spec: ModelSpec, dense_columns: int) -> None:
    torch.manual_seed(1)
    module = spec.build(dense_columns, EQUAL_DIMS)
    dense, flat = make_inputs(16, dense_columns, EQUAL_DIMS)
    flat.requires_grad_()

    logits = module(dense, Pooled(flat, EQUAL_DIMS))
    gradients = torch.autograd.grad(logits.square().sum(), [flat, *module.parameters()])

    assert logits.shape == (16,)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


@every_spec
@every_width
def test_dict_and_pooled_give_the_same_output_and_gradients(spec: ModelSpec, dense_columns: int) -> None:
    module = spec.build(dense_columns, EQUAL_DIMS)
    dense, flat = make_inputs(7, dense_columns, EQUAL_DIMS)
    leaf = flat.clone().requires_grad_()
    parts = {name: part.requires_grad_() for name, part in as_dict(flat, EQUAL_DIMS).items()}

    fast, plain = module(dense, Pooled(leaf, EQUAL_DIMS)), module(dense, parts)
    fast_gradient = torch.autograd.grad(fast.sum(), leaf)[0]
    plain_gradients = torch.autograd.grad(plain.sum(), list(parts.values()))

    assert torch.equal(fast, plain)
    assert torch.equal(fast_gradient, torch.cat(plain_gradients, dim=1))


@every_spec
def test_the_order_of_the_mapping_does_not_matter(spec: ModelSpec) -> None:
    module = spec.build(2, EQUAL_DIMS)
    dense, flat = make_inputs(5, 2, EQUAL_DIMS)
    named = as_dict(flat, EQUAL_DIMS)
    backwards = {name: named[name] for name in reversed(named)}
    backwards_pooled = Pooled(torch.cat(list(backwards.values()), dim=1), dict.fromkeys(backwards, 4))

    assert torch.equal(module(dense, backwards), module(dense, named))
    assert torch.equal(module(dense, backwards_pooled), module(dense, named))


@every_spec
def test_samples_do_not_see_each_other(spec: ModelSpec) -> None:
    module = spec.build(2, EQUAL_DIMS).double()
    dense, flat = (part.double() for part in make_inputs(6, 2, EQUAL_DIMS))

    together = module(dense, Pooled(flat, EQUAL_DIMS))
    alone = [module(dense[row : row + 1], Pooled(flat[row : row + 1], EQUAL_DIMS)) for row in range(6)]

    torch.testing.assert_close(together, torch.cat(alone))


@every_spec
def test_gradients_are_right(spec: ModelSpec) -> None:
    torch.manual_seed(3)
    module = spec.build(2, EQUAL_DIMS).double()
    dense, flat = (part.double().requires_grad_() for part in make_inputs(3, 2, EQUAL_DIMS))

    assert torch.autograd.gradcheck(lambda x, e: module(x, Pooled(e, EQUAL_DIMS)), (dense, flat))


@every_spec
def test_a_seed_fixes_the_initial_values(spec: ModelSpec) -> None:
    torch.manual_seed(5)
    first = spec.build(2, EQUAL_DIMS).state_dict()
    torch.manual_seed(5)
    second = spec.build(2, EQUAL_DIMS).state_dict()

    assert all(torch.equal(first[name], second[name]) for name in first)


@every_spec
def test_initial_logits_are_moderate(spec: ModelSpec) -> None:
    torch.manual_seed(7)
    module = spec.build(13, {f"c{i}": 16 for i in range(26)})
    dense, flat = make_inputs(512, 13, {f"c{i}": 16 for i in range(26)})

    logits = module(dense, Pooled(0.05 * flat, {f"c{i}": 16 for i in range(26)}))

    assert 0.01 < logits.std() < 4


@every_spec
@pytest.mark.parametrize("dense_columns", [0, 2])
def test_export_with_any_number_of_samples(spec: ModelSpec, dense_columns: int) -> None:
    module = spec.build(dense_columns, EQUAL_DIMS)
    dense, flat = make_inputs(6, dense_columns, EQUAL_DIMS)
    samples = torch.export.Dim("samples")
    shapes = ({0: samples}, {name: {0: samples} for name in EQUAL_DIMS})

    program = torch.export.export(module, (dense, as_dict(flat, EQUAL_DIMS)), dynamic_shapes=shapes).module()
    dense, flat = make_inputs(9, dense_columns, EQUAL_DIMS)
    named = as_dict(flat, EQUAL_DIMS)

    torch.testing.assert_close(program(dense, named), module(dense, named))


def test_dlrm_is_the_naive_formula() -> None:
    module = Dlrm(bottom=(8,), top=(8,)).build(3, EQUAL_DIMS)
    dense, flat = make_inputs(5, 3, EQUAL_DIMS)
    vectors = [module.bottom(dense), *as_dict(flat, EQUAL_DIMS).values()]
    pairs = [(vectors[i] * vectors[j]).sum(dim=1) for i in range(4) for j in range(i)]

    expected = module.top(torch.cat([vectors[0], torch.stack(pairs, dim=1)], dim=1)).squeeze(1)

    torch.testing.assert_close(module(dense, Pooled(flat, EQUAL_DIMS)), expected)


def test_dlrm_of_the_paper_has_its_parameters() -> None:
    module = Dlrm().build(13, {f"c{i}": 16 for i in range(26)})
    shapes = [tuple(layer.weight.shape) for layer in module.modules() if isinstance(layer, nn.Linear)]

    assert shapes == [(512, 13), (256, 512), (64, 256), (16, 64), (512, 367), (256, 512), (1, 256)]


def test_deepfm_sums_over_all_pairs_of_fields() -> None:
    module = DeepFm(deep=(8,)).build(2, EQUAL_DIMS)
    dense, flat = make_inputs(5, 2, EQUAL_DIMS)
    weight = module.dense_vectors.weight
    fields = [dense[:, j : j + 1] * weight[:, j] for j in range(2)] + list(as_dict(flat, EQUAL_DIMS).values())
    pairs = sum((fields[i] * fields[j]).sum(dim=1) for i in range(5) for j in range(i))
    columns = torch.cat([dense, flat], dim=1)

    expected = pairs + (module.first_order(columns) + module.deep(columns)).squeeze(1)

    torch.testing.assert_close(module(dense, Pooled(flat, EQUAL_DIMS)), expected)


@pytest.mark.parametrize("rank", [None, 2])
def test_cross_layer_is_the_papers_equation(rank: int | None) -> None:
    layer = CrossLayer(6, rank)
    first, crossed = torch.randn(5, 6), torch.randn(5, 6)
    matrix = layer.weight.weight if rank is None else layer.weight[1].weight @ layer.weight[0].weight
    bias = layer.weight.bias if rank is None else layer.weight[1].bias

    torch.testing.assert_close(layer(first, crossed), first * (crossed @ matrix.T + bias) + crossed)


def test_dcn_takes_mixed_widths() -> None:
    module = Dcn(cross=2, deep=(8,)).build(3, MIXED_DIMS)
    dense, flat = make_inputs(5, 3, MIXED_DIMS)

    assert torch.equal(module(dense, Pooled(flat, MIXED_DIMS)), module(dense, as_dict(flat, MIXED_DIMS)))


def test_dcn_works_on_dense_columns_alone() -> None:
    assert Dcn(cross=1, deep=(4,)).build(3, {})(torch.randn(5, 3), {}).shape == (5,)


@pytest.mark.parametrize("spec", [Dlrm(), DeepFm()])
def test_mixed_widths_are_refused_with_both_names(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=r"feature user has 4 and item has 2: .*model.name=dcn"):
        spec.build(3, MIXED_DIMS)


@pytest.mark.parametrize("spec", [Dlrm(), DeepFm()])
def test_no_feature_at_all_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=f"model.name={spec.name} needs at least one categorical feature"):
        spec.build(3, {})


def test_dlrm_refuses_a_single_vector() -> None:
    with pytest.raises(ConfigError, match="two vectors to interact"):
        Dlrm().build(0, {"user": 4})


def test_dcn_refuses_no_columns_and_a_rank_that_saves_nothing() -> None:
    with pytest.raises(ConfigError, match="needs at least one column"):
        Dcn().build(0, {})
    with pytest.raises(ConfigError, match=r"model.low_rank=6 must be below the 6 input columns"):
        Dcn(low_rank=6).build(2, {"user": 4})


@pytest.mark.parametrize(
    ("member", "options", "message"),
    [
        (Dlrm, {"bottom": [8, 0]}, r"model.bottom.1=0: input should be greater than 0"),
        (Dlrm, {"top": [70_000]}, r"model.top.0=70000"),
        (Dcn, {"structure": "sideways"}, r"model.structure=sideways.*'stacked' or 'parallel'"),
        (Dcn, {"cross": 0}, r"model.cross=0"),
    ],
)
def test_options_out_of_range_are_named(member: type[ModelSpec], options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(member, options, "model")


def test_options_come_from_lists_as_in_yaml() -> None:
    assert build(Dlrm, {"bottom": [8, 4], "top": []}, "model") == Dlrm(bottom=(8, 4), top=())
