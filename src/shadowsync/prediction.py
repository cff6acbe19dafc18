"""Predictions of a trained model.

`B` samples of a batch, `T` samples in all.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shadowsync.data.batch import Batch
from shadowsync.data.reader import batches
from shadowsync.data.source import OpenSource
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.training.replica import Replica

BATCH_SIZE = 4096


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


def predictions(predictor: Predictor, source: OpenSource) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels, `[B]` each, batch by batch in the order of the rows."""
    for batch in batches(source, BATCH_SIZE):
        yield predictor.logits(batch), batch.labels


def score(predictor: Predictor, source: OpenSource) -> tuple[Tensor, Tensor]:
    """Logits and labels of all rows that can be used, `[T]` each, in their order."""
    pairs = list(predictions(predictor, source)) or [(torch.empty(0), torch.empty(0))]
    return torch.cat([logits for logits, _ in pairs]), torch.cat([labels for _, labels in pairs])
