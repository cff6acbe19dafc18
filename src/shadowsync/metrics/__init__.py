"""Measures of quality and speed, off the hot path."""
