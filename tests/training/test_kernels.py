"""Which precision and which library compute: by what the processor can do and by what the clock says."""

import itertools
import re
import time
from collections.abc import Callable
from functools import partial

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
    choose_computing,
    fastest_kernels,
    onednn_runs,
    parse_kernels,
    timed_products,
)

MODULE = nn.Sequential(nn.Linear(13, 40), nn.ReLU(), nn.Linear(40, 1))


def choose(precision: str = "auto", libraries: str = "auto", batch_size: int = 32) -> Computing:
    return choose_computing(precision, libraries, "cpu", MODULE, batch_size)


class Work:
    """Products of made-up layers that take what is given, by a clock of their own.

    Args:
        seconds: by dtype, for each of the three products those of each library.
        once: more, the first time that a product of fp32 is computed.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seconds: Callable[[torch.dtype], list[dict[str, float]]],
        once: float = 0.0,
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr(kernels, "onednn_runs", lambda dtype: True)
        monkeypatch.setattr(
            kernels,
            "_libraries",
            lambda shape, batch_size, dtype: [
                {
                    letter: partial(self._pass, each, [once] if dtype == torch.float32 else [])
                    for letter, each in product.items()
                }
                for product in seconds(dtype)
            ],
        )

    def _pass(self, seconds: float, once: list[float]) -> None:
        self.now += seconds + sum(once)
        once.clear()

    def clock(self) -> float:
        return self.now

    @property
    def chosen(self) -> Kernels:
        layers = [nn.Linear(3, 5)]
        return fastest_kernels(layers, timed_products(layers, 4, ["fp32"], self.clock)["fp32"])


@pytest.fixture
def no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor whose bf16 products raise, as oneDNN's do without AVX-512."""
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda device: False)
    monkeypatch.setattr(kernels, "onednn_runs", lambda dtype: dtype == torch.float32 and onednn_runs(dtype))


@pytest.fixture
def bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda device: True)
    monkeypatch.setattr(kernels, "bf16_leads", lambda layers, batch_size, timed: True)


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
    work = Work(monkeypatch, lambda dtype: [{"t": bf16_s if dtype == torch.bfloat16 else 1e-3}] * 3)
    monkeypatch.setattr(timed_products, "__defaults__", (work.clock,))
    found = choose()
    assert found.precision == chosen
    assert found.why == ("" if chosen == "bf16" else "products of bf16 bring too little on this processor")


def test_the_first_turn_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library does only once, such as making its kernels, decides nothing: here it is much of fp32's time."""
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda device: True)
    work = Work(monkeypatch, lambda dtype: [{"t": 2e-3 if dtype == torch.bfloat16 else 1e-3}] * 3, once=10e-3)
    monkeypatch.setattr(kernels, "TIMED_S", 0.04)
    monkeypatch.setattr(timed_products, "__defaults__", (work.clock,))
    assert choose().precision == "fp32"


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


def test_the_faster_library_wins_product_by_product(monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch, slower, faster = 1e-4, 1.5e-4, 0.5e-4
    fast, slow = {"t": by_torch, "o": faster}, {"t": by_torch, "o": slower}
    work = Work(monkeypatch, lambda dtype: [fast, slow, {"t": by_torch, "T": slower, "o": slower, "O": faster}])
    assert str(work.chosen) == "3x5=otO"


def test_equally_fast_libraries_leave_the_product_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(Work(monkeypatch, lambda dtype: [{"t": 1e-2, "o": 1e-2}] * 3).chosen) == "3x5=ttt"


@pytest.mark.skipif(not onednn_runs(torch.float32), reason="install a torch with oneDNN to compare it")
def test_timing_ends_in_time_however_many_and_wide_the_layers_are() -> None:
    layers = [nn.Linear(width, 1 << 12, device="meta") for width in range(1 << 12, (1 << 12) + 500)]
    layers += [nn.Linear(1 << 20, 1 << 16, device="meta"), *(nn.Linear(16 + k, 8, device="meta") for k in range(500))]
    began = time.thread_time()
    timed_products(layers, 1 << 20, ["fp32"])
    assert time.thread_time() - began < 20 * kernels.TIMED_S


def test_what_was_not_reached_is_left_to_torch() -> None:
    clock, layers = itertools.count(0.0, kernels.TIMED_S * 0.6), [nn.Linear(3, 5), nn.Linear(5, 7)]
    timed = timed_products(layers, 4, ["fp32"], lambda: next(clock))
    assert fastest_kernels(layers, timed["fp32"]).layers == {"3x5": "ttt"}


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
