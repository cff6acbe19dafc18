"""The tests of checkpoints write many small files, and a disk's flush takes longer than all the rest of a test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_helpers import forget_memory, memory_root


@pytest.fixture(autouse=True)
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What `os.fsync` was called for, in order; nothing is flushed."""
    paths: list[Path] = []

    def record(descriptor: int) -> None:
        paths.append(Path(f"/proc/self/fd/{descriptor}").resolve())

    monkeypatch.setattr(os, "fsync", record)
    return paths


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test leaves in memory makes those after it slower."""
    yield
    forget_memory()


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where checkpoints go."""
    return f"{tmp_path}/checkpoints" if request.param == "local" else memory_root()
