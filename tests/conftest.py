"""What holds for all tests."""

import pytest

from shadowsync import runtime_choice


@pytest.fixture(autouse=True)
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that leave open where their roles run have them in one process on any machine."""
    monkeypatch.setattr(runtime_choice, "cores", lambda: 2)
