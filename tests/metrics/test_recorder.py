"""The recorder: counts, rates and frames on a hand-driven clock; threads; resumes."""

import json
import threading

import msgspec
import pytest
import torch

from shadowsync.metrics.frame import Frame
from shadowsync.metrics.quality import evaluate_scores
from shadowsync.metrics.recorder import (
    GlobalSteps,
    JobCounts,
    Recorder,
    RecoveryStats,
    average_sync_gap,
    example_level_parallelism,
    rate,
)

LOGITS = torch.tensor([-2.0, 0.5, 1.0, -1.0])
LABELS = torch.tensor([0.0, 1.0, 1.0, 0.0])


class HandClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def steps(recorder: Recorder, clock: HandClock, trainers: list[int], every_s: float = 1.0) -> None:
    """One step of four samples for each trainer named, the clock moving on after each."""
    for trainer in trainers:
        recorder.record(trainer, LOGITS, LABELS)
        clock.now += every_s


def test_frame_before_the_first_step() -> None:
    frame = Recorder(2, 10, HandClock()).frame(JobCounts(total_samples=80))
    assert (frame.seconds, frame.samples, frame.eps, frame.eps_per_trainer) == (0.0, 0, 0.0, (0.0, 0.0))
    assert (frame.auc, frame.ne_window, frame.loss, frame.sync_gap) == (None, None, None, None)


def test_frames_rates_are_over_the_interval() -> None:
    clock = HandClock()
    recorder = Recorder(2, 10, clock)
    steps(recorder, clock, [0, 1, 0, 0])  # at 100 … 103, now 104
    first = recorder.frame(JobCounts(total_samples=80, sync_count=2, wire={"bytes": {"pull": 7}}, saves=1))
    steps(recorder, clock, [1, 1])
    second = recorder.frame(JobCounts(total_samples=80, sync_count=3, replica_distance=0.1))
    assert (first.seconds, first.samples, first.eps, first.eps_per_trainer) == (4.0, 16, 4.0, (3.0, 1.0))
    assert (first.sync_gap, first.wire_bytes, first.saves, first.total_samples) == (2.0, {"pull": 7}, 1, 80)
    assert (second.seconds, second.samples, second.eps, second.eps_per_trainer) == (6.0, 24, 4.0, (0.0, 4.0))
    assert (second.sync_gap, second.sync_count, second.replica_distance) == (2.0, 3, 0.1)
    assert second.loss == pytest.approx(evaluate_scores(LOGITS, LABELS).logloss)
    assert second.auc == 1.0


def test_a_frame_holds_what_failures_have_cost_and_leaves_out_what_there_is_not() -> None:
    recorder = Recorder(1, 10, HandClock())
    stats = RecoveryStats(pls=0.0, target_pls=0.1, seconds={"save": 1.5}, emulated_job_s=7200.0)
    frame = recorder.frame(JobCounts(total_samples=8, recovery=stats))
    assert (frame.pls, frame.target_pls, frame.recovery_seconds, frame.emulated_job_s) == (
        0.0,
        0.1,
        {"save": 1.5},
        7200.0,
    )
    assert json.loads(msgspec.json.encode(frame))["pls"] == 0.0
    plain = json.loads(msgspec.json.encode(recorder.frame(JobCounts(total_samples=8))))
    assert not {"pls", "target_pls", "recovery_seconds", "emulated_job_s"} & set(plain)


def test_the_last_frame_ends_with_the_last_step() -> None:
    clock = HandClock()
    recorder = Recorder(1, 10, clock)
    steps(recorder, clock, [0, 0])
    recorder.frame(JobCounts(total_samples=16))  # at 2 s
    steps(recorder, clock, [0, 0])  # at 2 and 3 s
    clock.now += 50.0
    frame = recorder.frame(JobCounts(total_samples=16), ended=True)
    assert (frame.seconds, frame.eps) == (3.0, 8.0)
    again = recorder.frame(JobCounts(total_samples=16), ended=True)
    assert (again.seconds, again.eps, again.samples) == (3.0, 0.0, 16)


