"""Rows that are copied when they are wanted."""

import weakref
from collections.abc import Iterator, Mapping

import pytest
import torch
from embedding_cases import TABLES
from torch import Tensor

from shadowsync.embedding.saves import LiveRows, live_set, live_shard
from shadowsync.embedding.table import Shard

CHUNK = 3


class Copying:
    """Ten rows; each copied chunk is of one moment more than the one before."""

    def __init__(self) -> None:
        self.moment = 0
        self.weights: list[weakref.ref[Tensor]] = []

    def __call__(self, first: int, last: int) -> Iterator[Mapping[str, Tensor]]:
        for start in range(first, max(first + 1, last), CHUNK):
            self.moment += 1
            stamps = torch.full((min(start + CHUNK, last) - start,), float(self.moment))
            weight = stamps[:, None].expand(-1, 2).clone()
            self.weights.append(weakref.ref(weight))
            yield {"weight": weight, "momentum": stamps.clone(), "step": torch.tensor([self.moment])}


def read(source: LiveRows, first: int, last: int, name: str) -> list[float]:
    return torch.cat(list(source.read(first, last, name))).float().flatten().tolist()


def test_the_state_is_of_the_moment_of_the_weights_and_what_is_wide_of_the_last() -> None:
    source = LiveRows(Copying(), {"step"})
    assert read(source, 0, 7, "weight") == [1.0] * 6 + [2.0] * 6 + [3.0] * 2
    assert read(source, 7, 10, "weight") == [4.0] * 6
    assert read(source, 0, 7, "momentum") == [1.0] * 3 + [2.0] * 3 + [3.0]
    assert read(source, 7, 10, "momentum") == [4.0] * 3
    assert read(source, 7, 10, "step") == [4.0]
    assert read(source, 0, 7, "step") == [3.0]


def test_any_tensor_may_come_first() -> None:
    source = LiveRows(Copying(), {"step"})
    assert read(source, 0, 4, "momentum") == [1.0] * 3 + [2.0]
    assert read(source, 0, 4, "weight") == [1.0] * 6 + [2.0] * 2


def test_what_is_read_once_more_is_copied_anew() -> None:
    source = LiveRows(Copying(), {"step"})
    assert [read(source, 0, 2, "weight")[0] for _ in range(3)] == [1.0, 2.0, 3.0]
    assert read(source, 0, 2, "momentum") == [3.0] * 2


def test_of_no_rows_there_is_what_is_wide() -> None:
    source = LiveRows(Copying(), {"step"})
    assert (read(source, 0, 0, "weight"), read(source, 0, 0, "step")) == ([], [1.0])


def test_of_the_tensor_that_is_read_one_chunk_is_in_memory() -> None:
    copying = Copying()
    for part in LiveRows(copying, {"step"}).read(0, 10, "weight"):
        assert sum(weight() is not None for weight in copying.weights) == 1
        del part
    assert len(copying.weights) == 4


@pytest.mark.parametrize("numbers", [None, torch.tensor([20, 21, 39])])
def test_forms_are_told_without_memory(numbers: Tensor | None) -> None:
    shard = Shard(TABLES[0], 17, 40)
    nothing = {"weight": torch.zeros(0, 8), "momentum": torch.zeros(0), "step": torch.zeros(1, dtype=torch.int64)}
    rows = live_shard(shard, nothing, Copying()) if numbers is None else live_set(shard, numbers, nothing, Copying())
    count = 23 if numbers is None else 3
    assert {name: (t.device.type, t.dtype, tuple(t.shape)) for name, t in rows.tensors.items()} == {
        "weight": ("meta", torch.float32, (count, 8)),
        "momentum": ("meta", torch.float32, (count,)),
        "step": ("meta", torch.int64, (1,)),
    }
    assert rows.source is not None
    assert torch.cat(list(rows.source(0, 2, "weight"))).tolist() == [[1.0, 1.0]] * 2
