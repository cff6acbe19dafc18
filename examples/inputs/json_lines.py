"""JSON lines: an object in each line."""

from tempfile import TemporaryDirectory

from clicks import TEST, TRAIN, made, train

with TemporaryDirectory() as folder:
    made(TRAIN, seed=0).write_ndjson(f"{folder}/train.jsonl")
    made(TEST, seed=1).write_ndjson(f"{folder}/test.jsonl")
    train({"path": f"{folder}/train.jsonl", "test_path": f"{folder}/test.jsonl"})
