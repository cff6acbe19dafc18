"""What a run's folder stores is not believed, and holds no secrets; nobody trains where somebody trains."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from command_line import CommandLine, assert_sentence, everything_in, train

from shadowsync.checkpoint.format import MANIFEST, decode, encode, raw_json
from shadowsync.places import as_stored, is_remote, redacted, unfollowed
from shadowsync.runs import only_writer

SECRET = "s3cr3t-value"


def forge(folder: Path, dotted: str, value: object) -> None:
    """Writes a value into the configuration that a run stores, in every place."""
    section, _, key = dotted.partition(".")
    path = folder / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    stored[section] = {**stored.get(section, {}), key: value} if key else value
    path.write_text(yaml.safe_dump(stored))
    for manifest in folder.glob(f"checkpoints/*/{MANIFEST}"):
        read = decode(manifest.read_bytes(), "")
        manifest.write_bytes(encode(msgspec.structs.replace(read, config=raw_json("configuration", stored))))


def test_a_stored_configuration_is_not_looked_up_in_the_environment(
    trained: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "train")
    forge(trained.folder / "out", "data.path", "${oc.env:TOKEN}.parquet")
    resume = ("train", "--resume", "out", "data.epochs=2")
    assert_sentence(trained(*resume), 2, ["out", "not followed", "data.path"])
    assert trained(*resume, "data.path=${oc.env:TOKEN}.parquet").status == 0
    forge(trained.folder / "out", "data.test_path", "${oc.env:TOKEN}.parquet")
    assert_sentence(trained("evaluate", "out"), 2, ["data.test_path", "not followed", "--data"])
    assert trained("evaluate", "out", "--data", "test.parquet").status == 0


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("https://127.0.0.1:9/rows.parquet", "https://127.0.0.1:9/rows.parquet"),
        ("reference::./spec.json", "…"),
        ("simplecache::https://127.0.0.1:9/rows.parquet", "…"),
        ("file://x::memory://y", "…"),
    ],
)
def test_stored_urls_are_not_opened(trained: CommandLine, place: str, shown: str) -> None:
    for key in ("data.path", "data.test_path"):
        forge(trained.folder / "out", key, place)
    resumed = trained("train", "--resume", "out", "data.epochs=2")
    assert_sentence(resumed, 2, ["not followed", f"data.path={shown}", f"data.test_path={shown}"])
    assert_sentence(trained("evaluate", "out"), 2, ["data.test_path", f"--data={shown}"])


def test_a_stored_place_for_checkpoints_is_written_to_only_if_the_user_names_it(shadowsync: CommandLine) -> None:
    elsewhere = shadowsync.folder / "elsewhere"
    assert shadowsync(*train(f"train.checkpoint_dir={elsewhere}")).status == 0
    before = everything_in(shadowsync.folder)
    resume = ("train", "--resume", "out", "data.epochs=2")
    confirmed = f"train.checkpoint_dir={elsewhere}"
    assert_sentence(shadowsync(*resume), 2, ["out", "not followed", f"add {confirmed}"])
    assert everything_in(shadowsync.folder) == before
    assert shadowsync("evaluate", "out").status == 0  # files of this machine are read
    assert shadowsync(*resume, confirmed).status == 0
    assert not (shadowsync.folder / "out" / "checkpoints").exists()
    assert shadowsync("train", "--resume", "out", "data.epochs=3", "--out", "other").status == 0
    assert (shadowsync.folder / "other" / "checkpoints").is_dir()  # never where the folder of another run says


def test_checkpoints_on_another_machine_are_where_the_user_says(shadowsync: CommandLine) -> None:
    place = f"memory://{os.getpid()}-{id(shadowsync)}"
    assert shadowsync(*train(f"train.checkpoint_dir={place}")).status == 0
    assert_sentence(shadowsync("evaluate", "out"), 2, [place, "not followed", "--checkpoints"])
    assert_sentence(shadowsync("evaluate", "out", "--checkpoints", "memory://other"), 2, ["memory://other"])
    assert shadowsync("evaluate", "out", "--checkpoints", place).status == 0
    assert_sentence(shadowsync("train", "--resume", "out", "data.epochs=2"), 2, [f"add train.checkpoint_dir={place}"])
    assert_sentence(shadowsync("train", "--from", "out"), 2, ["for --from copy them to out/checkpoints"])
    assert shadowsync("train", "--resume", "out", "data.epochs=2", f"train.checkpoint_dir={place}").status == 0


def test_a_stored_cluster_is_not_joined(trained: CommandLine) -> None:
    forge(trained.folder / "out", "cluster", {"runtime": "ray", "address": "127.0.0.1:9"})
    said = trained("train", "--resume", "out", "data.epochs=2")
    assert_sentence(said, 2, ["not followed", "cluster.address=127.0.0.1:9"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train", None),
        ("train", [1]),
        ("train.checkpoint_dir", 5),
        ("train.checkpoint_dir", ["a"]),
        ("data", None),
        ("model", [1]),
        ("embedding", "x"),
        ("cluster", None),
        ("aggregation", 3),
        ("compression", [1]),
    ],
)
def test_wrong_types_in_a_stored_configuration(trained: CommandLine, key: str, value: object) -> None:
    forge(trained.folder / "out", key, value)
    for command in (("train", "--resume", "out", "data.epochs=2"), ("evaluate", "out")):
        assert_sentence(trained(*command), 2, [key.partition(".")[0]])


def test_a_train_section_of_nothing_in_config_yaml_alone_names_no_place(trained: CommandLine) -> None:
    (trained.folder / "out" / "config.yaml").write_text("train: null\n")
    assert trained("evaluate", "out").status == 0


def test_aliases_in_a_stored_configuration_do_not_fill_the_memory(trained: CommandLine) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (trained.folder / "out" / "config.yaml").write_text("\n".join(lines) + "\n")
    assert trained("evaluate", "out").status == 0


def test_secrets_are_in_no_file_of_a_run(shadowsync: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    hidden = shadowsync.folder / SECRET
    hidden.mkdir()
    shutil.copy(shadowsync.folder / "train.parquet", hidden / "rows.parquet")
    settings = ("data.path=${oc.env:SECRET}/rows.parquet", "report.html=true")
    place = f"memory://user:{SECRET}@host/{os.getpid()}?token={SECRET}"
    assert shadowsync(*train(*settings, f"train.checkpoint_dir={place}")).status == 0
    assert shadowsync(*train(*settings), "--out", "here").status == 0
    for folder in ("out", "here"):
        for path in (shadowsync.folder / folder).rglob("*"):
            assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
        result = json.loads((shadowsync.folder / folder / "result.json").read_text())
        assert result["config"]["data"]["path"] == "${oc.env:SECRET}/rows.parquet"
    assert_sentence(shadowsync("train", "--resume", "here", "data.epochs=2"), 2, ["data.path=…", "configuration file"])
    assert shadowsync("train", "run.yaml", settings[0], "--resume", "here", "data.epochs=2").status == 0
    stored = (shadowsync.folder / "here" / "config.yaml").read_text()
    assert SECRET not in stored
    assert "${oc.env:SECRET}/rows.parquet" in stored


@pytest.mark.parametrize(
    ("url", "stored"),
    [
        ("/data/day_?.parquet", "/data/day_?.parquet"),
        ("s3://bucket/day_?.parquet", "s3://bucket/day_?.parquet"),
        ("s3://key:pass@bucket/x", "s3://***@bucket/x"),
        ("s3://key:pa@ss@bucket/x", "s3://***@bucket/x"),
        ("https://token@host/x?version=1&sig=abc", "https://***@host/x?***"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("simplecache::https://u:p@host/x?sig=a/b", "simplecache::https://***@host/x?***"),
        ("https://u:p/w@host/x", "https://***@host/x"),
        ("https://u:p?w@host/x", "https://***?***"),
        ("HTTPS://token@host/x", "HTTPS://***@host/x"),
        ("https://host:8080/a@b/c", "https://host:8080/a@b/c"),
        ("https://host/x?TOKEN", "https://host/x?***"),
        ("https://host/x#access_token=abc", "https://host/x#***"),
        ("https://host/get?file/a.csv&token=abc", "https://host/get?***"),
        ("s3://bucket/a@b#1", "s3://bucket/a@b#1"),
        ("zip://a.csv::https://u:p@host/x.zip?sig=a::file://y", "zip://a.csv::https://***@host/x.zip?***::file://y"),
    ],
)
def test_credentials_of_urls(url: str, stored: str) -> None:
    assert redacted(url) == stored
    assert redacted(stored) == stored
    assert as_stored({"data": {"path": [url]}}, {}) == {"data": {"path": [stored]}}


def test_what_leads_to_another_machine(tmp_path: Path) -> None:
    assert not any(map(is_remote, ("rows.parquet", "/a/b", "file:///a", "local://a")))
    assert all(map(is_remote, ("s3://a", "reference::a", "file://a::b", "HTTPS://a", "data:,x")))
    stored = {"data": {"label": "a::b", "path": "x", "other": "http://x"}, "cluster": {"address": "auto"}}
    assert unfollowed(stored, tmp_path) == {"data.other": "http://x"}
    assert unfollowed({"train": {"checkpoint_dir": str(tmp_path / "in")}}, tmp_path) == {}
    assert unfollowed({"train": {"checkpoint_dir": str(tmp_path / ".." / "x")}}, tmp_path) != {}


HOLDER = "import sys\nfrom pathlib import Path\nfrom shadowsync.runs import only_writer\n"
HOLDER += "with only_writer(Path(sys.argv[1])):\n    print(flush=True)\n    sys.stdin.read()\n"


def test_a_folder_in_which_somebody_trains_is_left_alone(trained: CommandLine) -> None:
    out = trained.folder / "out"
    commands = {"report": ("report", "out"), "resume": ("train", "--resume", "out", "data.epochs=2"), "train": train()}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"\n"
            before = everything_in(trained.folder)
            named = ["out is in use", f"process {holder.pid} on {socket.gethostname()}"]
            for command in commands.values():
                assert_sentence(trained(*command), 2, named)
                assert everything_in(trained.folder) == before
        finally:
            holder.kill()
    left = (out / ".in-use").read_bytes()
    for name, command in commands.items():
        if name == "train":
            shutil.rmtree(out)
            out.mkdir()
        (out / ".in-use").write_bytes(left)
        assert trained(*command).status == 0, "the lock is gone with its holder, and its file is not in the way"
        assert not list(out.glob(".in-use"))


def test_a_job_may_keep_its_checkpoints_in_its_own_folder(shadowsync: CommandLine) -> None:
    assert shadowsync(*train(f"train.checkpoint_dir={shadowsync.folder / 'out'}")).status == 0


@pytest.mark.parametrize("place", ["shared", "local://{}/shared"])
def test_two_runs_do_not_share_a_place_for_checkpoints(shadowsync: CommandLine, place: str) -> None:
    named, setting = ["shared is in use", f"process {os.getpid()}"], place.format(shadowsync.folder)
    with only_writer(shadowsync.folder / "shared"):
        assert_sentence(shadowsync(*train(f"train.checkpoint_dir={setting}")), 2, named)
    assert not (shadowsync.folder / "out").exists()
    assert shadowsync(*train(f"train.checkpoint_dir={setting}")).status == 0
    with only_writer(shadowsync.folder / "shared"):
        assert_sentence(shadowsync("train", "--resume", "out", f"train.checkpoint_dir={setting}"), 2, named)


def test_nothing_is_written_through_a_link_in_the_place_of_a_lock(trained: CommandLine) -> None:
    victim = trained.folder / "victim"
    victim.write_text("precious")
    (trained.folder / "out" / ".in-use").symlink_to(victim)
    for command in (("report", "out"), ("train", "--resume", "out", "data.epochs=2")):
        assert_sentence(trained(*command), 2, [".in-use is no file of a run: remove it"])
    assert victim.read_text() == "precious"


def test_checkpoints_are_read_where_the_user_says(trained: CommandLine) -> None:
    moved = trained.folder / "moved"
    (trained.folder / "out" / "checkpoints").rename(moved)
    assert trained("evaluate", "out", "--checkpoints", str(moved)).status == 0
    assert_sentence(trained("evaluate", "out", "--checkpoints", "nowhere"), 2, ["nowhere"])
    assert trained("train", "--resume", "out", "data.epochs=2", f"train.checkpoint_dir={moved}").status == 0


def test_a_stored_port_is_opened_on_loopback_only(trained: CommandLine) -> None:
    forge(trained.folder / "out", "report", {"prometheus_host": "203.0.113.1", "prometheus_port": 0})
    assert trained("train", "--resume", "out", "data.epochs=2").status == 0


def test_a_folder_that_was_made_for_nothing_goes_away(tmp_path: Path) -> None:
    with only_writer(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with only_writer(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "kept").touch()
    assert everything_in(tmp_path) == {"a", "a/b", "a/b/kept"}


CODE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(13, 1)
    def forward(self, dense, embeddings):
        return self.out(torch.cat([dense, *embeddings.values()], dim=1)).squeeze(1)
"""


