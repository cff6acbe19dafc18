"""Embedding tables: their specification, placement, storage, servers and the client."""
