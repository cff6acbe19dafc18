"""Quality of predictions: log loss, normalized entropy (NE), calibration and AUC, streaming and exact.

Exact measures make one group per distinct logit, streaming ones a group per bin of a histogram; both then use the same
formulas. `B` samples, `K` groups of samples that share a logit, in ascending order of it.
"""

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from shadowsync.data.labels import FAMILIES, ONE_CLICK, Family, Task

_STRETCH_SAMPLES = 10_000
EXTREME_NATS = 1000.0
"""A log loss that no prediction has from which something can be learnt: an untrained model has 0.7."""
_MANTISSA_BITS = 12
_DROPPED_BITS = 23 - _MANTISSA_BITS
_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -12, 6
_FIRST_KEY = (127 + _LOWEST_EXPONENT) << _MANTISSA_BITS
_BINS_PER_SIGN = (_HIGHEST_EXPONENT - _LOWEST_EXPONENT) << _MANTISSA_BITS
BINS = 2 * _BINS_PER_SIGN + 1


class CurvePoint(msgspec.Struct, frozen=True):
    """One bin of a calibration curve: means of its predictions and labels, and how many samples it has."""

    prediction: float
    label: float
    count: int


class LogitGroups(NamedTuple):
    """Samples grouped by their logit, ascending: it, and the weight of labels 1 and of labels 0, float64 `[K]` each."""

    logit: Tensor
    positives: Tensor
    negatives: Tensor


class Scored(NamedTuple):
    """Logits and labels of rows, `[B]` or `[B, T]`, and the rows' weights, `[B]`, or None for ones."""

    logits: Tensor
    labels: Tensor
    weights: Tensor | None = None

    @staticmethod
    def join(parts: Sequence["Scored"]) -> "Scored":
        """All rows, one part after the other; there may be none."""
        if not parts:
            return Scored(torch.empty(0), torch.empty(0))
        logits, labels = torch.cat([part.logits for part in parts]), torch.cat([part.labels for part in parts])
        weights = [part.weights for part in parts if part.weights is not None]
        return Scored(logits, labels, torch.cat(weights) if weights else None)


class Peak(msgspec.Struct, frozen=True):
    """The worst stretch of a training: steps that are too long show there, however well it ends.

    `ne` (None if it holds one label only) and `logloss` are of the predictions made in it before training on them;
    `end` is the number of samples trained when it ended.
    """

    ne: float | None
    logloss: float
    samples: int
    end: int


@dataclass(frozen=True)
class TestMetrics:
    """Quality on a fixed set of samples, of one label; a sample of weight 2 counts as two.

    Attributes:
        auc: exact; as `ne` None unless both labels are there. None for other labels than clicks, as `logloss` is.
        ne: the loss over that of always predicting the mean label: for clicks normalized entropy, for numbers 1 − R².
        logloss: mean, in nats; None without samples.
        calibration: mean prediction over mean label; None without a positive one.
        curve: calibration in bins of equal count, ascending; for clicks.
        only_label: that all samples have; None if there are both, or no samples, or other labels than clicks.
        loss: what the labels are (`labels.Task.kind`).
        measures: those asked for by name, of which a value that is not defined is None.
        tasks: of each label by name, the first one too, where there are several.
    """

    __test__ = False  # pytest would take the class for a test

    samples: int
    auc: float | None
    ne: float | None
    logloss: float | None
    calibration: float | None
    curve: tuple[CurvePoint, ...]
    only_label: int | None = None
    loss: str = "logloss"
    measures: Mapping[str, float | None] = field(default_factory=dict)
    tasks: Mapping[str, "TestMetrics"] = field(default_factory=dict)

    def undefined(self, rows: str) -> str | None:
        """Why AUC and NE of `rows` are not defined, if they are not."""
        if self.only_label is None:
            return None
        return (
            f"AUC and NE of {rows} are not defined, as all {self.samples:,} labels are {self.only_label}: give rows of "
            "both labels"
        )

    def by_name(self) -> dict[str, float | None]:
        """All measures by the names that `train.best_by` takes: of the first label plain, of others as `LABEL/NAME`."""
        own = {name: getattr(self, name) for name in ("auc", "ne", "logloss", "calibration")} | dict(self.measures)
        others = list(self.tasks.items())[1:]
        return own | {f"{task}/{name}": value for task, of in others for name, value in of.by_name().items()}


