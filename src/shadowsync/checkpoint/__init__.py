"""Checkpoints: their format, and a store of whole and incremental ones."""
