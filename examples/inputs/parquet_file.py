"""A parquet file to train on, and one to test."""

from tempfile import TemporaryDirectory

from clicks import TEST, TRAIN, made, train

with TemporaryDirectory() as folder:
    made(TRAIN, seed=0).write_parquet(f"{folder}/train.parquet")
    made(TEST, seed=1).write_parquet(f"{folder}/test.parquet")
    train({"path": f"{folder}/train.parquet", "test_path": f"{folder}/test.parquet"})