def evaluate_scores(
    logits: Tensor, labels: Tensor, bins: int = 20, weights: Tensor | None = None, task: Task = ONE_CLICK[0]
) -> TestMetrics:
    """Exact quality of `logits [B]` against `labels [B]`, with a calibration curve of at most `bins` bins.

    The AUC is torchmetrics' `binary_auroc` without thresholds (the tests compare them), computed here because that
    import costs 0.8 s and needs sigmoids, which tie logits above 17 in float32.
    """
    logits, labels = logits.detach().double().cpu(), labels.detach().double().cpu()
    weights = torch.ones_like(labels) if weights is None else weights.double()
    loss, family = float(weights @ task.family.loss(logits, labels)), task.family
    total, label, prediction = (
        float(weights @ each) for each in (torch.ones_like(labels), labels, family.predict(logits))
    )
    calibration = prediction / label if label > 0 else None
    if not task.clicks:
        mean = torch.full_like(labels, label / total if total else 0.0)
        of_mean = float(weights @ family.loss(family.link(mean), labels))
        ne = loss / of_mean if of_mean > 0 else None
        return TestMetrics(len(labels), None, ne, None, calibration, (), loss=task.kind)
    values, group_of = torch.unique(logits, sorted=True, return_inverse=True)
    by_label = torch.zeros(2, len(values), dtype=torch.float64)
    by_label.index_add_(1, group_of, torch.stack([weights * labels, weights * (1.0 - labels)]))
    groups = LogitGroups(values, *by_label)
    seen = torch.unique(labels[weights > 0]).tolist()
    return TestMetrics(
        samples=len(labels),
        auc=area_under_roc(groups),
        ne=normalized_entropy(loss, label, total),
        logloss=loss / total if total else None,
        calibration=calibration,
        curve=calibration_curve(groups, bins),
        only_label=int(seen[0]) if len(seen) == 1 else None,
    )


class Quality:
    """Streaming quality of predictions made before each sample was trained on; used off the hot path.

    Every measure is None until it is defined: the log loss needs a sample, the calibration a positive label, NE and
    AUC both labels. Of other labels than clicks there is the mean loss. `lifetime` are the sums over all samples so
    far, each of which counts once. Not thread-safe: `Recorder` guards it.
    """

    def __init__(self, window: int, kind: str = "logloss") -> None:
        """`window`: samples over which the window's NE is taken; costs 12 bytes each. `kind`: as of `labels.Task`."""
        self.lifetime = Sums()
        self._kind = kind
        self._window = _Window(window)
        self._stretches = _Stretches()
        self._histogram = LogitHistogram()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Takes `logits [B]` (any float type) and `labels [B]`."""
        logits, labels = logits.detach().to("cpu", torch.float32), labels.detach().to("cpu", torch.float32)
        loss = self.lifetime.add(logits, labels, FAMILIES[self._kind])
        if self._kind == "logloss":
            self._window.add(loss, labels)
            self._stretches.add(loss, labels)
            self._histogram.add(logits, labels)

    @property
    def ne_window(self) -> float | None:
        return normalized_entropy(*self._window.sums())

    @property
    def ne_lifetime(self) -> float | None:
        return self.lifetime.ne if self._kind == "logloss" else None

    @property
    def only_label(self) -> int | None:
        """As of `Sums`; None of other labels than clicks."""
        return self.lifetime.only_label if self._kind == "logloss" else None

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
    def auc(self) -> float | None:
        """AUC of all samples so far, within half the chance that a positive and a negative share a bin."""
        return area_under_roc(self._histogram.groups())

    def state(self) -> dict[str, Any]:
        """Plain JSON values from which `restore` goes on."""
        return {
            "lifetime": list(astuple(self.lifetime)),
            "window": list(self._window.sums()),
            "stretches": msgspec.to_builtins(self._stretches),
            "histogram": self._histogram.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`: sums are exact, the samples of the window are all taken to be its mean."""
        self.lifetime = Sums(*msgspec.convert(state["lifetime"], tuple[int, float, float, float]))
        self._window.restore(*msgspec.convert(state["window"], tuple[float, float, float]))
        # checkpoints of before the stretches were kept hold none: the worst one is then looked for from here on
        self._stretches = msgspec.convert(state.get("stretches", {"end": self.lifetime.count}), _Stretches)
        self._histogram.restore(state["histogram"])


