"""Which features go to which server, and how the answers become one tensor in the order of the tables.

`B` samples, `F` features of one route.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.gathering import Gathering
from shadowsync.embedding.gathering_plan import plan_gathering
from shadowsync.embedding.requests import spread
from shadowsync.embedding.selection import Columns, Selection, Selector
from shadowsync.embedding.table import Shard, Slot, Table, group_by_table, slots_of

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class Parts:
    """For a route with row parts: the ids `lowest … highest` go to it, less `shift`; each int64 `[F]`.

    The first part takes every id below it too, and the last every id above, so that an id that is in no part reaches a
    server, which refuses it.
    """

    lowest: Tensor
    highest: Tensor
    shift: Tensor


@dataclass(frozen=True)
class Section:
    """A run of columns of one answer that stay side by side in the output.

    Attributes:
        layer: k for the k-th parts of their tables; a whole table is its own part 0.
        start: first column in the output.
        stop: column after the last.
    """

    layer: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Route:
    """The look-ups that one server pools and answers in one request.

    Attributes:
        server: its position.
        slots: as in `Lookup`.
        selection: the features, in the order of the slots.
        parts: None if all tables are whole.
    """

    server: int
    slots: tuple[int, ...]
    selection: Selection
    parts: Parts | None

    def ids(self, ids: Jagged) -> Jagged:
        """What the route asks its server for, from the ids of all features."""
        ids = self.selection.ids(ids)
        return ids if self.parts is None else _narrow(ids, self.parts)


@dataclass(frozen=True)
class Fan:
    """What one pull asks for, and how the answers are put together: those of the routes, then the gathered groups'.

    Attributes:
        routes: what servers pool.
        gathering: what is made here from distinct rows; None if nothing is.
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
    """Fans for a fixed placement.

    Attributes:
        columns: of the output.
    """

    def __init__(self, tables: Sequence[Table], features: Sequence[str], servers: Sequence[Sequence[Shard]]) -> None:
        self._tables = tuple(tables)
        self._servers = tuple(tuple(shards) for shards in servers)
        self._selector = Selector(tables, features)
        self.columns: Columns = self._selector.columns
        self._slots = [slots_of(shards) for shards in servers]
        parts = group_by_table(shard for shards in servers for shard in shards)
        self._part = {shard: index for shards in parts.values() for index, shard in enumerate(shards)}
        self._fans: dict[tuple[bool, frozenset[str]], Fan] = {}

    def fan(self, apart: bool, unique: frozenset[str] = frozenset()) -> Fan:
        """What a pull asks for.

        Args:
            apart: features pooled by mean go in look-ups of their own: they carry weights, which slow a look-up down.
            unique: names of the tables whose distinct rows are asked for, to be pooled here.
        """
        fan = self._fans.get((apart, unique))
        if fan is None:
            fan = self._fans[apart, unique] = self._make_fan(apart, unique)
        return fan

    def _make_fan(self, apart: bool, unique: Set[str]) -> Fan:
        pooled = self._selector.features_of(self._tables, {table.name for table in self._tables} - unique)
        means = self._selector.means
        asked = [
            (server, [slot for slot, found in enumerate(slots) if found.feature in group])
            for group in ([pooled - means, pooled & means] if apart else [pooled])
            for server, slots in enumerate(self._slots)
        ]
        asked = [(server, slots) for server, slots in asked if slots]
        routes = tuple(self._route(server, slots) for server, slots in asked)
        gathering = plan_gathering(self._tables, unique, self._selector, self._servers) if unique else None
        sections = [self._sections([self._slots[server][slot] for slot in slots]) for server, slots in asked]
        groups = gathering.groups if gathering else ()
        sections += [self._spans(group.pooled.names) for group in groups if group.pooled is not None]
        return _fan(routes, gathering, sections, self.columns.width)

    def _route(self, server: int, slots: Sequence[int]) -> Route:
        chosen = [self._slots[server][slot] for slot in slots]
        selection = self._selector.select([slot.feature for slot in chosen])
        return Route(server, tuple(slots), selection, _parts([slot.shard for slot in chosen]))

    def _sections(self, slots: Sequence[Slot]) -> list[Section]:
        spans = [(self._part[slot.shard], self.columns.span[slot.feature]) for slot in slots]
        return _joined([Section(layer, span.start, span.stop) for layer, span in spans])

    def _spans(self, features: Sequence[str]) -> list[Section]:
        spans = [self.columns.span[feature] for feature in features]
        return _joined([Section(0, span.start, span.stop) for span in spans])


def _joined(sections: Sequence[Section]) -> list[Section]:
    found: list[Section] = []
    for section in sections:
        if found and (found[-1].layer, found[-1].stop) == (section.layer, section.start):
            found[-1] = Section(section.layer, found[-1].start, section.stop)
        else:
            found.append(section)
    return found


def _fan(
    routes: tuple[Route, ...], gathering: Gathering | None, sections: Sequence[Sequence[Section]], width: int
) -> Fan:
    numbered = sorted(
        enumerate(s for found in sections for s in found), key=lambda pair: (pair[1].layer, pair[1].start)
    )
    return Fan(
        routes,
        gathering,
        tuple(tuple(section.stop - section.start for section in found) for found in sections),
        tuple(index for index, section in numbered if section.layer == 0),
        tuple((index, slice(section.start, section.stop)) for index, section in numbered if section.layer),
        [list(found) for found in sections] == [[Section(0, 0, width)]],
    )


def _parts(shards: Sequence[Shard]) -> Parts | None:
    if all(shard.rows == shard.table.rows for shard in shards):
        return None
    return Parts(
        torch.tensor([shard.start if shard.start else INT64_MIN for shard in shards]),
        torch.tensor([shard.stop - 1 if shard.stop < shard.table.rows else INT64_MAX for shard in shards]),
        torch.tensor([shard.start for shard in shards]),
    )


def _narrow(ids: Jagged, parts: Parts) -> Jagged:
    """Only the ids in the parts, counted from the start of their part."""
    keep = (ids.values >= spread(parts.lowest, ids)) & (ids.values <= spread(parts.highest, ids))
    kept_before = torch.zeros(len(keep) + 1, dtype=torch.int64)
    torch.cumsum(keep, 0, out=kept_before[1:])
    values = (ids.values - spread(parts.shift, ids))[keep]
    weights = None if ids.weights is None else ids.weights[keep]
    return Jagged(values, kept_before[ids.bag_offsets()], weights, ids.feature_count, ids.samples)
