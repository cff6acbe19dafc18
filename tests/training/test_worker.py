"""A worker's step: what it hands to its update, and what the update of the replica methods does with it."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.leases import Lease
from shadowsync.data.reader import LeasedBatch
from shadowsync.embedding.client import Pulled
from shadowsync.errors import NonFiniteLoss
from shadowsync.models.vectors import VectorGradients
from shadowsync.rpc.pending import DONE, Pending
from shadowsync.training.gate import Gate
from shadowsync.training.optimizers import Rates, Sgd
from shadowsync.training.replica import Replica, WorkerModule
from shadowsync.training.worker import Driver, LocalUpdate, TrainerContext, Worker

B, N, D = 4, 3, 2
DENSE_LR, EMBEDDING_LR = 0.5, 0.25
WAIT_S = 10.0


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(N + D, 1)

    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return self.top(torch.cat([dense, *embeddings.values()], dim=1)).squeeze(1)


@dataclass
class Rows:
    """An embedding client whose answer is in the ids, and that keeps what is pushed."""

    admits: bool = False
    preparing: Callable[[], None] = lambda: None
    pushed: list[tuple[Tensor, float]] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)

    def prepare(self, ids: Jagged, minute: int) -> Jagged:
        self.happened.append("prepared")
        self.preparing()
        return ids

    def fetch(self, ids: Jagged) -> Pulled:
        self.happened.append("fetched")
        return Pulled(ids.values.view(B, 1).float().expand(B, D) / 10, ())

    def push(self, pulled: Pulled, gradient: VectorGradients, lr: float) -> Pending[None]:
        self.pushed.append((gradient.pooled, lr))
        return DONE


@dataclass
class Given:
    """A feed of given batches that counts how many are done."""

    waiting: deque[LeasedBatch]
    finished: list[int] = field(default_factory=list)

    def next(self, wait: bool) -> LeasedBatch | None:
        return self.waiting.popleft() if self.waiting else None

    def done(self, leased: LeasedBatch) -> bool:
        self.finished.append(leased.number)
        return True


@dataclass
class Kept:
    """An update that applies nothing."""

    numbers: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    gradients: list[tuple[Tensor, ...]] = field(default_factory=list)
    settled_at: list[int] = field(default_factory=list)

    begun: list[int] = field(default_factory=list)
    quiet: bool = True
    happened: list[str] = field(default_factory=list)

    def begin(self, leased: LeasedBatch) -> Callable[[], bool]:
        self.happened.append("asked")
        return lambda: self._admitted(leased.number)

    def _admitted(self, number: int) -> bool:
        self.happened.append("admitted")
        self.begun.append(number)
        return True

    def ready(self, leased: LeasedBatch) -> None:
        assert leased.number in self.begun

    def apply(
        self, leased: LeasedBatch, pulled: Pulled, module: WorkerModule, gradient: VectorGradients, factor: float
    ) -> None:
        assert gradient.pooled.shape == pulled.pooled.shape
        self.numbers.append(leased.number)
        self.factors.append(factor)
        self.gradients.append(module.gradients)

    def settle(self) -> None:
        self.settled_at.append(len(self.numbers))

    def idle(self) -> None:
        self.settle()

    def left(self) -> None:
        """Nobody waits."""


def batches(count: int) -> Iterator[LeasedBatch]:
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        ids = Jagged(torch.randint(9, (B,), generator=generator), None, None, 1, B)
        labels = torch.randint(2, (B,), generator=generator).float()
        batch = Batch(dense=torch.randn(B, N, generator=generator), ids=ids, labels=labels)
        yield LeasedBatch(batch, Lease(0, 0, 0, 0, ()), number * B, (number + 1) * B, number)


@dataclass
class Bench:
    """One worker with everything around it; `asked` counts how often it asked for the samples trained."""

    rates: Rates
    count: int = 5
    asked: int = 0
    prefetch: int = 1
    gate: Gate = field(default_factory=Gate)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.replica = Replica(Tower(), Sgd(), {"user": D})
        self.rows, self.feed = Rows(), Given(deque(batches(self.count)))

    def local(self) -> LocalUpdate:
        return LocalUpdate(self.rows, self.feed, DENSE_LR, EMBEDDING_LR)

    def train(self, update: LocalUpdate | Kept) -> Worker:
        module = self.replica.worker_module()
        self.gate.join()
        context = TrainerContext(
            rank=0,
            feed=self.feed,
            driver=Driver(),
            gate=self.gate,
            rates=self.rates,
            prefetch=self.prefetch,
            record=lambda rank, logits, labels: None,
            trained=self._trained,
            stopping=lambda: False,
            before_step=lambda rank, iteration: None,
            place=lambda leased: f"batch {leased.number}",
            ended=lambda: None,
        )
        worker = Worker(context, 0, 0, module, self.rows, update)
        worker.run()
        return worker

    def _trained(self) -> int:
        self.asked += 1
        return (self.asked - 1) * B


def test_every_batch_reaches_the_update_once_and_in_order() -> None:
    bench, update = Bench(Rates()), Kept()
    before = bench.replica.flat.clone()
    worker = bench.train(update)
    assert update.numbers == list(range(bench.count))
    assert worker.iterations == bench.count
    assert torch.equal(bench.replica.flat, before), "the worker itself changes no parameter"
    assert not bench.rows.pushed
    assert not bench.feed.finished
    assert all(found is not None for gradients in update.gradients for found in gradients)
    assert update.settled_at
    assert set(update.settled_at) == {bench.count}, "nothing is on its way while the worker idles, and at its end"


@pytest.mark.parametrize("admits", [False, True])
def test_a_look_up_is_prepared_while_the_answer_is_waited_for(admits: bool) -> None:
    """And rows are read after it: none is older than the step that the worker was let go on from."""
    bench = Bench(Rates(), count=2)
    bench.rows = Rows(admits)
    bench.train(Kept(happened=bench.rows.happened))
    assert bench.rows.happened == ["asked", "prepared", "admitted", "fetched"] * 2


@pytest.mark.parametrize("admits", [False, True])
def test_no_pause_comes_between_a_look_up_that_admits_keys_and_its_step(admits: bool) -> None:
    bench, update = Bench(Rates(), prefetch=0), Kept()
    looking, go_on = threading.Event(), threading.Event()

    def look() -> None:
        looking.set()
        assert go_on.wait(WAIT_S)

    bench.rows = Rows(admits, look)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(bench.train, update)
        try:
            assert looking.wait(WAIT_S)
            assert bench.gate.hold(0.05) is not admits
            go_on.set()
            assert bench.gate.hold(WAIT_S)
            if admits:
                assert len(update.numbers) == bench.rows.happened.count("fetched") > 0
            else:
                assert not update.numbers
        finally:
            go_on.set()
            bench.gate.release()
        training.result(WAIT_S)
    assert update.numbers == list(range(bench.count))


def test_a_pause_waits_for_a_look_up_ahead_that_admits_keys_and_the_next_one_for_the_pause() -> None:
    bench, update = Bench(Rates()), Kept()
    looking, go_on = threading.Event(), threading.Event()

    def look() -> None:
        looking.set()
        assert go_on.wait(WAIT_S)

    bench.rows = Rows(admits=True, preparing=look)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(bench.train, update)
        try:
            assert looking.wait(WAIT_S)
            assert not bench.gate.hold(0.05)
            go_on.set()
            assert bench.gate.hold(WAIT_S)
            assert bench.rows.happened.count("prepared") == 1
        finally:
            go_on.set()
            bench.gate.release()
        training.result(WAIT_S)
    assert update.numbers == list(range(bench.count))


def test_the_local_update_is_sgd_on_both_parts() -> None:
    bench = Bench(Rates())
    tower = Tower()
    tower.load_state_dict(bench.replica.module.state_dict())
    bench.train(bench.local())
    for leased, (pushed, lr) in zip(batches(bench.count), bench.rows.pushed, strict=True):
        pooled = Rows().fetch(leased.batch.ids).pooled.clone().requires_grad_()
        logits = tower(leased.batch.dense, {"user": pooled})
        loss = nn.functional.binary_cross_entropy_with_logits(logits, leased.batch.labels)
        by_pooled, *gradients = torch.autograd.grad(loss, [pooled, *tower.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(tower.parameters(), gradients, strict=True):
                parameter.sub_(DENSE_LR * gradient)
        torch.testing.assert_close(pushed, by_pooled)
        assert lr == EMBEDDING_LR
    for own, expected in zip(bench.replica.module.parameters(), tower.parameters(), strict=True):
        torch.testing.assert_close(own, expected)
    assert bench.feed.finished == list(range(bench.count))


@pytest.mark.parametrize(
    ("rates", "asked", "factors"),
    [
        (Rates(), 1, [1.0] * 5),
        (Rates(warmup_samples=2 * B), 2, [0.5, 1.0, 1.0, 1.0, 1.0]),
        (Rates(decay="linear", total_samples=4 * B), 4, [0.75, 0.5, 0.25, 0.0, 0.0]),
        (Rates(decay="linear", total_samples=10 * B), 5, [0.9, 0.8, 0.7, 0.6, 0.5]),
    ],
)
def test_samples_are_asked_for_only_as_long_as_the_rate_moves(rates: Rates, asked: int, factors: list[float]) -> None:
    bench, update = Bench(rates), Kept()
    bench.train(update)
    assert update.factors == pytest.approx(factors)
    assert bench.asked == asked


def test_a_loss_that_is_not_finite_reaches_no_update() -> None:
    bench, update = Bench(Rates()), Kept()
    bad = bench.feed.waiting[2].batch
    bad.dense.fill_(torch.inf)
    said = r"batch 2 .*samples: look for extreme values in the dense columns of these rows \(up to inf\), lower train"
    with pytest.raises(NonFiniteLoss, match=said):
        bench.train(update)
    assert update.numbers == [0, 1]


@pytest.mark.parametrize(
    ("value", "said"),
    [(torch.nan, "^parameter top.weight of the model holds NaN .* before the first step"), (0.0, "^the model gives a")],
)
def test_before_the_first_step_the_model_is_to_blame_and_no_learning_rate(
    value: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(Rates())
    monkeypatch.setattr(bench, "_trained", lambda: 0)
    with torch.no_grad():
        bench.replica.module.top.weight[0, 0] = value
    bench.feed.waiting[0].batch.dense.fill_(torch.inf)
    with pytest.raises(NonFiniteLoss, match=said) as caught:
        bench.train(Kept())
    assert "lr" not in str(caught.value)


def test_both_parts_follow_the_factor() -> None:
    bench = Bench(Rates(warmup_samples=2 * B), count=2)
    start = bench.replica.flat.clone()
    module = bench.replica.worker_module()
    leased, pulled = next(batches(1)), SimpleNamespace(pooled=torch.ones(B, D))
    _, _, gradient = module.loss_and_gradients(leased.batch.dense, pulled.pooled, leased.batch.labels)
    bench.local().apply(leased, pulled, module, gradient, 0.5)
    torch.testing.assert_close(bench.replica.flat, start - 0.5 * DENSE_LR * module.flat_gradient())
    assert bench.rows.pushed[0][1] == 0.5 * EMBEDDING_LR
