"""The command line, ready to be called."""

from pathlib import Path

import pytest
from command_line import CommandLine


@pytest.fixture
def shadowsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path, monkeypatch, capsys)
