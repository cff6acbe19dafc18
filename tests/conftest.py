"""What holds for all tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that leave open where their roles run have them in one process on any machine."""
    monkeypatch.setattr("shadowsync.job.cores", lambda: 2)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """For torch's operators: tensors are tiny here, and threads that wait for each other at a busy core cost more."""
    torch.set_num_threads(1)
