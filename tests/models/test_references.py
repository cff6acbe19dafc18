"""Each model against one that is written here in plain torch: the same weights and batch, equal logits.

`B` samples, `N` dense columns, `D` width of a vector. All in float64, where nothing but a difference is left.
"""

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadowsync.models.dcn import Dcn
from shadowsync.models.deepfm import DeepFm
from shadowsync.models.dlrm import Dlrm
from shadowsync.models.fm import Fm
from shadowsync.models.mmoe import Mmoe
from shadowsync.models.model import TowerSpec
from shadowsync.models.vectors import Pooled
from shadowsync.models.wide_deep import WideDeep
from shadowsync.models.youtube_dnn import YoutubeDnn

SAMPLES, DENSE, DIM = 9, 3, 4
ROWS = {"user": 11, "item": 7, "tags": 5}


class Case:
    """Tables, ids and columns; `lists`: the ids of `tags` are lists of 0 to 3, else one each."""

    def __init__(self, width: int, lists: bool) -> None:
        generator = torch.Generator().manual_seed(width)
        self.tables = {name: torch.randn(rows, width, generator=generator).double() for name, rows in ROWS.items()}
        self.dense = torch.randn(SAMPLES, DENSE, generator=generator).double()
        self.ids: dict[str, list[list[int]]] = {}
        for name, rows in ROWS.items():
            counts = [sample % 4 if lists and name == "tags" else 1 for sample in range(SAMPLES)]
            self.ids[name] = [torch.randint(rows, (count,), generator=generator).tolist() for count in counts]

    def pooled(self, mean: bool = False) -> dict[str, Tensor]:
        """`[B, width]` of each feature."""
        found = {}
        for name, table in self.tables.items():
            rows = [table[ids].sum(dim=0) / (max(1, len(ids)) if mean else 1) for ids in self.ids[name]]
            found[name] = torch.stack(rows)
        return found

    def design(self) -> Tensor:
        """How often each id of each feature occurs in a sample, and the dense columns: `[B, Σ rows + N]`."""
        counts = torch.zeros(SAMPLES, sum(ROWS.values())).double()
        starts = dict(zip(ROWS, itertools.accumulate(ROWS.values(), initial=0), strict=False))
        for name, start in starts.items():
            for sample, ids in enumerate(self.ids[name]):
                for row in ids:
                    counts[sample, start + row] += 1
        return torch.cat([counts, self.dense], dim=1)

    def weights(self, module: nn.Module, order: str) -> Tensor:
        """The first-order weight of each column of the design."""
        of_ids = torch.cat([table[:, 0] for table in self.tables.values()])
        return torch.cat([of_ids, module.get_parameter(f"{order}.dense.weight").detach()[0]])

    def vectors(self, module: nn.Module) -> Tensor:
        """The vector of each column of the design."""
        of_ids = torch.cat([table[:, 1:] for table in self.tables.values()])
        return torch.cat([of_ids, module.get_parameter("dense_vectors.weight").detach().T])


def made(spec: TowerSpec | Fm, width: int) -> nn.Module:
    """The model with all its parameters and statistics drawn, in evaluation mode."""
    torch.manual_seed(5)
    module = spec.build(DENSE, dict.fromkeys(ROWS, width)).double().eval()
    with torch.no_grad():
        for tensor in [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]:
            tensor.copy_(0.1 + 0.5 * torch.rand(tensor.shape) if tensor.dim() < 2 else torch.randn(tensor.shape) / 2)
    return module


def logits_of(module: nn.Module, pooled: Mapping[str, Tensor], dense: Tensor) -> Tensor:
    dims = {name: found.shape[1] for name, found in pooled.items()}
    answers = [module(dense, Pooled(torch.cat(list(pooled.values()), dim=1), dims)), module(dense, pooled)]
    torch.testing.assert_close(*answers, rtol=0, atol=1e-12)
    return answers[0].detach()


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-9, atol=1e-9)


