"""A user's module as it is: its embedding tables are served, everything else is the dense part.

`wrap` copies the module with stand-ins in place of its `nn.Embedding` and `nn.EmbeddingBag` (what TorchRec's
collections hold, too), which keep no weights. What a batch looks up is found by calling the module: in a first pass,
before rows are pulled, the stand-ins note the ids that they are called with, and the pass ends at the last of them; in
the second one they answer with the vectors, and compare.

`B` samples, `L` ids of one look-up, `D` width of a table.
"""

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.source import Schema
from shadowsync.errors import ConfigError, ShadowSyncError, blamed
from shadowsync.models.inputs import Binding, Given, Inputs, binding
from shadowsync.models.model import check_module, class_of, copy_module
from shadowsync.models.vectors import Call, LookedUp, Pooled
from shadowsync.registry import nearest

Output = Literal["logits", "probability"]
_LEAST, _MOST = 1e-37, 1 - 2**-24
"""Between them lie all probabilities of float32 but 0 and 1, which have no logit, and no gradient in PyTorch either."""
_MOST_COLUMNS = 128
"""Ids per sample of one look-up that are asked for side by side; of more each distinct row crosses."""
_PROBED = ((5, 3), (8, 6), (4, 1))
"""Samples, and ids of one sample at most, of the batches that a module is tried with: a width that is fixed is the same
for lists of one id and for longer ones. Where it takes no lists so short the others decide."""


class _CannotBeCalled(ConfigError):
    """The module raised with a made-up batch."""


Noted = list[tuple["Served", Call]]


class _Enough(BaseException):
    """The last look-up of a pass was noted; no `except Exception` of the module's stops it."""


class _Current:
    """What the stand-ins of one module do with a look-up now; copied and sent with them, and then doing nothing."""

    def __init__(self) -> None:
        self.take: Callable[[Served, Call], Tensor] | None = None

    @contextmanager
    def taking(self, take: Callable[["Served", Call], Tensor]) -> Iterator[None]:
        self.take = take
        try:
            yield
        finally:
            self.take = None


class Served(nn.Module):
    """Stands in for an embedding whose rows are served.

    Attributes:
        path: the embedding's name in the user's module.
        table: name of the table, which several may look rows up in.
        original: what it stands in for.
    """

    path: str
    table: str
    current: _Current
    original: type[nn.Module]
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    @property
    def weight(self) -> nn.Parameter:
        raise ConfigError(
            f"the weight of {self.path} is read outside of a look-up, so that its rows cannot be served: freeze it "
            f"with requires_grad_(False), which leaves it in the model as it is, or look up what is needed of it"
        )

    def _take(self, call: Call) -> Tensor:
        if self.current.take is None:
            raise ConfigError(f"{self.path} is looked up outside of the model's forward, where there are no rows of it")
        return self.current.take(self, call)

    def vectors(self, call: Call, rows: Tensor) -> Tensor:
        """The answer to a look-up, from a row for each of its ids, float32 `[L, D]`."""
        raise NotImplementedError


class ServedEmbedding(Served, nn.Embedding):  # type: ignore[misc] # whose weight is a tensor
    """Stands in for an `nn.Embedding`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Embedding's name for it
        return self._take(Call(input))

    def vectors(self, call: Call, rows: Tensor) -> Tensor:
        # of a look-up with no ids servers pool bags with nothing in them, which are not wanted
        found = rows[: call.ids.numel()].view(*call.ids.shape, self.embedding_dim)
        if self.padding_idx is None:
            return found
        return torch.where((call.ids == self.padding_idx).unsqueeze(-1), found.detach(), found)


class ServedEmbeddingBag(Served, nn.EmbeddingBag):  # type: ignore[misc] # as above
    """Stands in for an `nn.EmbeddingBag`."""

    def forward(  # the names are those of nn.EmbeddingBag
        self,
        input: Tensor,  # noqa: A002
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        if input.dim() == 2:
            bags, size = input.shape
            offsets = torch.arange(bags + 1, device=input.device) * size
            weights = None if per_sample_weights is None else per_sample_weights.flatten()
            return self._take(Call(input.flatten(), offsets, weights))
        if offsets is None:
            raise ConfigError(f"{self.path} is called with ids in one dimension and needs offsets of its bags")
        if not self.include_last_offset:
            offsets = F.pad(offsets, (0, 1), value=input.shape[0])
        return self._take(Call(input, offsets, per_sample_weights))

    def vectors(self, call: Call, rows: Tensor) -> Tensor:
        assert call.offsets is not None
        if not len(rows):  # `embedding_bag` refuses to look up in nothing
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
        index, padded = torch.arange(len(call.ids), device=rows.device), None
        if self.padding_idx is not None and bool((is_padding := call.ids == self.padding_idx).any()):
            padded = int(is_padding.to(torch.uint8).argmax())
            index = index.masked_fill(is_padding, padded)
        return F.embedding_bag(
            index,
            rows,
            call.offsets.long(),
            mode=self.mode,
            per_sample_weights=call.weights,
            include_last_offset=True,
            padding_idx=padded,
        )


_STAND_INS: Mapping[type[nn.Module], type[Served]] = {
    nn.Embedding: ServedEmbedding,
    nn.EmbeddingBag: ServedEmbeddingBag,
}


class _Zeros(nn.Linear):
    """In place of an `nn.Linear` where only ids matter."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name for it
        return input.new_zeros(*input.shape[:-1], self.out_features)


