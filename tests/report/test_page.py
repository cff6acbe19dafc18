"""The page as text: complete, escaped, self-contained, whatever is missing."""

import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from fake_runs import make_frames, make_result, make_test, page_of

from shadowsync.errors import SaveError
from shadowsync.metrics.quality import CurvePoint
from shadowsync.report.cards import SECONDS, curve, kept, steady
from shadowsync.report.page import flat, headlines, render_page, write_page
from shadowsync.report.plots import Axis, Bar, Line, bar_chart, line_chart, spread
from shadowsync.report.result import WireSection


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_full_page_has_every_plot_and_every_number() -> None:
    html = page_of("full")
    page = Page(html)
    assert page.tags.count("svg") == 7
    for word in ("Learning curve", "Calibration", "Examples per second", "Sync gap", "Distance", "Bytes", "train.lr"):
        assert word in page.text
    for term in ("Normalized entropy", "Example-level parallelism", "best reachable"):
        assert term in page.text
    assert page.text.count("Good:") == 7
    assert len(html) < 300_000
    assert "Timeline" not in html
    assert "emulated" not in html.lower()


def test_a_run_on_a_cluster_has_a_timeline_and_its_events_in_words() -> None:
    page = Page(page_of("cluster"))
    assert page.tags.count("svg") == 8
    assert "Who was at work" in page.text
    assert "its process was killed by signal 9" in page.text
    assert "on <another> node" in page.text
    assert "another" not in page.tags
    labels = [value or "" for _, name, value in page.attributes if name == "aria-label"]
    assert any(label.startswith("Timeline of the roles. The state of each role") for label in labels)


def test_an_emulated_run_is_labelled_wherever_its_speed_is_told() -> None:
    page = Page(page_of("cluster"))
    assert "Training report: dlrm on completejourney (emulated)" in page.text
    assert "every step was made to take 20 ms" in page.text
    assert page.text.count("Emulated examples per second") == 2
    assert "emulated examples/s (EPS)" in page.text
    assert "\nExamples per second" not in page.text


def test_a_learning_curve_does_not_run_backwards_after_everybody_went_back() -> None:
    told = [10, 20, 30, 30, 25, 25, 35]
    frames = [msgspec.structs.replace(frame, samples=at) for frame, at in zip(make_frames(7), told, strict=True)]
    assert [frame.samples for frame in kept(frames)] == [10, 20, 25, 25, 35]
    assert kept([]) == []


@pytest.mark.parametrize("run", ["full", "cluster", "recovery", "gradients", "bare"])
def test_nothing_points_outside_the_page_and_every_reference_meets_one_identifier(run: str) -> None:
    page = Page(page_of(run))
    assert not {"script", "img", "iframe", "object", "embed"} & set(page.tags)
    for tag, name, value in page.attributes:
        if name in {"src", "href", "xlink:href", "action", "data"}:
            assert (value or "").startswith(("#", "data:,")), (tag, name, value)
    names = [value for _, name, value in page.attributes if name == "id"]
    assert len(names) == len(set(names))
    used = {value[1:] for _, name, value in page.attributes if name == "xlink:href" and value}
    used |= {match for _, _, value in page.attributes for match in re.findall(r"url\(#([^)]+)\)", value or "")}
    assert used <= set(names)


@pytest.mark.parametrize("run", ["full", "cluster", "recovery", "gradients"])
def test_every_svg_is_well_formed_with_themed_colours_and_real_text(run: str) -> None:
    for svg in re.findall(r"<svg.*?</svg>", page_of(run), flags=re.DOTALL):
        ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns:xlink="x" ', 1))
        assert "<text" in svg
        assert "var(--" in svg
        assert not re.search(r"#0a0[bc]", svg)
        assert "font-family" not in svg


@pytest.mark.parametrize(("count", "trainers"), [(0, 2), (1, 1), (1, 9), (2, 2), (3, 1), (700, 9)])
def test_any_number_of_frames_and_trainers(count: int, trainers: int) -> None:
    html = render_page(make_result(trainers), make_frames(count, trainers))
    assert "Examples per second" in html
    assert len(html) < 400_000
    assert ("ended before the first report" in html) == (count == 0)


def test_missing_sections() -> None:
    result = make_result(1, test=None, train=None, sync=None, wire=None, machine=None, versions={}, config={})
    page = Page(render_page(result, []))
    assert page.tags.count("svg") == 0
    assert "a model on data" in page.text
    assert "There was no test set" in page.text


