"""One conformance test that every model passes, and what is particular to each. `B` samples, `N` dense columns."""

import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn

from shadowsync.assembly import make_module
from shadowsync.choices import choose_all
from shadowsync.config import parse
from shadowsync.data.source import Feature, Schema
from shadowsync.embedding.table import Table
from shadowsync.errors import ConfigError
from shadowsync.models.dcn import CrossLayer, Dcn
from shadowsync.models.deepfm import DeepFm
from shadowsync.models.dlrm import Dlrm
from shadowsync.models.fm import Fm
from shadowsync.models.interest import Dien, Din
from shadowsync.models.mmoe import Mmoe
from shadowsync.models.model import ModelSpec, SequenceInput
from shadowsync.models.vectors import JaggedVectors, Pooled
from shadowsync.models.wide_deep import WideDeep
from shadowsync.models.youtube_dnn import YoutubeDnn
from shadowsync.registry import build, members

EQUAL_DIMS = {"user": 4, "item": 4, "shop": 4}
MIXED_DIMS = {"user": 4, "item": 2, "shop": 3}
SEQUENCES = {"seen": SequenceInput(4, ("item",)), "visited": SequenceInput(4, ("shop",))}

SPECS = {
    "dlrm": Dlrm(bottom=(32,), top=(16,)),
    "dlrm without hidden layers": Dlrm(bottom=(), top=()),
    "dlrm with batch norm and dropout": Dlrm(bottom=(32,), top=(16,), norm="batch", dropout=0.3),
    "fm": Fm(),
    "deepfm": DeepFm(deep=(8, 8)),
    "deepfm projected": DeepFm(deep=(8, 8), first_order="projection"),
    "deepfm with layer norm": DeepFm(deep=(8, 8), norm="layer"),
    "wide_deep": WideDeep(deep=(8,)),
    "wide_deep with batch norm": WideDeep(deep=(8,), norm="batch"),
    "youtube_dnn": YoutubeDnn(deep=(8,)),
    "youtube_dnn with dropout": YoutubeDnn(deep=(8, 8), dropout=0.5),
    "dcn stacked": Dcn(cross=2, deep=(8,)),
    "dcn parallel": Dcn(cross=2, deep=(8,), structure="parallel"),
    "dcn low rank": Dcn(cross=2, low_rank=2, deep=(8,)),
    "dcn without a tower": Dcn(cross=1, deep=()),
    "din": Din(attention=(16,), deep=(8,)),
    "din without hidden layers": Din(attention=(), deep=()),
    "din with layer norm and dropout": Din(attention=(16,), deep=(8,), norm="layer", dropout=0.1),
    "dien": Dien(deep=(8,)),
    "dien with fewer steps": Dien(deep=(8,), steps=2),
    "mmoe": Mmoe(experts=3, expert=(8,), top=(8,)),
    "mmoe with batch norm and dropout": Mmoe(experts=2, expert=(8, 8), top=(), norm="batch", dropout=0.1),
}

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_width = pytest.mark.parametrize("dense_columns", [0, 1, 3])


@every_spec
def test_asking_for_its_shapes_does_not_load_torchs_compiler(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a second of every process that begins."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    with torch.device("meta"):
        module = built(spec, 2)
    assert all(parameter.is_meta for parameter in module.parameters())


def takes_sequences(spec: ModelSpec) -> bool:
    return isinstance(spec, Din | Dien)


def sequences_for(spec: ModelSpec) -> dict[str, SequenceInput]:
    return SEQUENCES if takes_sequences(spec) else {}


def built(spec: ModelSpec, dense_columns: int) -> nn.Module:
    """The model as it predicts: in training dropout differs from call to call, and a batch norm mixes samples."""
    return spec.build(dense_columns, EQUAL_DIMS, sequences_for(spec)).eval()


def make_inputs(samples: int, dense_columns: int, dims: dict[str, int]) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, dense_columns), torch.randn(samples, sum(dims.values()))


def make_sequences(spec: ModelSpec, samples: int) -> dict[str, JaggedVectors]:
    """Sequences of 0 to 3 vectors for a model that takes them, else none."""
    found = {}
    for shift, (name, sequence) in enumerate(sequences_for(spec).items()):
        offsets = torch.zeros(samples + 1, dtype=torch.int64)
        torch.cumsum((torch.arange(samples) * 3 + shift) % 4, 0, out=offsets[1:])
        found[name] = JaggedVectors(name, torch.randn(int(offsets[-1]), sequence.dim), offsets)
    return found


