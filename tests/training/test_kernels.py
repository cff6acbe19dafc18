"""Which precision and which library compute: by what the processor can do and by what the clock says."""

import itertools
import re
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shadowsync.errors import ConfigError
from shadowsync.training import kernels
from shadowsync.training.kernels import (
    Computing,
    Kernels,
    bf16_leads,
    choose_computing,
    fastest_kernels,
    onednn_runs,
    parse_kernels,
)

MODULE = nn.Sequential(nn.Linear(13, 40), nn.ReLU(), nn.Linear(40, 1))


def choose(precision: str = "auto", libraries: str = "auto", batch_size: int = 32) -> Computing:
    return choose_computing(precision, libraries, "cpu", MODULE, batch_size)


@pytest.fixture
def no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor whose bf16 products raise, as oneDNN's do without AVX-512."""
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda device: False)
    monkeypatch.setattr(kernels, "onednn_runs", lambda dtype: dtype == torch.float32 and onednn_runs(dtype))


@pytest.fixture
def bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda device: True)
    monkeypatch.setattr(kernels, "bf16_leads", lambda layers, batch_size: True)


def test_auto_is_fp32_without_native_bf16(no_bf16: None) -> None:
    found = choose()
    assert (found.precision, found.why) == ("fp32", "this processor does not multiply bf16")
    assert found.sentence.startswith("computing in fp32 (this processor does not multiply bf16), matrices by ")


def test_auto_is_bf16_where_it_is_native(bf16: None) -> None:
    assert (choose().precision, choose().why) == ("bf16", "")


@pytest.mark.parametrize(("bf16_s", "chosen"), [(0.5e-3, "bf16"), (0.9e-3, "fp32"), (1.7e-3, "fp32")])
def test_auto_is_bf16_only_where_its_products_take_clearly_less_time(
    monkeypatch: pytest.MonkeyPatch, bf16_s: float, chosen: str
) -> None:
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda device: True)
    at = [0.0]

    def products(shape: object, batch_size: int, dtype: torch.dtype) -> list[dict[str, Callable[[], None]]]:
        def product() -> None:
            at[0] += bf16_s if dtype == torch.bfloat16 else 1e-3

        return [{"t": product}] * 3

    monkeypatch.setattr(kernels, "_libraries", products)
    layers = [layer for layer in MODULE if isinstance(layer, nn.Linear)]
    assert bf16_leads(layers, 32, lambda: at[0]) == (chosen == "bf16")
    monkeypatch.setattr(kernels, "bf16_leads", lambda layers, batch_size: chosen == "bf16")
    found = choose()
    assert found.precision == chosen
    assert found.why == ("" if chosen == "bf16" else "products of bf16 bring too little on this processor")


def test_bf16_asked_for_works_by_torch_and_says_that_it_is_slow(no_bf16: None) -> None:
    found = choose("bf16")
    assert (found.precision, found.kernels) == ("bf16", "torch")
    assert "slow, train.precision=auto takes fp32" in found.why


def test_onednn_asked_for_where_it_has_no_products(no_bf16: None) -> None:
    assert choose("bf16", "onednn").kernels == "torch"
    assert "oneDNN has no bf16 products here" in choose("bf16", "onednn").why


def test_what_was_asked_for_is_taken() -> None:
    assert choose("fp32", "torch") == Computing("fp32", "torch")
    if onednn_runs(torch.float32):
        assert choose("fp32", "13x40=otT,40x1=too").kernels == "13x40=otT,40x1=too"


def test_the_choice_names_every_layer_and_can_be_read_again() -> None:
    found = choose("fp32")
    if not onednn_runs(torch.float32):
        assert found.kernels == "torch"
        return
    assert [name for name, _ in re.findall(r"(\d+x\d+)=(\w{3})", found.kernels)] == ["13x40", "40x1"]
    assert str(parse_kernels(found.kernels)) == found.kernels
    assert choose("fp32", found.kernels).kernels == found.kernels


