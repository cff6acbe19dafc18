"""The yardstick: the same DLRM in a plain PyTorch loop, as a careful user would write it.

One `nn.EmbeddingBag(sparse=True)` per table with `torch.optim.Adagrad`, the dense part with fused Adagrad, fp32, two
threads inside torch.

    python benchmarks/plain_loop.py      prints examples/s at batch 1,024 and 128

`B` samples, `N` dense columns, `F` features, `D` dimension.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shadowsync.data.batch import Batch, Jagged
from shadowsync.metrics.quality import evaluate_scores
from shadowsync.models.dlrm import Dlrm

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe, table


@dataclass(frozen=True)
class Shape:
    """What is trained: tables of `rows × dim`, one feature each, the dense columns beside them, and the top tower."""

    dense_columns: int = 13
    features: int = 26
    rows: int = 200_000
    dim: int = 16
    top: tuple[int, ...] = (512, 256)


class PlainModel(nn.Module):
    """Bags and the dense part in one module."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        names = [f"c{index}" for index in range(shape.features)]
        self.bags = nn.ModuleDict(
            {name: nn.EmbeddingBag(shape.rows, shape.dim, mode="sum", sparse=True) for name in names}
        )
        for bag in self.bags.values():
            nn.init.uniform_(bag.weight, -(shape.rows**-0.5), shape.rows**-0.5)
        self.dense_part = Dlrm(top=shape.top).build(shape.dense_columns, dict.fromkeys(names, shape.dim))

    def forward(self, dense: Tensor, ids: Jagged) -> Tensor:
        """Logits `[B]` of dense columns `[B, N]` and the ids of `F` features."""
        offsets = ids.bag_offsets() if ids.offsets is not None else None
        columns = ids.values.view(ids.feature_count, ids.samples) if offsets is None else None
        pooled = {}
        for index, (name, bag) in enumerate(self.bags.items()):
            if columns is not None:
                pooled[name] = bag(columns[index].unsqueeze(1))
            else:
                assert offsets is not None
                bags = offsets[index * ids.samples : (index + 1) * ids.samples + 1]
                pooled[name] = bag(ids.values[bags[0] : bags[-1]], bags[:-1] - bags[0])
        return self.dense_part(dense, pooled)


@dataclass(frozen=True)
class Trained:
    """Examples per second after the warm-up, and the AUC of the predictions made before each sample was trained on."""

    eps: float
    auc: float


def train(
    batches: Iterable[Batch], shape: Shape = Shape(), threads: int = 2, warmup: int = 5, device: str = "cpu"
) -> Trained:
    """Trains on all batches, with all of the model on the device; the first `warmup` of them are not timed."""
    torch.set_num_threads(threads)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, said aloud: else it warns
    model = PlainModel(shape).to(device)
    optimizers = [
        torch.optim.Adagrad(model.bags.parameters(), lr=0.15, eps=1e-8),
        torch.optim.Adagrad(model.dense_part.parameters(), lr=0.005, eps=1e-8, fused=device == "cpu"),
    ]
    remaining = iter(batches) if device == "cpu" else (_placed(batch, device) for batch in batches)
    for batch in itertools.islice(remaining, warmup):
        _step(model, optimizers, batch)
    start, logits, labels = time.perf_counter(), [], []
    for batch in remaining:
        logits.append(_step(model, optimizers, batch))
        labels.append(batch.labels)
    found = torch.cat(logits).cpu()  # waits for a GPU
    seconds = time.perf_counter() - start
    auc = evaluate_scores(found, torch.cat(labels).cpu()).auc
    return Trained(sum(map(len, labels)) / seconds, auc if auc is not None else float("nan"))


def _placed(batch: Batch, device: str) -> Batch:
    offsets = None if batch.ids.offsets is None else batch.ids.offsets.to(device)
    ids = replace(batch.ids, values=batch.ids.values.to(device), offsets=offsets)
    return Batch(batch.labels.to(device), batch.dense.to(device), ids)


def _step(model: PlainModel, optimizers: Sequence[torch.optim.Optimizer], batch: Batch) -> Tensor:
    logits = model(batch.dense, batch.ids)
    loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return logits.detach()


def random_batches(count: int, batch_size: int, shape: Shape, zipf: float = 1.2, seed: int = 0) -> list[Batch]:
    """Batches of one id per feature, whose ranks follow a Zipf law, spread over the rows by a multiplication."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, shape.rows + 1, dtype=torch.float64).pow(-zipf)
    cumulative = (weights.cumsum(0) / weights.sum()).float()
    batches = []
    for _ in range(count):
        ranks = torch.searchsorted(cumulative, torch.rand(shape.features * batch_size, generator=generator))
        ids = ranks.clamp(max=shape.rows - 1) * 2_654_435_761 % shape.rows
        labels = (torch.rand(batch_size, generator=generator) < 0.25).float()
        dense = torch.randn(batch_size, shape.dense_columns, generator=generator)
        batches.append(Batch(labels, dense, Jagged(ids, None, None, shape.features, batch_size)))
    return batches


def main() -> None:
    """Three runs at each batch size, alternating."""
    shape = Shape()
    sizes = {1024: random_batches(40, 1024, shape), 128: random_batches(120, 128, shape)}
    speeds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(3):
        for size, batches in sizes.items():
            speeds[size].append(train(batches, shape).eps)
    rows = [(size, statistics.median(speeds[size]), min(speeds[size]), max(speeds[size])) for size in sizes]
    print("\n".join(describe()), table(["batch", "examples/s", "least", "most"], rows), sep="\n\n")


if __name__ == "__main__":
    main()
