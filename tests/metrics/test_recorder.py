"""The recorder: counts, rates and frames on a hand-driven clock; threads; resumes."""

import json
import threading
from typing import Any

import msgspec
import pytest
import torch

from shadowsync.aggregation.counts import AggregationState
from shadowsync.compression.wire import WireTotals
from shadowsync.metrics.history import Frame, JobCounts
from shadowsync.metrics.quality import evaluate_scores
from shadowsync.metrics.recorder import Recorder, average_sync_gap

LOGITS = torch.tensor([-2.0, 0.5, 1.0, -1.0])
LABELS = torch.tensor([0.0, 1.0, 1.0, 0.0])


class Timed(Recorder):
    """A recorder whose clock moves when it is told to."""

    def __init__(self, trainers: int = 1, now: float = 100.0) -> None:
        self.now = now
        super().__init__(trainers, 10, lambda: self.now)

    def steps(self, *trainers: int) -> None:
        """One step of four samples for each trainer named, a second passing after each."""
        for trainer in trainers:
            self.record(trainer, LOGITS, LABELS)
            self.now += 1.0


def frame_of(
    recorder: Recorder,
    steps: AggregationState | None = None,
    wire: WireTotals | None = None,
    ended: bool = False,
    **told: Any,
) -> Frame:
    given = {"total_samples": 80, "sync_count": 0, "replica_distance": None, "saves": 0, **told}
    return recorder.frame(JobCounts(**given), wire or WireTotals(), steps, ended=ended)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))  # type: ignore[no-any-return]


def test_frame_before_the_first_step() -> None:
    frame = frame_of(Timed(2))
    assert (frame.seconds, frame.samples, frame.eps, frame.eps_per_trainer) == (0.0, 0, 0.0, (0.0, 0.0))
    assert (frame.auc, frame.ne_window, frame.loss, frame.sync_gap) == (None, None, None, None)


def test_frames_rates_are_over_the_interval() -> None:
    recorder = Timed(2)
    recorder.steps(0, 1, 0, 0)  # at 100 … 103, now 104
    first = frame_of(recorder, sync_count=2, wire=WireTotals(bytes={"pull": 7}), saves=1)
    recorder.steps(1, 1)
    second = frame_of(recorder, sync_count=3, replica_distance=0.1)
    assert (first.seconds, first.samples, first.eps, first.eps_per_trainer) == (4.0, 16, 4.0, (3.0, 1.0))
    assert (first.sync_gap, first.wire_bytes, first.saves, first.total_samples) == (2.0, {"pull": 7}, 1, 80)
    assert (second.seconds, second.samples, second.eps, second.eps_per_trainer) == (6.0, 24, 4.0, (0.0, 4.0))
    assert (second.sync_gap, second.sync_count, second.replica_distance) == (2.0, 3, 0.1)
    assert second.loss == pytest.approx(evaluate_scores(LOGITS, LABELS).logloss)
    assert second.auc == 1.0


def test_a_frame_holds_what_it_is_told_and_a_line_leaves_out_what_there_is_not() -> None:
    told: dict[str, Any] = {
        "checkpointing": True,
        "failures": 2,
        "roles": {"trainer-0": "dead"},
        "queue_depth": {"embedding-0": 3},
        "emulated_step_ms": 20.0,
        "pls": 0.0,
        "target_pls": 0.1,
        "recovery_seconds": {"save": 1.5},
        "emulated_job_s": 7200.0,
        "step_seconds": {"0.1": 0.5},
        "held_bytes": 7,
    }
    steps = AggregationState(global_steps=9, dropped=2, staleness=((0, 1), (2, 3)), mode="gba")
    frame = frame_of(Timed(), steps, WireTotals(raw_bytes={"pull": 9}), **told)
    assert {name: getattr(frame, name) for name in told} == told
    assert (frame.wire_raw_bytes, frame.staleness) == ({"pull": 9}, 1.5)
    assert (frame.global_steps, frame.dropped, frame.aggregation_mode) == (9, 2, "gba")
    line = msgspec.json.encode(frame)
    assert json.loads(line)["pls"] == 0.0
    assert msgspec.json.decode(line, type=Frame) == frame
    absent = {"roles", "failures", "queue_depth", "staleness", "global_steps", "step_seconds"}
    absent |= {"pls", "target_pls", "recovery_seconds", "emulated_job_s"}
    assert not absent & set(json.loads(msgspec.json.encode(frame_of(Timed()))))


