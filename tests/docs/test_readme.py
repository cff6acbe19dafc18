"""What the documentation shows works: code, configurations, commands and the drawing."""

import importlib
import re
import runpy
import shlex
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from omegaconf import OmegaConf
from typer.testing import CliRunner

import shadowsync.sync
from shadowsync import Job
from shadowsync.choices import choose_all
from shadowsync.cli import app
from shadowsync.config import parse
from shadowsync.models.model import ModelSpec
from shadowsync.registry import members
from shadowsync.report.result import read_result
from shadowsync.sync.method import SyncMethod

ROOT = Path(__file__).parents[2]
COMMANDS = ROOT / "docs/commands.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^    (shadowsync .*)$", re.MULTILINE)


def blocks(language: str, *pages: Path) -> list[str]:
    return [text for page in pages for kind, text in _FENCE.findall(page.read_text("utf-8")) if kind == language]


def commands(*pages: Path) -> list[str]:
    return [line for page in pages for line in _COMMAND.findall(page.read_text("utf-8"))]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_first_python_of_the_readme_prints_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    own_config, _ = blocks("python", ROOT / "README.md")
    assert len([line for line in own_config.splitlines() if line]) <= 12
    exec(compile(own_config, "README.md", "exec"), {})
    auc = re.fullmatch(r"AUC (0\.\d{4}), [\d,]+ examples/s, sync gap \d+\.\d\n", capsys.readouterr().out)
    assert float(auc[1]) > 0.6
    assert all(
        (Path("runs/bmuf") / name).exists()
        for name in ("result.json", "metrics.jsonl", "config.yaml", "report.html", "checkpoints", "tensorboard")
    )


@pytest.mark.parametrize(("page", "place", "auc"), [("README.md", 1, 0.66), ("docs/models.md", 0, 0.68)])
def test_the_modules_shown_train(page: str, place: int, auc: float, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python", ROOT / page)[place], page, "exec"), {})
    assert float(capsys.readouterr().out) > auc


def test_the_readmes_commands_train_a_csv_as_it_lies() -> None:
    draw = np.random.default_rng(0)
    item = draw.integers(0, 20, 20_000)
    clicked = (draw.random(20_000) < item / 20).astype(int)
    clicks = {"clicked": clicked, "item": [f"i{i}" for i in item], "price": draw.random(20_000)}
    pl.DataFrame(clicks).write_csv("clicks.csv")
    lines = commands(ROOT / "README.md")
    assert len(lines) == 3
    for line in lines:
        run(line)
    assert (read_result(Path("runs/first")).test.auc or 0) > 0.7
    assert len(pl.read_csv("predictions.csv")) == 20_000


@pytest.mark.parametrize("text", blocks("yaml", *PAGES))
def test_every_configuration_shown_is_accepted(text: str) -> None:
    values: Any = OmegaConf.to_container(OmegaConf.create(text))
    choose_all(parse(values), own_model=False)


@pytest.mark.parametrize("name", ["criteo", "parquet"])
def test_the_data_page_shows_the_data_section_of_the_example(name: str) -> None:
    example = (ROOT / f"examples/{name}.yaml").read_text("utf-8")
    section = example[example.index("data:\n") : example.index("train:\n")].split("\nmodel:")[0].rstrip("\n")
    assert section in (ROOT / "docs/data.md").read_text("utf-8")


def test_the_commands_shown_run_in_their_order_in_an_empty_folder() -> None:
    lines = commands(COMMANDS)
    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.name for group in app.registered_groups}
    others = {"models", "methods", "show_options"}  # which list what there is, without a file
    others.add("drain")  # which needs a run on several machines
    assert {line.split()[1] for line in lines} - groups == known - others
    for line in lines:
        run(line)
    assert pl.read_csv("predictions.csv").columns == ["label", "probability", "logit"]
    assert len(pl.read_csv("predictions.csv")) == 5000
    assert Path("comparison.html").is_file()
    trained = [read_result(Path(f"runs/{name}")).data.trained_samples for name in ("easgd", "ma", "ma8")]
    assert trained == [20_000, 20_000, 40_000]