def test_undefined_and_nan_figures() -> None:
    frames = [
        msgspec.structs.replace(f, auc=None, ne_window=math.nan, ne_lifetime=None, loss=None, sync_gap=math.inf)
        for f in make_frames(5)
    ]
    test = make_test(auc=None, ne=None, calibration=None, logloss=None, curve=())
    html = render_page(make_result(test=test), frames)
    assert "does not hold both labels" in html
    assert "nan" not in Page(html).text.lower().split()
    one = (CurvePoint(prediction=0.0, label=0.0, count=1),)  # a test set of one sample, without positives
    assert Page(render_page(make_result(test=make_test(curve=one)), make_frames(3))).tags.count("svg") == 7


def test_everything_is_escaped() -> None:
    attack = "<script>alert(1)</script>\"'&"
    result = make_result(
        config={"data": {"name": attack, attack: attack}, "model": {"name": attack}},
        versions={attack: attack},
        machine={"system": attack},
        wire=WireSection(bytes={attack: 3}, raw_bytes={attack: 5}),
    )
    page = Page(render_page(result, make_frames(3)))
    assert "script" not in page.tags
    assert attack in page.text


def test_headlines_say_it_in_words() -> None:
    said = {h.name: h.meaning for h in headlines(make_result(test=make_test(auc=0.931, ne=0.6, calibration=1.021)))}
    assert "in 93.1 % of cases" in said["Test AUC"]
    assert said["Test NE"].startswith("40.0 % of the uncertainty")
    assert said["Calibration"] == "2.1 % more positives are predicted than there are."
    assert said["Examples per second"] == "1,270,000 samples in 32.0 s, by 2 trainers."
    said = {h.name: h.meaning for h in headlines(make_result(test=make_test(ne=1.01, calibration=0.9)))}
    assert said["Test NE"] == "Not better than always predicting the mean label."
    assert said["Calibration"] == "10.0 % fewer positives are predicted than there are."


def test_configuration_is_written_as_overrides() -> None:
    tables = [{"name": "t", "features": ("a", "b"), "rows": None}]
    config = {"train": {"lr": 0.1, "clip_norm": None, "hogwild": True}, "embedding": {"tables": tables}, "empty": {}}
    assert list(flat(config)) == [
        ("train.lr", "0.1"),
        ("train.clip_norm", "null"),
        ("train.hogwild", "true"),
        ("embedding.tables", "[{name: t, features: [a, b], rows: null}]"),
        ("empty", "{}"),
    ]


def test_long_runs_are_averaged_into_few_points() -> None:
    frames = make_frames(1_000)
    x, y = curve(frames, SECONDS, lambda f: f.eps, points=250)
    assert len(x) == len(y) == 250
    assert (x[0], x[-1]) == (4.0, 1_000.0)
    assert sum(y) / 250 == pytest.approx(sum(f.eps for f in frames) / 1_000)


def test_rates_of_very_short_intervals_are_left_out() -> None:
    frames = make_frames(4)
    frames.append(msgspec.structs.replace(frames[-1], seconds=4.01, eps=9e9))
    assert steady(frames) == frames[:4]
    assert steady([]) == []


@pytest.mark.parametrize("heights", [[0.5, 0.5, 0.5], [0.0, 0.01], [0.99, 1.0], [0.1, 0.9], [-3.0], [7.0]])
def test_labels_are_moved_apart(heights: list[float]) -> None:
    moved = spread(heights, 0.1)
    assert all(above - below >= 0.1 - 1e-9 for below, above in pairwise(moved))
    assert 0 <= moved[0] <= moved[-1] <= 1


def test_dollar_signs_are_no_formulas_and_bars_of_nothing_are_drawn() -> None:
    assert "$x_1$ \\frac" in line_chart("money", Axis("$x$"), Axis("y"), [Line([1.0, 2.0], [1.0, 2.0], "$x_1$ \\frac")])
    assert "0 bytes" in bar_chart("nothing", [Bar("pull", 0.0)], Axis("bytes", lambda value: f"{value:.0f} bytes"))


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match=r"report\.html: cannot be written"):
        write_page(tmp_path / "none" / "report.html", make_result(), [])


def test_start_up_imports_nothing_heavy() -> None:
    code = (
        "import sys, shadowsync.report, shadowsync.report.reporter, shadowsync.metrics.recorder\n"
        "print(sorted({'matplotlib', 'tensorboard', 'jinja2', 'torchmetrics'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
