"""Several parquet files by a pattern; the last rows of them all are the test."""

from tempfile import TemporaryDirectory

from clicks import TEST, TRAIN, made, train

with TemporaryDirectory() as folder:
    rows = made(TRAIN + TEST, seed=0)
    for number, part in enumerate(rows.iter_slices(1000)):
        part.write_parquet(f"{folder}/part-{number}.parquet")
    train({"path": f"{folder}/part-*.parquet", "test": {"last": TEST}})
