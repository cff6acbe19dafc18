"""Keys of dynamic tables that have no row: which were looked up before, and how often those that may get one.

A doorkeeper and counters, as in Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy"
(2017), of each set of rows by itself and in memory beside them. The first look-up of a key leaves two bits in a Bloom
filter of 512; from the second on it is counted, if it is among the 16 keys of its set that come most often. Unlike
there a counter is of one key, by 16 bits of its hash, and does not saturate at 15; and what is forgotten is so bit by
bit: half of a filter that is three quarters full, and a look-up of one counter whenever a key comes that has none.

`K` keys, `S` sets, `W` rows of a set.
"""

import numpy as np
from numpy.typing import NDArray

from shadowsync.embedding.initial import hashes_of
from shadowsync.embedding.table import WAYS
from shadowsync.serving import Ids, Mask, Words

DOOR_BITS = 32 * WAYS
"""Of the Bloom filter of a set, 32 beside each of its rows."""
_MOST = 0x7FFF  # look-ups that a counter can hold; the bits above them are of the key's hash


def _door_bits(hashes: Words) -> tuple[Ids, Ids]:
    """The two bits of its set's filter that tell that a key was looked up."""
    places = (hashes & np.uint64(DOOR_BITS - 1), hashes >> np.uint64(9) & np.uint64(DOOR_BITS - 1))
    return places[0].view(np.int64), places[1].view(np.int64)


class Waiting:
    """Of all sets of a server; whoever changes them is alone.

    Args:
        counters: int32 `[S, W]`, as they lie beside the rows.
        doors: int32 `[S, W]`, likewise.
    """

    def __init__(self, counters: NDArray[np.int32], doors: NDArray[np.int32]) -> None:
        self._counters, self._doors = counters, doors.view(np.uint32)

    def knows(self, sets: Ids, hashes: Words) -> Mask:
        """Which keys were looked up before, `[K]`; of those that were not, some."""
        found = np.ones(len(sets), dtype=np.bool_)
        for bits in _door_bits(hashes):
            found &= self._doors[sets, bits >> 5] >> (bits & 31).astype(np.uint32) & 1 > 0
        return found

    def count(self, sets: Ids, hashes: Words, known: Mask) -> Ids:
        """Takes note of a look-up of keys, each of another set, of which some are `known`; how often each was looked up
        with this time, as far as that is told, `[K]`: one that the filter has lost is as new once, and then goes on."""
        self._let_in(sets[~known], hashes[~known])
        times = np.ones(len(sets), dtype=np.int64)
        sets, hashes = sets[known], hashes[known]
        each, held, mine = np.arange(len(sets)), self._counters[sets], _marks(hashes)
        same, counts = held & ~_MOST == mine[:, None], held & _MOST
        same &= counts > 0
        counted = same.any(1)
        # a key that is counted from now on takes the place of the one that came least often; of several any
        ranks = counts * np.int32(WAYS) + (np.arange(WAYS, dtype=np.int32) - (mine >> 15)[:, None]) % WAYS
        chosen = np.where(counted, same.argmax(1), ranks.argmin(1))
        times[known] = own = np.where(counted, counts[each, chosen], 1) + 1
        fading = (hashes >> np.uint64(18) & np.uint64(WAYS - 1)).view(np.int64)
        self._counters[sets, fading] -= ~counted & (counts[each, fading] > 0)
        self._counters[sets, chosen] = mine | np.minimum(own, _MOST)
        return times

    def _let_in(self, sets: Ids, hashes: Words) -> None:
        for bits in _door_bits(hashes):
            self._doors[sets, bits >> 5] |= np.uint32(1) << (bits & 31).astype(np.uint32)
        full = np.bitwise_count(self._doors[sets]).sum(1) > DOOR_BITS * 3 // 4
        if full.any():
            words = hashes[full, None] + np.arange(1, WAYS // 2 + 1, dtype=np.uint64)
            self._doors[sets[full]] &= hashes_of(words.view(np.int64), np.uint64(0)).view(np.uint32)

    def remove(self, sets: Ids, hashes: Words) -> None:
        """Keys, each of another set, have got a row."""
        held = self._counters[sets]
        self._counters[sets] = np.where(held & ~_MOST == _marks(hashes)[:, None], 0, held)


def _marks(hashes: Words) -> NDArray[np.int32]:
    """What of a key's hash is beside its look-ups: never negative."""
    return ((hashes >> np.uint64(16) & np.uint64(0xFFFF)) << np.uint64(15)).astype(np.int32)
