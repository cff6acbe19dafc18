"""Gradient methods, which say which gradients make a global step, and the tokens that tell how old a gradient is."""
