"""A module of your own, trained by four workers that never wait: python examples/own_model.py"""

import tempfile

import torch
from torch import Tensor, nn

from shadowsync import Job, Table

FEATURES = [f"c{k}" for k in range(1, 7)]
DIMS = [16, 16, 8, 8, 4, 4]


class GatedTower(nn.Module):
    """A tower whose inputs are weighed by a gate that the dense columns open and close."""

    def __init__(self, dense: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(dense, width), nn.Sigmoid())
        self.tower = nn.Sequential(nn.Linear(dense + width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.logit = nn.Linear(64, 1)

    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """`[B, N]` and `{feature: [B, D]}` to logits `[B]`."""
        vectors = torch.cat([embeddings[name] for name in FEATURES], dim=1)
        hidden = self.tower(torch.cat([dense, self.gate(dense) * vectors], dim=1))
        return self.logit(hidden).squeeze(1)


config = {
    "data": {"name": "synthetic", "rows": 60_000, "test_rows": 20_000, "features": 6, "table_rows": 2_000},
    "train": {"trainers": 2, "workers": 2, "batch_size": 256},
}
tables = [Table(name, rows=2_000, dim=dim, features=(name,)) for name, dim in zip(FEATURES, DIMS, strict=True)]
with tempfile.TemporaryDirectory() as folder:
    result = Job(config, model=GatedTower(13, sum(DIMS)), tables=tables, out=folder).run()
if result.test is not None and result.test.auc is not None:
    print(f"test AUC {result.test.auc:.4f}, at best {result.test.best_auc:.4f}")
