"""`CompressedCut`: the graph is that of a masked layer, and what would cross is counted."""

import copy
import re
from pathlib import Path

import pytest
import torch
from codec_cases import numbers
from torch import nn

from shadowsync import CompressedCut
from shadowsync.errors import ConfigError, NonFiniteTensor


def test_forward_and_gradient_are_those_of_a_masked_layer():
    cut, inputs = CompressedCut(keep=0.25), numbers((40, 32)).requires_grad_()
    weights = numbers((40, 32), 1)
    (cut(inputs) * weights).sum().backward()
    least = inputs.detach().abs().flatten().topk(320).values[-1]
    mask = inputs.detach().abs() >= least
    assert mask.sum() == 320
    assert torch.equal(inputs.grad, weights * mask)
    assert torch.equal(cut(inputs.detach()), inputs.detach() * mask)
    assert cut.kept_share == pytest.approx(0.25)


@pytest.mark.parametrize("values", ["fp32", "bf16", "int8", "int4"])
def test_a_model_learns_through_a_cut_as_through_a_mask(values):
    torch.manual_seed(0)
    bottom, top = nn.Linear(8, 64), nn.Linear(64, 1)
    cut = CompressedCut(keep=0.3, values=values, refresh=1)
    inputs = numbers((50, 8))
    hidden = bottom(inputs)
    top(cut(hidden)).square().mean().backward()
    through_cut = [parameter.grad.clone() for parameter in (*bottom.parameters(), *top.parameters())]
    for layer in (bottom, top):
        layer.zero_grad()
    mask = (hidden.abs() >= hidden.abs().flatten().topk(round(0.3 * hidden.numel())).values[-1]).float()
    top(bottom(inputs) * mask).square().mean().backward()
    tolerance = {"fp32": 1e-6, "bf16": 0.02, "int8": 0.02, "int4": 0.3}[values]
    for mine, reference in zip(through_cut, (*bottom.parameters(), *top.parameters()), strict=True):
        assert (mine - reference.grad).norm() <= tolerance * reference.grad.norm() + 1e-7


@pytest.mark.parametrize("codec", ["plain", "bf16", "int8", "int4"])
def test_without_a_mask_the_gradient_passes_straight_through(codec):
    cut, inputs, gradient = CompressedCut(codec), numbers((40, 16)).requires_grad_(), numbers((40, 16), 1)
    cut(inputs).backward(gradient)
    assert (inputs.grad - gradient).abs().max() <= gradient.abs().max() / 7
    assert (codec == "plain") == torch.equal(inputs.grad, gradient)
    assert cut.kept_share == 1


def test_bytes_are_counted_in_both_directions():
    cut, inputs = CompressedCut(keep=0.1, values="int8"), numbers((100, 50)).requires_grad_()
    cut(inputs).sum().backward()
    assert cut.raw_bytes == 2 * 4 * 5000
    assert 500 < cut.backward_bytes == 500 + 2 * 2
    assert cut.backward_bytes < cut.forward_bytes < cut.backward_bytes + 5000 / 8
    cut(inputs)
    assert cut.raw_bytes == 3 * 4 * 5000


def test_thresholds_are_refreshed_and_batches_may_differ_in_size():
    cut = CompressedCut(keep=0.1, refresh=3)
    for batch in (64, 64, 10, 64, 7, 1):
        assert cut(numbers((batch, 30))).shape == (batch, 30)
    assert cut._state.refreshes == 2


def test_in_eval_mode_what_is_below_the_last_threshold_is_zero_and_nothing_is_counted():
    cut, inputs = CompressedCut(keep=0.1, values="int8"), 1.5 * numbers((64, 30), 1)
    cut(numbers((64, 30)))
    arrived = cut(inputs)  # by a threshold that was corrected
    counted, state = cut.forward_bytes, cut._state
    cut.eval()
    assert torch.equal(cut(inputs), inputs * (arrived != 0))  # unrounded
    assert torch.equal(cut(inputs[:3]), cut(inputs)[:3])  # each sample by itself, few or many
    assert cut(inputs * float("nan")).isnan().all()
    assert (cut.forward_bytes, cut._state) == (counted, state)
    with torch.no_grad():
        assert 0 < cut.train()(inputs).count_nonzero() < inputs.numel()


