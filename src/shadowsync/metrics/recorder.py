"""Gathers what workers did: counts exactly, measures quality off the hot path, makes the frames of the history.

`B` samples of a worker's batch.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from shadowsync.aggregation.counts import AggregationState
from shadowsync.compression.wire import WireTotals
from shadowsync.metrics.history import Frame, JobCounts
from shadowsync.metrics.quality import Quality

_DRAIN_EVERY_S = 0.1
_BACKLOG_SAMPLES = 4_000_000


def average_sync_gap(iterations: int, syncs: int) -> float | None:
    """Iterations per synchronisation, summed over the trainers; None where there was none (ShadowSync)."""
    return iterations / syncs if syncs > 0 else None


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _since(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {kind: count - before.get(kind, 0) for kind, count in now.items()}


@dataclass(frozen=True)
class Speed:
    """Speed of a job from the first to the last trained batch, start-up and pauses before resumes left out.

    `samples` and `iterations` are those so far, before a resume too; `eps_per_trainer` since the last start, each over
    the trainer's own first to last batch.
    """

    samples: int
    iterations: int
    seconds: float
    eps: float
    eps_per_trainer: tuple[float, ...]


class _TrainedBatch(NamedTuple):
    trainer: int
    at: float
    samples: int
    logits: Tensor | None
    labels: Tensor | None


@dataclass
class _Tally:
    """Steps of one trainer since the last start, or of all, those before a resume included.

    Steps are seen as they end. So the time of the first step after a start is not in the `seconds` from the first to
    the last, and its samples must not be in the rate: `timed_samples` are those of the others.
    """

    samples: int = 0
    iterations: int = 0
    seconds: float = 0.0
    timed_samples: int = 0
    last: float | None = None  # when the newest step ended; None before the first one since the start

    def add(self, step: _TrainedBatch) -> None:
        if self.last is None:
            self.last = step.at
        else:
            self.timed_samples += step.samples
        self.samples += step.samples
        self.iterations += 1
        self.seconds += max(0.0, step.at - self.last)
        self.last = max(self.last, step.at)


@dataclass(frozen=True)
class _LastFrame:
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


class Recorder:
    """Takes every worker's steps and turns them into frames.

    `record` only appends to a queue: it takes no lock and costs about a microsecond. A thread of its own empties the
    queue ten times a second while the recorder is entered (`with recorder:`); `frame`, `speed` and `state` empty it
    too. Should measuring ever fall behind by more than `backlog_samples`, further steps are counted but not measured,
    so that neither memory grows nor a worker waits.
    """

    def __init__(
        self,
        trainers: int,
        window: int,
        clock: Callable[[], float] = time.monotonic,
        backlog_samples: int = _BACKLOG_SAMPLES,
        kind: str = "logloss",
    ) -> None:
        """`trainers` that start; more may join. `window` and `kind` are as of `Quality`."""
        self._clock = clock
        self._backlog_samples = backlog_samples
        self._queue: deque[_TrainedBatch] = deque()
        self._lock = threading.Lock()
        self._quality = Quality(window, kind)
        self._all = _Tally()
        self._each = [_Tally() for _ in range(trainers)]
        self._mark = _LastFrame()
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
            self._queue.append(_TrainedBatch(trainer, self._clock() - age_s, count, logits.detach(), labels))
        else:
            self.count(trainer, count, age_s)

    def count(self, trainer: int, samples: int, age_s: float = 0.0) -> None:
        """Notes that a batch was trained of which nothing else is known."""
        self._queue.append(_TrainedBatch(trainer, self._clock() - age_s, samples, None, None))

    def __enter__(self) -> "Recorder":
        def drain_until_stopped() -> None:
            while not self._stop.wait(_DRAIN_EVERY_S):
                self.drain()

        self._stop.clear()
        self._thread = threading.Thread(target=drain_until_stopped, name="recorder", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
            while len(self._each) <= step.trainer:  # one that joined later
                self._each.append(_Tally())
                self._marked_samples.append(0)
            self._each[step.trainer].add(step)
        logits = [step.logits for step in steps if step.logits is not None]
        labels = [step.labels for step in steps if step.labels is not None]
        if logits:
            self._quality.update(torch.cat(logits), torch.cat(labels))

    @property
    def samples(self) -> int:
        """Samples trained so far, those before a resume included."""
        self.drain()
        return self._all.samples

    def window_loss(self) -> tuple[float, int, int]:
        """As `Quality.window_loss`."""
        with self._lock:
            return self._quality.window_loss()

    def only_label(self) -> tuple[int | None, int]:
        """The label that all samples so far have (None if there are both), and how many samples that is."""
        with self._lock:
            return self._quality.only_label, self._quality.lifetime.count

    def frame(
        self, told: JobCounts, wire: WireTotals, steps: AggregationState | None = None, *, ended: bool = False
    ) -> Frame:
        """The state of the job now; its rates are over the time since the frame before.

        `steps` are those of a gradient method, None where replicas are merged. When it has `ended`, no worker trains
        any more and the frame ends with the last step: what came after it (a checkpoint, the test set) is not taken
        for slow training.
        """
        with self._lock:
            self._drain()
            before, quality = self._mark, self._quality
            now = dataclasses.replace(
                self._counted(None if ended else self._clock()),
                sync_count=told.sync_count,
                applied=0 if steps is None else steps.applied,
                staleness_sum=0 if steps is None else steps.staleness_sum,
                wire_elements=dict(wire.elements),
                wire_kept=dict(wire.kept),
            )
            passed, measured = now.seconds - before.seconds, now.measured - before.measured
            done = [tally.samples - marked for tally, marked in zip(self._each, self._marked_samples, strict=True)]
            applied, steps_late = now.applied - before.applied, now.staleness_sum - before.staleness_sum
            elements, kept = _since(now.wire_elements, before.wire_elements), _since(now.wire_kept, before.wire_kept)
            self._mark = now
            self._marked_samples = [tally.samples for tally in self._each]
            return Frame(
                **msgspec.structs.asdict(told),
                seconds=now.seconds,
                samples=now.samples,
                eps=_rate(now.samples - before.samples, passed),
                eps_per_trainer=tuple(_rate(samples, passed) for samples in done),
                auc=quality.auc,
                ne_window=quality.ne_window,
                ne_lifetime=quality.ne_lifetime,
                loss=(now.loss_sum - before.loss_sum) / measured if measured else None,
                sync_gap=average_sync_gap(now.iterations - before.iterations, now.sync_count - before.sync_count),
                wire_bytes=dict(wire.bytes),
                wire_raw_bytes=dict(wire.raw_bytes),
                wire_kept_share=WireTotals(elements=elements, kept=kept).kept_shares,
                wire_refreshes=dict(wire.refreshes),
                global_steps=None if steps is None else steps.global_steps,
                dropped=None if steps is None else steps.dropped,
                aggregation_mode=None if steps is None else steps.mode,
                # none was applied, or the job went back since
                staleness=steps_late / applied if applied > 0 and steps_late >= 0 else None,
            )

    def _counted(self, now: float | None) -> _LastFrame:
        """The mark before with what the recorder knows by itself counted up to now; None: up to the last step."""
        since = 0.0 if now is None or self._all.last is None else max(0.0, now - self._all.last)
        return dataclasses.replace(
            self._mark,
            seconds=max(self._all.seconds + since, self._mark.seconds),  # never less than in the frame before
            samples=self._all.samples,
            iterations=self._all.iterations,
            measured=self._quality.lifetime.count,
            loss_sum=self._quality.lifetime.loss,
        )

    def speed(self) -> Speed:
        """Speed from the first to the last batch so far."""
        with self._lock:
            self._drain()
            total, each = self._all, tuple(_rate(tally.timed_samples, tally.seconds) for tally in self._each)
            eps = _rate(total.timed_samples, total.seconds)
            return Speed(total.samples, total.iterations, total.seconds, eps, each)

    def iterations(self) -> Sequence[int]:
        """Steps of each trainer since the last start."""
        self.drain()
        return [tally.iterations for tally in self._each]

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
                "total": {name: value for name, value in vars(self._all).items() if name != "last"},
                "mark": vars(self._mark).copy(),
                "quality": self._quality.state(),
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, whatever the number of trainers was; to be called before the first step.

        Raises:
            LookupError, TypeError, ValueError, msgspec.ValidationError: it is not what `state` gives.
        """
        self._all = msgspec.convert(state["total"], _Tally)
        self._mark = msgspec.convert(state["mark"], _LastFrame)
        self._quality.restore(state["quality"])

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Goes back to `state` in the middle of a run, in which everybody went back to a checkpoint.

        Samples, iterations and quality are those of the state again. Time is not given back: what the steps that are
        lost took stays in `Frame.seconds` and in `Speed`. To be called while no worker records; raises as `restore`.
        """
        total = msgspec.convert(state["total"], _Tally)
        with self._lock:
            self._drain()
            seconds = self._mark.seconds
            self._all = dataclasses.replace(total, seconds=self._all.seconds, last=self._all.last)
            self._quality.restore(state["quality"])
            self._mark = dataclasses.replace(self._counted(self._clock()), seconds=seconds)