def test_a_module_without_layers() -> None:
    module = nn.ParameterList([torch.ones(3)])
    assert choose_computing("fp32", "auto", "cpu", module, 8).kernels == "torch"


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 9999), st.integers(1, 9999)).map("{0[0]}x{0[1]}".format),
        st.tuples(st.sampled_from("to"), st.sampled_from("to"), st.sampled_from("tToO")).map("".join),
        min_size=1,
    )
)
def test_a_record_is_read_as_it_was_written(layers: dict[str, str]) -> None:
    assert parse_kernels(str(Kernels(layers))) == Kernels(layers)


@pytest.mark.parametrize("text", ["mkl", "", "13x40", "13x40=tt", "13x40=ttx", "13x40=Ttt", "13x40=ttt,", "a" * 999])
def test_what_cannot_be_read_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed are auto, torch, onednn, and what the result\.json") as raised:
        choose("fp32", text)
    assert len(str(raised.value)) < 250


def ticking(seconds: Iterator[float]) -> Iterator[float]:
    return itertools.accumulate(seconds)


@pytest.mark.skipif(not onednn_runs(torch.float32), reason="install a torch with oneDNN to compare it")
def test_the_faster_library_wins_product_by_product() -> None:
    """The clock is a script: start, a reading before each layer and product, and two for each library of a product."""
    by_torch, slower, faster = 1e-4, 1.5e-4, 0.5e-4
    took = ((by_torch, faster), (by_torch, slower), (by_torch, slower, slower, faster))
    readings = [0.0, 0.0]
    for product in took:
        readings += [0.0, *itertools.chain.from_iterable((0.0, seconds) for seconds in product)]
    clock = ticking(iter([*readings, 99.0]))
    assert str(fastest_kernels([nn.Linear(3, 5)], 4, torch.float32, lambda: next(clock))) == "3x5=otO"


@pytest.mark.skipif(not onednn_runs(torch.float32), reason="install a torch with oneDNN to compare it")
def test_equally_fast_libraries_leave_the_product_with_torch() -> None:
    clock = itertools.count(0.0, 0.01)
    assert str(fastest_kernels([nn.Linear(3, 5)], 4, torch.float32, lambda: next(clock))) == "3x5=ttt"


@pytest.mark.skipif(not onednn_runs(torch.float32), reason="install a torch with oneDNN to compare it")
def test_timing_ends_in_time_however_many_and_wide_the_layers_are() -> None:
    layers = [nn.Linear(width, 1 << 12, device="meta") for width in range(1 << 12, (1 << 12) + 500)]
    layers += [nn.Linear(1 << 20, 1 << 16, device="meta"), *(nn.Linear(16 + k, 8, device="meta") for k in range(500))]
    began = time.thread_time()
    fastest_kernels(layers, 1 << 20, torch.float32)
    assert time.thread_time() - began < 20 * kernels.TIMED_S
    clock = itertools.count(0.0, 0.03)
    named = fastest_kernels([nn.Linear(3, 5), nn.Linear(5, 7)], 4, torch.float32, lambda: next(clock))
    assert named.layers == {"3x5": "ttt"}, "what was not reached is left to torch"


@pytest.mark.skipif(not onednn_runs(torch.float32), reason="install a torch with oneDNN to compare it")
def test_every_product_of_no_rows_runs() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        if onednn_runs(dtype):
            nothing = torch.zeros(0, 3, dtype=dtype)
            layer = parse_kernels("3x5=ooO,5x7=ooo").of(nn.Linear(3, 5))
            outputs = layer.forward(nothing, torch.ones(5, 3, dtype=dtype), None, True)
            assert layer.by_input(outputs, torch.ones(5, 3, dtype=dtype)).shape == (0, 3)
            assert torch.equal(layer.by_weight(outputs, nothing), torch.zeros(5, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_agrees_with_what_runs(dtype: torch.dtype) -> None:
    """On any processor: oneDNN's product is as torch's where the probe allows it, and raises where it does not."""
    inputs, weight = torch.rand(4, 3).to(dtype), torch.rand(5, 3).to(dtype)
    if onednn_runs(dtype):
        product = torch.ops.mkldnn._linear_pointwise(inputs, weight, None, "none", [], "")
        torch.testing.assert_close(product, nn.functional.linear(inputs, weight))
    else:
        with pytest.raises((RuntimeError, AttributeError)):
            torch.ops.mkldnn._linear_pointwise(inputs, weight, None, "none", [], "")