def test_gap_is_none_without_a_new_synchronisation() -> None:
    clock = HandClock()
    recorder = Recorder(1, 10, clock)
    steps(recorder, clock, [0])
    assert recorder.frame(JobCounts(total_samples=8)).sync_gap is None


def test_speed_leaves_out_start_up_and_the_step_that_starts_the_clock() -> None:
    clock = HandClock()
    clock.now = 5_000.0
    recorder = Recorder(2, 10, clock)
    steps(recorder, clock, [0, 1, 0, 1, 0])  # one step a second
    clock.now += 1_000.0
    speed = recorder.speed()
    assert (speed.samples, speed.iterations, speed.seconds) == (20, 5, 4.0)
    assert speed.eps == 4.0
    assert speed.eps_per_trainer == (2.0, 2.0)
    assert list(recorder.iterations()) == [3, 2]


def test_speed_of_a_single_step_is_not_infinite() -> None:
    clock = HandClock()
    recorder = Recorder(1, 10, clock)
    steps(recorder, clock, [0])
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
        frames = [recorder.frame(JobCounts(total_samples=12_000)) for _ in range(5)]
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
    clock = HandClock()
    first = Recorder(2, 10, clock)
    steps(first, clock, [0, 1, 0])
    first.frame(JobCounts(total_samples=80, sync_count=2))
    steps(first, clock, [0])  # trained after the last frame, before the checkpoint
    state = json.loads(json.dumps(first.state()))

    clock.now = 9_000.0
    second = Recorder(3, 10, clock)
    second.restore(state)
    assert second.frame(JobCounts(total_samples=80, sync_count=2)).samples == 16
    steps(second, clock, [2, 2, 2])
    frame = second.frame(JobCounts(total_samples=80, sync_count=4))
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


def test_a_count_that_starts_anew_gives_no_negative_gap() -> None:
    clock = HandClock()
    recorder = Recorder(1, 10, clock)
    steps(recorder, clock, [0])
    recorder.frame(JobCounts(total_samples=8, sync_count=5))
    steps(recorder, clock, [0])
    assert recorder.frame(JobCounts(total_samples=8, sync_count=1)).sync_gap is None


def test_rates() -> None:
    assert example_level_parallelism(batch_size=512, workers=3, trainers=2) == 3072
    assert average_sync_gap(90, 9) == 10.0
    assert average_sync_gap(90, 0) is None
    assert rate(10, 2.0) == 5.0
    assert rate(10, 0.0) == 0.0


def test_the_share_that_crosses_is_that_of_the_interval() -> None:
    recorder = Recorder(1, 10, HandClock())
    for elements, kept, share in ((100, 5, 0.05), (100, 5, None), (300, 25, 0.1)):
        counts = JobCounts(8, wire={"elements": {"push": elements}, "kept": {"push": kept}, "refreshes": {"push": 2}})
        frame = recorder.frame(counts)
        assert frame.wire_kept_share == ({} if share is None else {"push": share})
        assert frame.wire_refreshes == {"push": 2}


def test_a_frame_says_what_it_is_told_of_the_cluster() -> None:
    counts = JobCounts(
        total_samples=8,
        wire={"raw_bytes": {"pull": 9}},
        checkpointing=True,
        failures=2,
        roles={"trainer-0": "dead"},
        queue_depth={"embedding-0": 3},
        emulated_step_ms=20.0,
        steps=GlobalSteps(
            "gba", count=9, dropped=2, applied=4, staleness_sum=6, step_seconds={"0.1": 0.5}, held_bytes=7
        ),
    )
    frame = Recorder(1, 10, HandClock()).frame(counts)
    assert (frame.wire_raw_bytes, frame.checkpointing, frame.failures) == ({"pull": 9}, True, 2)
    assert (frame.roles, frame.queue_depth) == ({"trainer-0": "dead"}, {"embedding-0": 3})
    assert (frame.staleness, frame.emulated_step_ms) == (1.5, 20.0)
    assert (frame.global_steps, frame.dropped, frame.aggregation_mode) == (9, 2, "gba")
    assert (frame.step_seconds, frame.held_bytes) == ({"0.1": 0.5}, 7)
    assert msgspec.json.decode(msgspec.json.encode(frame), type=Frame) == frame


