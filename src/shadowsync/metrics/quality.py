"""Quality of predictions: log loss, normalized entropy (NE), calibration and AUC, streaming and exact.

`B` samples.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from shadowsync.metrics.histogram import LogitHistogram
from shadowsync.metrics.scores import (
    CurvePoint,
    area_under_roc,
    calibration_curve,
    group_exactly,
    normalized_entropy,
)

_CHUNK_SAMPLES = 4096
_STRETCH_SAMPLES = 10_000
EXTREME_NATS = 1000.0
"""A log loss that no prediction has from which something can be learnt: an untrained model has 0.7."""


class Peak(msgspec.Struct, frozen=True):
    """The worst stretch of a training: steps that are too long show there, however well it ends.

    Attributes:
        ne: of the predictions made in it before training on them; None if it holds one label only.
        logloss: their mean log loss in nats.
        samples: its length.
        end: samples trained when it ended.
    """

    ne: float | None
    logloss: float
    samples: int
    end: int


@dataclass(frozen=True)
class TestMetrics:
    """Quality on a fixed set of samples.

    Attributes:
        samples: in the set.
        auc: area under the ROC curve, exact; None unless both labels are there.
        ne: mean log loss over the entropy of the mean label; None as above.
        logloss: mean log loss in nats; None without samples.
        calibration: mean prediction over mean label; None without a positive label.
        curve: bins of equal count, ascending.
        only_label: the label that all samples have; None if there are both, or no samples.
    """

    __test__ = False  # pytest would take the class for a test

    samples: int
    auc: float | None
    ne: float | None
    logloss: float | None
    calibration: float | None
    curve: tuple[CurvePoint, ...]
    only_label: int | None = None


def evaluate_scores(logits: Tensor, labels: Tensor, bins: int = 20) -> TestMetrics:
    """Exact quality of `logits [B]` against `labels [B]` (0 or 1), with a calibration curve of at most `bins` bins.

    The AUC is torchmetrics' `binary_auroc` without thresholds (the tests compare them), computed here because that
    import costs 0.8 s and needs sigmoids, which tie logits above 17 in float32.
    """
    logits, labels = logits.detach().double().cpu(), labels.detach().double().cpu()
    sums = _Sums()
    sums.add(logits, labels)
    groups = group_exactly(logits, labels)
    return TestMetrics(
        samples=sums.count,
        auc=area_under_roc(groups),
        ne=sums.ne,
        logloss=sums.logloss,
        calibration=sums.calibration,
        curve=calibration_curve(groups, bins),
        only_label=sums.only_label,
    )


class Quality:
    """Streaming quality of predictions made before each sample was trained on; used off the hot path.

    Every measure is None until it is defined: the log loss needs a sample, the calibration a positive label, NE and
    AUC both labels. Not thread-safe: `Recorder` guards it.
    """

    def __init__(self, window: int) -> None:
        """`window`: samples over which the window's NE is taken; costs 12 bytes each."""
        self._lifetime = _Sums()
        self._window = _Window(window)
        self._stretches = _Stretches()
        self._histogram = LogitHistogram()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Takes `logits [B]` (any float type) and `labels [B]` (0 or 1)."""
        logits, labels = logits.detach().to("cpu", torch.float32), labels.detach().to("cpu", torch.float32)
        loss = self._lifetime.add(logits, labels)
        self._window.add(loss, labels)
        self._stretches.add(loss, labels)
        self._histogram.add(logits, labels)

    @property
    def samples(self) -> int:
        """Samples seen so far."""
        return self._lifetime.count

    @property
    def only_label(self) -> int | None:
        """The label that all samples so far have; None if there are both, or no samples."""
        return self._lifetime.only_label

    @property
    def loss_sum(self) -> float:
        """Sum of the log loss of all samples so far, in nats."""
        return self._lifetime.loss

    @property
    def logloss(self) -> float | None:
        """Mean log loss of all samples so far, in nats."""
        return self._lifetime.logloss

    @property
    def ne_lifetime(self) -> float | None:
        """Normalized entropy over all samples so far."""
        return self._lifetime.ne

    @property
    def ne_window(self) -> float | None:
        """Normalized entropy over the last `window` samples."""
        return normalized_entropy(*self._window.sums())

    def window_loss(self) -> tuple[float, int, int]:
        """Mean log loss of the last `window` samples, how many of them have more than `EXTREME_NATS`, and of how many
        samples that is."""
        loss, _, count = self._window.sums()
        return loss / count if count else 0.0, self._window.extremes(), count

    @property
    def peak(self) -> Peak | None:
        """The 10,000 samples in a row (counted from the first) of the highest log loss; None before there are any."""
        return self._stretches.worst

    @property
    def calibration(self) -> float | None:
        """Mean prediction over mean label of all samples so far: 1 is right, above 1 predicts too many."""
        return self._lifetime.calibration

    @property
    def auc(self) -> float | None:
        """AUC of all samples so far, within `LogitHistogram.auc_error` of the exact one."""
        return area_under_roc(self._histogram.groups())

    def curve(self, bins: int = 20) -> tuple[CurvePoint, ...]:
        """The calibration curve of all samples so far."""
        return calibration_curve(self._histogram.groups(), bins)

    def state(self) -> dict[str, Any]:
        """Plain JSON values from which `restore` goes on."""
        return {
            "lifetime": self._lifetime.state(),
            "window": self._window.state(),
            "stretches": self._stretches.state(),
            "histogram": self._histogram.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`: sums are exact, the samples of the window are all taken to be its mean."""
        self._lifetime = _Sums(*msgspec.convert(state["lifetime"], tuple[int, float, float, float]))
        self._window.restore(msgspec.convert(state["window"], tuple[float, float, float]))
        # checkpoints of before the stretches were kept hold none: the worst one is then looked for from here on
        self._stretches = msgspec.convert(state.get("stretches", {"end": self._lifetime.count}), _Stretches)
        self._histogram.restore(state["histogram"])


