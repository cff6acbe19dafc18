"""Which features go to which server, and how the servers' answers become one tensor in the order of the tables.

`B` samples, `F` features of one route, `U` units of `u` columns: every table is some whole number of units wide, so
that a gradient's columns are gathered in runs of `u` floats instead of one by one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.requests import spread
from shadowsync.embedding.table import Shard, Slot, Table, group_by_table, slots_of

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class Columns:
    """Where each feature's pooled vector stands in the client's output: tables in their order, features in theirs.

    Attributes:
        span: the columns of each feature, by name.
        width: all columns.
        unit: the greatest width that divides every table's.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.span: dict[str, slice] = {}
        self.width = 0
        for table in tables:
            for feature in table.features:
                self.span[feature] = slice(self.width, self.width + table.dim)
                self.width += table.dim
        self.unit = math.gcd(*(table.dim for table in tables)) or 1

    def units(self, feature: str) -> range:
        """The feature's units in the output."""
        span = self.span[feature]
        return range(span.start // self.unit, span.stop // self.unit)


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
    """The look-ups that one server answers in one request.

    Attributes:
        server: its position.
        slots: as in `Lookup`.
        features: positions in the source's order, int64 `[F]`; None for all in order.
        mean: whether each feature is pooled by mean, bool `[F]`; None if none is.
        parts: None if all tables are whole.
        units: every unit of the answer in the output, int64 `[U]`; None if the answer is the output.
    """

    server: int
    slots: tuple[int, ...]
    features: Tensor | None
    mean: Tensor | None
    parts: Parts | None
    units: Tensor | None


@dataclass(frozen=True)
class Fan:
    """The routes of one pull, and how their answers are put together.

    Attributes:
        routes: what is asked.
        widths: for each route, the widths of the sections of its answer.
        first: which sections, counted over all answers, make up the output side by side: those of layer 0.
        added: the sections of later layers and where they are added, layer by layer: an order of summation that the
            placement does not change.
    """

    routes: tuple[Route, ...]
    widths: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    added: tuple[tuple[int, slice], ...]


class Router:
    """Routes for a fixed placement.

    Attributes:
        columns: of the output.
        together: all features of a server in one look-up.
        apart: features pooled by mean in look-ups of their own: they carry weights, which slow a look-up down.
    """

    def __init__(self, tables: Sequence[Table], features: Sequence[str], servers: Sequence[Sequence[Shard]]) -> None:
        self.columns = Columns(tables)
        self._position = {feature: index for index, feature in enumerate(features)}
        self._slots = [slots_of(shards) for shards in servers]
        parts = group_by_table(shard for shards in servers for shard in shards)
        self._part = {shard: index for shards in parts.values() for index, shard in enumerate(shards)}
        means = {feature for table in tables if table.pooling == "mean" for feature in table.features}
        self.together = self._fan(means, [set(features)])
        self.apart = self._fan(means, [set(features) - means, means])

    def _fan(self, means: set[str], groups: Sequence[set[str]]) -> Fan:
        asked = [
            (server, [slot for slot, found in enumerate(slots) if found.feature in group])
            for group in groups
            for server, slots in enumerate(self._slots)
        ]
        asked = [(server, slots) for server, slots in asked if slots]
        routes = tuple(self._route(server, slots, means) for server, slots in asked)
        sections = [self._sections([self._slots[server][slot] for slot in slots]) for server, slots in asked]
        return _fan(routes, sections)

    def _route(self, server: int, slots: Sequence[int], means: set[str]) -> Route:
        chosen = [self._slots[server][slot] for slot in slots]
        positions = [self._position[slot.feature] for slot in chosen]
        mean = torch.tensor([slot.feature in means for slot in chosen])
        units = [unit for slot in chosen for unit in self.columns.units(slot.feature)]
        return Route(
            server=server,
            slots=tuple(slots),
            features=None if positions == list(range(len(self._position))) else torch.tensor(positions),
            mean=mean if bool(mean.any()) else None,
            parts=self._parts([slot.shard for slot in chosen]),
            units=None if units == list(range(self.columns.width // self.columns.unit)) else torch.tensor(units),
        )

    def _parts(self, shards: Sequence[Shard]) -> Parts | None:
        if all(shard.rows == shard.table.rows for shard in shards):
            return None
        return Parts(
            torch.tensor([shard.start if shard.start else INT64_MIN for shard in shards]),
            torch.tensor([shard.stop - 1 if shard.stop < shard.table.rows else INT64_MAX for shard in shards]),
            torch.tensor([shard.start for shard in shards]),
        )

    def _sections(self, slots: Sequence[Slot]) -> list[Section]:
        found: list[Section] = []
        for slot in slots:
            layer = self._part[slot.shard]
            span = self.columns.span[slot.feature]
            if found and (found[-1].layer, found[-1].stop) == (layer, span.start):
                found[-1] = Section(layer, found[-1].start, span.stop)
            else:
                found.append(Section(layer, span.start, span.stop))
        return found

    def assemble(self, fan: Fan, answers: Sequence[Tensor], samples: int) -> Tensor:
        """The output `[B, Σ D_f]` from the answers to the routes of a fan."""
        if not answers:
            return torch.zeros(samples, 0)
        if len(answers) == 1 and fan.routes[0].units is None:
            return answers[0]
        pairs = zip(answers, fan.widths, strict=True)
        sections = [section for answer, widths in pairs for section in answer.split_with_sizes(widths, 1)]
        # one copy into one new tensor: a second tensor of this size often costs more in page faults than the copy
        pooled = torch.cat([sections[index] for index in fan.first], 1)
        for index, columns in fan.added:
            pooled[:, columns] += sections[index]
        return pooled

    def gradient_for(self, route: Route, gradient: Tensor) -> Tensor:
        """The part of the output's gradient `[B, Σ D_f]` that belongs to a route's answer, `[B, U * u]`."""
        if route.units is None:
            return gradient
        unit = self.columns.unit
        units = gradient.reshape(len(gradient), self.columns.width // unit, unit)
        return units.index_select(1, route.units).flatten(1)


def _fan(routes: tuple[Route, ...], sections: Sequence[Sequence[Section]]) -> Fan:
    numbered = sorted(
        enumerate(s for found in sections for s in found), key=lambda pair: (pair[1].layer, pair[1].start)
    )
    return Fan(
        routes,
        tuple(tuple(section.stop - section.start for section in found) for found in sections),
        tuple(index for index, section in numbered if section.layer == 0),
        tuple((index, slice(section.start, section.stop)) for index, section in numbered if section.layer),
    )


def local_ids(ids: Jagged, route: Route) -> Jagged:
    """What a route asks its server for, from the ids of all features."""
    if route.features is not None:
        ids = _select(ids, route.features)
    if route.mean is not None and ids.offsets is not None:
        ids = mean_weighted(ids, route.mean)
    return ids if route.parts is None else _narrow(ids, route.parts)


def _select(ids: Jagged, features: Tensor) -> Jagged:
    if ids.offsets is not None or ids.weights is not None:
        return ids.select(features.tolist())
    values = ids.values.view(ids.feature_count, ids.samples).index_select(0, features).flatten()
    return Jagged(values, None, None, len(features), ids.samples)


def mean_weighted(ids: Jagged, mean: Tensor) -> Jagged:
    """The ids with weights that turn a sum into a mean: 1 over the number of ids in the bag.

    With explicit weights this divides the weighted sum by the number of ids, not by the sum of their weights.
    """
    lengths = ids.lengths()
    per_bag = lengths.clamp(min=1).to(torch.float32).reciprocal()
    per_bag = torch.where(mean.repeat_interleave(ids.samples), per_bag, 1.0)
    weights = per_bag.repeat_interleave(lengths, output_size=len(ids.values))
    if ids.weights is not None:
        weights = weights * ids.weights
    return Jagged(ids.values, ids.offsets, weights, ids.feature_count, ids.samples)


def _narrow(ids: Jagged, parts: Parts) -> Jagged:
    """Only the ids in the parts, counted from the start of their part."""
    keep = (ids.values >= spread(parts.lowest, ids)) & (ids.values <= spread(parts.highest, ids))
    kept_before = torch.zeros(len(keep) + 1, dtype=torch.int64)
    torch.cumsum(keep, 0, out=kept_before[1:])
    values = (ids.values - spread(parts.shift, ids))[keep]
    weights = None if ids.weights is None else ids.weights[keep]
    return Jagged(values, kept_before[ids.bag_offsets()], weights, ids.feature_count, ids.samples)
