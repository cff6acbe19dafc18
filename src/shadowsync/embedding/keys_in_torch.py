"""Which row a key has, by operators of torch alone: for exported models.

`L` keys of `F` features.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shadowsync.embedding.initial import salt_of
from shadowsync.embedding.keys import DEFAULT, LOWEST, NOBODY, drops_keys
from shadowsync.embedding.table import WAYS, Table
from shadowsync.embedding.waiting import DOOR_BITS
from shadowsync.serving import MIXERS

_GOLDEN, _FIRST, _SECOND = (int(word.astype("int64")) for word in MIXERS)


class KeysInTorch(nn.Module):
    """For the tables of features in their order, of which those with `keys`, by table what is kept beside its rows
    (`keys.PARTS`), are dynamic."""

    def __init__(self, tables: Sequence[Table], keys: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().__init__()
        names = list(dict.fromkeys(table.name for table in tables if table.name in keys))
        firsts, first = {}, 0
        for name in names:
            firsts[name], first = first, first + len(keys[name]["key"])
        drops = [drops_keys(table) for table in tables]
        self.dropping = any(drops)
        salts = [int(salt_of(table.name).astype("int64")) for table in tables]
        self.owners: Tensor
        self.doors: Tensor
        self.salts: Tensor
        self.sets: Tensor
        self.first: Tensor
        self.dynamic: Tensor
        self.drops: Tensor
        self.register_buffer("owners", torch.cat([keys[name]["key"] for name in names]))
        self.register_buffer("doors", torch.cat([keys[name]["door"] for name in names]))
        self.register_buffer("salts", torch.tensor(salts, dtype=torch.int64))
        self.register_buffer("sets", torch.tensor([table.rows // WAYS for table in tables]).long())
        self.register_buffer("first", torch.tensor([firsts.get(table.name, 0) for table in tables]).long())
        self.register_buffer("drops", torch.tensor(drops).bool())
        self.register_buffer("dynamic", torch.tensor([table.name in keys for table in tables]).bool())

    def forward(self, values: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Rows `[L]` of keys `[L]`, each of the feature at its place, and which of them look something up; other
        features' ids stay as they are."""
        keys = values.clamp(min=LOWEST)
        hashes = _mixed(keys ^ self.salts[feature])
        sets = _shifted(_shifted(hashes, 32) * self.sets[feature], 32)
        dynamic = self.dynamic[feature]
        start = torch.where(dynamic, self.first[feature] + sets * WAYS, 0)
        ways = torch.arange(WAYS)
        owners = self.owners[start[:, None] + ways]
        way = ((owners == (keys ^ NOBODY)[:, None]) * (ways + 1)).amax(1) - 1
        known = torch.ones_like(dynamic)
        for bits in (hashes & DOOR_BITS - 1, _shifted(hashes, 9) & DOOR_BITS - 1):
            known &= self.doors[start + _shifted(bits, 5)].long() >> (bits & 31) & 1 > 0
        after = (ways - (hashes & WAYS - 1)[:, None]) % WAYS
        shared = torch.where(owners == DEFAULT ^ NOBODY, after, WAYS).amin(1)
        other = torch.where(known & (shared < WAYS), sets * WAYS + (shared + (hashes & WAYS - 1)) % WAYS, 0)
        rows = torch.where(way < 0, other, sets * WAYS + way)
        return torch.where(dynamic, rows, values), ~(dynamic & (way < 0) & self.drops[feature])


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right as if words had no sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(words: Tensor) -> Tensor:
    words = words + _GOLDEN
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return words ^ _shifted(words, 31)
