"""Frames of polars; a LazyFrame is never in memory as a whole."""

from clicks import TEST, TRAIN, made, train

train(data=made(TRAIN, seed=0).lazy(), test_data=made(TEST, seed=1))
