"""Gathers what workers did: counts exactly, measures quality off the hot path, makes the frames of the history.

`B` samples of a worker's batch.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from shadowsync.metrics.frame import Frame
from shadowsync.metrics.quality import Quality
from shadowsync.metrics.roles import RoleState

Clock = Callable[[], float]

_DRAIN_EVERY_S = 0.1
_BACKLOG_SAMPLES = 4_000_000


def example_level_parallelism(batch_size: int, workers: int, trainers: int) -> int:
    """ELP: samples that are in a forward or backward pass at once (ShadowSync, arXiv 2003.03477)."""
    return batch_size * workers * trainers


def average_sync_gap(iterations: int, syncs: int) -> float | None:
    """Iterations per synchronisation, summed over the trainers; None where there was none (ShadowSync)."""
    return iterations / syncs if syncs > 0 else None


def rate(amount: float, seconds: float) -> float:
    """Amount per second; 0 where no time has passed."""
    return amount / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class RecoveryStats:
    """What failures, and being ready for them, have cost a job so far; as in `Frame`.

    Attributes:
        seconds: by kind (`save`, `load`, `lost`, `wait`).
    """

    pls: float | None = None
    target_pls: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    emulated_job_s: float | None = None


@dataclass(frozen=True)
class GlobalSteps:
    """What a gradient method has done so far; counts are cumulative, resumes included.

    Attributes:
        mode: the method at work; another than the configured one where that changes it.
        count: global steps, k.
        dropped: gradients that a step left out.
        applied: gradients that a step took.
        staleness_sum: of the applied ones, in steps.
        step_seconds, held_bytes: as in `Frame`.
    """

    mode: str
    count: int
    dropped: int
    applied: int
    staleness_sum: int
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    held_bytes: int | None = None

    def staleness_since(self, applied: int, staleness_sum: int) -> float | None:
        """Mean of the gradients applied since these counts; None if none was, or if the job went back since."""
        count, steps = self.applied - applied, self.staleness_sum - staleness_sum
        return steps / count if count > 0 and steps >= 0 else None


@dataclass(frozen=True)
class JobCounts:
    """What a frame holds besides the workers' steps, as there; counts are cumulative over the job, resumes included.

    Attributes:
        wire: what crossed, as `WireTotals.by_name`.
        recovery: what failures have cost.
        steps: of a gradient method; None where replicas are merged.
    """

    total_samples: int
    sync_count: int = 0
    wire: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    wire_codecs: Mapping[str, str] = field(default_factory=dict)
    saves: int = 0
    replica_distance: float | None = None
    checkpointing: bool = False
    failures: int = 0
    roles: Mapping[str, RoleState] = field(default_factory=dict)
    queue_depth: Mapping[str, int] = field(default_factory=dict)
    emulated_step_ms: float | None = None
    recovery: RecoveryStats = field(default_factory=RecoveryStats)
    steps: GlobalSteps | None = None


@dataclass(frozen=True)
class Speed:
    """Speed of a job from the first to the last trained batch, start-up left out.

    Attributes:
        samples: trained so far, those before a resume included.
        iterations: steps so far, likewise.
        seconds: from the first to the last batch, without the pause before a resume.
        eps: samples per second over these seconds.
        eps_per_trainer: the same since the last start, each over the trainer's own first to last batch.
    """

    samples: int
    iterations: int
    seconds: float
    eps: float
    eps_per_trainer: tuple[float, ...]


class _Step(NamedTuple):
    trainer: int
    at: float
    samples: int
    logits: Tensor | None
    labels: Tensor | None


@dataclass
class _Tally:
    """Steps of one trainer (or of all) since the last start.

    Steps are seen as they end. So the time of the first step is not in the time from the first to the last, and its
    samples (`lead`) must not be in the rate.
    """

    samples: int = 0
    iterations: int = 0
    lead: int = 0
    first: float | None = None
    last: float = 0.0

    def add(self, step: _Step) -> None:
        if self.first is None:
            self.first, self.lead, self.last = step.at, step.samples, step.at
        self.samples += step.samples
        self.iterations += 1
        self.last = max(self.last, step.at)

    @property
    def seconds(self) -> float:
        return 0.0 if self.first is None else self.last - self.first

    @property
    def timed_samples(self) -> int:
        return self.samples - self.lead


@dataclass(frozen=True)
class _Mark:
    """Where the frame before ended."""

    seconds: float = 0.0
    samples: int = 0
    iterations: int = 0
    sync_count: int = 0
    measured: int = 0
    loss_sum: float = 0.0
    applied: int = 0
    staleness_sum: int = 0
    wire_elements: Mapping[str, int] = field(default_factory=dict)
    wire_kept: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Base:
    """What was done before a resume."""

    samples: int = 0
    iterations: int = 0
    seconds: float = 0.0
    timed_samples: int = 0


class Recorder:
    """Takes every worker's steps and turns them into frames.

    `record` only appends to a queue: it takes no lock and costs about a microsecond. A thread of its own empties the
    queue ten times a second while the recorder is entered (`with recorder:`); `frame`, `speed` and `state` empty it
    too. Should measuring ever fall behind by more than `backlog_samples`, further steps are counted but not measured,
    so that neither memory grows nor a worker waits.
    """

    def __init__(
        self, trainers: int, window: int, clock: Clock = time.monotonic, backlog_samples: int = _BACKLOG_SAMPLES
    ) -> None:
        """`trainers` that start; more may join. `window`: samples over which the window's NE is taken.

        `clock`: seconds, from any origin.
        """
        self._clock = clock
        self._backlog_samples = backlog_samples
        self._queue: deque[_Step] = deque()
        self._lock = threading.Lock()
        self._quality = Quality(window)
        self._all = _Tally()
        self._each = [_Tally() for _ in range(trainers)]
        self._base = _Base()
        self._mark = _Mark()
        self._marked_samples = [0] * trainers
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def record(self, trainer: int, logits: Tensor, labels: Tensor, age_s: float = 0.0) -> None:
        """Notes that a worker of `trainer` has trained a batch of which it had predicted `logits [B]`, `age_s` ago.

        Called by workers after each step. The tensors are read later, so they must not be written to afterwards;
        logits of any float type and device do.
        """
        count = labels.shape[0]
        if len(self._queue) * count < self._backlog_samples:
            self._queue.append(_Step(trainer, self._clock() - age_s, count, logits.detach(), labels))
        else:
            self.count(trainer, count, age_s)

    def count(self, trainer: int, samples: int, age_s: float = 0.0) -> None:
        """Notes that a batch was trained of which nothing else is known."""
        self._queue.append(_Step(trainer, self._clock() - age_s, samples, None, None))

    def __enter__(self) -> "Recorder":
        def drain_until_stopped() -> None:
            while not self._stop.wait(_DRAIN_EVERY_S):
                self.drain()

        self._stop.clear()
        self._thread = threading.Thread(target=drain_until_stopped, name="recorder", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.drain()

    def drain(self) -> None:
        """Takes the steps queued so far into the counts and the quality."""
        with self._lock:
            self._drain()

    def _drain(self) -> None:
        steps = [self._queue.popleft() for _ in range(len(self._queue))]
        for step in steps:
            self._all.add(step)
            self._tally(step.trainer).add(step)
        logits = [step.logits for step in steps if step.logits is not None]
        labels = [step.labels for step in steps if step.labels is not None]
        if logits:
            self._quality.update(torch.cat(logits), torch.cat(labels))

    def _tally(self, trainer: int) -> _Tally:
        """The trainer's tally; one that joined later gets its own with its first step."""
        while len(self._each) <= trainer:
            self._each.append(_Tally())
            self._marked_samples.append(0)
        return self._each[trainer]

    @property
    def samples(self) -> int:
        """Samples trained so far, those before a resume included."""
        self.drain()
        return self._base.samples + self._all.samples

    def window_loss(self) -> tuple[float, int, int]:
        """As `Quality.window_loss`."""
        with self._lock:
            return self._quality.window_loss()

    def only_label(self) -> tuple[int | None, int]:
        """The label that all samples so far have (None if there are both), and how many samples that is."""
        with self._lock:
            return self._quality.lifetime.only_label, self._quality.lifetime.count

    def frame(self, counts: JobCounts, *, ended: bool = False) -> Frame:
        """The state of the job now; its rates are over the time since the frame before.

        `ended`: no worker trains any more, so the frame ends with the last step; what came after it (a checkpoint,
        the test set) is not taken for slow training.
        """
        with self._lock:
            self._drain()
            mark = self._marked(counts, self._all.last if ended else self._clock())
            frame = self._frame(counts, mark)
            self._mark = mark
            self._marked_samples = [tally.samples for tally in self._each]
        return frame

    def _marked(self, counts: JobCounts, at: float) -> _Mark:
        steps, wire = counts.steps, counts.wire
        return dataclasses.replace(
            self._counted(at),
            sync_count=counts.sync_count,
            applied=0 if steps is None else steps.applied,
            staleness_sum=0 if steps is None else steps.staleness_sum,
            wire_elements=dict(wire.get("elements", {})),
            wire_kept=dict(wire.get("kept", {})),
        )

    def _counted(self, at: float) -> _Mark:
        """With the counts of the mark before of what the recorder does not know by itself."""
        # from the first batch, without the pause before a resume; never less than in the frame before
        since = 0.0 if self._all.first is None else max(at, self._all.last) - self._all.first
        return dataclasses.replace(
            self._mark,
            seconds=max(self._base.seconds + since, self._mark.seconds),
            samples=self._base.samples + self._all.samples,
            iterations=self._base.iterations + self._all.iterations,
            measured=self._quality.lifetime.count,
            loss_sum=self._quality.lifetime.loss,
        )

    def _frame(self, counts: JobCounts, now: _Mark) -> Frame:
        before, quality, steps, recovery = self._mark, self._quality, counts.steps, counts.recovery
        passed, measured = now.seconds - before.seconds, now.measured - before.measured
        done = [tally.samples - marked for tally, marked in zip(self._each, self._marked_samples, strict=True)]
        crossed = {kind: count - before.wire_elements.get(kind, 0) for kind, count in now.wire_elements.items()}
        kept = {kind: count - before.wire_kept.get(kind, 0) for kind, count in now.wire_kept.items()}
        return Frame(
            seconds=now.seconds,
            samples=now.samples,
            total_samples=counts.total_samples,
            eps=rate(now.samples - before.samples, passed),
            eps_per_trainer=tuple(rate(samples, passed) for samples in done),
            auc=quality.auc,
            ne_window=quality.ne_window,
            ne_lifetime=quality.lifetime.ne,
            loss=(now.loss_sum - before.loss_sum) / measured if measured else None,
            sync_count=counts.sync_count,
            sync_gap=average_sync_gap(now.iterations - before.iterations, now.sync_count - before.sync_count),
            replica_distance=counts.replica_distance,
            wire_bytes=dict(counts.wire.get("bytes", {})),
            saves=counts.saves,
            wire_raw_bytes=dict(counts.wire.get("raw_bytes", {})),
            wire_codecs=dict(counts.wire_codecs),
            wire_kept_share={kind: kept[kind] / count for kind, count in crossed.items() if count > 0},
            wire_refreshes=dict(counts.wire.get("refreshes", {})),
            checkpointing=counts.checkpointing,
            failures=counts.failures,
            roles=dict(counts.roles),
            queue_depth=dict(counts.queue_depth),
            staleness=None if steps is None else steps.staleness_since(before.applied, before.staleness_sum),
            emulated_step_ms=counts.emulated_step_ms,
            pls=recovery.pls,
            target_pls=recovery.target_pls,
            recovery_seconds=dict(recovery.seconds),
            emulated_job_s=recovery.emulated_job_s,
            global_steps=None if steps is None else steps.count,
            dropped=None if steps is None else steps.dropped,
            aggregation_mode=None if steps is None else steps.mode,
            step_seconds={} if steps is None else dict(steps.step_seconds),
            held_bytes=None if steps is None else steps.held_bytes,
        )

    def speed(self) -> Speed:
        """Speed from the first to the last batch so far."""
        with self._lock:
            self._drain()
            total = self._totals()
        return Speed(
            samples=total.samples,
            iterations=total.iterations,
            seconds=total.seconds,
            eps=rate(total.timed_samples, total.seconds),
            eps_per_trainer=tuple(rate(tally.timed_samples, tally.seconds) for tally in self._each),
        )

    def iterations(self) -> Sequence[int]:
        """Steps of each trainer since the last start."""
        self.drain()
        return [tally.iterations for tally in self._each]

    def _totals(self) -> _Base:
        base, tally = self._base, self._all
        return _Base(
            samples=base.samples + tally.samples,
            iterations=base.iterations + tally.iterations,
            seconds=base.seconds + tally.seconds,
            timed_samples=base.timed_samples + tally.timed_samples,
        )

    @property
    def quality(self) -> Quality:
        """Quality so far; to be read when no worker records any more."""
        self.drain()
        return self._quality

    def state(self) -> dict[str, Any]:
        """Plain JSON values from which `restore` goes on, taken while no worker records."""
        with self._lock:
            self._drain()
            return {
                "total": vars(self._totals()).copy(),
                "mark": vars(self._mark).copy(),
                "quality": self._quality.state(),
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, whatever the number of trainers was; to be called before the first step.

        Raises:
            LookupError, TypeError, ValueError, msgspec.ValidationError: it is not what `state` gives.
        """
        self._base = msgspec.convert(state["total"], _Base)
        self._mark = msgspec.convert(state["mark"], _Mark)
        self._quality.restore(state["quality"])

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Goes back to `state` in the middle of a run, in which everybody went back to a checkpoint.

        Samples, iterations and quality are those of the state again. Time is not given back: what the steps that are
        lost took stays in `Frame.seconds` and in `Speed`. To be called while no worker records.

        Raises:
            LookupError, TypeError, ValueError, msgspec.ValidationError: it is not what `state` gives.
        """
        total = msgspec.convert(state["total"], _Base)
        with self._lock:
            self._drain()
            done, seconds = self._all, self._mark.seconds
            self._base = _Base(
                samples=total.samples - done.samples,
                iterations=total.iterations - done.iterations,
                seconds=self._base.seconds,
                timed_samples=total.timed_samples - done.timed_samples,
            )
            self._quality.restore(state["quality"])
            self._mark = dataclasses.replace(self._counted(self._clock()), seconds=seconds)
