"""One thread for torch's operators, and the helpers of the tests of whole jobs."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "job"))  # `job_helpers`


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    return importlib.import_module("cluster_jobs").Cluster(monkeypatch)