def run_tower(ours: nn.Module, inputs: Tensor, norm: str = "none", last_relu: bool = False) -> Tensor:
    """What layers with these parameters give, written out: products, normalisation, ReLU; a last product alone."""
    state = {name: tensor.detach() for name, tensor in ours.state_dict().items()}
    products = sorted({int(name.split(".")[0]) for name in state if name.count(".") == 1})
    for position in products:
        inputs = inputs @ state[f"{position}.weight"].T + state[f"{position}.bias"]
        behind = f"{position + 1}.0"
        if norm == "batch" and f"{behind}.running_mean" in state:
            mean, variance = state[f"{behind}.running_mean"], state[f"{behind}.running_var"]
            inputs = (inputs - mean) / (variance + 1e-5).sqrt() * state[f"{behind}.weight"] + state[f"{behind}.bias"]
        elif norm == "layer" and f"{behind}.weight" in state:
            mean, variance = inputs.mean(1, keepdim=True), inputs.var(1, unbiased=False, keepdim=True)
            inputs = (inputs - mean) / (variance + 1e-5).sqrt() * state[f"{behind}.weight"] + state[f"{behind}.bias"]
        if last_relu or position != products[-1]:
            inputs = inputs.clamp(min=0)
    return inputs


TOWERS = [("none", 0.0), ("batch", 0.0), ("layer", 0.3)]
each_tower = pytest.mark.parametrize(("norm", "dropout"), TOWERS, ids=[norm for norm, _ in TOWERS])


def all_pairs(design: Tensor, vectors: Tensor) -> Tensor:
    """`Σ_{i<j} ⟨v_i, v_j⟩ x_i x_j` over all columns, one pair after the other (Rendle 2010)."""
    pairs = itertools.combinations(range(design.shape[1]), 2)
    return sum((vectors[i] @ vectors[j] * design[:, i] * design[:, j] for i, j in pairs), torch.zeros(1).double())


def test_fm() -> None:
    case, module = Case(1 + DIM, lists=False), made(Fm(), 1 + DIM)
    design = case.design()
    expected = module.first_order.bias + design @ case.weights(module, "first_order")
    expected = expected + all_pairs(design, case.vectors(module))
    assert_equal(logits_of(module, case.pooled(), case.dense), expected)


def test_fm_takes_a_list_as_one_field() -> None:
    case, module = Case(1 + DIM, lists=True), made(Fm(), 1 + DIM)
    design, vectors = case.design(), case.vectors(module)
    within = slice(ROWS["user"] + ROWS["item"], sum(ROWS.values()))
    tags, own = design[:, within], vectors[within]
    # pairs of a list's own ids are left out, those of an id with itself too, where it occurs twice
    left_out = all_pairs(tags, own)
    expected = module.first_order.bias + design @ case.weights(module, "first_order") + all_pairs(design, vectors)
    assert_equal(logits_of(module, case.pooled(), case.dense), expected - left_out)


@each_tower
def test_deepfm(norm: str, dropout: float) -> None:
    case, module = Case(1 + DIM, lists=False), made(DeepFm(deep=(8, 6), norm=norm, dropout=dropout), 1 + DIM)
    design, vectors = case.design(), case.vectors(module)
    pooled = case.pooled()
    deep = torch.cat([case.dense, *(rows[:, 1:] for rows in pooled.values())], dim=1)
    linear = module.first_order.bias + design @ case.weights(module, "first_order")
    expected = linear + all_pairs(design, vectors) + run_tower(module.deep, deep, norm)[:, 0]
    assert_equal(logits_of(module, pooled, case.dense), expected)


@each_tower
def test_wide_deep(norm: str, dropout: float) -> None:
    case, module = Case(1 + DIM, lists=True), made(WideDeep(deep=(8, 6), norm=norm, dropout=dropout), 1 + DIM)
    pooled = case.pooled()
    deep = torch.cat([case.dense, *(rows[:, 1:] for rows in pooled.values())], dim=1)
    wide = module.wide.bias + case.design() @ case.weights(module, "wide")
    assert_equal(logits_of(module, pooled, case.dense), wide + run_tower(module.deep, deep, norm)[:, 0])


def test_wide_deep_takes_vectors_of_different_widths() -> None:
    torch.manual_seed(5)
    dims = {"user": 5, "item": 3, "tags": 2}
    module = WideDeep(deep=(8,)).build(DENSE, dims).double()
    dense, pooled = torch.randn(6, DENSE).double(), {name: torch.randn(6, dim).double() for name, dim in dims.items()}
    deep = torch.cat([dense, *(rows[:, 1:] for rows in pooled.values())], dim=1)
    wide = module.wide.bias + (dense @ module.wide.dense.weight.T)[:, 0] + sum(rows[:, 0] for rows in pooled.values())
    assert_equal(logits_of(module, pooled, dense), wide + run_tower(module.deep, deep)[:, 0])


