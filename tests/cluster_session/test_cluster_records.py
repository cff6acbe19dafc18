"""What trainers elsewhere tell of their batches reaches the driver's recorder."""

import threading
from concurrent.futures import Future, wait
from typing import Any

import msgspec
import pytest
import torch
from helpers import PackedConnection
from torch import Tensor

from shadowsync.cluster import records
from shadowsync.cluster.records import RecordSender, RecordTaker
from shadowsync.errors import DataError
from shadowsync.metrics.recorder import Recorder
from shadowsync.rpc.connection import EMPTY, Connection, Payload
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.pending import Pending, Promise
from shadowsync.rpc.served import Served, served

WINDOW = 10_000
Batches = list[tuple[Tensor, Tensor]]


class Slow(Connection):
    """Answers when told to."""

    def __init__(self, behind: Connection) -> None:
        self.behind = behind
        self.calls: list[tuple[str, Payload]] = []
        self.answers: list[Promise[Payload]] = []

    def call(self, method: str, payload: Payload = EMPTY, timeout_s: float | None = None) -> Pending[Payload]:
        self.calls.append((method, payload))
        self.answers.append(Promise())
        return self.answers[-1]

    def answer(self) -> None:
        """All that was asked."""
        for call, answer in zip(self.calls, self.answers, strict=True):
            if not answer.done():
                answer.keep(self.behind.call(*call).result())

    def close(self) -> None:
        self.behind.close()