@pytest.mark.parametrize("options", [{"keep": 1}, {"codec": "int8"}, {"keep": 0.1}], ids=str)
def test_in_eval_mode_everything_passes_where_no_threshold_was_chosen(options):
    cut, inputs = CompressedCut(**options), numbers((5, 30))
    cut(inputs)  # fewer than 256 elements: all of them cross
    assert torch.equal(cut.eval()(inputs), inputs)


def test_thresholds_are_saved_with_the_model():
    options = {"keep": 0.25, "scope": "group", "groups": (8, 24)}
    cut, inputs = CompressedCut(**options), numbers((64, 32)) * torch.tensor([1e-3] * 8 + [1.0] * 24)
    arrived = cut(inputs)
    other = CompressedCut(**options)
    other.load_state_dict(cut.state_dict())
    assert torch.equal(other.eval()(inputs), arrived)
    assert not CompressedCut("bf16").state_dict()


def test_a_model_that_was_saved_before_thresholds_were_is_loaded_without():
    model = nn.Sequential(nn.Linear(8, 64), CompressedCut(keep=0.2))
    saved = model.state_dict()
    del saved["1.tau"]
    model(numbers((50, 8)))
    assert model[1].tau > 0
    model.load_state_dict(saved)
    assert model[1]._state is None
    assert "1.tau" not in saved
    assert model.eval()(inputs := numbers((50, 8))).equal(model[0](inputs))


def test_a_model_predicts_as_it_was_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), CompressedCut(keep=0.05), nn.Linear(512, 1))
    inputs = numbers((200, 8))
    with torch.no_grad():
        trained, predicted = model(inputs), model.eval()(inputs)
    assert torch.equal(trained, predicted)


def test_groups_have_thresholds_of_their_own():
    cut = CompressedCut(keep=0.5, scope="group", groups=(8, 8))
    arrived = cut(numbers((64, 16)) * torch.tensor([1.0] * 8 + [1e-3] * 8))
    assert arrived[:, :8].count_nonzero() == arrived[:, 8:].count_nonzero() == 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_type_of_the_model_is_kept(dtype):
    inputs = numbers((64, 16)).to(dtype).requires_grad_()
    arrived = CompressedCut(keep=0.5)(inputs)
    arrived.sum().backward()
    assert arrived.dtype == inputs.grad.dtype == dtype


@pytest.mark.parametrize(
    ("codec", "largest"),
    [
        *((codec, torch.finfo(torch.float16).max) for codec in ("int8", "int4", "bf16", "plain")),
        ("plain", float("inf")),
    ],
)
def test_rounding_up_does_not_lead_out_of_a_narrow_type(codec, largest):
    inputs = torch.full((4, 16), largest, dtype=torch.float16, requires_grad=True)
    arrived = CompressedCut(codec)(inputs)
    arrived.backward(torch.full_like(inputs, largest))
    assert bool((arrived == largest).all())
    assert bool((inputs.grad == largest).all())


