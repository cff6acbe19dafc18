"""`benchmarks/study.py`: it runs what is missing, writes tables in their places, and says which of them are old."""

import fcntl
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--report", action="store_true")
given = parser.parse_args()
kept = given.out / "runs.jsonl"
if given.report:
    print(f"machine\\n\\n{kept.read_text().count(chr(10))} runs")
elif not kept.exists():
    given.out.mkdir(parents=True, exist_ok=True)
    kept.write_text('{"cell": "a", "result": {}}\\n')
"""


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Of a repository with one experiment, which hangs on `code.py`."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.delitem(sys.modules, "study", raising=False)
    import study  # noqa: PLC0415

    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "code.py").write_text("")
    (tmp_path / "page.md").write_text("before\n<!-- study one -->\n<!-- end one -->\nafter\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    for name, value in {"HERE": tmp_path, "ROOT": tmp_path, "RECORDS": tmp_path / "records"}.items():
        monkeypatch.setattr(study, name, value)
    monkeypatch.setattr(study, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(study, "EXPERIMENTS", {"one": study.Experiment("script.py", depends=("code.py",))})
    monkeypatch.setattr(study, "commit", lambda: git(tmp_path, "rev-parse", "--short", "HEAD"))
    return study


def test_a_table_is_written_in_its_place_and_says_when_its_code_has_changed(study: ModuleType, tmp_path: Path) -> None:
    assert study.run("one", float("inf")) == 0
    assert study.run("one", float("inf")) == 0
    sessions = (tmp_path / "records" / "one" / "sessions.jsonl").read_text().splitlines()
    assert [json.loads(line)["runs"] for line in sessions] == [1], "the second time there was nothing to run"
    assert not list(study.stale())
    study.write()
    written = (tmp_path / "page.md").read_text()
    assert written.startswith("before\n<!-- study one -->\n`benchmarks/study.py run one` (")
    assert "```text\n1 runs\n```\n<!-- end one -->\nafter\n" in written
    assert "machine" not in written
    study.write()
    assert (tmp_path / "page.md").read_text() == written
    (tmp_path / "code.py").write_text("x = 1")
    git(tmp_path, "commit", "-qam", "second")
    assert [(name, len(changes)) for name, changes in study.stale()] == [("one", 1)]
    study.write()
    assert "**Older than the code** (changes since: 1)." in (tmp_path / "page.md").read_text()


def test_a_table_is_old_where_a_default_of_training_has_changed(study: ModuleType, tmp_path: Path) -> None:
    """Not where a key is new or gone, or is none of training."""
    page = tmp_path / "docs" / "configuration.md"
    page.parent.mkdir()
    page.write_text(
        "## train\n| `lr` | float | `0.03` | rate |\n| `old` | int | `1` | |\n## report\n| `a` | int | `1` | |\n"
    )
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "defaults")
    study.run("one", float("inf"))
    page.write_text(
        "## train\n| `lr` | float | `0.005` | rate |\n| `new` | int | `1` | |\n## report\n| `a` | int | `2` | |\n"
    )
    git(tmp_path, "commit", "-qam", "another rate")
    assert list(study.stale()) == [("one", ["train: lr is 0.005 by default, and was 0.03"])]


def test_a_table_that_somebody_vouches_for_is_not_old_and_says_why(study: ModuleType, tmp_path: Path) -> None:
    """Until the code changes again."""
    study.run("one", float("inf"))
    for number in (1, 2):
        (tmp_path / "code.py").write_text(f"x = {number}")
        git(tmp_path, "commit", "-qam", f"change {number}")
        assert [name for name, _ in study.stale()] == ["one"]
        study.vouch("one", f"nothing reads {number}")
        assert not list(study.stale())
    study.write()
    written = (tmp_path / "page.md").read_text()
    assert "in ways that move none of these figures: nothing reads 1.\n" in written
    changed = f"The code has changed since, up to {study.commit()}, in ways that move none of these figures"
    assert f"{changed}: nothing reads 2.\n" in written
    assert "Older" not in written
    with pytest.raises(SystemExit, match="one is not older than the code"):
        study.vouch("one", "to be sure")


def test_what_was_cut_or_is_no_record_is_left_out_and_not_written_into(study: ModuleType, tmp_path: Path) -> None:
    kept = study.Cells(tmp_path)
    kept.write("a", {"auc": 0.5})
    with (tmp_path / "runs.jsonl").open("ab") as file:
        file.write(b'null\n{}\n[1]\n\xff\xfe\n{"cell": "\xff", "result": {}}\n{"cell": "b", "resu')
    kept.write("c", {})
    assert kept.all() == [{"auc": 0.5}, {}]
    (tmp_path / "records" / "one").mkdir(parents=True)
    (tmp_path / "records" / "one" / "sessions.jsonl").write_text('{"commit": "a", "proce')
    with pytest.raises(SystemExit, match=r"sessions\.jsonl has a line that is no session: mend it, or take it out"):
        list(study.stale())


def test_of_two_at_once_one_is_refused(study: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "records" / "one").mkdir(parents=True)
    with (tmp_path / "records" / "one" / "sessions.jsonl").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert study.run("one", float("inf")) == 1
    assert "one is skipped: it is being run by another process" in capsys.readouterr().err
    assert study.run("one", float("inf")) == 0


def test_ctrl_c_ends_it_and_what_was_run_is_on_record(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(subprocess.Popen[bytes]):
        waited = False

        def wait(self, timeout: float | None = None) -> int:
            if not self.waited and "script.py" in str(self.args):
                super().wait()
                self.waited = True
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(study.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.run("one", float("inf"))
    assert [session.runs for session in study.sessions_of("one")] == [1]


def test_a_page_without_the_place_and_an_unknown_commit_are_said(study: ModuleType, tmp_path: Path) -> None:
    study.run("one", float("inf"))
    assert study.changed_since("0" * 8, ("code.py",)) == ["00000000 is not in this history"]
    (tmp_path / "page.md").write_text("nothing\n")
    with pytest.raises(SystemExit, match="there must be one place for one"):
        study.write()


def test_every_experiment_names_files_that_are_there(study: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "study", raising=False)
    import study as real  # noqa: PLC0415

    page = real.PAGE.read_text("utf-8")
    for name, experiment in real.EXPERIMENTS.items():
        assert (real.HERE / experiment.script).exists()
        assert all((real.ROOT / path).exists() for path in experiment.depends), name
        assert f"<!-- study {name} -->" in page