class _Recorder:
    """Calls a copy of a module to see what it looks up. It shares the module's parameters, which nobody changes.

    Layers whose outputs cannot decide about ids, but for tricks that the second pass finds out, are not computed.
    """

    def __init__(self, model: nn.Module, whole: bool = False) -> None:
        self.model = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        self._current = next(child.current for child in self.model.modules() if isinstance(child, Served))
        for child in [] if whole else list(self.model.modules()):
            if type(child) is nn.Linear:
                child.__class__ = _Zeros
            elif type(child) is nn.Dropout:
                child.p = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Recorder":
        return _Recorder(self.model)

    def note(
        self, bound: Binding, batch: Inputs, training: bool, most: int | None, make: Callable[..., Tensor] = torch.zeros
    ) -> Noted:
        """The look-ups of a batch in their order, `most` of them; `make` gives the vectors that they are answered with.

        What the module does to its arguments in place is done to the batch.
        """
        found: Noted = []

        def take(served: Served, call: Call) -> Tensor:
            found.append((served, call._replace(ids=call.ids.clone())))  # it may be changed in place behind the look-up
            if len(found) == most:
                raise _Enough
            shape = call.ids.shape if call.offsets is None else (len(call.offsets) - 1,)
            return make(*shape, served.embedding_dim)

        if self.model.training != training:
            self.model.train(training)
        with self._current.taking(take), suppress(_Enough):
            bound(self.model, batch)
        return found


@dataclass(frozen=True)
class Site:
    """A look-up that a module makes in every pass.

    Attributes:
        name: the path of the embedding, with a number from its second look-up on.
        form: `columns`, the same number of ids for each sample, which are features with one id; `sum` or `mean`, a bag
            for each sample, pooled by the servers; `rows`, anything else: a row for each id comes here.
        columns: ids per sample of the form `columns`.
        padding: the id that does not count in a bag.
    """

    name: str
    path: str
    table: str
    form: Literal["columns", "sum", "mean", "rows"]
    columns: int
    dim: int
    padding: int | None

    @property
    def features(self) -> tuple[str, ...]:
        """What servers are asked for."""
        return (self.name,) if self.columns == 1 else tuple(f"{self.name}[{column}]" for column in range(self.columns))

    @property
    def pooling(self) -> Literal["sum", "mean", "none"]:
        return "none" if self.form == "rows" else "mean" if self.form == "mean" else "sum"


