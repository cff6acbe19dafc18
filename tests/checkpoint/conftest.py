"""The tests of checkpoints write many small files, and a disk's flush takes longer than all the rest of a test."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What `os.fsync` was called for, in order; nothing is flushed."""
    paths: list[Path] = []

    def record(descriptor: int) -> None:
        paths.append(Path(f"/proc/self/fd/{descriptor}").resolve())

    monkeypatch.setattr(os, "fsync", record)
    return paths