def run(line: str) -> None:
    command, _, file = line.partition(" > ")
    done = CliRunner().invoke(app, shlex.split(command, comments=True)[1:], catch_exceptions=False)
    assert done.exit_code == 0, line
    if file:
        Path(file).write_text(done.stdout, "utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_named_in_the_text_exist(page: Path) -> None:
    reference = runpy.run_path(str(ROOT / "docs/make_configuration.py"))["reference"]()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", reference, re.M | re.S))
    names = "|".join(sections)
    for section, key in re.findall(rf"`(?:[^`\n]* )?({names})\.([a-z_]+)(?:=[^`\n]*)?`", page.read_text("utf-8")):
        assert f"`{key}`" in sections[section], f"{page.name} names {section}.{key}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_the_text_exist(page: Path) -> None:
    for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|md|yaml))`", page.read_text("utf-8")):
        places = (ROOT / name, ROOT / "src/shadowsync" / name)
        assert name == FEDADAM_FILE or any(place.exists() for place in places), f"{page.name} names {name}"


def test_the_map_has_every_folder_of_the_package() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for package in (ROOT / "src/shadowsync").glob("*/__init__.py"):
        assert f"`{package.parent.name}/`" in page
    (line,) = re.findall(r"^\| `models/` \|.*$", page, re.M)
    assert set(members("shadowsync.models", ModelSpec)) <= set(re.findall(r"\w+", line))


def test_the_make_targets_that_are_described_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\bmake ([a-z]+)\b", page.read_text("utf-8")):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name} names make {target}"


def test_the_drawing_is_sound() -> None:
    drawing = ET.parse(ROOT / "docs/img/how-it-works.svg").getroot()
    width, height = (float(edge) for edge in drawing.attrib["viewBox"].split()[2:])
    assert drawing.find("{*}title") is not None
    for element in drawing.iter():
        assert not any("href" in key for key in element.attrib), "it must load nothing"
        if element.tag.endswith("}rect"):
            x, y, w, h = (float(element.attrib[key]) for key in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= width
            assert 0 <= y <= y + h <= height


# --- the method of CONTRIBUTING --------------------------------------------------------------------------------------

FEDADAM_FILE = "src/shadowsync/sync/fedadam.py"


@pytest.fixture
def new_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SyncMethod]]:
    (code,) = blocks("python", ROOT / "CONTRIBUTING.md")
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "fedadam.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(shadowsync.sync, "__path__", [*shadowsync.sync.__path__, str(folder)])
    importlib.invalidate_caches()
    yield members("shadowsync.sync", SyncMethod)["fedadam"]
    del sys.modules["shadowsync.sync.fedadam"]


def test_the_new_method_trains_and_resumes(new_method: Callable[..., SyncMethod]) -> None:
    data = {"name": "synthetic", "rows": 4000, "test_rows": 500, "features": 3, "table_rows": 100, "dense": 4}
    sync = {"method": "fedadam", "schedule": "every_k", "k": 5, "eta": 0.003}
    model = {"bottom": [16], "top": [16]}
    train = {"trainers": 2, "batch_size": 100}
    report = {"html": False, "tensorboard": False}
    config: dict[str, Any] = {"data": data, "sync": sync, "model": model, "train": train, "report": report}
    first = Job(config, out="first").run()
    assert first.sync.method == "fedadam"
    assert first.sync.count >= 6
    again = Job(config | {"data": data | {"epochs": 2}}, resume="first", out="second").run()
    assert again.data.trained_samples == 8000
    assert again.config["sync"]["tau"] == 1e-3


def test_the_new_method_follows_a_constant_difference(new_method: Callable[..., SyncMethod]) -> None:
    class Group:
        def mean(self, weights: torch.Tensor) -> torch.Tensor:
            return weights

    method = new_method(eta=0.5, tau=1e-12)
    weights = torch.tensor([1.0, -2.0])
    state = method.init(torch.zeros(2))
    after = method.sync(weights, Group(), state)  # type: ignore[arg-type]
    assert torch.allclose(weights, torch.tensor([0.5, -0.5]))  # m / √v = 0.1 Δ / √(0.01 Δ²) = ±1
    assert torch.equal(after["global"], weights)
