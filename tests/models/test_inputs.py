"""Columns of a batch under their names, in the forms in which modules are called with them."""

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shadowsync.data.batch import Jagged
from shadowsync.data.source import Feature, Schema
from shadowsync.errors import ConfigError
from shadowsync.models.inputs import Inputs, binding

SCHEMA = Schema(("price", "age"), (Feature("user", 9), Feature("recent", 9, multi_hot=True)))


def batch_of(recent: list[list[int]], weights: bool = False) -> Inputs:
    count = len(recent)
    values = torch.tensor([*range(count), *(one for ids in recent for one in ids)])
    lengths = torch.tensor([*[1] * count, *(len(ids) for ids in recent)])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    dense = torch.arange(2.0 * count).view(count, 2)
    return Inputs(SCHEMA, dense, Jagged(values, offsets, torch.rand(len(values)) if weights else None, 2, count))


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 8), max_size=5), min_size=1, max_size=6),
    st.none() | st.integers(0, 7),
    st.booleans(),
    st.integers(-1, 0),
)
def test_padding_keeps_the_last_ids_in_their_order(
    recent: list[list[int]], length: int | None, left: bool, fill: int
) -> None:
    size = max(map(len, recent)) if length is None else length
    wanted = []
    for ids in recent:
        kept = ids[len(ids) - min(size, len(ids)) :]
        padding = [fill] * (size - len(kept))
        wanted.append(padding + kept if left else kept + padding)
    found = batch_of(recent).padded("recent", length, fill, left)
    assert found.dtype == torch.int64
    assert found.tolist() == wanted


def test_columns_are_what_their_kind_is() -> None:
    batch = batch_of([[3, 4], [], [5]])
    assert batch["age"].tolist() == [1.0, 3.0, 5.0]
    assert batch["user"].tolist() == [0, 1, 2]
    assert batch["recent"].tolist() == [[3, 4], [0, 0], [5, 0]]
    assert list(batch.columns()) == ["price", "age", "user", "recent"]
    assert batch.ids("user", "user").tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch.matrix("user", "recent", "price").tolist() == [[0, 3, 4, 0], [1, 0, 0, 2], [2, 5, 0, 4]]
    assert batch.jagged("recent").bag_offsets().tolist() == [0, 2, 2, 3]
    singles = Inputs(Schema((), (Feature("a", 9), Feature("b", 9))), torch.zeros(2, 0), Jagged(
        torch.tensor([1, 2, 3, 4]), None, None, 2, 2))  # fmt: skip
    assert singles.ids().tolist() == [[1, 3], [2, 4]]


class Takes(nn.Module):
    """Answers with what it is called with."""

    def forward(self, user: Tensor, dense: Tensor, other: str = "default") -> Any:
        return user, dense, other


class TakesKeyed(nn.Module):
    """Says by its annotation what it takes."""

    def forward(self, everything: "KeyedJaggedTensor") -> Any:  # noqa: F821
        return everything


def test_parameters_are_called_like_columns_and_groups() -> None:
    batch = batch_of([[3], [4]])
    user, dense, other = binding(Takes(), None, SCHEMA)(Takes(), batch)
    assert (user.tolist(), other) == ([0, 1], "default")
    assert dense is batch.dense
    given = {"user": ("user", "user"), "dense": "recent", "other": lambda own: own["price"]}
    user, dense, other = binding(Takes(), given, SCHEMA)(Takes(), batch)
    assert (user.shape, dense.tolist(), other.tolist()) == ((2, 2), [[3], [4]], [0.0, 2.0])
    user, dense, _ = binding(Takes(), lambda own: (own["user"], own.dense), SCHEMA)(Takes(), batch)
    assert user.tolist() == [0, 1]


def test_the_double_of_a_keyed_tensor_is_asked_of_torchrec(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Keyed:
        def __init__(self, *given: Any, **named: Any) -> None:
            made.append((*given, named))

    module = type("module", (), {"KeyedJaggedTensor": Keyed})
    for name in ("torchrec", "torchrec.sparse"):
        monkeypatch.setitem(sys.modules, name, type("package", (), {"__path__": []}))
    monkeypatch.setitem(sys.modules, "torchrec.sparse.jagged_tensor", module)
    found = binding(TakesKeyed(), None, SCHEMA)(TakesKeyed(), batch_of([[3, 4], []]))
    assert isinstance(found, Keyed)
    ((keys, values, weights, named),) = made
    assert (keys, values.tolist(), weights) == (["user", "recent"], [0, 1, 3, 4], None)
    assert (named["offsets"].tolist(), named["stride"]) == ([0, 1, 2, 4, 4], 2)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"user": "usr"}, ("user is to be column usr", "did you mean user?")),
        ({"usr": "user"}, ("usr is no parameter of the forward of Takes", "did you mean user?")),
        ({"user": ("user", "dense")}, ("column dense", "price, age, user, recent")),
        (lambda own: own["prise"], ("there is no column prise", "did you mean price?")),
        (lambda own: own.padded("price"), ("price",)),
    ],
    ids=["no such column", "no such parameter", "two columns", "a function's column", "a dense one to pad"],
)
def test_what_is_no_column_is_one_sentence(given: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        binding(Takes(), given, SCHEMA)(Takes(), batch_of([[1]]))
    assert all(part in str(caught.value) for part in parts)


def test_a_parameter_without_a_column_is_one_sentence() -> None:
    class Wants(nn.Module):
        def forward(self, usr: Tensor) -> Tensor:
            return usr

    with pytest.raises(ConfigError, match=r"Wants is called with usr, .*did you mean user\?.*inputs=lambda batch"):
        binding(Wants(), None, SCHEMA)
