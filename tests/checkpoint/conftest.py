"""The tests of checkpoints write many small files, and a disk's flush takes longer than all the rest of a test."""

import os
from pathlib import Path

import pytest
from checkpoint_helpers import memory_root


@pytest.fixture(autouse=True)
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What `os.fsync` was called for, in order; nothing is flushed."""
    paths: list[Path] = []

    def record(descriptor: int) -> None:
        paths.append(Path(f"/proc/self/fd/{descriptor}").resolve())

    monkeypatch.setattr(os, "fsync", record)
    return paths


@pytest.fixture(params=["local", "url", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where checkpoints go."""
    place = f"{tmp_path}/checkpoints"
    return {"local": place, "url": f"file://{place}", "memory": memory_root()}[request.param]
