"""The site's own pages: the tutorial runs, the notebook executes, the reference has what is exported, keys are ten."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml
from typer.testing import CliRunner

import shadowsync
from shadowsync.cli import app
from shadowsync.report.result import read_result

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_tutorial_runs_from_its_csv_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "tutorial.md").read_text("utf-8")
    code, shown = (re.findall(rf"^```{kind}\n(.*?)^```$", page, re.M | re.S) for kind in ("python", "yaml"))
    exec(compile(code[0], "tutorial.md", "exec"), {})
    Path("first.yaml").write_text(shown[1], "utf-8")
    commands = re.findall(r"^    (shadowsync .*)$", page, re.M)
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command)[1:], catch_exceptions=False)
        assert done.exit_code == 0, f"{command}\n{done.output}"
        if " inspect " in command:
            assert yaml.safe_load(Path("clicks.yaml").read_text("utf-8")) == yaml.safe_load(shown[0])
    assert len(commands) == 7
    first = read_result(Path("runs/first"))
    assert first.validation is not None
    assert first.test is not None
    assert (first.test.auc or 0) > 0.68
    assert first.data.train_samples + (first.data.valid_samples or 0) + first.data.test_samples == 40_000
    assert pl.read_csv("predictions.csv").columns == ["item", "probability", "logit"]
    assert all(Path(name).is_file() for name in ("model.pt2", "comparison.html", "runs/longer/result.json"))


def test_the_notebook_executes(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs nbclient and ipykernel, of the extra dev")
    notebook = Path(shutil.copy(DOCS / "first_steps.ipynb", tmp_path))
    assert not any(cell.get("outputs") for cell in json.loads(notebook.read_text("utf-8"))["cells"]), (
        "clear its outputs"
    )
    program = "import sys, nbformat, nbclient; notebook = nbformat.read(sys.argv[1], 4); nbclient.execute(notebook, "
    program += "timeout=300); nbformat.write(notebook, sys.argv[1])"
    command = [sys.executable, "-c", program, notebook.name]
    ended = subprocess.run(
        command, cwd=tmp_path, env=own_folders(tmp_path), capture_output=True, text=True, check=False, timeout=400
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    outputs = [
        output for cell in json.loads(notebook.read_text("utf-8"))["cells"] for output in cell.get("outputs", ())
    ]
    said = "".join("".join(output.get("text", "")) for output in outputs)
    assert [float(auc) > 0.7 for auc in re.findall(r"test AUC (0\.\d{3})", said)] == [True, True]


def own_folders(folder: Path) -> dict[str, str]:
    """The environment with places for what the notebook's tools keep, which is nobody else's."""
    return {**os.environ, "JUPYTER_RUNTIME_DIR": str(folder), "IPYTHONDIR": str(folder)}


def test_the_reference_has_every_exported_name_seam_and_what_serves() -> None:
    page = (DOCS / "api.md").read_text("utf-8")
    assert sorted(re.findall(r"^::: shadowsync\.(\w+)$", page, re.M)) == shadowsync.__all__
    seams = re.findall(r"^::: shadowsync\.[a-z_.]+\.(\w+)$", page, re.M)
    table = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("| seam |")[2].partition("\n\n")[0]
    assert {"load", "Model", "FailureTimes", *re.findall(r"`([A-Z]\w+)`", table)} == set(seams)


def test_the_keys_are_ten() -> None:
    assert len(re.findall(r"^\| `[a-z_.]+` \|", (DOCS / "keys.md").read_text("utf-8"), re.M)) == 10


def test_a_link_that_leads_nowhere_ends_the_build_of_the_site(tmp_path: Path) -> None:
    """By the command of `make site`: with --quiet mkdocs counts no warnings, and --strict does nothing."""
    pytest.importorskip("mkdocs", reason="needs mkdocs, of the extra docs")
    for name in ("docs", "examples", "src", "mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        place = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        place(ROOT / name, tmp_path / name)
    (command,) = re.findall(r"\$\(BIN\)/(mkdocs build .*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    words = [sys.executable, "-m", *shlex.split(command)]
    with (tmp_path / "docs" / "keys.md").open("a", encoding="utf-8") as page:
        page.write("\n[nowhere](nowhere.md)\n")
    broken = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert broken.returncode != 0
    assert "nowhere.md" in broken.stderr
