"""A histogram of logits by label, from which the AUC and the calibration curve so far are read.

`B` samples, `K` bins.
"""

import base64
import zlib

import numpy as np
import torch
from torch import Tensor

from shadowsync.metrics.scores import Groups

_MANTISSA_BITS = 12
_DROPPED_BITS = 23 - _MANTISSA_BITS
_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -12, 6
_FIRST_KEY = (127 + _LOWEST_EXPONENT) << _MANTISSA_BITS
_BINS_PER_SIGN = (_HIGHEST_EXPONENT - _LOWEST_EXPONENT) << _MANTISSA_BITS
BINS = 2 * _BINS_PER_SIGN + 1


class LogitHistogram:
    """Counts of logits in bins of relative width 2^-12, from 2^-12 to 2^6 on both sides of 0, by label.

    The bin of a float32 is the head of its bit pattern, so finding it costs a shift, and bins are as narrow around
    −0.01 as around −10 in proportion. Every bf16 in the range has a bin of its own: for bf16 logits the AUC is exact.
    Otherwise it errs by at most half the chance that a positive and a negative share a bin, which `auc_error` gives;
    inside a bin the two are nearly equally likely to be the higher, so the true error is far smaller (under 1e-4 for
    the logits of click models). 147,457 bins, 2.4 MB.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(BINS * 2, dtype=torch.int64)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Counts `logits [B]` with `labels [B]`; a label of 0.5 or more counts as 1."""
        index = bin_of(logits).mul_(2).add_(labels >= 0.5)
        self._counts.scatter_add_(0, index, torch.ones_like(index))

    def groups(self) -> Groups:
        """The bins that hold samples, ascending."""
        negatives, positives = self._counts.view(BINS, 2).double().unbind(1)
        kept = (negatives + positives).nonzero().squeeze(1)
        return Groups(_centre_of(kept), positives[kept], negatives[kept])

    def auc_error(self) -> float:
        """The largest possible difference between the exact AUC and the one of the groups."""
        negatives, positives = self._counts.view(BINS, 2).double().unbind(1)
        pairs = float(positives.sum() * negatives.sum())
        return float(positives @ negatives) / (2.0 * pairs) if pairs else 0.0

    def state(self) -> str:
        """The bins that hold samples with their counts, packed into text for a checkpoint's JSON values."""
        index = self._counts.nonzero().squeeze(1)
        steps = index.diff(prepend=index.new_zeros(1))  # small numbers, which pack well
        packed = torch.stack([steps, self._counts[index]]).numpy().astype("<i8").tobytes()
        return base64.b64encode(zlib.compress(packed)).decode("ascii")

    def restore(self, state: str) -> None:
        """Takes the counts of `state` in place of its own.

        Raises:
            LookupError, TypeError, ValueError: it is not what `state` gives.
        """
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


def _centre_of(bins: Tensor) -> Tensor:
    """The logit in the middle of each bin, float64 `[K]`."""
    signed = (bins - _BINS_PER_SIGN).int()
    head = signed.abs().sub_(1).add_(_FIRST_KEY).bitwise_left_shift_(_DROPPED_BITS)
    magnitude = head.add_(1 << (_DROPPED_BITS - 1)).view(torch.float32).double()
    return torch.where(signed == 0, torch.zeros_like(magnitude), magnitude.copysign(signed))
