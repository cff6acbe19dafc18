"""Making pages again from what a run wrote, and comparing runs."""

import io
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_runs import make_events, make_frames, make_recovery_result, make_result, make_test
from rich.console import Console

from shadowsync.errors import DataError
from shadowsync.metrics.history import Frame
from shadowsync.report.compare import (
    PastRun,
    compare,
    comparison_table,
    differences,
    notices,
    read_runs,
    remake_page,
    render_comparison,
    write_comparison,
)
from shadowsync.report.files import write_events, write_frames
from shadowsync.report.page import render_page
from shadowsync.report.result import DataSection, Result, ThroughputSection, write_result


def save(folder: Path, result: Result, frames: list[Frame]) -> Path:
    folder.mkdir(parents=True)
    write_result(folder, result)
    with closing(write_frames(folder)) as history:
        for frame in frames:
            history.append(frame)
    return folder


def test_a_page_is_made_again_as_it_was_with_its_timeline_and_without_timeline_and_metrics(tmp_path: Path) -> None:
    folder, page = save(tmp_path / "a", make_result(), make_frames(6)), tmp_path / "page.html"
    with closing(write_events(folder)) as log:
        for event in make_events():
            log.append(event)
    remake_page(folder, page)
    assert page.read_text() == render_page(make_result(), make_frames(6), make_events())
    (folder / "metrics.jsonl").unlink()
    (folder / "events.jsonl").unlink()
    remake_page(folder, page)
    assert "ended before the first report" in page.read_text()
    assert "Timeline" not in page.read_text()


def best(runs: list[PastRun], heading: str) -> list[bool]:
    headings, rows = compare(runs)
    return [row[headings.index(heading)].best for row in rows]


def test_emulated_runs_are_labelled_and_win_nothing_by_speed() -> None:
    fast = ThroughputSection(seconds=3.0, eps=90_000.0, elp=512, eps_per_trainer=(90_000.0,), emulated_step_ms=5.0)
    pair = [
        PastRun("real", make_result(1), make_frames(5)),
        PastRun("fake", make_result(1, throughput=fast), make_frames(5)),
    ]
    assert best(pair, "examples/s") == [False, False]
    assert best([pair[1], PastRun("slow", with_eps(fast, 9.0), [])], "examples/s") == [True, False]
    assert "fake (emulated)</th>" in render_comparison(pair)
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(comparison_table(pair))
    assert "fake (emulated)" in console.file.getvalue()


def with_eps(speed: ThroughputSection, eps: float) -> Result:
    return make_result(1, throughput=msgspec.structs.replace(speed, eps=eps))


def test_a_folder_without_a_result(tmp_path: Path) -> None:
    save(tmp_path / "a", make_result(), [])
    with pytest.raises(DataError, match=r"b/result\.json: there is no such file"):
        read_runs([tmp_path / "a", tmp_path / "b"])


def test_runs_are_told_apart_by_name_or_path(tmp_path: Path) -> None:
    folders = [tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "other"]
    for folder in folders:
        save(folder, make_result(), make_frames(2))
    assert [run.name for run in read_runs(folders)] == [str(folders[0]), str(folders[1]), "other"]


def runs() -> list[PastRun]:
    return [
        PastRun("one", make_result(1, test=make_test(auc=0.91, ne=0.62)), make_frames(5, 1)),
        PastRun("two", make_result(2, test=make_test(auc=0.93, ne=0.61)), make_frames(5, 2)),
        PastRun("bare", make_result(4, test=None, sync=None), []),
    ]


def test_the_best_of_each_column_is_marked() -> None:
    assert best(runs(), "test AUC") == [False, True, False]
    assert best(runs(), "test NE") == [False, True, False]
    assert best(runs(), "examples/s") == [False, False, False]  # all equal
    headings, rows = compare(runs())
    assert rows[2][headings.index("test AUC")].text == "—"
    assert compare(runs()[2:])[0] == [heading for heading in headings if heading != "method"]


def test_recovery_is_compared_where_some_run_recovers() -> None:
    names, _ = compare(runs())
    assert not {"recovery", "lost samples (PLS)"} & set(names)
    idle = make_recovery_result(mode="none", failures=0, pls=0.0)
    partial = PastRun("partial", make_result(3, recovery=make_recovery_result()), [])
    several = [runs()[0], partial, PastRun("idle", make_result(recovery=idle), [])]
    headings, rows = compare(several)
    assert headings == [*names, "recovery", "lost samples (PLS)"]
    told = [[cell.text for cell in cells[-2:]] for cells in rows]
    assert told == [["—", "—"], ["partial", "0.0630"], ["—", "—"]]
    assert not any(cell.best for cells in compare([partial, runs()[0]])[1] for cell in cells[-2:])
    assert '<th scope="col" class="right">lost samples (PLS)</th>' in render_comparison(several)