@dataclass
class Sums:
    """Sums over all samples; in Python's float64, so that a billion samples add up."""

    count: int = 0
    loss: float = 0.0
    prediction: float = 0.0
    label: float = 0.0

    def add(self, logits: Tensor, labels: Tensor, family: Family) -> Tensor:
        """Adds `[B]` samples and returns their loss `[B]`."""
        loss = family.loss(logits, labels)
        self.count += len(labels)
        self.loss += float(loss.sum(dtype=torch.float64))
        self.prediction += float(family.predict(logits).sum(dtype=torch.float64))
        self.label += float(labels.sum(dtype=torch.float64))
        return loss

    @property
    def only_label(self) -> int | None:
        """The label that all samples have; None if there are both, or no samples."""
        return int(self.label > 0) if self.count and self.label in (0, self.count) else None

    @property
    def logloss(self) -> float | None:
        return self.loss / self.count if self.count else None

    @property
    def ne(self) -> float | None:
        return normalized_entropy(self.loss, self.label, self.count)

    @property
    def calibration(self) -> float | None:
        """Mean prediction over mean label: 1 is right, above 1 predicts too many."""
        return self.prediction / self.label if self.label else None


class _Window:
    """Loss and label of the last `size` samples, and whether the loss is extreme, `[3, size]`: the oldest give way."""

    def __init__(self, size: int) -> None:
        self._held = torch.zeros(3, size)
        self._count = self._next = 0

    def add(self, loss: Tensor, labels: Tensor) -> None:
        size = self._held.shape[1]
        newest = torch.stack([loss, labels, (loss > EXTREME_NATS).to(loss.dtype)])[:, -size:]
        count = newest.shape[1]
        self._held[:, torch.arange(self._next, self._next + count) % size] = newest
        self._next, self._count = (self._next + count) % size, min(self._count + count, size)

    def sums(self) -> tuple[float, float, int]:
        """Sum of the loss, sum of the labels, samples in the window."""
        loss, label = self._held[:2, : self._count].sum(dim=1, dtype=torch.float64).tolist()
        return loss, label, self._count

    def extremes(self) -> int:
        """Samples with an extreme loss; restored ones, of which only the mean is known, do not count."""
        return int(self._held[2, : self._count].sum(dtype=torch.float64))

    def restore(self, loss: float, label: float, count: float) -> None:
        """Fills the window with samples of the saved mean: its NE is kept and fades out as new samples come."""
        size = self._held.shape[1]
        self._count = min(int(count), size)
        self._next = self._count % size
        if self._count:
            self._held[:, : self._count] = torch.tensor([[loss / count], [label / count], [0.0]])


@dataclass
class _Stretches:
    """Sums over the stretch under way, which ends after `_STRETCH_SAMPLES`, and the worst that is over."""

    loss: float = 0.0
    label: float = 0.0
    count: int = 0
    end: int = 0
    worst: Peak | None = None

    def add(self, loss: Tensor, labels: Tensor) -> None:
        while len(labels):
            room = _STRETCH_SAMPLES - self.count
            self.loss += float(loss[:room].sum(dtype=torch.float64))
            self.label += float(labels[:room].sum(dtype=torch.float64))
            self.count += len(labels[:room])
            self.end += len(labels[:room])
            loss, labels = loss[room:], labels[room:]
            if self.count == _STRETCH_SAMPLES:
                logloss = self.loss / self.count
                if self.worst is None or logloss > self.worst.logloss:
                    ne = normalized_entropy(self.loss, self.label, self.count)
                    self.worst = Peak(ne, logloss, self.count, self.end)
                self.loss, self.label, self.count = 0.0, 0.0, 0


