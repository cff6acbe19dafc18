"""When a chain of deltas is rewritten."""

import torch
from checkpoint_helpers import USERS, full_table, make_snapshot

from shadowsync.embedding.table import RowSet
from shadowsync.recovery_controller import MOST_LAYERS, Chain, rows_bytes


def test_many_small_deltas_are_a_long_chain() -> None:
    chain = Chain()
    chain.whole(1000)
    for _ in range(MOST_LAYERS - 1):
        chain.delta(1)
        assert not chain.is_long
    chain.delta(1)
    assert chain.is_long
    chain.rewritten()
    assert not chain.is_long


def test_deltas_larger_than_what_they_lie_on_are_a_long_chain() -> None:
    chain = Chain()
    chain.whole(1000)
    chain.delta(600)
    chain.delta(400)
    assert not chain.is_long
    chain.delta(1)
    assert chain.is_long
    chain.rewritten()
    chain.delta(1200)
    assert not chain.is_long, "row numbers come with the rows"
    chain.delta(1)
    assert chain.is_long
    chain.whole(1000)
    assert not chain.is_long


def test_a_chain_that_was_resumed_is_as_long_as_it_was() -> None:
    assert not Chain([1000, 500, 500]).is_long
    assert Chain([1000, 500, 501]).is_long
    assert Chain([1000, *[1] * MOST_LAYERS]).is_long


def test_a_chain_that_could_not_be_rewritten_is_tried_again_some_saves_later() -> None:
    for size in (1, 70):
        chain = Chain([1000, *[size] * MOST_LAYERS])
        assert chain.is_long
        chain.put_off()
        later = 0
        while not chain.is_long:
            chain.delta(size)
            later += 1
        assert 1 < later < MOST_LAYERS


def test_bytes_are_those_of_numbers_rows_and_state_also_where_only_their_form_is_told() -> None:
    tables = make_snapshot(1).tables
    assert rows_bytes(tables) == 4 * (USERS.rows * 5 + 7 * 3 + 10)
    tensors = {name: tensor[:2].to("meta") for name, tensor in full_table(USERS, 0).items()}
    assert rows_bytes([RowSet(USERS, 0, 9, torch.tensor([1, 2]), tensors)]) == 2 * (8 + 4 * 5)


def test_what_is_nearly_everything_is_better_saved_as_a_whole() -> None:
    chain = Chain([1000])
    assert chain.takes(500)
    assert not chain.takes(501)
