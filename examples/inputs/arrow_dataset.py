"""A dataset of PyArrow, here of a folder of feather files, which no source reads by itself."""

from tempfile import TemporaryDirectory

import pyarrow.dataset
from clicks import TEST, TRAIN, made, train

with TemporaryDirectory() as folder:
    for number, part in enumerate(made(TRAIN, seed=0).iter_slices(1000)):
        part.write_ipc(f"{folder}/part-{number}.feather")
    train(data=pyarrow.dataset.dataset(folder, format="feather"), test_data=made(TEST, seed=1))
