"""Which precision and which library compute: by what the processor can do and by what the clock says."""

import itertools
import re
from collections.abc import Iterator

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
    multiplies_bf16,
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


def test_auto_is_fp32_without_native_bf16(no_bf16: None) -> None:
    found = choose()
    assert (found.precision, found.why) == ("fp32", "this processor does not multiply bf16")
    assert found.sentence.startswith("computing in fp32 (this processor does not multiply bf16), matrices by ")


def test_auto_is_bf16_where_it_is_native(bf16: None) -> None:
    assert (choose().precision, choose().why) == ("bf16", "")


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
        st.from_regex(r"[1-9][0-9]{0,3}x[1-9][0-9]{0,3}", fullmatch=True),
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
    """The clock is a script: start, then two readings for each of the eight products, the last of which ends it."""
    by_torch, slower, faster = 1.0, 1.5, 0.5
    took = (by_torch, faster, by_torch, slower, by_torch, slower, slower, faster)
    readings = [0.0, *itertools.chain.from_iterable((0.0, seconds) for seconds in took), 99.0]
    clock = ticking(iter(readings))
    assert str(fastest_kernels([nn.Linear(3, 5)], 4, torch.float32, lambda: next(clock))) == "3x5=otO"


@pytest.mark.skipif(not onednn_runs(torch.float32), reason="install a torch with oneDNN to compare it")
def test_equally_fast_libraries_leave_the_product_with_torch() -> None:
    clock = itertools.count(0.0, 0.01)
    assert str(fastest_kernels([nn.Linear(3, 5)], 4, torch.float32, lambda: next(clock))) == "3x5=ttt"


def test_the_probe_agrees_with_what_runs() -> None:
    """On any processor: what the probe allows does not raise, and bf16 is native only where oneDNN runs it."""
    inputs, weight = torch.ones(4, 3, dtype=torch.bfloat16), torch.ones(5, 3, dtype=torch.bfloat16)
    if onednn_runs(torch.bfloat16):
        assert torch.ops.mkldnn._linear_pointwise(inputs, weight, None, "none", [], "").shape == (4, 5)
    assert onednn_runs(torch.bfloat16) or not multiplies_bf16("cpu")
