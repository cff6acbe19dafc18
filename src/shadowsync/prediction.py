"""Predictions of a trained model.

`B` samples of a batch, `T` samples in all.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from shadowsync.data.batch import Batch
from shadowsync.data.reader import batches
from shadowsync.data.source import OpenSource
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.metrics.units import UnitActivity
from shadowsync.training.replica import Replica

BATCH_SIZE = 4096
WATCHED_ROWS = 40_000
"""About how many rows, spread over all of them, are looked at for units that are dead."""


class Predictor:
    """A dense part with the embeddings it looks up; fp32, whatever it was trained in.

    Args:
        replica: with the parameters to predict with.
        embeddings: without codecs: predictions see the rows as they are.
    """

    def __init__(self, replica: Replica, embeddings: EmbeddingClient) -> None:
        self._replica = replica
        self._embeddings = embeddings

    def logits(self, batch: Batch) -> Tensor:
        """Logits, float32 `[B]`."""
        pulled = self._embeddings.pull(batch.ids)
        return self._replica.predict(batch.dense, pulled.pooled, pulled.sequences)


def predictions(
    predictor: Predictor, source: OpenSource, activity: UnitActivity | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels, `[B]` each, batch by batch in the order of the rows.

    Args:
        predictor: of the model.
        source: of the rows.
        activity: of the predictor's module; notes what its units do on about `WATCHED_ROWS` of them.
    """
    every = -(-source.rows // WATCHED_ROWS)
    for number, batch in enumerate(batches(source, BATCH_SIZE)):
        with nullcontext() if activity is None or number % every else activity.watching(len(batch)):
            logits = predictor.logits(batch)
        yield logits, batch.labels


def score(predictor: Predictor, source: OpenSource, activity: UnitActivity | None = None) -> tuple[Tensor, Tensor]:
    """As `predictions`, of all rows that can be used, `[T]` each, in their order."""
    pairs = list(predictions(predictor, source, activity)) or [(torch.empty(0), torch.empty(0))]
    return torch.cat([logits for logits, _ in pairs]), torch.cat([labels for _, labels in pairs])
