"""Formulas of quality over groups of samples that share a logit.

Exact measures make one group per distinct logit, streaming ones a group per bin of a histogram; both then use the same
formulas. `K` groups in ascending order of the logit.
"""

import math
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor


class CurvePoint(msgspec.Struct, frozen=True):
    """One bin of a calibration curve.

    Attributes:
        prediction: mean predicted probability of the bin's samples.
        label: mean label of the bin's samples.
        count: samples in the bin.
    """

    prediction: float
    label: float
    count: int


@dataclass(frozen=True)
class Groups:
    """Samples grouped by their logit, ascending.

    Attributes:
        logit: of the group, float64 `[K]`.
        positives: samples of label 1, float64 `[K]`.
        negatives: samples of label 0, float64 `[K]`.
    """

    logit: Tensor
    positives: Tensor
    negatives: Tensor


def entropy(mean_label: float) -> float | None:
    """Entropy of a coin of this mean, in nats; None where it is 0 (only one label was seen)."""
    if not 0.0 < mean_label < 1.0:
        return None
    return -mean_label * math.log(mean_label) - (1.0 - mean_label) * math.log1p(-mean_label)


def normalized_entropy(loss_sum: float, label_sum: float, count: float) -> float | None:
    """Mean log loss over the entropy of the mean label; None until both labels were seen.

    Defined by He et al., Practical Lessons from Predicting Clicks on Ads at Facebook (ADKDD 2014), section 3: below 1
    is better than always predicting the mean, and unlike the log loss it can be compared between data sets.
    """
    background = entropy(label_sum / count) if count else None
    return None if background is None else loss_sum / count / background


def area_under_roc(groups: Groups) -> float | None:
    """Chance that a random positive has a higher logit than a random negative, ties counting half.

    The Mann-Whitney form of the area under the ROC curve; None unless both labels are there.
    """
    positives, negatives = groups.positives.sum(), groups.negatives.sum()
    if positives == 0 or negatives == 0:
        return None
    lower_negatives = groups.negatives.cumsum(0) - groups.negatives
    ordered = groups.positives @ (lower_negatives + 0.5 * groups.negatives)
    return float(ordered / positives / negatives)


def calibration_curve(groups: Groups, bins: int) -> tuple[CurvePoint, ...]:
    """Mean prediction against mean label in at most `bins` bins of nearly equal count, ascending.

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
        CurvePoint(prediction / count, label / count, round(count))
        for count, label, prediction in sums.T.tolist()
        if count
    )


def group_exactly(logits: Tensor, labels: Tensor) -> Groups:
    """One group per distinct logit of `logits [B]`; a label of 0.5 or more counts as 1."""
    values, group_of = torch.unique(logits.double(), sorted=True, return_inverse=True)
    positive = (labels >= 0.5).double()
    sums = torch.zeros(2, len(values), dtype=torch.float64)
    sums.index_add_(1, group_of, torch.stack([positive, 1.0 - positive]))
    return Groups(values, sums[0], sums[1])
