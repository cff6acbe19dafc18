"""Every command from end to end on small data."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import polars as pl
import pytest
import torch
from command_line import CommandLine, assert_sentence
from omegaconf import OmegaConf

from shadowsync.config import Config


def test_train_says_where_the_results_are(shadowsync: CommandLine) -> None:
    said = shadowsync("train", "run.yaml", "train.trainers=1", "--out", "out")
    assert (said.status, said.err) == (0, "")
    assert said.out.startswith("parquet: 1 trainer(s)")
    assert "test AUC" in said.out
    assert said.out.splitlines()[-1] == "result: out/result.json"
    assert {path.name for path in Path("out").iterdir()} == {
        "checkpoints",
        "config.yaml",
        "events.jsonl",
        "metrics.jsonl",
        "result.json",
    }


def test_a_job_of_hardly_any_steps_says_so_once(shadowsync: CommandLine) -> None:
    said = shadowsync("train", "run.yaml", "train.batch_size=1000000", "train.warmup_samples=60", "--out", "short")
    assert said.status == 0
    assert said.out.count("the job makes only 1 step(s) of each replica") == 1
    assert said.out.count("train.warmup_samples=60 is not less than the 60 samples of the job") == 1
    assert "the job makes only" not in shadowsync("train", "run.yaml", "data.epochs=6", "--out", "long").out


def test_the_report_is_named_where_there_is_one(shadowsync: CommandLine) -> None:
    said = shadowsync("train", "run.yaml", "report.html=true", "report.tensorboard=true", "--out", "out")
    assert said.out.splitlines()[-1] == "report: out/report.html"
    assert "<html" in Path("out/report.html").read_text()
    assert any(Path("out/tensorboard").iterdir())


def test_overrides_lie_over_the_file_in_any_order(shadowsync: CommandLine) -> None:
    assert shadowsync("train", "data.epochs=2", "run.yaml", "sync.method=ma", "--out", "out").status == 0
    result = json.loads(Path("out/result.json").read_text())
    assert result["data"]["trained_samples"] == 120
    assert (result["config"]["sync"]["method"], result["config"]["train"]["batch_size"]) == ("ma", 8)


def test_without_a_place_a_new_folder_in_runs_is_taken(shadowsync: CommandLine) -> None:
    for count in (1, 2):
        assert shadowsync("train", "run.yaml").status == 0
        assert len(list(Path("runs").glob("*/result.json"))) == count


def test_resume_goes_on_with_what_was_changed(shadowsync: CommandLine) -> None:
    assert shadowsync("train", "run.yaml", "sync.method=easgd", "sync.form=sequential", "--out", "out").status == 0
    said = shadowsync("train", "--resume", "out", "data.epochs=3", "train.trainers=3", "sync.method=bmuf")
    assert (said.status, said.err) == (0, "")
    result = json.loads(Path("out/result.json").read_text())
    assert result["data"]["trained_samples"] == 180
    assert (result["sync"]["method"], result["config"]["train"]["trainers"]) == ("bmuf", 3)
    assert shadowsync("train", "--resume", "out").status == 0
    again = json.loads(Path("out/result.json").read_text())
    assert again["data"]["trained_samples"] == 180
    assert (again["sync"]["method"], again["test"]) == ("bmuf", result["test"])


def test_resume_goes_from_a_gradient_method_back_to_replicas(shadowsync: CommandLine) -> None:
    assert shadowsync("train", "run.yaml", "aggregation.method=gba", "--out", "out").status == 0
    back = ("train", "--resume", "out", "sync.method=ma", "data.epochs=2")
    said = shadowsync(*back)
    assert (said.status, "set aggregation.method=null" in said.err) == (2, True)
    said = shadowsync(*back, "aggregation.method=null")
    assert (said.status, said.err) == (0, "")
    result = json.loads(Path("out/result.json").read_text())
    assert (result["data"]["trained_samples"], result["sync"]["method"]) == (120, "ma")


def test_the_module_is_the_command(shadowsync: CommandLine) -> None:
    run = [sys.executable, "-m", "shadowsync.cli", "train", "no.yaml"]
    said = subprocess.run(run, capture_output=True, text=True, check=False, cwd=shadowsync.folder, timeout=120)
    assert (said.returncode, said.stderr.startswith("shadowsync: no.yaml")) == (2, True)


def test_what_a_trained_model_is_good_for(trained: CommandLine) -> None:
    result = json.loads(Path("out/result.json").read_text())
    said = trained("evaluate", "out")
    assert (said.status, said.err) == (0, "")
    assert f"{result['test']['auc']:.4f}" in said.out
    assert trained("evaluate", "out", "--data", "train.parquet").status == 0
    said = trained("predict", "out", "--data", "train.parquet", "--out", "p.parquet")
    assert (said.status, said.out) == (0, "60 predictions written to p.parquet\n")
    assert pl.read_parquet("p.parquet").height == 60
    said = trained("predict", "out", "--data", "train.parquet", "--out", "p.csv", "--keep", "item", "--keep", "shop")
    assert (said.status, said.out) == (0, "60 predictions written to p.csv\n")
    assert Path("p.csv").read_text().startswith("item,shop,probability,logit\n")
    pl.read_parquet("train.parquet").with_columns(pl.col("price") * 1e9).write_parquet("large.parquet")
    said = trained("evaluate", "out", "--data", "large.parquet")
    assert (said.status, said.err) == (0, "")
    assert said.out.splitlines()[-1].startswith("dense columns with numbers beyond ±10,000")
    said = trained("predict", "out", "--data", "large.parquet", "--out", "p.csv")
    assert (said.status, said.out) == (0, "60 predictions written to p.csv\n")
    assert said.err.startswith("dense columns with numbers beyond ±10,000")
    for command in (("evaluate", "out"), ("predict", "out", "--out", "p.csv")):
        assert_sentence(trained(*command, "--data", ""), 2, ["--data is empty: give the path of the rows"])
    assert trained("export", "out", "--out", "model.pt2").status == 0
    assert callable(torch.export.load("model.pt2").module())


def test_reports_are_made_again_and_compared(trained: CommandLine) -> None:
    shutil.copytree("out", "two")
    assert trained("report", "out").out == "report: out/report.html\n"
    said = trained("report", "out", "two")
    assert said.status == 0
    assert "out" in said.out
    assert "two" in said.out
    assert said.out.splitlines()[-1] == "comparison: comparison.html"
    assert trained("report", "out", "two", "--out", "pages.html").out.splitlines()[-1] == "comparison: pages.html"
    assert Path("pages.html").read_text() == Path("comparison.html").read_text()
    assert trained("report", "out", "--out", "page.html").out == "report: page.html\n"
    assert Path("page.html").read_text() == Path("out/report.html").read_text()
    said = trained("report", "out", "two", "--out", "none/page.html")
    assert (said.status, said.err) == (1, "shadowsync: none/page.html: cannot be written: No such file or directory\n")


def test_data_of_a_log_is_written_with_the_lines_that_read_it(shadowsync: CommandLine) -> None:
    said = shadowsync("data", "criteo", "--out", "written.parquet", "data.path=log.tsv.gz", "data.hash_size=50")
    assert (said.status, said.err) == (0, "")
    Path("written.yaml").write_text(said.out)
    for config, out in (("written.yaml", "out"), ("criteo.yaml", "log")):
        assert shadowsync("train", config, "model.embedding_dim=4", "--out", out).status == 0
        assert json.loads(Path(out, "result.json").read_text())["data"]["trained_samples"] == 20


def test_rows_of_all_parts_may_be_written_to_a_place_with_any_name(shadowsync: CommandLine) -> None:
    own = ("data.rows=200", "data.test_rows=50", "data.valid.fraction=0.2")
    said = shadowsync("data", "synthetic", *own, "--out", "it's: #1/a {b}.parquet")
    assert (said.status, said.err) == (0, "")
    section = OmegaConf.create(said.out).data
    assert section.path == "it's: #1/a {b}.parquet"
    assert section.test_path == "it's: #1/a {b}.test.parquet"
    assert section.valid.path == "it's: #1/a {b}.valid.parquet"
    assert all(Path(place).is_file() for place in (section.path, section.test_path, section.valid.path))


def test_rows_are_written_whatever_module_the_configuration_names(shadowsync: CommandLine) -> None:
    said = shadowsync("data", "synthetic", "data.rows=50", "model.name=torch.nn:Linear", "--out", "rows.parquet")
    assert said.status == 0, said.err
    assert (shadowsync.folder / "rows.parquet").exists()


def test_help_says_what_a_command_does(shadowsync: CommandLine) -> None:
    for command in ("", "train", "evaluate", "predict", "export", "report", "data"):
        said = shadowsync(*([command] if command else []), "--help")
        assert (said.status, said.err) == (0, "")
        assert "Usage" in said.out
    assert "recovery" in shadowsync("plan", "--help").out


def test_the_version_is_said(shadowsync: CommandLine) -> None:
    said = shadowsync("--version")
    assert (said.status, said.out, said.err) == (0, f"shadowsync {version('shadowsync')}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_given_its_completion(shadowsync: CommandLine, shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--install-completion" in shadowsync("--help").out
    monkeypatch.setenv("_SHADOWSYNC_COMPLETE", f"source_{shell}")
    assert "_SHADOWSYNC_COMPLETE" in shadowsync().out


def test_the_help_of_train_names_every_section_and_where_the_keys_are(shadowsync: CommandLine) -> None:
    said = " ".join(shadowsync("train", "--help").out.split())
    assert "docs/configuration.md" in said
    for section in Config.model_fields:
        assert f" {section} (" in said, section


def test_rows_that_changed_since_a_checkpoint_are_exported(shadowsync: CommandLine) -> None:
    assert shadowsync("train", "run.yaml", "train.keep=9", "--out", "out").status == 0
    (since,) = (path.name for path in Path("out/checkpoints").iterdir())
    assert shadowsync("train", "--resume", "out", "data.epochs=2").status == 0
    said = shadowsync("export", "out", "--since", since, "--out", "changes")
    listed = json.loads(Path("changes/delta.json").read_text())
    assert (said.status, listed["since"]) == (0, since)
    changed = sum(table["changed"] for table in listed["tables"])
    assert said.out == f"{changed} rows that changed from {since} to {listed['until']} are in changes\n"
    assert 0 < changed <= sum(table["rows"] for table in listed["tables"])
    wrong = shadowsync("export", "out", "--since", "samples-000000000001", "--out", "other")
    assert wrong.status == 2
    assert "is not a checkpoint" in wrong.err
    assert not Path("other").exists()


def test_models_and_methods_are_listed_a_line_each(shadowsync: CommandLine) -> None:
    for command, names in (("models", ("dlrm", "dcn")), ("methods", ("easgd", "background", "gba"))):
        lines = shadowsync(command).out.splitlines()
        for name in names:
            assert [line for line in lines if line.split(" ")[0].endswith(f"={name}")], name


def test_options_say_what_can_be_set_at_a_path(shadowsync: CommandLine) -> None:
    everything = shadowsync("options").out
    for path, named, not_named in (
        ("train", ("batch_size", "learning rate"), "dense_servers"),
        ("train.lr", ("0.005",), "batch_size"),
        ("model.name=dcn", ("low_rank",), "bottom"),
        ("model.low_rank", ("model.name=dcn",), "structure"),
    ):
        said = shadowsync("options", path)
        assert (said.status, said.err) == (0, "")
        assert all(word in said.out for word in named)
        assert not_named not in said.out
        assert not_named in everything


def test_an_unknown_path_of_options_is_a_sentence(shadowsync: CommandLine) -> None:
    assert_sentence(shadowsync("options", "trian.lr"), 2, ["trian.lr", "did you mean train.lr?"])
    assert_sentence(shadowsync("options", "model.name=dlmr"), 2, ["did you mean model.name=dlrm?"])


def test_a_run_begins_with_another_one(trained: CommandLine) -> None:
    said = trained("train", "--from", "out", "data.path=test.parquet", "--out", "tuesday")
    assert (said.status, said.err) == (0, "")
    assert "begins with samples-000000000060 of out, at the first of its own rows" in said.out
    assert re.search(r"table item +50 x 4 +50 x 4 +50 rows", said.out)
    assert json.loads(Path("tuesday/result.json").read_text())["data"]["trained_samples"] == 30
    assert trained("train", "--resume", "tuesday", "data.epochs=2").status == 0
    assert_sentence(trained("train", "--from", "out", "--resume", "out"), 2, ["--resume", "--from", "one of them"])
    assert_sentence(trained("train", "--from", "out", "--out", "out"), 2, ["out holds a run already"])
    assert_sentence(trained("train", "--from", "nothing"), 2, ["nothing: there is no such folder"])