def one_of(sequences: Mapping[str, JaggedVectors], row: int) -> dict[str, JaggedVectors]:
    """The sequences of one sample."""
    spans = {name: found.offsets[row : row + 2] for name, found in sequences.items()}
    return {
        name: JaggedVectors(name, sequences[name].values[span[0] : span[1]], span - span[0])
        for name, span in spans.items()
    }


def as_dict(flat: Tensor, dims: dict[str, int]) -> dict[str, Tensor]:
    return {name: part.clone() for name, part in Pooled(flat, dims).items()}


def test_every_member_of_the_registry_is_tested_here() -> None:
    assert {type(spec) for spec in SPECS.values()} == set(members("shadowsync.models", ModelSpec).values())


@every_spec
@every_width
def test_one_logit_per_sample_and_gradients_everywhere(spec: ModelSpec, dense_columns: int) -> None:
    torch.manual_seed(1)
    module = built(spec, dense_columns)
    dense, flat = make_inputs(16, dense_columns, EQUAL_DIMS)
    leaves = {name: found.leaf() for name, found in make_sequences(spec, 16).items()}
    flat.requires_grad_()

    logits = module(dense, Pooled(flat, EQUAL_DIMS, leaves))
    vectors = [flat, *(found.values for found in leaves.values())]
    gradients = torch.autograd.grad(logits.square().sum(), [*vectors, *module.parameters()])

    assert logits.shape == (16,)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


@every_spec
@every_width
def test_dict_and_pooled_give_the_same_output_and_gradients(spec: ModelSpec, dense_columns: int) -> None:
    module = built(spec, dense_columns)
    dense, flat = make_inputs(7, dense_columns, EQUAL_DIMS)
    sequences = make_sequences(spec, 7)
    leaf = flat.clone().requires_grad_()
    parts = {name: part.requires_grad_() for name, part in as_dict(flat, EQUAL_DIMS).items()}

    fast, plain = module(dense, Pooled(leaf, EQUAL_DIMS, sequences)), module(dense, parts | sequences)
    fast_gradient = torch.autograd.grad(fast.sum(), leaf)[0]
    plain_gradients = torch.autograd.grad(plain.sum(), list(parts.values()))

    assert torch.equal(fast, plain)
    torch.testing.assert_close(fast_gradient, torch.cat(plain_gradients, dim=1), rtol=1e-6, atol=1e-7)


@every_spec
def test_the_order_of_the_mapping_does_not_matter(spec: ModelSpec) -> None:
    module = built(spec, 2)
    dense, flat = make_inputs(5, 2, EQUAL_DIMS)
    sequences = make_sequences(spec, 5)
    named = as_dict(flat, EQUAL_DIMS)
    backwards = {name: named[name] for name in reversed(named)}
    backwards_pooled = Pooled(torch.cat(list(backwards.values()), dim=1), dict.fromkeys(backwards, 4), sequences)

    assert torch.equal(module(dense, sequences | backwards), module(dense, named | sequences))
    assert torch.equal(module(dense, backwards_pooled), module(dense, named | sequences))


@every_spec
def test_samples_do_not_see_each_other(spec: ModelSpec) -> None:
    module = built(spec, 2).double()
    dense, flat = (part.double() for part in make_inputs(6, 2, EQUAL_DIMS))
    made = make_sequences(spec, 6).items()
    sequences = {name: JaggedVectors(name, found.values.double(), found.offsets) for name, found in made}

    together = module(dense, Pooled(flat, EQUAL_DIMS, sequences))
    alone = [
        module(dense[row : row + 1], Pooled(flat[row : row + 1], EQUAL_DIMS, one_of(sequences, row)))
        for row in range(6)
    ]

    torch.testing.assert_close(together, torch.cat(alone))


@every_spec
def test_gradients_are_right(spec: ModelSpec) -> None:
    torch.manual_seed(3)
    module = built(spec, 2).double()
    dense, flat = (part.double().requires_grad_() for part in make_inputs(3, 2, EQUAL_DIMS))
    sequences = make_sequences(spec, 3)

    def logits(dense: Tensor, flat: Tensor, *values: Tensor) -> Tensor:
        pairs = zip(sequences.items(), values, strict=True)
        given = {name: JaggedVectors(name, vectors, found.offsets) for (name, found), vectors in pairs}
        logits: Tensor = module(dense, Pooled(flat, EQUAL_DIMS, given))
        return logits

    values = [found.values.double().requires_grad_() for found in sequences.values()]
    assert torch.autograd.gradcheck(logits, (dense, flat, *values))


