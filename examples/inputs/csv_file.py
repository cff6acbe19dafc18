"""CSV as most programs write it, with a header; a .gz is read as it is, too."""

from tempfile import TemporaryDirectory

from clicks import TEST, TRAIN, made, train

with TemporaryDirectory() as folder:
    made(TRAIN, seed=0).write_csv(f"{folder}/train.csv")
    made(TEST, seed=1).write_csv(f"{folder}/test.csv")
    train({"path": f"{folder}/train.csv", "test_path": f"{folder}/test.csv"})
