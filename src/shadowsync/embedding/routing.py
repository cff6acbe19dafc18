"""Which features go to which server, pooled or as distinct rows, and how the answers become one tensor.

`B` samples, `F` features of one route.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.gathering import Gathering, plan_gathering
from shadowsync.embedding.requests import Selection, Selector, mean_weighted, spread
from shadowsync.embedding.table import Shard, Table, group_by_table, slots_of

ID_BYTES = 4
REQUEST_BYTES = 1 << 14
"""What one more request to a server costs besides its contents: some 0.1 ms, in which 1 Gbit/s carries this much."""
WORTH = 0.9
"""Finding duplicates takes processor time, so that it has to save a tenth of the traffic."""


@dataclass(frozen=True)
class UniqueRows:
    """When duplicates are removed before rows and gradients cross.

    Attributes:
        mode: `auto` is wherever that is less traffic.
        float_bytes: what one float takes there and back together, as the codecs of pulls and pushes encode it.
        every: pulls between two estimates of `auto`.
    """

    mode: Literal["auto", "always", "never"] = "never"
    float_bytes: float = 8.0
    every: int = 500


NEVER = UniqueRows()


class Traffic(NamedTuple):
    """Bytes of one table in one batch, both ways."""

    pooled: float
    unique: float


class UniqueChoice:
    """Chooses tables, from the traffic of a batch now and then; the choice holds until the next estimate.

    Tables that lie with servers `here` whole cross no network, so nothing would be gained.
    """

    def __init__(
        self,
        settings: UniqueRows,
        tables: Sequence[Table],
        features: Sequence[str],
        servers: Sequence[Sequence[Shard]],
        here: Collection[int] = (),
    ) -> None:
        self._settings = settings
        self._positions = {feature: index for index, feature in enumerate(features)}
        held = group_by_table(shard for shards in servers for shard in shards)
        self._parts = {name: len(shards) for name, shards in held.items()}
        self._servers = len(servers) - len(here)
        self._pulls = itertools.count()
        elsewhere = {s.table.name for at, shards in enumerate(servers) if at not in here for s in shards}
        self._pooled = tuple(table for table in tables if not table.sequences and table.name in elsewhere)
        self._forced = frozenset(table.name for table in tables if table.sequences or settings.mode == "always")
        self._chosen = self._forced

    def tables(self, ids: Jagged) -> frozenset[str]:
        """Names of the tables whose distinct rows are asked for in this pull of the ids of all features: always those
        of which a feature is a sequence, so that rows which it shares with others cross once and take one step."""
        if self._settings.mode == "auto" and next(self._pulls) % self._settings.every == 0 and ids.samples:
            found = choose({table.name: self._traffic(table, ids) for table in self._pooled}, self._servers)
            self._chosen = self._forced | found
        return self._chosen

    def _traffic(self, table: Table, ids: Jagged) -> Traffic:
        mine = ids.select([self._positions[feature] for feature in table.features])
        vector = table.dim * self._settings.float_bytes
        weighted = mine.weights is not None or (mine.offsets is not None and "mean" in table.poolings.values())
        per_bag = vector + (0 if mine.offsets is None else ID_BYTES)
        per_id = ID_BYTES * (1 + weighted)
        pooled = len(mine.values) * per_id + self._parts[table.name] * mine.samples * len(table.features) * per_bag
        distinct = len(np.unique(mine.values.numpy()))
        return Traffic(pooled, distinct * vector + number_bytes(distinct, table.rows))


def number_bytes(count: int, rows: int) -> float:
    """About what the numbers of so many distinct of all rows take: as gaps `log2(e rows / count)` bits each, which is
    the entropy of rows that are drawn independently. Tables of unlike density on one server take more."""
    return count * min(ID_BYTES, math.log2(math.e * rows / count) / 8) if count else 0.0


def choose(traffic: Mapping[str, Traffic], servers: int) -> frozenset[str]:
    """The tables that should cross as distinct rows.

    Those that get smaller, if all in all that is worth the search; the others come along unless what pooling them
    saves pays for requests of their own.
    """
    smaller = frozenset(name for name, found in traffic.items() if found.unique <= found.pooled)
    others = [found for name, found in traffic.items() if name not in smaller]
    apart = sum(found.pooled for found in others) + servers * REQUEST_BYTES
    chosen = smaller if others and apart < sum(found.unique for found in others) else frozenset(traffic)
    crossing = sum(found.unique if name in chosen else found.pooled for name, found in traffic.items())
    crossing += servers * REQUEST_BYTES if chosen != frozenset(traffic) else 0
    return chosen if smaller and crossing <= WORTH * sum(f.pooled for f in traffic.values()) else frozenset()


INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class ColumnRun(NamedTuple):
    """A run of columns of one answer that stay side by side in the output, of the `layer`-th parts of their tables; a
    whole table is its own part 0."""

    layer: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Route:
    """The look-ups that the server at one position pools and answers in one request, with the features in the order of
    the slots.

    Attributes:
        parts: lowest and highest id that go there of each feature, and what is taken off them, int64 `[3, F]`; None if
            all tables are whole. The first part of a table takes every id below it too, and the last every id above, so
            that an id that is in no part reaches a server, which refuses it.
    """

    server: int
    slots: tuple[int, ...]
    selection: Selection
    parts: Tensor | None

    def ids(self, ids: Jagged) -> Jagged:
        """What the route asks its server for, from the ids of all features."""
        ids = self.selection.ids(ids)
        if self.selection.mean is not None and ids.offsets is not None:
            ids = mean_weighted(ids, self.selection.mean)
        return ids if self.parts is None else _narrow(ids, self.parts)


@dataclass(frozen=True)
class Fan:
    """What one pull asks for, and how the answers are put together: those of the routes, then the gathered groups'.

    Attributes:
        routes: what servers pool; `gathering` what is made here from distinct rows, if anything is.
        widths: for each answer, the widths of its sections.
        first: which sections, counted over all answers, make up the output side by side: those of layer 0.
        added: the sections of later layers and where they are added, layer by layer: an order of summation that the
            placement does not change.
        whole: there is one answer, and it is the output.
    """

    routes: tuple[Route, ...]
    gathering: Gathering | None
    widths: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    added: tuple[tuple[int, slice], ...]
    whole: bool

    def assemble(self, answers: Sequence[Tensor], samples: int) -> Tensor:
        """The output `[B, Σ D_f]` from the answers."""
        if not answers:
            return torch.zeros(samples, 0)
        if self.whole:
            return answers[0]
        pairs = zip(answers, self.widths, strict=True)
        sections = [section for answer, widths in pairs for section in answer.split_with_sizes(widths, 1)]
        # one copy into one new tensor: a second tensor of this size often costs more in page faults than the copy
        pooled = torch.cat([sections[index] for index in self.first], 1)
        for index, columns in self.added:
            pooled[:, columns] += sections[index]
        return pooled


class Router:
    """Fans for a fixed placement."""

    def __init__(self, tables: Sequence[Table], features: Sequence[str], servers: Sequence[Sequence[Shard]]) -> None:
        self._tables = tuple(tables)
        self._servers = tuple(tuple(shards) for shards in servers)
        self.selector = Selector(tables, features)
        self._slots = [slots_of(shards) for shards in servers]
        parts = group_by_table(shard for shards in servers for shard in shards)
        self._part = {shard: index for shards in parts.values() for index, shard in enumerate(shards)}
        self._fans: dict[tuple[bool, frozenset[str]], Fan] = {}

    def fan(self, apart: bool, unique: frozenset[str] = frozenset()) -> Fan:
        """What a pull asks for, with the distinct rows of the tables named in `unique`, to be pooled here; `apart`,
        tables with features pooled by mean go in look-ups of their own: they carry weights, which slow a look-up down.
        """
        if (fan := self._fans.get((apart, unique))) is None:
            fan = self._fans[apart, unique] = self._make_fan(apart, unique)
        return fan

    def _make_fan(self, apart: bool, unique: Set[str]) -> Fan:
        pooled = {feature for table in self._tables if table.name not in unique for feature in table.features}
        # all features of a table stay together: optimizers step its rows once, by all of their gradients
        means = {f for table in self._tables if "mean" in table.poolings.values() for f in table.features}
        routes, sections = [], []
        for chosen in [pooled - means, pooled & means] if apart else [pooled]:
            for server, held in enumerate(self._slots):
                slots = [(number, slot) for number, slot in enumerate(held) if slot.feature in chosen]
                if slots:
                    selection = self.selector.select([slot.feature for _, slot in slots])
                    parts = _parts([slot.shard for _, slot in slots])
                    routes.append(Route(server, tuple(number for number, _ in slots), selection, parts))
                    sections.append(self._sections([(self._part[slot.shard], slot.feature) for _, slot in slots]))
        gathering = plan_gathering(self._tables, unique, self.selector, self._servers) if unique else None
        groups = [group.pooled for group in gathering.groups if group.pooled] if gathering else []
        sections += [self._sections([(0, feature) for feature in features]) for features in groups]
        numbered = sorted(enumerate(section for found in sections for section in found), key=lambda pair: pair[1])
        return Fan(
            tuple(routes),
            gathering,
            tuple(tuple(section.stop - section.start for section in found) for found in sections),
            tuple(index for index, section in numbered if section.layer == 0),
            tuple((index, slice(section.start, section.stop)) for index, section in numbered if section.layer),
            sections == [[ColumnRun(0, 0, self.selector.width)]],
        )

    def _sections(self, features: Sequence[tuple[int, str]]) -> list[ColumnRun]:
        """Of one answer, given the layer and the name of each of its features."""
        found: list[ColumnRun] = []
        for layer, feature in features:
            start, stop = self.selector.columns[feature].start, self.selector.columns[feature].stop
            if found and (found[-1].layer, found[-1].stop) == (layer, start):
                start = found.pop().start
            found.append(ColumnRun(layer, start, stop))
        return found


def _parts(shards: Sequence[Shard]) -> Tensor | None:
    if all(shard.rows == shard.table.rows for shard in shards):
        return None
    spans = (
        (
            shard.start if shard.start else INT64_MIN,
            shard.stop - 1 if shard.stop < shard.table.rows else INT64_MAX,
            shard.start,
        )
        for shard in shards
    )
    return torch.tensor(list(spans)).t().contiguous()


def _narrow(ids: Jagged, parts: Tensor) -> Jagged:
    """Only the ids in the parts, counted from the start of their part."""
    lowest, highest, shift = (spread(each, ids) for each in parts)
    keep = (ids.values >= lowest) & (ids.values <= highest)
    kept_before = torch.zeros(len(keep) + 1, dtype=torch.int64)
    torch.cumsum(keep, 0, out=kept_before[1:])
    weights = None if ids.weights is None else ids.weights[keep]
    return Jagged((ids.values - shift)[keep], kept_before[ids.bag_offsets()], weights, ids.feature_count, ids.samples)