def test_the_last_frame_ends_with_the_last_step() -> None:
    recorder = Timed()
    recorder.steps(0, 0)
    frame_of(recorder)  # at 2 s
    recorder.steps(0, 0)  # at 2 and 3 s
    recorder.now += 50.0
    frame = frame_of(recorder, ended=True)
    assert (frame.seconds, frame.eps) == (3.0, 8.0)
    again = frame_of(recorder, ended=True)
    assert (again.seconds, again.eps, again.samples) == (3.0, 0.0, 16)


@pytest.mark.parametrize("counts", [[0], [5, 1]])
def test_there_is_no_gap_without_a_new_synchronisation_nor_where_the_count_starts_anew(counts: list[int]) -> None:
    recorder, gap = Timed(), None
    for count in counts:
        recorder.steps(0)
        gap = frame_of(recorder, sync_count=count).sync_gap
    assert gap is None
    assert (average_sync_gap(90, 9), average_sync_gap(90, 0)) == (10.0, None)


def test_speed_leaves_out_start_up_and_the_step_that_starts_the_clock() -> None:
    recorder = Timed(2, now=5_000.0)
    recorder.steps(0, 1, 0, 1, 0)
    recorder.now += 1_000.0
    speed = recorder.speed()
    assert (speed.samples, speed.iterations, speed.seconds) == (20, 5, 4.0)
    assert (speed.eps, speed.eps_per_trainer) == (4.0, (2.0, 2.0))
    assert list(recorder.iterations()) == [3, 2]


def test_speed_of_a_single_step_is_not_infinite() -> None:
    recorder = Timed()
    recorder.steps(0)
    assert (recorder.speed().eps, recorder.speed().samples) == (0.0, 4)


def test_every_step_of_many_threads_is_counted() -> None:
    recorder = Recorder(3, 1_000)
    logits, labels = torch.zeros(5, dtype=torch.bfloat16), torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])

    def work(trainer: int) -> None:
        for _ in range(400):
            recorder.record(trainer, logits, labels)

    with recorder:
        workers = [threading.Thread(target=work, args=(i % 3,)) for i in range(6)]
        for worker in workers:
            worker.start()
        frames = [frame_of(recorder) for _ in range(5)]
        for worker in workers:
            worker.join()
    assert recorder.samples == 6 * 400 * 5
    assert list(recorder.iterations()) == [800, 800, 800]
    assert recorder.quality.lifetime.count == 12_000
    assert recorder.quality.lifetime.calibration == pytest.approx(0.5 / 0.4)
    assert [frame.samples for frame in frames] == sorted(frame.samples for frame in frames)


def test_the_thread_drains_while_entered() -> None:
    recorder = Recorder(1, 10)
    drained = threading.Event()
    update = recorder.quality.update

    def watched(logits: torch.Tensor, labels: torch.Tensor) -> None:
        update(logits, labels)
        drained.set()

    recorder.quality.update = watched
    with recorder:
        recorder.record(0, LOGITS, LABELS)
        assert drained.wait(timeout=120)


def test_a_full_backlog_counts_without_measuring() -> None:
    recorder = Recorder(1, 10, backlog_samples=8)
    for _ in range(5):
        recorder.record(0, LOGITS, LABELS)
    assert recorder.samples == 20
    assert recorder.quality.lifetime.count == 8
    recorder.record(0, LOGITS, LABELS)
    assert recorder.quality.lifetime.count == 12


def test_record_keeps_no_graph() -> None:
    recorder = Recorder(1, 10)
    logits = torch.zeros(2, requires_grad=True) * 2
    recorder.record(0, logits, torch.tensor([0.0, 1.0]))
    assert recorder.quality.lifetime.logloss == pytest.approx(0.6931, abs=1e-4)


def test_a_resumed_job_goes_on_where_it_was() -> None:
    first = Timed(2)
    first.steps(0, 1, 0)
    frame_of(first, sync_count=2)
    first.steps(0)  # trained after the last frame, before the checkpoint
    second = Timed(3, now=9_000.0)
    second.restore(through_json(first.state()))
    assert frame_of(second, sync_count=2).samples == 16
    second.steps(2, 2, 2)
    frame = frame_of(second, sync_count=4)
    assert (frame.seconds, frame.samples, frame.eps_per_trainer) == (6.0, 28, (0.0, 0.0, 4.0))
    assert frame.sync_gap == 1.5
    speed = second.speed()
    assert (speed.samples, speed.iterations, speed.seconds) == (28, 7, 5.0)
    assert speed.eps == (12 + 8) / 5.0  # the first step of each start only starts the clock
    assert second.quality.lifetime.count == 28


