"""What of a module is served, in which form, and what cannot be."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.source import Feature, Schema
from shadowsync.errors import ConfigError
from shadowsync.models.vectors import Call, Pooled
from shadowsync.models.wrapping import Site, Wrapped, wrap

SCHEMA = Schema(("price",), (Feature("user", 9), Feature("item", 9), Feature("recent", 9, multi_hot=True)))


class Tables(nn.Module):
    """Looks up what its function looks up in these embeddings."""

    def __init__(self, ask: Any, **embeddings: nn.Module) -> None:
        super().__init__()
        self.ask, self.tables, self.scale = ask, nn.ModuleDict(embeddings), nn.Parameter(torch.ones(1))

    def forward(self, batch: Any) -> Tensor:
        found = self.ask(self.tables, batch)
        return (self.scale * found.flatten(1).sum(dim=1)) if found.dim() > 1 else self.scale * found


def sites(ask: Any, **embeddings: nn.Module) -> tuple[Site, ...]:
    return wrap(Tables(ask, **embeddings), lambda batch: batch).planned(SCHEMA).sites


def bag(**options: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(9, 2, include_last_offset=True, **options)


def look_up_bag(tables: Any, batch: Any) -> Tensor:
    recent = batch.jagged("recent")
    return tables["a"](recent.values, recent.bag_offsets())


FORMS = {
    "one id": (lambda t, b: t["a"](b["user"]), nn.Embedding(9, 2), ("columns", 1)),
    "one id in a matrix": (lambda t, b: t["a"](b.ids("user")), nn.Embedding(9, 2), ("columns", 1)),
    "columns": (lambda t, b: t["a"](b.ids("user", "item", "user")), nn.Embedding(9, 2), ("columns", 3)),
    "as long as the longest": (lambda t, b: t["a"](b["recent"]), nn.Embedding(9, 2), ("rows", 1)),
    "cut to the first ids": (lambda t, b: t["a"](b["recent"][:, :3]), nn.Embedding(9, 2), ("rows", 1)),
    "three ids at least": (
        lambda t, b: t["a"](b["recent"]).unfold(1, 3, 1).sum((1, 3)),
        nn.Embedding(9, 2),
        ("rows", 1),
    ),
    "of one length": (lambda t, b: t["a"](b.padded("recent", 4)), nn.Embedding(9, 2), ("columns", 4)),
    "too long": (lambda t, b: t["a"](b.padded("recent", 200)), nn.Embedding(9, 2), ("rows", 1)),
    "not of samples": (lambda t, b: t["a"](torch.arange(3)).sum(0) + b.dense, nn.Embedding(9, 2), ("rows", 1)),
    "sum": (look_up_bag, bag(mode="sum"), ("sum", 1)),
    "mean": (look_up_bag, bag(mode="mean"), ("mean", 1)),
    "max": (look_up_bag, bag(mode="max"), ("rows", 1)),
    "two bags each": (
        lambda t, b: t["a"](b.ids("user", "item").flatten(), torch.arange(2 * len(b.dense) + 1)).view(-1, 4),
        bag(mode="sum"),
        ("rows", 1),
    ),
    "matrix of a bag": (lambda t, b: t["a"](b.ids("user", "item")), nn.EmbeddingBag(9, 2), ("mean", 1)),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_look_up_has_its_form(name: str) -> None:
    ask, table, (form, columns) = FORMS[name]
    (site,) = sites(ask, a=copy.deepcopy(table))
    assert (site.path, site.table, site.form, site.columns) == ("tables.a", "tables.a", form, columns)
    assert len(site.features) == columns
    assert site.pooling == {"columns": "sum", "rows": "none"}.get(form, form)


def test_a_table_may_be_looked_up_often_and_by_several() -> None:
    first, second = nn.Embedding(9, 2), nn.Embedding(9, 2)
    second.weight = first.weight

    def ask(tables: Any, batch: Any) -> Tensor:
        return tables["a"](batch["user"]) + tables["b"](batch["item"]) + tables["a"](batch["item"])

    found = sites(ask, a=first, b=second)
    assert [site.name for site in found] == ["tables.a", "tables.b", "tables.a#2"]
    assert {site.table for site in found} == {"tables.a"}


def test_the_module_given_is_not_touched_and_its_rows_are_not_copied() -> None:
    model = Tables(lambda t, b: t["a"](b["user"]), a=nn.Embedding(9, 2))
    before = copy.deepcopy(model.state_dict())
    wrapped = wrap(model, lambda batch: batch)
    assert type(model.tables["a"]) is nn.Embedding
    assert model.state_dict().keys() == before.keys()
    assert wrapped.initial["tables.a"].data_ptr() == model.tables["a"].weight.data_ptr()
    assert [name for name, _ in wrapped.named_parameters()] == ["model.scale"]
    copied = copy.deepcopy(wrapped)
    assert copied.initial == {}, "they go to the servers alone"
    assert isinstance(copied, Wrapped)


def test_what_is_never_looked_up_and_what_is_frozen_stays() -> None:
    frozen = nn.Embedding(9, 2)
    frozen.weight.requires_grad_(False)
    model = Tables(lambda t, b: t["a"](b["user"]) + t["frozen"](b["item"]), a=nn.Embedding(9, 2), frozen=frozen,
                   idle=nn.Embedding(9, 2))  # fmt: skip
    wrapped = wrap(model, lambda batch: batch).planned(SCHEMA)
    assert set(wrapped.tables) == {"tables.a", "tables.idle"}
    assert wrapped.features == ("tables.a",)
    back = wrapped.unwrapped(lambda name, start, stop: wrapped.initial[name][start:stop])
    assert back.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    assert type(back.tables["a"]) is nn.Embedding
    assert vars(back.tables["a"]).keys() == vars(model.tables["a"]).keys()


def test_asking_gives_the_ids_of_a_batch_without_what_is_padded() -> None:
    def ask(tables: Any, batch: Any) -> Tensor:
        recent = batch.jagged("recent")
        return tables["a"](recent.values, recent.bag_offsets()) + tables["b"](batch.ids("user", "item")).sum(dim=1)

    wrapped = wrap(Tables(ask, a=bag(mode="mean", padding_idx=7), b=nn.Embedding(9, 2)), lambda batch: batch)
    values = torch.tensor([1, 2, 3, 4, 7, 5, 7])
    ids = Jagged(values, torch.tensor([0, 1, 2, 3, 4, 6, 7]), None, 3, 2)
    found, looked_up = wrapped.planned(SCHEMA).ask(Batch(torch.zeros(2), torch.zeros(2, 1), ids), training=True)
    assert found.values.tolist() == [5, 1, 2, 3, 4]
    assert found.bag_offsets().tolist() == [0, 1, 1, 2, 3, 4, 5]
    assert [call.ids.tolist() for call in looked_up.calls] == [[7, 5, 7], [[1, 3], [2, 4]]]
    assert looked_up.ids.values is values


def test_the_first_ids_of_lists_that_are_all_empty_are_none() -> None:
    model = Tables(lambda t, b: t["a"](b["recent"][:, :1]).sum(dim=1), a=nn.Embedding(9, 2))
    wrapped = wrap(model, lambda batch: batch).planned(SCHEMA)
    ids = Jagged(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 2, 3, 4, 4, 4]), None, 3, 2)
    found, looked_up = wrapped.ask(Batch(torch.zeros(2), torch.zeros(2, 1), ids), training=True)
    assert found.bag_offsets().tolist() == [0, 0, 0]
    pooled = Pooled(torch.zeros(2, 2, requires_grad=True), {"tables.a": 2}, looked_up=looked_up)
    assert torch.equal(wrapped(torch.zeros(2, 1), pooled), torch.zeros(2))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_no_ids_at_all_have_the_gradients_of_plain_torch(mode: str) -> None:
    plain = bag(mode=mode)
    served = wrap(Tables(look_up_bag, a=plain), lambda batch: batch).model.tables["a"]
    rows, offsets = torch.zeros(0, 2, requires_grad=True), torch.zeros(4, dtype=torch.int64)
    weights = torch.zeros(0, requires_grad=True) if mode == "sum" else None
    call = Call(torch.zeros(0, dtype=torch.int64), offsets, weights)
    found = served.vectors(call, rows)
    assert torch.equal(found, plain(*call))
    found.sum().backward()
    assert rows.grad is not None
    assert weights is None or weights.grad is not None


def test_ids_that_a_module_changes_in_place_are_changed_once() -> None:
    def ask(tables: Any, batch: Any) -> Tensor:
        column = batch["user"]
        column += 1
        return tables["a"](column)

    wrapped = wrap(Tables(ask, a=nn.Embedding(12, 2)), lambda batch: batch).planned(SCHEMA)
    ids = Jagged(torch.arange(1, 7), None, None, 3, 2)
    batch = Batch(torch.zeros(2), torch.zeros(2, 1), ids)
    assert wrapped.ask(batch, training=True)[0].values.tolist() == [2, 3]
    assert ids.values.tolist() == [1, 2, 3, 4, 5, 6], "the pass with rows is to find them as they were"


class Own(nn.Embedding):
    """Does more than look up."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


