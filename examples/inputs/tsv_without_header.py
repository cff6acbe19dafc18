"""A log of fields between tabs, whose columns the configuration names; `-` says that a value is missing."""

from tempfile import TemporaryDirectory

from clicks import TEST, TRAIN, made, train

with TemporaryDirectory() as folder:
    for name, rows in (("train", made(TRAIN, seed=0)), ("test", made(TEST, seed=1))):
        rows.write_csv(f"{folder}/{name}.log", separator="\t", include_header=False, null_value="-")
    how = {"name": "csv", "separator": "\t", "header": ["clicked", "price", "user", "item"], "null_words": ["-"]}
    train({"path": f"{folder}/train.log", "test_path": f"{folder}/test.log", **how})