@pytest.mark.parametrize(
    "change",
    [
        {"total": None},
        {"total": {"samples": []}},
        {"mark": {"sync_count": None}},
        {"quality": 7},
        {"quality": {"lifetime": ["a", 0, 0, 0], "window": [0, 0, 0], "histogram": ""}},
        {"quality": {"lifetime": [0, 0, 0, 0], "window": [0, 0, {}], "histogram": ""}},
        {"quality": {"lifetime": [0, 0, 0, 0], "window": [0, 0, 0], "histogram": "AAAA"}},
    ],
)
def test_a_state_that_no_recorder_gives_is_refused(change: dict[str, object]) -> None:
    state = Recorder(1, 10).state()
    with pytest.raises((LookupError, TypeError, ValueError, msgspec.ValidationError)):
        Recorder(1, 10).restore(state | change)


def test_the_share_that_crosses_is_that_of_the_interval() -> None:
    recorder = Timed()
    for elements, kept, share in ((100, 5, 0.05), (100, 5, None), (300, 25, 0.1)):
        wire = WireTotals(elements={"push": elements}, kept={"push": kept}, refreshes={"push": 2})
        frame = frame_of(recorder, wire=wire)
        assert frame.wire_kept_share == ({} if share is None else {"push": share})
        assert frame.wire_refreshes == {"push": 2}


def late(*counts: int) -> AggregationState:
    """So many gradients were applied 0, 1, 2 … steps late."""
    return AggregationState(mode="gba", staleness=tuple(enumerate(counts)))


def test_staleness_is_that_of_the_interval_also_after_a_resume() -> None:
    recorder = Timed()
    assert frame_of(recorder, late(0, 4)).staleness == 1.0
    resumed = Timed()
    resumed.restore(recorder.state())
    for one in (recorder, resumed):
        assert frame_of(one, late(0, 4, 0, 2)).staleness == 3.0
        assert frame_of(one, late(0, 4, 0, 2)).staleness is None


def test_a_state_of_before_staleness_was_counted_is_restored() -> None:
    state = Timed().state()
    del state["mark"]["applied"], state["mark"]["staleness_sum"]
    recorder = Timed()
    recorder.restore(state)
    assert frame_of(recorder, late(0, 4)).staleness == 1.0


def test_a_job_that_went_back_has_no_staleness_until_the_next_interval() -> None:
    recorder = Timed()
    state = recorder.state()
    frame_of(recorder, late(0, 4, 0, 2))
    recorder.rewind(state)
    assert frame_of(recorder, late(0, 4)).staleness is None
    assert frame_of(recorder, late(0, 4, 1)).staleness == 2.0


def test_a_trainer_may_join_in_mid_run() -> None:
    recorder = Timed()
    recorder.steps(0, 0)
    assert frame_of(recorder).eps_per_trainer == (4.0,)
    recorder.steps(2, 2)
    assert frame_of(recorder).eps_per_trainer == (0.0, 0.0, 4.0)
    assert recorder.iterations() == [2, 0, 2]
    assert recorder.speed().eps_per_trainer == (4.0, 0.0, 4.0)


def test_going_back_gives_back_samples_and_quality_but_no_time() -> None:
    recorder = Timed(2)
    recorder.steps(0, 1, 0)
    state = through_json(recorder.state())
    recorder.steps(0, 1, 1)
    lost = frame_of(recorder, sync_count=3)
    assert (lost.seconds, lost.samples) == (6.0, 24)
    recorder.steps(0)  # trained after the last frame, and lost too
    recorder.rewind(state)
    recorder.steps(0, 1)
    frame = frame_of(recorder, sync_count=4)
    assert (frame.seconds, frame.samples) == (9.0, 20)
    assert frame.eps == pytest.approx(8 / 3)
    assert frame.sync_gap == 2.0
    assert frame.loss == pytest.approx(evaluate_scores(LOGITS, LABELS).logloss)
    assert recorder.quality.lifetime.count == 20
    speed = recorder.speed()
    assert (speed.samples, speed.iterations, speed.seconds) == (20, 5, 8.0)
    assert speed.eps == (20 - 4) / 8.0
    resumed = Timed(2)
    resumed.restore(through_json(recorder.state()))
    assert (resumed.samples, resumed.quality.lifetime.count) == (20, 20)