@dataclass
class _Sums:
    """Sums over all samples; in Python's float64, so that a billion samples add up."""

    count: int = 0
    loss: float = 0.0
    prediction: float = 0.0
    label: float = 0.0

    def add(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Adds `[B]` samples and returns their log loss `[B]`, computed from the logits so that it stays finite."""
        loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        self.count += len(labels)
        self.loss += float(loss.sum(dtype=torch.float64))
        self.prediction += float(logits.sigmoid().sum(dtype=torch.float64))
        self.label += float(labels.sum(dtype=torch.float64))
        return loss

    @property
    def only_label(self) -> int | None:
        return int(self.label > 0) if self.count and self.label in (0, self.count) else None

    @property
    def logloss(self) -> float | None:
        return self.loss / self.count if self.count else None

    @property
    def ne(self) -> float | None:
        return normalized_entropy(self.loss, self.label, self.count)

    @property
    def calibration(self) -> float | None:
        return self.prediction / self.label if self.label else None

    def state(self) -> list[float]:
        return [self.count, self.loss, self.prediction, self.label]


class _Window:
    """Loss and label of the last `size` samples, and whether the loss is extreme, in chunks `[3, C]`, oldest first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._count = 0
        self._chunks: deque[Tensor] = deque()

    def add(self, loss: Tensor, labels: Tensor) -> None:
        """Takes `[B]` new samples and forgets as many of the oldest as are beyond the window."""
        chunk = torch.stack([loss, labels, (loss > EXTREME_NATS).to(loss.dtype)])[:, -self._size :]
        self._count += chunk.shape[1]
        if self._chunks and self._chunks[-1].shape[1] < _CHUNK_SAMPLES:
            chunk = torch.cat([self._chunks.pop(), chunk], dim=1)
        self._chunks.append(chunk)
        self._trim()

    def _trim(self) -> None:
        while (excess := self._count - self._size) > 0:
            oldest = self._chunks.popleft()
            self._count -= min(excess, oldest.shape[1])
            if excess < oldest.shape[1]:
                self._chunks.appendleft(oldest[:, excess:])

    def sums(self) -> tuple[float, float, int]:
        """Sum of the loss, sum of the labels, samples in the window."""
        total = torch.zeros(2, dtype=torch.float64)
        for chunk in self._chunks:
            total += chunk[:2].sum(dim=1, dtype=torch.float64)
        return float(total[0]), float(total[1]), self._count

    def extremes(self) -> int:
        """Samples with an extreme loss; restored ones, of which only the mean is known, do not count."""
        return int(sum(float(chunk[2].sum()) for chunk in self._chunks))

    def state(self) -> list[float]:
        return list(self.sums())

    def restore(self, state: tuple[float, float, float]) -> None:
        """Fills the window with samples of the saved mean: its NE is kept and fades out as new samples come."""
        loss, label, count = state
        self._chunks.clear()
        self._count = min(int(count), self._size)
        if self._count:
            self._chunks.append(torch.tensor([[loss / count], [label / count], [0.0]]).expand(3, self._count))


@dataclass
class _Stretches:
    """Sums over the stretch under way, which ends after `_STRETCH_SAMPLES`, and the worst that is over."""

    loss: float = 0.0
    label: float = 0.0
    count: int = 0
    end: int = 0
    worst: Peak | None = None

    def add(self, loss: Tensor, labels: Tensor) -> None:
        """Takes `[B]` new samples."""
        while len(labels):
            room = _STRETCH_SAMPLES - self.count
            self.loss += float(loss[:room].sum(dtype=torch.float64))
            self.label += float(labels[:room].sum(dtype=torch.float64))
            self.count += len(labels[:room])
            self.end += len(labels[:room])
            loss, labels = loss[room:], labels[room:]
            if self.count == _STRETCH_SAMPLES:
                self._finish()

    def _finish(self) -> None:
        logloss = self.loss / self.count
        if self.worst is None or logloss > self.worst.logloss:
            ne = normalized_entropy(self.loss, self.label, self.count)
            self.worst = Peak(ne, logloss, self.count, self.end)
        self.loss, self.label, self.count = 0.0, 0.0, 0

    def state(self) -> dict[str, Any]:
        builtins: dict[str, Any] = msgspec.to_builtins(self)
        return builtins
