"""A torch DataLoader whose batches are dicts of tensors and lists."""

from typing import Any

import polars as pl
import torch
from clicks import TEST, TRAIN, made, train
from torch.utils.data import DataLoader


def loader(rows: pl.DataFrame) -> Any:
    """As one has it for a model in plain PyTorch."""

    def collate(places: list[int]) -> dict[str, Any]:
        part = rows[places]
        tensors = {name: torch.tensor(part[name].to_list()) for name in ("clicked", "price", "item")}
        return {**tensors, "user": part["user"].to_list()}

    places: Any = range(len(rows))
    return DataLoader(places, batch_size=100, collate_fn=collate)


train(data=loader(made(TRAIN, seed=0)), test_data=loader(made(TEST, seed=1)))
