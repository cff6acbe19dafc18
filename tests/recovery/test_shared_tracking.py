"""Priorities of rows that other processes push to: what they tell in shared memory, and what outlives its owner."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from shadowsync.config import parse
from shadowsync.data.batch import Jagged
from shadowsync.embedding.memory import parts_of
from shadowsync.embedding.optimizers import RowwiseAdagrad
from shadowsync.embedding.requests import Lookup
from shadowsync.embedding.server import EmbeddingServer
from shadowsync.embedding.table import Shard, Table
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.embedding.watching import RowTracking
from shadowsync.memory.shared import SharedMemory, bytes_of, can_share
from shadowsync.recovery.settings import recovery_settings, row_tracking

pytestmark = pytest.mark.skipif(not can_share(), reason="needs memory files and /proc, as Linux has them")
ADAGRAD = RowwiseAdagrad(0.01)
SHARDS = [Shard(Table("small", 4, 2, ("s",)), 0, 4), Shard(Table("big", 40, 2, ("b",)), 10, 40)]
ROWS = [3, 5, 8, 13, 21]


def tracking_of(priority: str) -> RowTracking:
    given = {"mode": "partial", "priority": priority} | ({} if priority == "all" else {"min_rows": 10, "share": 0.5})
    found = row_tracking(recovery_settings(parse({"recovery": given}).recovery, "processes"), seed=1)
    assert found is not None
    return found


@pytest.fixture(params=["all", "scar", "mfu", "ssu"])
def tracking(request: pytest.FixtureRequest) -> RowTracking:
    return tracking_of(request.param)


def memory_for(tracking: RowTracking) -> SharedMemory:
    followed = [part for shard in SHARDS for part in tracking.parts(shard)]
    return SharedMemory.create(bytes_of([*parts_of(SHARDS, ADAGRAD), *followed]), "the rows")


@pytest.fixture
def memory(tracking: RowTracking) -> Iterator[SharedMemory]:
    with contextlib.closing(memory_for(tracking)) as made:
        yield made


def server(memory: SharedMemory, tracking: RowTracking | None, seed: int | None = None) -> EmbeddingServer:
    return EmbeddingServer(SHARDS, TorchStorage, ADAGRAD, seed, tracking, SharedMemory.open(memory.path))


def push(guest: EmbeddingServer, rows: list[int], times: int = 1) -> None:
    """To the big table."""
    lookup = Lookup(
        (1,), Jagged(torch.tensor(rows * times), torch.arange(0, len(rows) * times + 1), None, 1, 5 * times)
    )
    guest.push(lookup, [torch.ones(5 * times, 2)], 0.1)


def told(guest: EmbeddingServer) -> None:
    """As after so many pushes that what is queued is told of."""
    guest.watches._tell()


def picked_by(owner: EmbeddingServer) -> list[int]:
    """Rows of the big table in a save that begins now."""
    owner.watches.begin()
    picked = owner.pick(1, end_of_round=True)
    assert picked is not None
    return picked.tolist()


def test_the_owner_picks_what_guests_have_pushed_to(memory: SharedMemory, tracking: RowTracking) -> None:
    owner = server(memory, tracking, seed=3)
    guests = [server(memory, tracking if tracking.priority.sees else None) for _ in range(2)]
    push(guests[0], ROWS, times=2)
    push(guests[1], ROWS)
    for guest in guests:
        told(guest)
    picked = picked_by(owner)
    assert picked
    assert set(picked) <= {row + 10 for row in ROWS}
    assert not torch.equal(owner.state()[1].tensors["weight"][ROWS], torch.zeros(5, 2))


def test_marks_are_there_as_soon_as_a_push_is_over() -> None:
    """Who pushed may be killed right afterwards, and the next delta is to have the row all the same."""
    tracking = tracking_of("all")
    memory = memory_for(tracking)
    owner, guest = server(memory, tracking, seed=3), server(memory, tracking)
    push(guest, ROWS)
    assert picked_by(owner) == [row + 10 for row in ROWS]


def test_who_takes_the_owners_place_misses_nothing_that_was_not_saved(
    memory: SharedMemory, tracking: RowTracking
) -> None:
    owner, guest = server(memory, tracking, seed=3), server(memory, tracking if tracking.priority.sees else None)
    push(guest, ROWS)
    told(guest)
    before = owner.state()[1].tensors["weight"].clone()
    if tracking.priority.name in ("all", "scar"):  # others may lose what was picked for a save that nobody confirms
        picked_by(owner)
    heir = server(memory, tracking)
    heir.inherit()
    assert torch.equal(heir.state()[1].tensors["weight"], before)
    picked = picked_by(heir)
    assert picked
    if tracking.priority.name == "all":
        assert {row + 10 for row in ROWS} <= set(picked)


def test_priorities_that_look_at_weights_alone_need_no_word_from_guests() -> None:
    assert [tracking_of(name).priority.sees for name in ("all", "scar", "mfu", "ssu")] == [True, False, True, True]
