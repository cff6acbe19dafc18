"""The wire: served objects and connections to them, with tensors as raw frames (ZeroMQ with CURVE)."""
