"""Checkpoints and what happens after a failure."""