@every_spec
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
def test_a_batch_without_any_behaviour_is_an_ordinary_one(spec: ModelSpec, precision: torch.dtype | None) -> None:
    module = built(spec, 2)
    dense, flat = make_inputs(3, 2, EQUAL_DIMS)
    empty = {name: JaggedVectors(name, torch.zeros(0, 4), torch.zeros(4, dtype=torch.int64)) for name in SEQUENCES}
    leaves = {name: found.leaf() for name, found in empty.items() if name in sequences_for(spec)}

    with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
        logits = module(dense, Pooled(flat, EQUAL_DIMS, leaves))
    gradients = torch.autograd.grad(logits.sum(), list(module.parameters()), allow_unused=True)

    assert logits.isfinite().all()
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)


@every_spec
def test_sequences_are_used_or_refused(spec: ModelSpec) -> None:
    if takes_sequences(spec):
        module = built(spec, 2)
        dense, flat = make_inputs(9, 2, EQUAL_DIMS)
        for name in SEQUENCES:
            sequences = make_sequences(spec, 9)
            before = module(dense, Pooled(flat, EQUAL_DIMS, sequences))
            sequences[name].values.add_(1)
            assert not torch.equal(module(dense, Pooled(flat, EQUAL_DIMS, sequences)), before)
    else:
        message = f"model.name={spec.name} takes one vector per feature, but feature seen has pooling=none: set "
        with pytest.raises(ConfigError, match=message):
            spec.build(2, EQUAL_DIMS, SEQUENCES)


@every_spec
def test_a_seed_fixes_the_initial_values(spec: ModelSpec) -> None:
    torch.manual_seed(5)
    first = spec.build(2, EQUAL_DIMS, sequences_for(spec)).state_dict()
    torch.manual_seed(5)
    second = spec.build(2, EQUAL_DIMS, sequences_for(spec)).state_dict()

    assert all(torch.equal(first[name], second[name]) for name in first)


def test_modules_that_are_made_at_once_in_one_process_are_alike() -> None:
    config = parse({"data": {"name": "synthetic"}, "train": {"seed": 5}})
    choices, together = choose_all(config, own_model=False), Barrier(8)
    schema = Schema(("x", "y"), (Feature("f", 9),))
    tables = [Table("f", 9, 16, ("f",))]

    def made() -> Tensor:
        together.wait()
        module = make_module(config, choices, schema, tables, None)
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    before = torch.random.get_rng_state()
    with ThreadPoolExecutor(8) as pool:
        first, *others = [answer.result() for answer in [pool.submit(made) for _ in range(8)]]
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(torch.random.get_rng_state(), before)


@every_spec
def test_initial_logits_are_moderate(spec: ModelSpec) -> None:
    torch.manual_seed(7)
    dims = {"item": 16, "shop": 16} | {f"c{i}": 16 for i in range(24)}
    sequences = {name: SequenceInput(16, found.partners) for name, found in sequences_for(spec).items()}
    module = spec.build(13, dims, sequences).eval()
    dense, flat = make_inputs(512, 13, dims)
    offsets = torch.arange(513) * 5
    given = {name: JaggedVectors(name, 0.05 * torch.randn(512 * 5, 16), offsets) for name in sequences}

    logits = module(dense, Pooled(0.05 * flat, dims, given))

    assert 0.01 < logits.std() < 4


