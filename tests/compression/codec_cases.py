"""Codecs with options worth testing, and tensors to try them on."""

import pytest
import torch
from torch import Tensor

from shadowsync.compression.codec import Codec
from shadowsync.registry import build, members

MEMBERS = members("shadowsync.compression", Codec)
OPTIONS: dict[str, list[dict[str, object]]] = {
    "int8": [{}, {"rounding": "stochastic", "seed": 7}, {"block": 8}],
    "int4": [{}, {"rounding": "stochastic"}, {"block": 16}],
    "threshold": [
        {},
        {"keep": 1},
        {"keep": 0.3, "refresh": 2, "feedback": False},
        {"keep": 0.05, "values": "bf16"},
        {"keep": 0.05, "values": "int8", "rounding": "stochastic"},
        {"keep": 0.2, "values": "int4", "block": 32, "scope": "group"},
        {"select": "significant", "values": "int8"},
    ],
}
CODECS = {
    " ".join([name, *(f"{key}={value}" for key, value in options.items())]): build(member, options, "compression")
    for name, member in MEMBERS.items()
    for options in OPTIONS.get(name, [{}])
}
EACH = pytest.mark.parametrize("codec", [pytest.param(codec, id=name) for name, codec in CODECS.items()])


def numbers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: Codec, tensor: Tensor) -> Tensor:
    encoded = codec.encode(tensor)
    return codec.decode(encoded.frames, encoded.shape)