def tied() -> nn.Module:
    model = Tables(lambda t, b: t["a"](b["user"]), a=nn.Embedding(9, 2), out=nn.Linear(2, 9, bias=False))
    model.tables["out"].weight = model.tables["a"].weight
    return model


def only(table: nn.Module) -> nn.Module:
    return Tables(lambda t, b: t["a"](b["user"]), a=table)


def computed() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Embedding(9, 2))


REFUSED = {
    "nothing": (lambda: nn.Linear(2, 1), ("Linear has no embedding", "it holds none")),
    "only frozen": (lambda: only(nn.Embedding(9, 2).requires_grad_(False)), ("only frozen ones",)),
    "no module": (lambda: "model", ("must be an instance of torch.nn.Module",)),
    "max_norm": (lambda: only(nn.Embedding(9, 2, max_norm=1.0)), ("tables.a", "max_norm=1.0")),
    "by frequency": (lambda: only(nn.Embedding(9, 2, scale_grad_by_freq=True)), ("tables.a", "scale_grad_by_freq")),
    "half": (lambda: only(nn.Embedding(9, 2).half()), ("tables.a", "torch.float16", ".float()")),
    "own forward": (lambda: only(Own(9, 2)), ("tables.a", "Own has a forward of its own")),
    "computed": (lambda: only(computed()), ("tables.a", "computed from other parameters")),
    "tied": (tied, ("tables.a", "tables.out.weight", "tied")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_named(name: str) -> None:
    model, parts = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        wrap(model())
    assert [part for part in parts if part not in str(caught.value)] == []


class Negatives(Tables):
    """Looks ids up a second time where it is trained."""

    def forward(self, batch: Any) -> Tensor:
        found = super().forward(batch)
        return found + self.tables["b"](batch["item"]).sum(1) if self.training else found


BAD = {
    "too few rows": (only(nn.Embedding(4, 2)), {}, ("tables.a is asked for row 8", "rows 0 to 3")),
    "floats": (Tables(lambda t, b: t["a"](b["price"]), a=nn.Embedding(9, 2)), {}, ("tables.a", "torch.float32")),
    "no look-up": (Tables(lambda t, b: b.dense, a=nn.Embedding(9, 2)), {}, ("looks nothing up",)),
    "bad call": (only(nn.Embedding(9, 2)), {"inputs": lambda b: (b, b)}, ("Tables cannot be called", "TypeError")),
    "no column": (only(nn.Embedding(9, 2)), {"inputs": None}, ("is called with batch", "inputs=lambda")),
    "branch": (
        Tables(lambda t, b: t["a"](b["user"]) + (t["b"](b["user"]) if len(b.dense) > 6 else 0),
               a=nn.Embedding(9, 2), b=nn.Embedding(9, 2)),
        {}, ("tables.b", "for some rows and not for others"),
    ),
    "training": (
        Negatives(lambda t, b: t["a"](b["user"]), a=nn.Embedding(9, 2), b=nn.Embedding(9, 2)),
        {}, ("tables.b", "in training and not in evaluation"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_the_rows_is_one_sentence(name: str) -> None:
    model, options, parts = BAD[name]
    with pytest.raises(ConfigError) as caught:
        wrap(model, **{"inputs": lambda batch: batch, **options}).planned(SCHEMA)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"output": "logit"}, ("output='logit'", "did you mean logits?")),
        ({"rows": {"tables.b": torch.zeros(9, 2)}}, ("no table tables.b", "did you mean tables.a?")),
        ({"rows": {"tables.a": torch.zeros(9, 3)}}, ("tables.a", "[9, 3]", "[9, 2]")),
        ({"rows": {"tables.a": "rows.npy"}}, ("tables.a", "no array of numbers")),
        ({"rows": [torch.zeros(9, 2)]}, ("rows is no mapping",)),
        ({"inputs": "user"}, ("inputs='user'", "a function of a batch")),
    ],
    ids=["output", "table", "form", "text", "list", "inputs"],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        wrap(only(nn.Embedding(9, 2)), **options)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_what_is_wrapped_already_is_refused() -> None:
    with pytest.raises(ConfigError, match="is wrapped already"):
        wrap(wrap(only(nn.Embedding(9, 2))))


@pytest.mark.parametrize(
    ("answer", "options", "wanted"),
    [
        (lambda p: p, {}, 0.25),
        (lambda p: p[:, None], {}, 0.25),
        (lambda p: {"y_pred": p, "other": p + 1}, {}, 0.25),
        (lambda p: {"only": p}, {}, 0.25),
        (lambda p: {"a": p + 1, "b": p}, {"key": "b"}, 0.25),
        (lambda p: {"a": p, "b": p}, {}, "returns a, b: say which"),
        (lambda p: p, {"key": "b"}, "returns Tensor and no b"),
        (lambda p: (p, p), {}, "returns tuple"),
        (lambda p: p, {"output": "probability"}, -1.0986123),
        (lambda p: p * 5, {"output": "probability"}, "returns 1.25 to 1.25 where probabilities are expected"),
        (lambda p: p * 0 + 1, {"output": "probability"}, 16.635532),
    ],
)
def test_outputs_become_logits(answer: Any, options: dict[str, Any], wanted: float | str) -> None:
    class Answers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Embedding(9, 1)

        def forward(self, user: Tensor) -> Any:
            return answer(self.a(user)[:, 0] * 0 + 0.25)

    wrapped = wrap(Answers(), **options).planned(SCHEMA)
    plain = wrapped.unwrapped(lambda name, start, stop: wrapped.initial[name][start:stop])
    ids = Jagged(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 2, 3, 4, 4, 4]), None, 3, 2)
    if isinstance(wanted, str):
        with pytest.raises(ConfigError, match=wanted):
            wrapped.logits(plain, torch.zeros(2, 1), ids)
    else:
        found = wrapped.logits(plain, torch.zeros(2, 1), ids)
        torch.testing.assert_close(found, torch.full((2,), wanted), rtol=1e-3, atol=1e-6)


def test_a_compiled_module_is_told_to_be_given_before() -> None:
    with pytest.raises(ConfigError, match=r"is compiled: give it as it was before torch\.compile, model\._orig_mod"):
        wrap(torch.compile(only(nn.Embedding(9, 2)), backend="eager"))  # type: ignore[arg-type] # it is a module


def test_errors_call_it_by_the_name_of_its_class() -> None:
    assert wrap(only(nn.Embedding(9, 2)))._get_name() == "Tables"
