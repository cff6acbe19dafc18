"""Tables of PyArrow."""

from clicks import TEST, TRAIN, made, train

train(data=made(TRAIN, seed=0).to_arrow(), test_data=made(TEST, seed=1).to_arrow())
