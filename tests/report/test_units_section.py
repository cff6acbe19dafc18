"""A network that dies is told of: a card, notices and a warning where it is bad, and silence where it is well."""

import io
import json
import math
from pathlib import Path

import pytest
from fake_runs import make_frames, make_result, page_of
from rich.console import Console

from shadowsync.config import ReportConfig
from shadowsync.metrics.quality import Peak
from shadowsync.metrics.units import Units
from shadowsync.report.measures import key_numbers
from shadowsync.report.page import render_page
from shadowsync.report.reporter import Reporter
from shadowsync.report.result import Result, TrainSection, read_result, warnings

WELL = Units(rows=40_960, sizes={"bottom.1": 512, "top.1": 4}, dead={"bottom.1": 3 / 512, "top.1": 0.5})
DYING = Units(
    rows=40_960,
    sizes={"bottom.1": 512, "bottom.3": 256, "bottom.7": 16},
    dead={"bottom.1": 0.25, "bottom.3": 158 / 256, "bottom.7": 1.0},
)
ASTRAY = TrainSection(ne_window=0.6, ne_lifetime=0.7, peak=Peak(ne=2.5, logloss=1.25, samples=10_000, end=20_000))
CONFIG = {"train": {"lr": 0.03, "warmup_samples": 7_500}}
DO = "lower train.lr (it is 0.03) or raise train.warmup_samples (7500)"
DEAD = (
    "dead units: 158 of 256 of bottom.3, 16 of 16 of bottom.7 were 0 on all 40,960 test rows looked at, and nothing of "
    f"what lies in front of bottom.7 gets through: {DO}"
)
WENT_ASTRAY = (
    "training went astray: the log loss of samples 10,001 to 20,000 was 1.25 (NE 2.50), and always guessing 0.5 gives "
    f"0.69: {DO}"
)


def shown(result: Result, folder: Path) -> str:
    console = Console(file=io.StringIO(), width=80)
    with Reporter(folder, console, ReportConfig(tensorboard=False)) as reporter:
        reporter.finish(result)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_network_that_lives_is_shown_without_a_warning(tmp_path: Path) -> None:
    result = make_result(config=CONFIG, units=WELL)
    assert list(warnings(result)) == []
    assert "warning" not in shown(result, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "bottom.1: 3 of 512" in page
    assert "top.1: 2 of 4" in page
    assert "Warning" not in page
    assert "Dead unit" in page
    assert read_result(tmp_path).units == WELL


def test_a_dead_network_is_warned_of_in_the_terminal_and_on_the_page(tmp_path: Path) -> None:
    result = make_result(config=CONFIG, units=DYING, train=ASTRAY)
    assert list(warnings(result)) == [DEAD, WENT_ASTRAY]
    text = shown(result, tmp_path)
    assert f"warning: {DEAD}\n" in text
    assert f"warning: {WENT_ASTRAY}\n" in text
    page = (tmp_path / "report.html").read_text()
    assert f"Warning: {DEAD}." in page
    assert f"Warning: {WENT_ASTRAY}." in page
    rows = {row.name: row.value for row in key_numbers(result)}
    assert rows["dead in bottom.3"] == "158 of 256"
    assert rows["dead in bottom.7"] == "16 of 16"
    assert "dead in bottom.1" not in rows
    assert rows["training NE, worst"] == "2.5000"
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["units"]["dead"]["bottom.7"] == 1.0
    assert found["train"]["peak"] == {"ne": 2.5, "logloss": 1.25, "samples": 10_000, "end": 20_000}


@pytest.mark.parametrize(
    "peak",
    [None, Peak(ne=1.9, logloss=1.5 * math.log(2), samples=10_000, end=10_000), Peak(12.0, 0.69, 10_000, 10_000)],
)
def test_an_honest_start_is_no_trouble_however_rare_positives_are(peak: Peak | None) -> None:
    assert list(warnings(make_result(train=TrainSection(ne_window=1.0, ne_lifetime=1.0, peak=peak)))) == []


def test_a_run_without_relus_has_no_card() -> None:
    assert "Dead unit" not in page_of("full")


def test_of_many_layers_the_deadest_are_drawn_in_their_order() -> None:
    names = [f"l{i}" for i in range(30)]
    units = Units(rows=10, sizes=dict.fromkeys(names, 30), dead={name: i / 30 for i, name in enumerate(names)})
    page = render_page(make_result(config=CONFIG, units=units), make_frames())
    assert "10 layers with fewer of them are in result.json" in page
    assert "l29: 29 of 30" in page
    assert "l9: 9 of 30" not in page
    assert page.index("l10: 10") < page.index("l29: 29")
