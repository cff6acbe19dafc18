"""What the sources yield and the trainers eat.

`B` samples, `N` dense columns, `F` categorical features, `L` ids in all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Jagged:
    """The ids of `F` features for `B` samples, feature-major: first all samples of feature 0, then of feature 1 …

    Attributes:
        values: ids, int64 `[L]`.
        offsets: bag `f * B + b` is `values[offsets[f * B + b]:offsets[f * B + b + 1]]`, int64 `[F * B + 1]`;
            None says that every bag holds exactly one id, so that `L = F * B`.
        weights: one float32 per id `[L]`, or None for ones.
        feature_count: `F`.
        samples: `B`.
    """

    values: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    feature_count: int
    samples: int

    def bag_offsets(self) -> Tensor:
        """The offsets, made where they are implied, int64 `[F * B + 1]`."""
        if self.offsets is not None:
            return self.offsets
        return torch.arange(self.feature_count * self.samples + 1)

    def lengths(self) -> Tensor:
        """Ids per bag, int64 `[F * B]`."""
        return self.bag_offsets().diff()

    def select(self, features: Sequence[int]) -> "Jagged":
        """The bags of the given features, in the given order."""
        if self.offsets is None:
            return self._of_singles(lambda entries: entries[list(features)], len(features), self.samples)
        spans = [(f * self.samples, (f + 1) * self.samples) for f in features]
        return self._gather(spans, len(features), self.samples)

    def narrow(self, start: int, stop: int) -> "Jagged":
        """Samples `start … stop − 1` of every feature."""
        if self.offsets is None:
            return self._of_singles(lambda entries: entries[:, start:stop], self.feature_count, stop - start)
        spans = [(f * self.samples + start, f * self.samples + stop) for f in range(self.feature_count)]
        return self._gather(spans, self.feature_count, stop - start)

    def take(self, index: Tensor) -> "Jagged":
        """The samples at `index` (int64 `[K]`) of every feature, in that order."""
        if self.offsets is None:
            numbers = index.numpy()  # three times as fast as torch's indexing
            return self._of_singles(
                lambda entries: torch.from_numpy(entries.numpy().take(numbers, axis=1)), self.feature_count, len(index)
            )
        bags = (torch.arange(self.feature_count)[:, None] * self.samples + index).flatten()
        lengths = self.lengths()[bags]
        offsets = _offsets(lengths)
        shift = torch.repeat_interleave(self.offsets[bags] - offsets[:-1], lengths)
        where = torch.arange(int(offsets[-1])) + shift
        weights = self.weights[where] if self.weights is not None else None
        return Jagged(self.values[where], offsets, weights, self.feature_count, len(index))

    @staticmethod
    def join(parts: Sequence["Jagged"]) -> "Jagged":
        """The samples of all parts, one part after the other; all of the same features, weighted all or none."""
        first = parts[0]
        if len(parts) == 1:
            return first
        count, samples = first.feature_count, sum(part.samples for part in parts)
        if all(part.offsets is None and part.weights is None for part in parts):
            values = torch.cat([part.values.view(count, part.samples) for part in parts], dim=1)
            return Jagged(values.flatten(), None, None, count, samples)
        singles = [part.select([feature]) for feature in range(count) for part in parts]
        values = torch.cat([single.values for single in singles])
        weights = [single.weights for single in singles if single.weights is not None]
        offsets = _offsets(torch.cat([single.lengths() for single in singles]))
        return Jagged(values, offsets, torch.cat(weights) if weights else None, count, samples)

    def _of_singles(self, pick: Callable[[Tensor], Tensor], feature_count: int, samples: int) -> "Jagged":
        """Of one entry per bag, `[F, B]`, those that are picked."""
        values, weights = self.values, self.weights
        values = pick(values.view(self.feature_count, self.samples)).flatten()
        if weights is not None:
            weights = pick(weights.view(self.feature_count, self.samples)).flatten()
        return Jagged(values, None, weights, feature_count, samples)

    def _gather(self, spans: list[tuple[int, int]], feature_count: int, samples: int) -> "Jagged":
        """The bags of the spans."""
        assert self.offsets is not None
        if not spans:
            return Jagged(self.values[:0], torch.zeros(1, dtype=torch.int64), None, 0, samples)
        edges = self.offsets[torch.tensor(spans)].tolist()
        values = torch.cat([self.values[first:last] for first, last in edges])
        weights = None
        if self.weights is not None:
            weights = torch.cat([self.weights[first:last] for first, last in edges])
        offsets = _offsets(torch.cat([self.offsets[first : last + 1].diff() for first, last in spans]))
        return Jagged(values, offsets, weights, feature_count, samples)


def _offsets(lengths: Tensor) -> Tensor:
    """Where bags of these lengths begin and end, int64 `[bags + 1]`."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


@dataclass(frozen=True)
class Batch:
    """Samples with their labels.

    Attributes:
        labels: float32 `[B]`, or `[B, T]` of several tasks (see `labels`).
        dense: float32 `[B, N]`.
        ids: `F` features in the order of the source's schema.
        weights: of the samples in the loss and in measures, float32 `[B]`; None for ones.
        minutes: when they were, since 1970, int32 `[B]`; None if that is not known.
    """

    labels: Tensor
    dense: Tensor
    ids: Jagged
    weights: Tensor | None = None
    minutes: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def minute(self) -> int:
        """When it was, since 1970, so that a sample whose time is wrong changes nothing: the median; 0 if that is not
        known."""
        return 0 if self.minutes is None or not len(self.minutes) else int(self.minutes.median())

    def narrow(self, start: int, stop: int) -> "Batch":
        """Samples `start … stop − 1`."""
        beside = (None if tensor is None else tensor[start:stop] for tensor in (self.weights, self.minutes))
        return Batch(self.labels[start:stop], self.dense[start:stop], self.ids.narrow(start, stop), *beside)

    def take(self, index: Tensor) -> "Batch":
        """The samples at `index` (int64 `[K]`), in that order."""
        beside = (None if tensor is None else tensor[index] for tensor in (self.weights, self.minutes))
        return Batch(self.labels[index], self.dense[index], self.ids.take(index), *beside)

    @staticmethod
    def join(parts: Sequence["Batch"]) -> "Batch":
        """The samples of all parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        labels, dense = (torch.cat([getattr(part, name) for part in parts]) for name in ("labels", "dense"))
        beside = ([getattr(part, name) for part in parts] for name in ("weights", "minutes"))
        joined = (None if tensors[0] is None else torch.cat(tensors) for tensors in beside)
        return Batch(labels, dense, Jagged.join([part.ids for part in parts]), *joined)
