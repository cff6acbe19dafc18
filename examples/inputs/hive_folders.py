"""Folders by day: three of them to train on, the next one is the test, and the last one is left out."""

from pathlib import Path
from tempfile import TemporaryDirectory

from clicks import TEST, TRAIN, made, train

with TemporaryDirectory() as folder:
    days = [*made(TRAIN, seed=0).iter_slices(TRAIN // 3), made(TEST, seed=1), made(TEST, seed=2)]
    for number, rows in enumerate(days, start=1):
        day = Path(folder, f"day=2024-01-0{number}")
        day.mkdir()
        rows.write_parquet(day / "part.parquet")
    chosen = {"partitions": {"day": {"to": "2024-01-03"}}, "test_partitions": {"day": "2024-01-04"}}
    train({"name": "parquet", "path": folder, **chosen})