class Unwrapped(nn.Module):
    """Takes the tensors of sequences, which are no input of their own to torch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, dense: Tensor, named: dict[str, Tensor], sequences: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        logits: Tensor = self.module(dense, named | {name: JaggedVectors(name, *s) for name, s in sequences.items()})
        return logits


@pytest.mark.parametrize("name", [name for name in SPECS if name != "dien"])  # its 50 steps are traced one by one
def test_export_with_any_number_of_samples_and_behaviours(name: str) -> None:
    spec = SPECS[name]
    module = Unwrapped(built(spec, 0))
    samples = torch.export.Dim("samples")
    lengths = {name: torch.export.Dim(f"{name}_vectors", min=0) for name in sequences_for(spec)}
    given = {name: ({0: length}, {0: samples + 1}) for name, length in lengths.items()}
    shapes = ({0: samples}, {name: {0: samples} for name in EQUAL_DIMS}, given)

    def inputs(count: int) -> tuple[Tensor, dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        dense, flat = make_inputs(count, 0, EQUAL_DIMS)
        sequences = {name: (found.values, found.offsets) for name, found in make_sequences(spec, count).items()}
        return dense, as_dict(flat, EQUAL_DIMS), sequences

    program = torch.export.export(module, inputs(6), dynamic_shapes=shapes).module()

    for count in (9, 2):
        wanted = inputs(count)
        torch.testing.assert_close(program(*wanted), module(*wanted))


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


def test_projected_deepfm_sums_over_all_pairs_of_fields() -> None:
    module = DeepFm(deep=(8,), first_order="projection").build(2, EQUAL_DIMS)
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


def test_dcn_takes_mixed_widths_and_dense_columns_alone() -> None:
    module = Dcn(cross=2, deep=(8,)).build(3, MIXED_DIMS)
    dense, flat = make_inputs(5, 3, MIXED_DIMS)

    assert torch.equal(module(dense, Pooled(flat, MIXED_DIMS)), module(dense, as_dict(flat, MIXED_DIMS)))
    assert Dcn(cross=1, deep=(4,)).build(3, {})(torch.randn(5, 3), {}).shape == (5,)


@pytest.mark.parametrize(
    ("spec", "dense_columns", "dims", "message"),
    [
        (Dlrm(), 3, MIXED_DIMS, r"feature user has 4 and item has 2: .*model.name=dcn"),
        (DeepFm(), 3, MIXED_DIMS, r"feature user has 4 and item has 2: .*model.name=dcn"),
        (Dlrm(), 3, {}, "model.name=dlrm needs at least one categorical feature"),
        (DeepFm(), 3, {}, "model.name=deepfm needs at least one categorical feature"),
        (Fm(), 3, MIXED_DIMS, r"model.name=fm needs vectors of one width, but feature user has 4 and item has 2"),
        (Fm(), 3, {}, "model.name=fm needs at least one categorical feature"),
        (DeepFm(), 3, {"user": 1}, "model.name=deepfm takes the first column .* feature user have 1: set the dim"),
        (WideDeep(), 3, {}, "model.name=wide_deep needs at least one categorical feature"),
        (YoutubeDnn(), 0, {}, "model.name=youtube_dnn needs at least one column"),
        (Dlrm(), 0, {"user": 4}, "two vectors to interact"),
        (Dcn(), 0, {}, "needs at least one column"),
        (Dcn(low_rank=6), 2, {"user": 4}, r"model.low_rank=6 must be below the 6 input columns"),
    ],
)
def test_columns_that_a_model_cannot_work_on(
    spec: ModelSpec, dense_columns: int, dims: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        spec.build(dense_columns, dims)


@pytest.mark.parametrize(
    ("member", "options", "message"),
    [
        (Dlrm, {"bottom": [8, 0]}, r"model.bottom.1=0: input should be greater than 0"),
        (Dlrm, {"top": [70_000]}, r"model.top.0=70000"),
        (Dcn, {"structure": "sideways"}, r"model.structure=sideways.*'stacked' or 'parallel'"),
        (Dcn, {"cross": 0}, r"model.cross=0"),
        (Din, {"attention": [0]}, r"model.attention.0=0: input should be greater than 0"),
        (Dien, {"steps": 0}, r"model.steps=0: input should be greater than or equal to 1"),
        (Dien, {"auxiliary": -1}, r"model.auxiliary=-1"),
        (Dlrm, {"dropout": 1}, r"model.dropout=1: input should be less than 1"),
        (Dcn, {"norm": "bach"}, r"model.norm=bach: .*'none', 'batch' or 'layer'"),
        (DeepFm, {"first_order": "vector"}, r"model.first_order=vector: .*'scalar' or 'projection'"),
    ],
)
def test_options_out_of_range_are_named(member: type[ModelSpec], options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(member, options, "model")


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("dlrm", "dropot", "model.dropot is not an option of model.name=dlrm, did you mean dropout?; it has"),
        ("dlrm", "structure", "it has dropout, norm, bottom, top, and structure belongs to model.name=dcn"),
        ("fm", "targets", "it has none, and targets belongs to model.name=dien or model.name=din"),
        ("fm", "dropout", "model.name=fm: a factorisation machine has no layers: set model.name=deepfm, or"),
        ("dcn", "batch_norm", "is not an option of model.name=dcn: set model.norm=batch, or model.norm=layer"),
        ("deepfm", "l2_reg_dnn", "=deepfm: train.l2 is that of the layers, and embedding.l2 that of the rows"),
    ],
)
def test_unknown_options_are_answered(name: str, option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        choose_all(parse({"model": {"name": name, option: 1}}), own_model=False)


def test_options_come_from_lists_as_in_yaml() -> None:
    assert build(Dlrm, {"bottom": [8, 4], "top": []}, "model") == Dlrm(bottom=(8, 4), top=())