def test_a_line_of_a_run_in_one_process_is_as_it_was() -> None:
    frame = Recorder(1, 10, HandClock()).frame(JobCounts(total_samples=8))
    written = set(msgspec.json.decode(msgspec.json.encode(frame)))
    assert not {"roles", "failures", "queue_depth", "staleness", "global_steps", "step_seconds"} & written


def stale(applied: int, staleness_sum: int) -> JobCounts:
    return JobCounts(total_samples=8, steps=GlobalSteps("gba", applied, 0, applied, staleness_sum))


def test_staleness_is_that_of_the_interval() -> None:
    recorder = Recorder(1, 10, HandClock())
    assert recorder.frame(stale(4, 4)).staleness == 1.0
    assert recorder.frame(stale(6, 10)).staleness == 3.0
    assert recorder.frame(stale(6, 10)).staleness is None


def test_staleness_goes_on_after_a_resume() -> None:
    recorder = Recorder(1, 10, HandClock())
    recorder.frame(stale(4, 4))
    resumed = Recorder(1, 10, HandClock())
    resumed.restore(recorder.state())
    assert resumed.frame(stale(6, 10)).staleness == 3.0


def test_a_state_of_before_staleness_was_counted_is_restored() -> None:
    state = Recorder(1, 10, HandClock()).state()
    del state["mark"]["applied"], state["mark"]["staleness_sum"]
    recorder = Recorder(1, 10, HandClock())
    recorder.restore(state)
    assert recorder.frame(stale(4, 4)).staleness == 1.0


def test_a_job_that_went_back_has_no_staleness_until_the_next_interval() -> None:
    recorder = Recorder(1, 10, HandClock())
    state = recorder.state()
    recorder.frame(stale(6, 10))
    recorder.rewind(state)
    assert recorder.frame(stale(4, 4)).staleness is None
    assert recorder.frame(stale(5, 6)).staleness == 2.0


def test_a_trainer_may_join_in_mid_run() -> None:
    clock = HandClock()
    recorder = Recorder(1, 10, clock)
    steps(recorder, clock, [0, 0])
    assert recorder.frame(JobCounts(total_samples=80)).eps_per_trainer == (4.0,)
    steps(recorder, clock, [2, 2])
    assert recorder.frame(JobCounts(total_samples=80)).eps_per_trainer == (0.0, 0.0, 4.0)
    assert recorder.iterations() == [2, 0, 2]
    assert recorder.speed().eps_per_trainer == (4.0, 0.0, 4.0)


def test_going_back_gives_back_samples_and_quality_but_no_time() -> None:
    clock = HandClock()
    recorder = Recorder(2, 10, clock)
    steps(recorder, clock, [0, 1, 0])
    state = json.loads(json.dumps(recorder.state()))
    steps(recorder, clock, [0, 1, 1])
    lost = recorder.frame(JobCounts(total_samples=80, sync_count=3))
    assert (lost.seconds, lost.samples) == (6.0, 24)
    steps(recorder, clock, [0])  # trained after the last frame, and lost too
    recorder.rewind(state)
    steps(recorder, clock, [0, 1])
    frame = recorder.frame(JobCounts(total_samples=80, sync_count=4))
    assert (frame.seconds, frame.samples) == (9.0, 20)
    assert frame.eps == pytest.approx(8 / 3)
    assert frame.sync_gap == 2.0
    assert frame.loss == pytest.approx(evaluate_scores(LOGITS, LABELS).logloss)
    assert recorder.quality.lifetime.count == 20
    speed = recorder.speed()
    assert (speed.samples, speed.iterations, speed.seconds) == (20, 5, 8.0)
    assert speed.eps == (20 - 4) / 8.0


def test_a_run_that_went_back_is_saved_and_resumed() -> None:
    clock = HandClock()
    recorder = Recorder(1, 10, clock)
    steps(recorder, clock, [0, 0])
    state = recorder.state()
    steps(recorder, clock, [0, 0])
    recorder.rewind(state)
    steps(recorder, clock, [0])
    resumed = Recorder(1, 10, clock)
    resumed.restore(json.loads(json.dumps(recorder.state())))
    assert resumed.samples == 12
    assert resumed.quality.lifetime.count == 12