def differing(*configs: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return differences([PastRun("run", make_result(config=config), []) for config in configs])


def test_only_what_differs_is_listed_as_it_is_written_on_the_command_line() -> None:
    assert differences(runs()) == [("train.trainers", ["1", "2", "4"])]
    assert differences([runs()[0], runs()[0]]) == []
    assert differing({"data": {"dense": ["a", "b"], "log_dense": True}}, {"data": {"dense": []}}) == [
        ("data.dense", ["[a, b]", "[]"]),
        ("data.log_dense", ["true", "—"]),
    ]
    assert differing({"x": 1}, {"y": 1}) == [("x", ["1", "—"]), ("y", ["—", "1"])]


def rows_of(name: str, auc: float, data: dict[str, Any], samples: int = 310_000) -> PastRun:
    """A run with a section `data` of its own."""
    counts = DataSection(train_samples=5, trained_samples=5, test_samples=samples)
    return PastRun(name, make_result(config={"data": data}, data=counts, test=make_test(auc=auc)), [])


@pytest.mark.parametrize(
    ("other", "samples", "named"),
    [
        ({}, 300_000, "300,000 and 310,000 test rows"),
        ({"test_path": "b.parquet"}, 310_000, "data.test_path"),
        ({"label": "bought"}, 310_000, "data.label"),
    ],
)
def test_quality_on_different_rows_has_no_best_and_a_warning(other: dict[str, Any], samples: int, named: str) -> None:
    given = {"name": "parquet", "test_path": "a.parquet", "label": "clicked"}
    pair = [rows_of("one", 0.9, given), rows_of("two", 0.8, given | other, samples)]
    assert notices(pair) == [
        f"The runs were not tested on the same rows ({named}): their AUC, NE and log loss say nothing about which is "
        "better, so none of them is in bold."
    ]
    assert not any(cell.best for cells in compare(pair)[1] for cell in cells)
    assert f'<p class="notice" role="note">{notices(pair)[0]}</p>' in render_comparison(pair)


def test_other_settings_of_the_data_leave_the_test_the_same() -> None:
    parquet = {"name": "parquet", "test_path": "a.parquet", "label": "clicked"}
    pair = [rows_of("one", 0.9, parquet | {"path": "x", "readers": 1}), rows_of("two", 0.8, parquet | {"path": "y"})]
    assert notices(pair) == []
    assert [cell.best for cells in compare(pair)[1] for cell in cells].count(True) == 1
    untested = PastRun("bare", make_result(test=None, config={"data": {"name": "synthetic"}}), [])
    assert notices([*pair, untested]) == []
    made = {"name": "synthetic", "rows": 5, "test_rows": 9}
    assert notices([rows_of("one", 0.9, made), rows_of("two", 0.8, made | {"rows": 7, "epochs": 2})]) == []
    assert "data.seed" in notices([rows_of("one", 0.9, made), rows_of("two", 0.8, made | {"seed": 7})])[0]


def test_the_page_overlays_the_runs(tmp_path: Path) -> None:
    write_comparison(runs(), tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert html.count("<svg") == 3
    assert "Comparison of 3 runs" in html
    assert "train.trainers" in html
    assert len(html) < 200_000


def test_runs_without_frames_and_equal_configurations() -> None:
    html = render_comparison([PastRun("a", make_result(), []), PastRun("b", make_result(), [])])
    assert "None of the runs wrote" in html
    assert "all runs have the same configuration" in html


def test_long_names_leave_room_for_the_curves() -> None:
    """The plot ends where its longest label begins."""
    long = render_comparison([PastRun("20261121-112544-3f1c", make_result(1), make_frames(5)), *runs()])
    assert ">20261121…44-3f1c<" in long
    assert "20261121-112544-3f1c</th>" in long


def test_more_runs_than_colours_and_names_that_are_escaped() -> None:
    several = [PastRun(f"run {i}", make_result(i + 1), make_frames(3)) for i in range(10)]
    html = render_comparison([PastRun("<script>$a$", make_result(1), make_frames(3)), *several])
    assert "var(--series-7)" in html
    assert "var(--series-8)" not in html
    assert "<script" not in html
    assert "&lt;script&gt;$a$" in html


@pytest.mark.parametrize(("repeated", "width"), [(1, 60), (2, 80), (3, 120)])
def test_the_terminal_shows_the_same_cells(repeated: int, width: int) -> None:
    console, several = Console(file=io.StringIO(), width=width, color_system=None), runs() * repeated
    console.print(comparison_table(several))
    shown = console.file.getvalue()
    for run, cells in zip(several, compare(several)[1], strict=True):
        assert run.name in shown
        for cell in cells:
            assert cell.text in shown
