"""Frames of pandas."""

import pandas as pd
from clicks import TEST, TRAIN, made, train

later = pd.DataFrame(made(TEST, seed=1).to_dict(as_series=False))
train(data=pd.DataFrame(made(TRAIN, seed=0).to_dict(as_series=False)), test_data=later)
