"""The command line, ready to be called, and with a run that was trained once."""

import shutil
from pathlib import Path

import pytest
from command_line import CommandLine, trained_once


@pytest.fixture
def shadowsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="session")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_once(tmp_path_factory.mktemp("run"))


@pytest.fixture
def trained(shadowsync: CommandLine, a_run: Path) -> CommandLine:
    """A run in `out`."""
    shutil.copytree(a_run, shadowsync.folder / "out")
    return shadowsync