@each_tower
def test_youtube_dnn(norm: str, dropout: float) -> None:
    case, module = Case(DIM, lists=True), made(YoutubeDnn(deep=(8, 6), norm=norm, dropout=dropout), DIM)
    vectors, powers = case.pooled(mean=True), [case.dense, case.dense**2]
    powers.append(torch.where(case.dense < 0, -1.0, 1.0) * case.dense.abs() ** 0.5)
    expected = run_tower(module.deep, torch.cat([*powers, *vectors.values()], dim=1), norm)[:, 0]
    assert_equal(logits_of(module, vectors, case.dense), expected)


@each_tower
@pytest.mark.parametrize("structure", ["stacked", "parallel"])
@pytest.mark.parametrize("rank", [None, 2])
def test_dcn(structure: str, rank: int | None, norm: str, dropout: float) -> None:
    spec = Dcn(cross=2, low_rank=rank, deep=(8, 6), structure=structure, norm=norm, dropout=dropout)
    case, module = Case(DIM, lists=True), made(spec, DIM)
    pooled = case.pooled()
    first = crossed = torch.cat([case.dense, *pooled.values()], dim=1)
    for layer in range(2):
        given = dict(module.cross[layer].named_parameters())
        if rank is None:
            product = crossed @ given["weight.weight"].T + given["weight.bias"]
        else:
            product = crossed @ given["weight.0.weight"].T @ given["weight.1.weight"].T + given["weight.1.bias"]
        crossed = first * product + crossed
    deep = run_tower(module.deep, crossed if structure == "stacked" else first, norm, last_relu=True)
    last = deep if structure == "stacked" else torch.cat([crossed, deep], dim=1)
    assert_equal(logits_of(module, pooled, case.dense), F.linear(last, module.logit.weight, module.logit.bias)[:, 0])


@each_tower
def test_dlrm(norm: str, dropout: float) -> None:
    spec = Dlrm(bottom=(8, 6), top=(6,), norm=norm, dropout=dropout)
    case, module = Case(DIM, lists=True), made(spec, DIM)
    pooled = case.pooled()
    bottom = run_tower(module.bottom, case.dense, norm, last_relu=True)
    vectors = [bottom, *pooled.values()]
    products = [(vectors[i] * vectors[j]).sum(dim=1) for i in range(len(vectors)) for j in range(i)]
    top = run_tower(module.top, torch.cat([bottom, torch.stack(products, dim=1)], dim=1), norm)
    assert_equal(logits_of(module, pooled, case.dense), top[:, 0])


@pytest.mark.parametrize("tasks", [1, 3])
@each_tower
def test_mmoe(norm: str, dropout: float, tasks: int) -> None:
    """One task: a mixture of experts and one tower, whose logits are `[B]` as those of every other model."""
    spec = Mmoe(experts=4, expert=(8, 6), top=(5,), norm=norm, dropout=dropout, tasks=tasks)
    case, module = Case(DIM, lists=True), made(spec, DIM)
    pooled = case.pooled()
    inputs = torch.cat([case.dense, *pooled.values()], dim=1)
    experts = [run_tower(expert, inputs, norm, last_relu=True) for expert in module.experts]
    expected = []
    for gate, tower in zip(module.gates, module.towers, strict=True):
        scores = torch.exp(inputs @ gate.weight.T + gate.bias)
        shares = scores / scores.sum(dim=1, keepdim=True)
        mixed = sum((shares[:, i : i + 1] * expert for i, expert in enumerate(experts)), torch.zeros(1).double())
        expected.append(run_tower(tower, mixed, norm)[:, 0])
    assert len(expected) == tasks
    assert_equal(logits_of(module, pooled, case.dense), expected[0] if tasks == 1 else torch.stack(expected, dim=1))


def test_mmoe_of_one_expert_is_a_tower() -> None:
    case, module = Case(DIM, lists=False), made(Mmoe(experts=1, expert=(8,), top=(5,)), DIM)
    hidden = run_tower(module.experts[0], torch.cat([case.dense, *case.pooled().values()], dim=1), last_relu=True)
    assert_equal(logits_of(module, case.pooled(), case.dense), run_tower(module.towers[0], hidden)[:, 0])