def test_what_is_not_finite_is_named_in_both_directions():
    cut, inputs = CompressedCut(keep=0.5, values="int8", label="the middle"), numbers((64, 16)).requires_grad_()
    with pytest.raises(NonFiniteTensor, match=r"^the activations at the middle cannot be sent: 1,024 of 1,024 elem"):
        cut(inputs * float("nan"))
    with pytest.raises(NonFiniteTensor, match=r"^the gradient at the middle cannot be sent"):
        (cut(inputs) * float("inf")).sum().backward()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"codec": "treshold"}, "did you mean threshold"),
        ({"kep": 0.1}, "did you mean keep"),
        ({"keep": 2}, r"codec\.keep=2"),
        ({"feedback": True}, r"^codec\.feedback=true has no meaning"),
        ({"codec": None}, "codec=None is not known"),
        ({"groups": (8, 8)}, "groups have no effect with codec=threshold here, but with threshold and scope=group"),
        ({"groups": (8, 8), "codec": "bf16"}, "groups have no effect with codec=bf16"),
        ({"scope": "group"}, "scope=group has no effect without groups"),
        ({"scope": "group", "groups": (8, -8)}, "from 1 on, not -8"),
        ({"scope": "group", "groups": (8, 0)}, "from 1 on, not 0"),
        ({"scope": "group", "groups": (8, 2.5)}, "from 1 on, not 2.5"),
        ({"scope": "group", "groups": (8, True)}, "from 1 on, not True"),
        ({"scope": "group", "groups": "16"}, "are no widths"),
        ({"scope": "group", "groups": 16}, "are no widths"),
        ({"rounding": "stochastic"}, r"codec\.rounding=stochastic has no effect with values=fp32"),
        ({"codec": "int8", "seed": 3}, r"codec\.seed=3 has no effect with rounding=nearest"),
        ({"refresh": True}, r"codec\.refresh=True"),
        ({"band": float("inf")}, r"codec\.band=inf"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_told(options, told):
    with pytest.raises(ConfigError, match=told):
        CompressedCut(**options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_only_floating_point_numbers_cross(dtype):
    with pytest.raises(TypeError, match=f"^the cut takes floating-point numbers, not {dtype}$"):
        CompressedCut()(torch.ones((20, 20), dtype=dtype))


@pytest.mark.parametrize("values", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("keep", [0.5, 1])
def test_a_gradient_that_is_not_finite_is_told_whatever_its_values_cross_as(values, keep):
    cut, inputs = CompressedCut(keep=keep, values=values), numbers((64, 16)).requires_grad_()
    arrived = cut(inputs)
    gradient = torch.ones((64, 16))
    gradient.view(-1)[arrived.detach().flatten().nonzero()[0]] = float("nan")
    with pytest.raises(NonFiniteTensor, match=r"^the gradient at the cut cannot be sent: 1 of 1,024 elements"):
        arrived.backward(gradient)


def test_numbers_beyond_float32_are_told():
    inputs = numbers((64, 16)).double()
    with pytest.raises(NonFiniteTensor, match=r"the activations at the cut cannot be sent: 1e\+300 is beyond the r"):
        CompressedCut()(torch.cat((inputs, torch.full((1, 16), 1e300, dtype=torch.float64))))
    arrived = CompressedCut("plain")(inputs.requires_grad_())
    with pytest.raises(NonFiniteTensor, match=r"the gradient at the cut cannot be sent: 1e\+200 is beyond"):
        arrived.backward(torch.full((64, 16), 1e200, dtype=torch.float64))


def test_scales_are_of_features_where_they_are_given():
    inputs = torch.cat((numbers((10, 16)), 1e-4 * numbers((10, 16), 1)), 1)
    assert CompressedCut("int4", groups=(16, 16))(inputs)[:, 16:].any(1).all()
    assert not CompressedCut("int4")(inputs)[:, 16:].any()
    cut, given = CompressedCut("int4", groups=(16, 16)), inputs.clone().requires_grad_()
    cut(given).backward(inputs)
    assert given.grad is not None
    assert given.grad[:, 16:].any(1).all()
    assert cut.backward_bytes == cut.forward_bytes


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it while it traces
def test_it_may_be_in_a_model_that_is_compiled():
    model = nn.Sequential(nn.Linear(8, 64), CompressedCut(keep=0.2), nn.Linear(64, 1))
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    for seed in range(3):
        outputs = [one(numbers((50, 8), seed)) for one in (model, compiled)]
        for output in outputs:
            output.sum().backward()
        assert torch.equal(*outputs)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), compiled.parameters(), strict=True))


def test_it_is_a_module_like_others():
    model = nn.Sequential(nn.Linear(4, 300), CompressedCut(keep=0.1), nn.Linear(300, 1))
    model(numbers((5, 4)))
    twin = copy.deepcopy(model)
    assert set(model.state_dict()) == {"0.weight", "0.bias", "1.tau", "2.weight", "2.bias"}
    assert twin[1].forward_bytes == model[1].forward_bytes
    assert "keep=0.1" in repr(model)


def test_the_example_of_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "compression.md").read_text("utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(example, {})
    assert float(capsys.readouterr().out.split()[0]) > 20
