"""The helpers of the tests of whole jobs."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "job"))  # `job_helpers`
sys.path.append(str(Path(__file__).parents[1] / "runtime"))  # `wired_roles`


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    return importlib.import_module("cluster_jobs").Cluster(monkeypatch)
