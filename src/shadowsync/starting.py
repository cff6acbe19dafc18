"""A run that begins with what another one has learnt, on other rows: `train --from DIR`, `Job(start_from=…)`.

Rows and parameters that mean what they did come along with their optimizer's state; what is new, or has another form,
begins as in any run. The position in the data, counts, validations and learning rates begin anew.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from rich.table import Table as Shown
from torch import Tensor

from shadowsync.checkpoint.job_state import DenseImage, TrainerImage, dense_tensors, is_buffer, job_state, learnt_of
from shadowsync.choices import Choices, as_trained, choose_all, chosen_source
from shadowsync.cluster.images import Moved
from shadowsync.cluster.session import Session
from shadowsync.config import Config, parse, with_data
from shadowsync.data.columns import Buckets, Categorical, Fit, Hash, Ids, Keys, Vocabulary
from shadowsync.data.fitting import Learnt, told_apart
from shadowsync.data.frame import TableOptions
from shadowsync.data.values import Values, integers, words
from shadowsync.embedding.keys import DEFAULT, LOWEST, NOBODY, new_rows
from shadowsync.embedding.table import Table
from shadowsync.errors import ConfigError
from shadowsync.models.wrapping import Wrapped
from shadowsync.places import advice, unfollowed
from shadowsync.preparing import inherited, prepared
from shadowsync.registry import option_names
from shadowsync.runs import load_trained
from shadowsync.serving import Known
from shadowsync.training.replica import Replica, flat_length, laid_out

_ALL = 1 << 62
"""Rows; more than any table has."""


class Start:
    """What a run begins with: the best checkpoint of the run in `folder` if that was validated, else its newest.

    Attributes:
        saved: the checkpoint.

    Raises:
        ConfigError: there is no such folder.
        CheckpointError: it has no checkpoint that can be loaded.
    """

    def __init__(self, folder: Path) -> None:
        self.saved = load_trained(folder)
        self._folder, self._state = folder, job_state(self.saved)
        self._config = parse(self.saved.config)
        source = chosen_source(self._config)
        self._source = source.with_learnt(learnt_of(self.saved)) if isinstance(source, TableOptions) else source
        self._told: list[tuple[str, ...]] = []

    def prepared(self, config: Config, choices: Choices) -> tuple[Config, Choices]:
        """As `preparing.prepared`: columns of which nothing is said are declared as they were, and what was learnt of
        those that are what they were stays, but for values that are new to a vocabulary."""
        before, source = self._source, choices.source
        if isinstance(before, TableOptions) and isinstance(source, TableOptions):
            names = option_names(TableOptions) if source.undeclared else ()
            kept = inherited(self.saved.config.get("data") or {}, names, config.data.options)
            if before.learnt is None and "standardise" not in config.data.options:
                kept["standardise"] = False  # as by the version that trained it
            if code := unfollowed({"data": kept}, self._folder):
                raise ConfigError(
                    f"{self._folder} names code of its own, which is not run unless you name it ({', '.join(code)}): "
                    f"if it is yours give {advice(code)}"
                )
            if kept:
                config = with_data(config, **kept)
                choices = choose_all(config, choices.model is None)
        config, choices = prepared(config, choices, None, lambda _: None)
        now = choices.source
        if isinstance(before, TableOptions) and isinstance(now, TableOptions) and before.learnt and now.learnt:
            learnt = grown(before.learnt, now.learnt, now.tables)
            choices = replace(choices, source=now.with_learnt(learnt))
        if self._is_same_model(config, choices):
            choices = as_trained(choices, config, self._state.layout)
        return config, choices

    def _is_same_model(self, config: Config, choices: Choices) -> bool:
        own = choices.model is None
        return own == self._state.own_model and (own or config.model.name == self._config.model.name)

    def fill(self, session: Session) -> None:
        """Fills rows and the dense part of all trainers.

        Raises:
            ConfigError: which rows of a wrapped model mean what they did cannot be told.
            CheckpointError: the checkpoint is damaged.
        """
        self._told = []
        same = session.config.embedding.optimizer == self._config.embedding.optimizer
        taken = dict(self._rows_taken(session))
        image = self._dense(session)
        session.begin_with(self.saved, taken, same, image)
        if not same:
            self._tell("state of the rows' optimizer", self._config.embedding.optimizer, "", "begins anew")

    def _tell(self, what: str, before: object, now: object, taken: str) -> None:
        self._told.append((what, str(before), str(now), taken))

    @property
    def sentence(self) -> str:
        """What it is, for the user and the events of the run."""
        anew = [what for what, *_, taken in self._told if taken.startswith("begins")]
        rest = f"; anew begin {', '.join(anew[:5])}{' …' if len(anew) > 5 else ''}" if anew else ""
        return f"begins with {self.saved.name} of {self._folder}, at the first of its own rows{rest}"

    def table(self) -> Shown:
        """What was taken over and what was not, line by line."""
        shown = Shown("", "before", "now", "taken over", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for line in self._told:
            shown.add_row(*line)
        return shown

    # --- rows --------------------------------------------------------------------------------------------------------

    def _rows_taken(self, session: Session) -> Iterator[tuple[str, int | Moved]]:
        """Of each table by name, how many of its first rows, or where its rows go."""
        before, source = {table.name: table for table in self.saved.tables}, session.choices.source
        meant = {
            feature.name: self._rows_meant(feature.name, feature.rows, source) for feature in session.schema.features
        }
        changed = next((name for name, rows in meant.items() if not rows and self._had(name)), None)
        if isinstance(session.job.model, Wrapped) and changed is not None:
            raise ConfigError(
                f"the ids of column {changed} are not those that {self._folder} was trained with, and which tables of "
                "a wrapped model they look up is not known: declare the column as it was"
            )
        for table in session.tables:
            was, now = before.pop(table.name, None), f"{table.rows:,} x {table.dim}"
            if was is None:
                self._tell(f"table {table.name}", "", now, "begins anew")
                continue
            if (was.ids is None) != (table.ids is None) or (table.ids is not None and was.rows != table.rows):
                yield from self._moved(was, table, source)
                continue
            shared = [name for name in table.features if name in was.features]
            rows = min([was.rows, table.rows, *(meant.get(name, _ALL) for name in shared)])
            why = f"begins anew: its rows are {table.dim} wide" if was.dim != table.dim else ""
            why = why or ("" if rows else "begins anew: its ids mean something else")
            new = f", {table.rows - rows:,} begin anew" if rows < table.rows else ""
            self._tell(f"table {table.name}", f"{was.rows:,} x {was.dim}", now, why or f"{rows:,} rows{new}")
            if not why:
                yield table.name, rows
        for name, was in before.items():
            self._tell(f"table {name}", f"{was.rows:,} x {was.dim}", "", "left behind")

    def _moved(self, was: Table, table: Table, source: object) -> Iterator[tuple[str, Moved]]:
        """From a table of other ids, or of dynamic ones of another capacity, by what the ids stand for."""
        before, now = (f"{each.rows:,} x {each.dim}{' dynamic' if each.ids else ''}" for each in (was, table))
        if was.dim != table.dim:
            self._tell(f"table {table.name}", before, now, f"begins anew: its rows are {table.dim} wide")
            return
        kept: dict[str, Tensor] = {}
        if was.ids is not None:
            read = self.saved.rows(was.name, 0, was.rows, {"key", "count"})
            keys, counts = read["key"].numpy() ^ NOBODY, read["count"].numpy().astype(np.int64)
        else:
            keys = _keys_of(self._source, was)
            counts = np.ones(was.rows, dtype=np.int64)
            known = torch.from_numpy((keys != DEFAULT).astype(np.int32))
            kept = {"key": torch.from_numpy(keys ^ NOBODY), "count": known}
        if table.ids is not None:
            rows = new_rows(table, keys, counts)
        else:
            rows = Known(_keys_of(source, table).view(np.uint64)).find(keys.view(np.uint64))
            rows[keys == NOBODY] = -1
            rows[np.flatnonzero(keys == DEFAULT)[1:]] = -1  # of the rows that are shared, that of keys that are new
        if (rows < 0).all():
            self._tell(f"table {table.name}", before, now, "begins anew: its ids mean something else")
            return
        lost = int(((rows < 0) & (keys != NOBODY) & (keys != DEFAULT)).sum())
        rest = f", {lost:,} find no room" if lost else ""
        self._tell(f"table {table.name}", before, now, f"{(rows >= 0).sum():,} rows{rest}")
        yield table.name, Moved(torch.from_numpy(rows), kept)

    def _had(self, name: str) -> bool:
        return any(feature.name == name for feature in self._state.schema.features)

    def _rows_meant(self, name: str, rows: int, source: object) -> int:
        """So many of the first ids of a feature, which now has `rows`, mean what they did."""
        before = self._source
        if isinstance(before, TableOptions) and isinstance(source, TableOptions):
            kind, was = source.kinds.ids.get(name), before.kinds.ids.get(name)
            return 0 if kind is None or was is None else _ids_meant(kind, was)
        return _ALL if any(f.name == name and f.rows == rows for f in self._state.schema.features) else 0

    # --- dense part --------------------------------------------------------------------------------------------------

    def _dense(self, session: Session) -> DenseImage:
        """All trainers begin at what the run that was before is evaluated with."""
        template, method = session.template, session.choices.method
        others = self._others(session)
        same_model = not others and self._is_same_model(session.config, session.choices)
        shapes = {name: torch.Size(shape) for name, shape in self._state.layout.items()}
        slots = {slot.name: slot for slot in laid_out(shapes.items())} if same_model else {}
        taken = [slot for slot in template.slots if slot.name in slots and slots[slot.name].shape == slot.shape]
        same = session.config.train.optimizer == self._config.train.optimizer
        tensors = {name: tensor.clone() for name, tensor in dense_tensors(template).items()}
        length, places = flat_length(tuple(slots.values())), list(slots)
        for name in ["weight", *(template.state if same else ())] if taken else []:
            found = self._mean(name, len(places) if name in template.optimizer.per_parameter else length)
            for slot in taken:
                if name in template.optimizer.per_parameter:
                    tensors[name][template.slots.index(slot)] = found[places.index(slot.name)]
                else:
                    slot.view(tensors[name]).copy_(slots[slot.name].view(found))
        for name, tensor in tensors.items():
            there = self.saved.dense.get(f"replica.0.{name}")
            if is_buffer(name) and same_model and there is not None and there.numel() == tensor.numel():
                tensor.copy_(there.view_as(tensor))
        self._tell_dense(template, shapes, {slot.name for slot in taken}, same, others)
        state = method.init(tensors["weight"])
        images = tuple(TrainerImage(tensors, state) for _ in range(session.dense_copies))
        return DenseImage(images, tensors["weight"])

    def _others(self, session: Session) -> str:
        """Which columns, or labels, are as many as they were and others, or in another order: what was learnt of one
        would be taken for another. Empty if all are the same; a single label may have another name, and a wrapped model
        says itself which columns it takes."""
        tasks, schemas = (self._source.tasks, session.choices.source.tasks), (self._state.schema, session.schema)
        pairs: dict[str, list[list[Any]]] = {
            "labels": [[(task.name if len(of) > 1 else "", task.kind) for task in of] for of in tasks]
        }
        if not isinstance(session.job.model, Wrapped):
            pairs["dense columns"] = [[*schema.dense] for schema in schemas]
            pairs["features"] = [[feature.name for feature in schema.features] for schema in schemas]
        return next((what for what, (was, now) in pairs.items() if len(was) == len(now) and was != now), "")

    def _mean(self, name: str, elements: int) -> Tensor:
        """The final weights, or the mean of what the optimizer kept for each replica."""
        if name == "weight":
            return self.saved.dense_tensor("final", elements)
        ranks = range(self._state.trainers)
        return torch.stack([self.saved.dense_tensor(f"replica.{rank}.{name}", elements) for rank in ranks]).mean(0)

    def _tell_dense(
        self, template: Replica, shapes: Mapping[str, torch.Size], taken: set[str], same: bool, others: str
    ) -> None:
        now = {slot.name: slot.shape for slot in template.slots}
        found = f"begins anew: its {others} are others, or in another order" if others else f"{len(taken)} parameters"
        self._tell("dense part", f"{len(shapes)} parameters", f"{len(now)} parameters", found)
        for name in [*now, *(name for name in shapes if name not in now)]:
            if name not in taken and not others:
                was, form = (list(of[name]) if name in of else "" for of in (shapes, now))
                self._tell(f"parameter {name}", was, form, "begins anew" if name in now else "left behind")
        if not same:
            self._tell("state of the dense part's optimizer", self._config.train.optimizer, "", "begins anew")


def grown(before: Learnt, now: Learnt, tables: Mapping[str, str]) -> Learnt:
    """What was learnt `before` of columns that are declared as they were then, and what was learnt `now` of others.

    A vocabulary has the values of before, whose ids stay, and behind them those that are new, the most frequent first.
    `tables` has columns that share one, by column.
    """
    kept = {name for name, kind in now.kinds.ids.items() if _is_kept(kind, before.kinds.ids.get(name))}
    scaled = {name for name, kind in now.kinds.dense.items() if kind == before.kinds.dense.get(name)}
    alike = scaled | (kept - set(now.kinds.dense))  # of a column that is both, the dense kind learns
    fits = {**now.fits, **{name: fit for name, fit in before.fits.items() if name in alike}}
    for name in told_apart({name: now.kinds.ids[name] for name in kept}):  # values of another form have other ids
        fits[name] = msgspec.structs.replace(fits.get(name, Fit()), form=before.fit(name).form)
    fits = {name: msgspec.structs.replace(fit, listed=now.fit(name).listed) for name, fit in fits.items()}
    was = {tables.get(name, name): before.values[name] for name in kept if name in before.values}
    values = {}
    for name, found in now.values.items():
        kind, first = now.kinds.ids[name], was.get(tables.get(name, name))
        assert isinstance(kind, Vocabulary)
        values[name] = found if first is None else _with_new(first, found, kind.max_size)
    return Learnt(now.kinds, fits, values, now.rows)


def _with_new(before: Values, now: Values, most: int) -> Values:
    new = now.values.filter(pl.Series(before.known.find(words(now.values)) < 0, dtype=pl.Boolean))
    if not len(before) or not len(new) or new.dtype != before.values.dtype:
        return before if len(before) else now
    return Values(pl.concat([before.values, new.head(max(0, most - len(before)))]))


def _keys_of(source: object, table: Table) -> NDArray[np.int64]:
    """What each id of a table stands for, as a key of a dynamic one, int64 `[rows]`; `NOBODY` if that is not known."""
    if not isinstance(source, TableOptions):
        return np.arange(table.rows)
    found = np.full(table.rows, NOBODY, dtype=np.int64)
    kinds = [source.kinds.ids.get(feature) for feature in table.features]
    if all(isinstance(kind, Ids) for kind in kinds):
        rows = min(table.rows, *(kind.rows for kind in kinds if isinstance(kind, Ids)))
        found[:rows] = np.arange(rows)
        found[rows : rows + 1] = LOWEST  # of missing values
    elif all(isinstance(kind, Vocabulary) for kind in kinds) and source.learnt is not None:
        values = source.learnt.values[table.features[0]].values
        keys = words(values).view(np.int64) if values.dtype == pl.String else integers(values)
        found[0], found[1], found[2 : 2 + len(keys)] = LOWEST, DEFAULT, keys[: table.rows - 2]
    return found


def _is_kept(kind: Categorical, was: Categorical | None) -> bool:
    """Whether an id of before means what it did."""
    if isinstance(kind, Vocabulary | Ids | Keys):  # more values, or rows, are behind the others
        return type(was) is type(kind)
    if isinstance(kind, Hash | Buckets) and isinstance(was, Hash | Buckets):
        return kind == replace(was, missing=kind.missing)
    return kind == was


def _ids_meant(kind: Categorical, was: Categorical) -> int:
    if isinstance(kind, Ids) and isinstance(was, Ids) and (kind.rows, kind.missing) != (was.rows, was.missing):
        return min(kind.rows, was.rows)  # the row of missing values is the last one
    return _ALL if _is_kept(kind, was) else 0
