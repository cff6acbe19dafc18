"""The examples run as they are, on data made here."""

import re
import runpy
from pathlib import Path

import pytest
from made_rows import criteo_rows, write_shop
from typer.testing import CliRunner

from shadowsync.cli import app
from shadowsync.report.result import Result, read_result

EXAMPLES = Path(__file__).parents[2] / "examples"


def train(example: str, *settings: str) -> Result:
    """`shadowsync train examples/EXAMPLE SETTINGS` in the current folder."""
    small = ("report.tensorboard=false", "train.batch_size=64")
    words = ["train", str(EXAMPLES / example), *settings, *small, "--out", "out"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "report: out/report.html" in done.output
    return read_result(Path("out"))


def test_every_example_is_tested_in_this_folder() -> None:
    """Those in examples/inputs are in tests/job/test_input_examples.py."""
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file() and not path.name.startswith(".")} == {
        "criteo.yaml",
        "own_model.py",
        "parquet.yaml",
        "rayjob.yaml",
        "tune.py",
    }


def test_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    source = (EXAMPLES / "own_model.py").read_text("utf-8")
    assert len(source.splitlines()) <= 40
    assert not re.search(r"class \w+\((?!nn\.Module\))", source), "nothing of ours is subclassed"
    runpy.run_path(str(EXAMPLES / "own_model.py"), run_name="__main__")
    auc, best = map(float, re.findall(r"0\.\d{4}", capsys.readouterr().out))
    assert 0.75 < auc < best < 1
    assert list(tmp_path.iterdir()) == []


def test_criteo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = criteo_rows(6000, 0)
    (tmp_path / "train.txt").write_text(rows + "not a row\n", encoding="utf-8")
    (tmp_path / "test.txt").write_text(criteo_rows(1000, 1), encoding="utf-8")
    settings = ("data.path=train.txt", "data.test_path=test.txt", "data.hash_size=1000")
    result = train("criteo.yaml", *settings)
    assert (result.data.trained_samples, result.data.skipped_rows) == (6000, 1)
    assert (result.test.auc or 0) > 0.95


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_shop(tmp_path)
    result = train("parquet.yaml")
    assert result.data.trained_samples == 6000
    assert (result.test.auc or 0) > 0.75


@pytest.mark.parametrize("name", ["criteo.yaml", "parquet.yaml"])
def test_the_first_lines_say_how_to_run_it(name: str) -> None:
    assert f"#   shadowsync train examples/{name} " in (EXAMPLES / name).read_text("utf-8")