def batches(count: int = 40, size: int = 32, seed: int = 0) -> Batches:
    """Logits that say something about the labels."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        logits = torch.randn(size, generator=draw) * 2
        made.append((logits, (torch.rand(size, generator=draw) < logits.sigmoid()).float()))
    return made


@pytest.fixture(autouse=True)
def sent_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "EVERY_S", 3600.0)


def taker_of(recorder: Recorder, generation: int = 1) -> RecordTaker:
    taker = RecordTaker(recorder)
    taker.generation = generation
    return taker


def test_counts_are_the_same_and_quality_is_near() -> None:
    near, far = Recorder(2, WINDOW), Recorder(2, WINDOW)
    taker = taker_of(far)
    senders = [RecordSender(PackedConnection(Served(taker)), rank, 1) for rank in range(2)]
    for number, (logits, labels) in enumerate(batches()):
        near.record(number % 2, logits, labels)
        senders[number % 2].record(number % 2, logits, labels)
        if number % 7 == 0:
            senders[number % 2].flush(5)
    for sender in senders:
        assert sender.flush(5)
        sender.close()
    assert far.samples == near.samples == 40 * 32
    assert far.iterations() == near.iterations() == [20, 20]
    assert far.quality.lifetime.count == 40 * 32
    assert far.quality.lifetime.ne == pytest.approx(near.quality.lifetime.ne, abs=1e-3)
    assert far.quality.ne_window == pytest.approx(near.quality.ne_window, abs=1e-3)
    assert far.quality.auc == pytest.approx(near.quality.auc, abs=1e-3)
    assert far.quality.lifetime.calibration == pytest.approx(near.quality.lifetime.calibration, abs=1e-3)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_logits_of_any_float_type_and_shape_are_taken(kind: torch.dtype) -> None:
    recorder = Recorder(1, WINDOW)
    sender = RecordSender(PackedConnection(Served(taker_of(recorder))), 0, 1)
    logits, labels = batches(1)[0]
    sender.record(0, logits.to(kind), labels)
    assert sender.flush(5)
    sender.close()
    assert recorder.samples == recorder.quality.lifetime.count == 32


def test_the_time_of_a_batch_is_when_it_was_done_not_when_it_was_told() -> None:
    clock = [100.0]
    recorder = Recorder(1, WINDOW, lambda: clock[0])
    taker = taker_of(recorder)
    taker.records(*told(sizes=[4, 4, 4], ages=[6.0, 3.0, 0.0]))
    speed = recorder.speed()
    assert (speed.samples, speed.iterations) == (12, 3)
    assert speed.seconds == pytest.approx(6.0)
    assert speed.eps == pytest.approx(8 / 6)


def test_a_driver_that_is_behind_with_answers_still_counts_everything() -> None:
    recorder = Recorder(1, WINDOW)
    slow = Slow(PackedConnection(Served(taker_of(recorder))))
    sender = RecordSender(slow, 0, 1)
    made = batches(records.UNDER_WAY + 3)
    for logits, labels in made:
        sender.record(0, logits, labels)
        sender.flush(0)
    assert [len(payload.tensors) for _, payload in slow.calls] == [4] * records.UNDER_WAY + [2] * 3
    slow.answer()
    assert sender.flush(5)
    assert recorder.samples == 32 * len(made)
    assert recorder.samples - recorder.quality.lifetime.count == 32 * 3
    sender.record(0, *made[0])  # it has caught up
    sender.flush(0)
    slow.answer()
    assert recorder.samples - recorder.quality.lifetime.count == 32 * 3
    sender.close()


def test_flush_waits_for_the_answers() -> None:
    slow = Slow(PackedConnection(Served(taker_of(Recorder(1, WINDOW)))))
    sender = RecordSender(slow, 0, 1)
    assert sender.flush(0)  # there is nothing to wait for
    assert not slow.calls
    sender.record(0, *batches(1)[0])
    assert not sender.flush(0.01)
    threading.Timer(0.05, slow.answer).start()
    assert sender.flush(20)
    sender.close()


def test_a_lost_driver_ends_the_wait() -> None:
    slow = Slow(PackedConnection(Served(taker_of(Recorder(1, WINDOW)))))
    sender = RecordSender(slow, 0, 1)
    sender.record(0, *batches(1)[0])
    assert not sender.flush(0)
    slow.answers[0].fail(PeerLost("the connection is closed"))
    assert sender.flush(0)
    sender.close()


def test_it_sends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "EVERY_S", 0.01)
    recorder, heard = Recorder(1, WINDOW), threading.Event()

    class Telling(RecordTaker):
        @served()
        def records(
            self, trainer: int, generation: int, sizes: Tensor, ages: Tensor, measured: tuple[Tensor, Tensor] | None
        ) -> None:
            super().records(trainer, generation, sizes, ages, measured)
            heard.set()

    taker = Telling(recorder)
    taker.generation = 1
    sender = RecordSender(PackedConnection(Served(taker)), 0, 1)
    sender.record(0, *batches(1)[0])
    assert heard.wait(120)
    sender.close()
    assert recorder.samples == 32


Told = tuple[int, int, Tensor, Tensor, tuple[Tensor, Tensor] | None]


def told(
    sizes: Any = (2, 3),
    ages: Any = (0.1, 0.0),
    *,
    samples: int | None = None,
    measured: bool = True,
    trainer: int = 0,
    generation: int = 1,
    kinds: dict[str, torch.dtype] | None = None,
) -> Told:
    """What a sender tells, with anything in it wrong."""
    kinds = kinds or {}
    sizes = torch.tensor(sizes, dtype=kinds.get("sizes", torch.int32))
    samples = int(sizes.sum()) if samples is None else samples
    logits = torch.zeros(samples, dtype=kinds.get("logits", torch.float16))
    labels = torch.ones(samples, dtype=kinds.get("labels", torch.uint8))
    ages = torch.tensor(ages, dtype=kinds.get("ages", torch.float32))
    return trainer, generation, sizes, ages, (logits, labels) if measured else None


MALFORMED = {
    "sizes of another type": told(kinds={"sizes": torch.int64}),
    "ages of another type": told(kinds={"ages": torch.float64}),
    "logits of another type": told(kinds={"logits": torch.float32}),
    "labels of another type": told(kinds={"labels": torch.int8}),
    "sizes of two dimensions": told(sizes=[[2, 3]], ages=[0.1]),
    "fewer ages than sizes": told(ages=[0.1]),
    "too few samples": told(samples=4),
    "too many samples": told(samples=6),
    "an empty batch": told(sizes=[0, 3]),
    "a negative batch": told(sizes=[-1, 6], samples=5),
    "a negative batch, counted": told(sizes=[-1, 6], measured=False),
    "a negative trainer": told(trainer=-1),
    "a trainer beyond all bounds": told(trainer=1 << 16),
}


@pytest.mark.parametrize("wrong", MALFORMED.values(), ids=MALFORMED)
def test_what_does_not_fit_is_refused_and_changes_nothing(wrong: Told) -> None:
    recorder = Recorder(1, WINDOW)
    taker = taker_of(recorder)
    taker.records(*told())
    with pytest.raises(DataError):
        taker.records(*wrong)
    assert (recorder.samples, list(recorder.iterations()), recorder.quality.lifetime.count) == (5, [2], 5)


@pytest.mark.parametrize(
    "value",
    [[0, 1], [0, 1, 0, 1], [0, 1, 0, 1, [2]], [0, 1, 0, 1, [2, 4]], [0, 1, 0, None, None], None],
    ids=["no tensors", "nothing about logits", "labels are missing", "labels are not there", "no ages", "no records"],
)
def test_other_tensors_than_records_have_are_refused(value: Any) -> None:
    recorder = Recorder(1, WINDOW)
    _, _, sizes, ages, measured = told()
    assert measured is not None
    called = PackedConnection(Served(taker_of(recorder))).call(
        "records", Payload(msgspec.msgpack.encode(value), (sizes, ages, *measured))
    )
    with pytest.raises(DataError):
        called.result()
    assert recorder.samples == 0


def test_records_of_no_batches_are_nothing() -> None:
    recorder = Recorder(1, WINDOW)
    taker_of(recorder).records(*told(sizes=[], ages=[]))
    assert recorder.samples == 0


@pytest.mark.parametrize("age", [-5.0, float("nan")])
def test_an_age_that_cannot_be_counts_as_none(age: float) -> None:
    recorder = Recorder(1, WINDOW, lambda: 50.0)
    taker_of(recorder).records(*told(sizes=[1, 1], ages=[age, 0.0]))
    assert recorder.speed().seconds == 0.0


@pytest.mark.parametrize("generation", [0, 2])
def test_records_of_another_generation_are_dropped(generation: int) -> None:
    recorder = Recorder(1, WINDOW)
    taker = taker_of(recorder)
    taker.records(*told(generation=generation))
    assert recorder.samples == 0
    taker.generation = generation
    taker.records(*told(generation=generation))
    assert recorder.samples == 5


def test_a_trainer_that_joined_later_is_counted_by_its_rank() -> None:
    recorder = Recorder(1, WINDOW)
    taker_of(recorder).records(*told(trainer=3))
    assert list(recorder.iterations()) == [0, 0, 0, 2]


def test_many_threads_may_record() -> None:
    recorder = Recorder(1, WINDOW)
    sender = RecordSender(PackedConnection(Served(taker_of(recorder))), 0, 1)
    made = batches(50, 4)
    done: list[Future[None]] = [Future() for _ in range(4)]

    def work(future: Future[None]) -> None:
        for logits, labels in made:
            sender.record(0, logits, labels)
            sender.flush(1)
        future.set_result(None)

    for future in done:
        threading.Thread(target=work, args=(future,), daemon=True).start()
    assert not wait(done, 20).not_done
    assert sender.flush(5)
    sender.close()
    assert recorder.samples == 4 * 50 * 4
    assert list(recorder.iterations()) == [200]
