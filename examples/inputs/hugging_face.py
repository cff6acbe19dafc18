"""A Hugging Face Dataset, also one that was shuffled or selected from."""

from clicks import TEST, TRAIN, made, train
from datasets import Dataset

rows = Dataset.from_dict(made(TRAIN, seed=0).to_dict(as_series=False)).shuffle(seed=3)
train(data=rows, test_data=Dataset.from_dict(made(TEST, seed=1).to_dict(as_series=False)))