def test_code_that_a_run_names_is_named_again_before_it_is_run(shadowsync: CommandLine) -> None:
    (shadowsync.folder / "net_of_mine.py").write_text(CODE)
    (shadowsync.folder / "run.yaml").write_text(
        (shadowsync.folder / "run.yaml")
        .read_text()
        .replace("model:\n  embedding_dim: 4\n  bottom:\n  - 8\n  top:\n  - 8", "")
    )
    named = "model.name=net_of_mine:Net"
    assert shadowsync("train", "run.yaml", named, "model.embedding_dim=4", "--out", "out").status == 0
    for again in (("--resume", "out", "data.epochs=2"), ("--from", "out", "--out", "next")):
        assert_sentence(shadowsync("train", *again), 2, ["not followed (model.name)", f"add {named}"])
        assert shadowsync("train", *again, named).status == 0
    assert_sentence(shadowsync("evaluate", "out"), 2, ["out trained a module of your own", "--model net_of_mine:Net"])
    assert shadowsync("evaluate", "out", "--model", "net_of_mine:Net").status == 0
    for key, empty, value, flow in (
        ("report.callbacks", [], ["net_of_mine:Net"], "[net_of_mine:Net]"),
        ("train.measures", [], ["pr_auc", "net_of_mine:Net(c0)"], "[pr_auc, net_of_mine:Net(c0)]"),
        ("data.labels", {}, {"label": {"loss": "net_of_mine:Net"}}, "{label: {loss: net_of_mine:Net}}"),
    ):
        forge(shadowsync.folder / "out", key, value)
        resumed = shadowsync("train", "--resume", "out", "data.epochs=3", named)
        assert_sentence(resumed, 2, [f"not followed ({key})", f"add '{key}={flow}'"])
        forge(shadowsync.folder / "out", key, empty)