class LogitHistogram:
    """Counts of logits in bins of relative width 2^-12, from 2^-12 to 2^6 on both sides of 0, by label.

    The bin of a float32 is the head of its bit pattern, so finding it costs a shift, and bins are as narrow around
    −0.01 as around −10 in proportion. Every bf16 in the range has a bin of its own: for bf16 logits the AUC is exact.
    Otherwise it errs by at most half the chance that a positive and a negative share a bin, and inside a bin
    the two are nearly equally likely to be the higher, so the true error is far smaller (under 1e-4 for the logits of
    click models). 147,457 bins, 2.4 MB.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(BINS * 2, dtype=torch.int64)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Counts `logits [B]` with `labels [B]`; a label of 0.5 or more counts as 1."""
        index = bin_of(logits).mul_(2).add_(labels >= 0.5)
        self._counts.scatter_add_(0, index, torch.ones_like(index))

    def groups(self) -> LogitGroups:
        """The bins that hold samples, ascending."""
        negatives, positives = self._counts.view(BINS, 2).double().unbind(1)
        kept = (negatives + positives).nonzero().squeeze(1)
        signed = (kept - _BINS_PER_SIGN).int()
        head = signed.abs().sub_(1).add_(_FIRST_KEY).bitwise_left_shift_(_DROPPED_BITS)
        magnitude = head.add_(1 << (_DROPPED_BITS - 1)).view(torch.float32).double()
        centre = torch.where(signed == 0, torch.zeros_like(magnitude), magnitude.copysign(signed))
        return LogitGroups(centre, positives[kept], negatives[kept])

    def state(self) -> str:
        """The bins that hold samples with their counts, packed into text for a checkpoint's JSON values."""
        index = self._counts.nonzero().squeeze(1)
        steps = index.diff(prepend=index.new_zeros(1))  # small numbers, which pack well
        packed = torch.stack([steps, self._counts[index]]).numpy().astype("<i8").tobytes()
        return base64.b64encode(zlib.compress(packed)).decode("ascii")

    def restore(self, state: str) -> None:
        """Takes the counts of `state` in place of its own; `LookupError`, `TypeError` or `ValueError` if it is none."""
        try:
            unpacked = zlib.decompress(base64.b64decode(state))
        except zlib.error as error:
            raise ValueError(f"the histogram cannot be unpacked: {error}") from error
        packed = np.frombuffer(unpacked, dtype="<i8").astype(np.int64)
        steps, counts = torch.from_numpy(packed).view(2, -1)
        self._counts.zero_()
        self._counts[steps.cumsum(0)] = counts


def bin_of(logits: Tensor) -> Tensor:
    """The bin of every logit, int64 `[B]`; what lies outside the range falls into the middle or the outermost bins."""
    bits = logits.float().abs().view(torch.int32)
    distance = (bits.bitwise_right_shift_(_DROPPED_BITS) - (_FIRST_KEY - 1)).clamp_(0, _BINS_PER_SIGN)
    return torch.where(logits < 0, -distance, distance).long().add_(_BINS_PER_SIGN)


def normalized_entropy(loss_sum: float, label_sum: float, count: float) -> float | None:
    """Mean log loss over the entropy of the mean label; None until both labels were seen.

    Defined by He et al., Practical Lessons from Predicting Clicks on Ads at Facebook (ADKDD 2014): below 1 is better
    than always predicting the mean, and unlike the log loss it can be compared between data sets.
    """
    if not 0.0 < label_sum < count:
        return None
    mean = label_sum / count
    entropy = -mean * math.log(mean) - (1.0 - mean) * math.log1p(-mean)
    return loss_sum / count / entropy


def area_under_roc(groups: LogitGroups) -> float | None:
    """Chance that a random positive has a higher logit than a random negative, ties counting half.

    The Mann-Whitney form of the area under the ROC curve; None unless both labels are there.
    """
    positives, negatives = groups.positives.sum(), groups.negatives.sum()
    if positives == 0 or negatives == 0:
        return None
    lower_negatives = groups.negatives.cumsum(0) - groups.negatives
    ordered = groups.positives @ (lower_negatives + 0.5 * groups.negatives)
    return float(ordered / positives / negatives)


def calibration_curve(groups: LogitGroups, bins: int) -> tuple[CurvePoint, ...]:
    """Mean prediction against mean label in at most `bins` bins of nearly equal weight, ascending.

    Bins of equal count rather than of equal width: where clicks are rare nearly all samples share the first bins of
    equal width. A group is never cut, so fewer bins come back when logits are tied.
    """
    counts = groups.positives + groups.negatives
    total = float(counts.sum())
    if total == 0:
        return ()
    middle = counts.cumsum(0) - 0.5 * counts
    bin_of = (middle * (bins / total)).long().clamp_(0, bins - 1)
    sums = torch.zeros(3, bins, dtype=torch.float64)
    sums.index_add_(1, bin_of, torch.stack([counts, groups.positives, counts * groups.logit.sigmoid()]))
    return tuple(
        CurvePoint(prediction / count, label / count, max(1, round(count)))
        for count, label, prediction in sums.T.tolist()
        if count
    )