def _wanted(site: Site, call: Call, samples: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The ids of one site in a batch, of each of its features in turn; how many of each sample, int64 `[bags]`,
    None for one; and weights, None for ones."""
    ids = call.ids.long()
    if site.form == "columns":
        if not ids.numel():  # the first ids of lists that are all empty
            return ids.flatten(), torch.zeros(samples * site.columns, dtype=torch.int64), None
        return (ids if site.columns == 1 else ids.reshape(samples, site.columns).t()).flatten(), None, None
    if site.form == "rows":  # whose they are does not matter
        return ids.flatten(), F.pad(torch.tensor([ids.numel()]), (0, samples))[:samples], None
    assert call.offsets is not None
    offsets, weights = call.offsets.long(), None if call.weights is None else call.weights.detach().float()
    if site.padding is not None:
        kept = ids != site.padding
        ids, offsets = ids[kept], F.pad(kept.long().cumsum(0), (1, 0))[offsets]
        weights = None if weights is None else weights[kept]
    lengths = offsets.diff()
    one_each = weights is None and len(ids) == samples and bool((lengths == 1).all())
    return ids, None if one_each else lengths, weights


def _joined(sites: Sequence[Site], calls: Sequence[Call], samples: int) -> Jagged:
    """What servers are asked for: the ids of all features of all sites."""
    ids, lengths, weights = zip(*map(_wanted, sites, calls, [samples] * len(sites)), strict=True)
    values, offsets, found = torch.cat(ids), None, None
    if any(part is not None for part in (*lengths, *weights)):
        each = [torch.ones_like(own) if part is None else part for own, part in zip(ids, lengths, strict=True)]
        offsets = F.pad(torch.cat(each).cumsum(0), (1, 0))
    if any(part is not None for part in weights):
        found = torch.cat(
            [torch.ones(len(own)) if part is None else part for own, part in zip(ids, weights, strict=True)]
        )
    return Jagged(values, offsets, found, sum(site.columns for site in sites), samples)


class Wrapped(nn.Module):
    """A module whose embedding tables are served; `wrap` makes it, for `Job(model=…)` and `Trained(…, model=…)`.

    Attributes:
        tables: of each table its rows and their width.
        schema: of the rows that it is trained on; None before a job has said so.
        sites: its look-ups, in their order; empty before that.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Given,
        output: Output,
        key: str | None,
        tables: Mapping[str, tuple[int, int]],
        rows: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self.model, self.tables, self.output = model, dict(tables), output
        self.initial = dict(rows)
        self.schema: Schema | None = None
        self.sites: tuple[Site, ...] = ()
        self._inputs, self._key = inputs, key
        self._current = next(child.current for child in model.modules() if isinstance(child, Served))
        self._bound: Binding | None = None
        self._recorder: _Recorder | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the initial rows, which go to the servers alone, and with a way to call it that is made anew."""
        return {**self.__dict__, "initial": {}, "_bound": None}

    def _get_name(self) -> str:
        """What errors call it: as the user's own class."""
        return class_of(self.model)

    @property
    def features(self) -> tuple[str, ...]:
        """What servers are asked for, in the order of the ids that `ask` gives."""
        return tuple(feature for site in self.sites for feature in site.features)

    # --- what it looks up --------------------------------------------------------------------------------------------

    def planned(self, schema: Schema, weighted: bool = False) -> "Wrapped":
        """The same for rows of this schema, whose ids may carry weights: it is tried with made-up rows to find what it
        looks up in which table.

        Raises:
            ConfigError: it cannot be called with such rows, or some of its look-ups cannot be served.
        """
        made = copy.copy(self)
        made.initial, made.schema = self.initial, schema
        passes: list[tuple[int, Noted]] = []
        for samples, longest in _PROBED:
            with suppress(_CannotBeCalled) if longest == 1 else nullcontext():
                passes += self._tried(made, samples, longest, weighted)
        made.sites = tuple(_sites(self.tables, passes))
        made._recorder = _Recorder(self.model)
        return made

    def _tried(self, made: "Wrapped", samples: int, longest: int, weighted: bool) -> list[tuple[int, Noted]]:
        """The look-ups of a made-up batch in training and in evaluation, which depend on nothing but its ids and dense
        columns."""
        assert made.schema is not None
        results = []
        for training, whole in ((True, True), (True, False), (False, False)):
            try:
                with torch.random.fork_rng(devices=[]):
                    batch = _made_up(made.schema, samples, longest, weighted)
                    recorder, make = _Recorder(self.model, whole), torch.randn if whole else torch.zeros
                    results.append(recorder.note(made._bind(), batch, training, None, make))
            except ShadowSyncError:
                raise
            except Exception as error:  # whatever the user's module raises
                raise _CannotBeCalled(
                    f"the model {class_of(self)} cannot be called with what inputs makes of a batch "
                    f"({blamed(error)}): say what its forward takes with shadowsync.wrap(model, inputs=lambda batch: …)"
                ) from error
        first, quick, evaluated = results
        if not first:
            raise ConfigError(f"the model {class_of(self)} looks nothing up when it is called")
        for (served, one), (other, two) in zip(first, quick, strict=False):
            if served.path != other.path or not _same(one, two, weights=False):
                raise _unsteady(served.path)
        for here, there in itertools.zip_longest(*([served.path for served, _ in each] for each in (first, evaluated))):
            if here != there:
                raise _branching(str(here or there), "in training and not in evaluation, or the other way round")
        return [(samples, first), (samples, evaluated)]

    def ask(self, batch: Batch, training: bool) -> tuple[Jagged, LookedUp]:
        """What servers are to be asked for before the module is called with a batch, and what it is called with.

        Raises:
            ConfigError: it looks up something else than it did when it was planned.
        """
        assert self._recorder is not None
        assert self.schema is not None, "a job says what its rows are"
        with torch.no_grad():
            inputs = Inputs(self.schema, batch.dense.clone(), replace(batch.ids, values=batch.ids.values.clone()))
            found = self._recorder.note(self._bind(), inputs, training, len(self.sites))
        for number, site in enumerate(self.sites):
            if number == len(found) or found[number][0].path != site.path:
                raise _branching(site.path)
        calls = tuple(call for _, call in found)
        return _joined(self.sites, calls, len(batch)), LookedUp(batch.ids, calls)

    def _bind(self) -> Binding:
        if self._bound is None:
            if self.schema is None:
                raise ConfigError("a wrapped model has no rows before it is in a job: give it as Job(model=…)")
            self._bound = binding(self.model, self._inputs, self.schema)
        return self._bound

    # --- the pass with rows ------------------------------------------------------------------------------------------

    def forward(self, dense: Tensor, embeddings: Pooled) -> Tensor:
        """Logits `[B]`, if the module gives one per sample."""
        looked_up = embeddings.looked_up
        assert looked_up is not None, "whoever calls it has asked it before"
        steps = iter(zip(self.sites, looked_up.calls, self._answers(embeddings), strict=True))

        def take(served: Served, call: Call) -> Tensor:
            step = next(steps, None)
            if step is None or step[0].path != served.path:
                raise _branching(served.path)
            site, asked, answer = step
            if not _same(call, asked, weights=site.pooling != "none"):
                raise _unsteady(served.path)
            if site.form in ("sum", "mean"):
                return answer
            return served.vectors(call, answer)

        with self._current.taking(take):
            ids, device = looked_up.ids, dense.device
            offsets, weights = (None if tensor is None else tensor.to(device) for tensor in (ids.offsets, ids.weights))
            moved = replace(ids, values=ids.values.to(device), offsets=offsets, weights=weights)
            logits = self.logits(self.model, dense, moved)
        if (left := next(steps, None)) is not None:
            raise _branching(left[0].path)
        return logits

    def logits(self, model: nn.Module, dense: Tensor, ids: Jagged) -> Tensor:
        """What a module of this form says of a batch, as logits."""
        assert self.schema is not None
        inputs = Inputs(self.schema, dense, ids)
        if self.output == "logits":
            return self._chosen(self._bind()(model, inputs))
        with torch.autocast(dense.device.type, enabled=False):  # a probability in bf16 is none of 1 per mille
            found = self._chosen(self._bind()(model, inputs)).float()
            if not torch.compiler.is_exporting() and bool(((found < 0) | (found > 1)).any()):
                raise ConfigError(
                    f"the model {class_of(self)} returns {found.min():.3g} to {found.max():.3g} where "
                    'probabilities are expected: leave output="probability" out of shadowsync.wrap(model, …) if these '
                    "are logits"
                )
            return torch.logit(found.clamp(_LEAST, _MOST))

    def _answers(self, embeddings: Pooled) -> list[Tensor]:
        """Of each site its vectors, in the order of the sites: pooled `[B, D]`, or a row for each id.

        They are copies, which the module may change in place, as it may what an embedding gives it.
        """
        pooled = [site for table in self.tables for site in self.sites if site.table == table and site.form != "rows"]
        parts = torch.split_with_sizes(embeddings.flat, [site.columns * site.dim for site in pooled], dim=1)
        found = dict(zip((site.name for site in pooled), parts, strict=True))
        found |= {name: vectors.values for name, vectors in embeddings.sequences.items()}
        return [found[site.name].clone() for site in self.sites]

    def _chosen(self, found: Any) -> Tensor:
        """The part of a module's output that is meant, with one dimension less where that has one column."""
        wrong, returns = "", type(found).__name__
        if isinstance(found, Mapping):
            key = self._key or ("y_pred" if "y_pred" in found else next(iter(found)) if len(found) == 1 else None)
            if key not in found:
                returns = ", ".join(map(str, found))
                wrong = "say which of them is the prediction with shadowsync.wrap(model, key=…)"
            found = found.get(key)
        elif self._key is not None:
            returns, wrong = f"{returns} and no {self._key}", "leave key out of shadowsync.wrap(model, …)"
        if wrong or not isinstance(found, Tensor):
            wrong = (
                wrong or "it has to return a tensor of one logit or probability per sample, or a dict that holds one"
            )
            raise ConfigError(f"the model {class_of(self)} returns {returns}: {wrong}")
        return found.squeeze(1) if found.dim() == 2 and found.shape[1] == 1 else found

    # --- and back ----------------------------------------------------------------------------------------------------

    def unwrapped(self, rows: Callable[[str, int, int], Tensor]) -> nn.Module:
        """A copy of the user's module with the dense part as it is now and its tables in it; `rows` gives of (table,
        start, stop) those rows, `[stop − start, D]`."""
        model = copy.deepcopy(self.model)
        weights: dict[str, nn.Parameter] = {}
        for child in list(model.modules()):
            if isinstance(child, Served):
                if child.table not in weights:
                    weights[child.table] = nn.Parameter(rows(child.table, 0, self.tables[child.table][0]).clone())
                weight, kind = weights[child.table], child.original
                for name in ("path", "table", "current", "original"):
                    del vars(child)[name]
                object.__setattr__(child, "__class__", kind)  # which is no `Served`
                child.register_parameter("weight", weight)
        return model


def wrap(
    model: nn.Module,
    inputs: Given = None,
    *,
    output: Output = "logits",
    key: str | None = None,
    rows: Mapping[str, Any] | None = None,
) -> Wrapped:
    """A module as it is, for `Job(model=…)`: its embeddings become tables of the embedding servers, the rest is the
    dense part, and it is called with what it was called with before.

    `nn.Embedding`, `nn.EmbeddingBag` and TorchRec's unsharded collections are found anywhere inside. Those with frozen
    weights stay in the module. The module given is not touched, and may be on a GPU; the tables' rows begin as they are
    in it, and the optimizers are those of the configuration.

    Args:
        model: the module.
        inputs: what it is called with: a function of a batch (`Inputs`) that returns the argument, or a tuple of them;
            or a mapping from parameters of `forward` to names of columns, or to functions of a batch. None takes the
            columns that are called like the parameters.
        output: what it returns, one per sample.
        key: where it returns a dict, the entry that is meant; None takes `y_pred`, or the only one.
        rows: initial rows of tables in place of the module's, by the path of the embedding: arrays `[rows, D]`.

    Raises:
        ConfigError: nothing can be served, or something cannot.
    """
    if output not in ("logits", "probability"):
        raise ConfigError(
            f"wrap: output={output!r} is not known{nearest(str(output), ('logits', 'probability'))}; "
            "allowed: logits, probability"
        )
    check_module(model)
    if any(isinstance(child, Wrapped) for child in model.modules()):
        raise ConfigError("wrap: the model is wrapped already: give the module as it was before")
    if hasattr(model, "_orig_mod"):
        raise ConfigError("wrap: the model is compiled: give it as it was before torch.compile, model._orig_mod")
    if not (inputs is None or callable(inputs) or isinstance(inputs, Mapping)):
        raise ConfigError(
            f"wrap: inputs={inputs!r} says nothing about the arguments: give a function of a batch, or a mapping from "
            "parameters of forward to columns"
        )
    if not isinstance(rows or {}, Mapping):
        raise ConfigError('wrap: rows is no mapping: give arrays by the paths of their embeddings, as {"user": array}')
    found = _found(model)
    owners: dict[int, str] = {}  # the table of each weight
    for path, child in found.items():
        owners.setdefault(id(child.weight), path or type(child).__name__)
    copied = copy_module(model, {id(child.weight): nn.Parameter(torch.empty(0)) for child in found.values()})
    for tensor in itertools.chain(copied.parameters(), copied.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.cpu()  # where it is tried; train.device says where it is trained
    tables, initial, current = {}, {}, _Current()
    for path, child in found.items():
        table, stand_in = owners[id(child.weight)], copied.get_submodule(path)
        if table not in tables:
            tables[table] = (int(child.num_embeddings), int(child.embedding_dim))
            if not child.weight.is_meta:
                initial[table] = child.weight.detach().cpu()
        del stand_in._parameters["weight"]
        stand_in.__class__ = _STAND_INS[nn.Embedding if isinstance(child, nn.Embedding) else nn.EmbeddingBag]
        vars(stand_in).update(path=path or table, table=table, current=current, original=type(child))
    initial |= {name: _given_rows(name, given, tables) for name, given in (rows or {}).items()}
    return Wrapped(copied, inputs, output, key, tables, initial)


def _found(model: nn.Module) -> dict[str, Any]:
    """The embeddings of a module that are trained, by their paths; raises `ConfigError` for what cannot be served."""
    every = {path: child for path, child in model.named_modules() if isinstance(child, nn.Embedding | nn.EmbeddingBag)}
    found = {
        path: child for path, child in every.items() if "weight" not in child._parameters or child.weight.requires_grad
    }
    if not found:
        what = "only frozen ones" if every else "none"
        raise ConfigError(
            f"the model {class_of(model)} has no embedding that could be served: of nn.Embedding, nn.EmbeddingBag "
            f"and TorchRec's collections it holds {what}; a model that takes vectors is given as Job(model=…) without "
            "shadowsync.wrap"
        )
    for path, child in found.items():
        name, kind = path or type(child).__name__, nn.Embedding if isinstance(child, nn.Embedding) else nn.EmbeddingBag
        reasons = {
            "its weight is computed from other parameters": "weight" not in child._parameters,
            f"{type(child).__name__} has a forward of its own": type(child).forward is not kind.forward,
            f"max_norm={child.max_norm} changes rows when they are looked up": child.max_norm is not None,
            "scale_grad_by_freq changes gradients by how often an id occurs": child.scale_grad_by_freq,
        }
        for reason, holds in reasons.items():
            if holds:
                raise ConfigError(f"{name} cannot be served, because {reason}: replace it by a plain {kind.__name__}")
        if child.weight.dtype != torch.float32:
            raise ConfigError(
                f"{name} cannot be served, because its rows are {child.weight.dtype}: call .float() on it"
            )
    paths = {id(child.weight): path for path, child in found.items()}
    for owner, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in paths and owner not in found:
                raise ConfigError(
                    f"{paths[id(parameter)]} cannot be served, because {owner or type(module).__name__}.{name} is the "
                    "same weight (tied): give the other one a weight of its own"
                )
    return found


def _given_rows(name: str, given: Any, tables: Mapping[str, tuple[int, int]]) -> Tensor:
    if name not in tables:
        raise ConfigError(f"wrap: rows has no table {name}{nearest(name, tables)}; there are {', '.join(tables)}")
    try:
        found = torch.as_tensor(given).detach().to("cpu", torch.float32, copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"wrap: rows of {name} are no array of numbers ({reason}): give one [rows, D]") from error
    if tuple(found.shape) != tables[name]:
        raise ConfigError(f"wrap: rows of {name} are {list(found.shape)}, and the table is {list(tables[name])}")
    return found


def _made_up(schema: Schema, samples: int, longest: int, weighted: bool) -> Inputs:
    """A batch of random rows, the same each time; the first and the last row of every feature are in it."""
    generator, empty = torch.Generator().manual_seed(samples), torch.zeros(0, dtype=torch.int64)
    lengths, values = [empty], [empty]
    for feature in schema.features:
        lengths.append(
            torch.arange(samples) % (longest + 1) if feature.multi_hot else torch.ones_like(torch.arange(samples))
        )
        values.append(torch.randint(feature.rows, (int(lengths[-1].sum()),), generator=generator))
        values[-1][:1], values[-1][1:2] = feature.rows - 1, 0
    several, ids = any(feature.multi_hot for feature in schema.features), torch.cat(values)
    offsets = F.pad(torch.cat(lengths).cumsum(0), (1, 0)) if several else None
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    dense = torch.randn(samples, len(schema.dense), generator=generator)
    return Inputs(schema, dense, Jagged(ids, offsets, weights, len(schema.features), samples))


def _sites(tables: Mapping[str, tuple[int, int]], passes: Sequence[tuple[int, Noted]]) -> Iterator[Site]:
    """What a module looks up, from passes with different numbers of samples."""
    seen: dict[str, int] = {}
    for number in range(max(len(found) for _, found in passes)):
        calls = [(samples, *found[number]) for samples, found in passes if number < len(found)]
        served = calls[0][1]
        if len(calls) < len(passes) or any(other.path != served.path for _, other, _ in calls):
            raise _branching(served.path)
        seen[served.path] = seen.get(served.path, 0) + 1
        name = served.path + (f"#{seen[served.path]}" if seen[served.path] > 1 else "")
        for _, _, call in calls:
            _check_ids(served, call)
        form, columns = _form(served, [(samples, call) for samples, _, call in calls])
        yield Site(name, served.path, served.table, form, columns, tables[served.table][1], served.padding_idx)


def _form(served: Served, calls: Sequence[tuple[int, Call]]) -> tuple[Literal["columns", "sum", "mean", "rows"], int]:
    """How a look-up is asked for, and with how many ids per sample."""
    if isinstance(served, ServedEmbeddingBag):
        bags = all(call.offsets is not None and len(call.offsets) == samples + 1 for samples, call in calls)
        learnt = any(call.weights is not None and call.weights.requires_grad for _, call in calls)
        if bags and not learnt and served.mode in ("sum", "mean"):
            return ("sum", 1) if served.mode == "sum" else ("mean", 1)
        return "rows", 1
    even = all(call.ids.shape[:1] == (samples,) for samples, call in calls)
    widths = {call.ids.shape[1:] for _, call in calls}
    columns = math.prod(min(widths))
    if even and len(widths) == 1 and 1 <= columns <= _MOST_COLUMNS:
        return "columns", columns
    return "rows", 1


def _check_ids(served: Served, call: Call) -> None:
    if call.ids.is_floating_point() or call.ids.dtype == torch.bool:
        raise ConfigError(
            f"{served.path} is called with {call.ids.dtype} for ids: turn them into integers with .long()"
        )
    if call.ids.numel() and not 0 <= int(call.ids.min()) <= int(call.ids.max()) < served.num_embeddings:
        wrong = int(call.ids.min()) if int(call.ids.min()) < 0 else int(call.ids.max())
        raise ConfigError(
            f"{served.path} is asked for row {wrong} and has rows 0 to {served.num_embeddings - 1}: give it more rows, "
            "or the columns it looks up fewer (data.rows, data.hash_size)"
        )


def _same(one: Call, two: Call, weights: bool) -> bool:
    """Two passes of one batch ask for the same; also with the same weights, if these matter."""
    pairs = [(one.ids, two.ids), (one.offsets, two.offsets)] + ([(one.weights, two.weights)] if weights else [])
    return all(
        a is b or (a is not None and b is not None and a.shape == b.shape and torch.equal(a.to(b.device), b))
        for a, b in pairs
    )


def _unsteady(path: str) -> ConfigError:
    return ConfigError(
        f"{path} is looked up with other ids in a second pass of the same rows: ids may depend on the columns of a row "
        "only, not on vectors, layers, random numbers or what the model keeps between batches"
    )


def _branching(path: str, when: str = "for some rows and not for others") -> ConfigError:
    return ConfigError(
        f"{path} is looked up {when}: its rows can be served if every call of the model makes the same look-ups in the "
        "same order (with no ids, if need be)"
    )


def features_of(model: nn.Module | None, schema: Schema) -> tuple[str, ...]:
    """The features that servers are asked for: those that a wrapped module looks up, or those of the source."""
    return model.features if isinstance(model, Wrapped) else tuple(feature.name for feature in schema.features)


def check_called(model: nn.Module | None) -> None:
    """Raises `ConfigError` if a module that is not wrapped cannot be called with dense columns and vectors."""
    if not isinstance(model, nn.Module) or isinstance(model, Wrapped):
        return
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # of a compiled one nobody knows
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"the model {type(model).__name__} has forward{signature}, and a module of your own is called as "
            "forward(dense, embeddings): if it takes ids and looks them up itself, give it as shadowsync.wrap(model)"
        ) from error
