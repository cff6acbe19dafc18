"""Codecs: how tensors look on the wire."""
