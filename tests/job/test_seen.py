"""What a running job shows: frames to a caller, events of roles, figures for Prometheus, and that it is emulated."""

import io
import re
import urllib.request
from pathlib import Path

import pytest
from job_helpers import SMALL_DLRM, settings, train_counted, write_rows
from rich.console import Console

from shadowsync import Job
from shadowsync.errors import ShadowSyncError
from shadowsync.metrics.history import Frame
from shadowsync.report.files import read_events
from shadowsync.training.worker import TrainerLost


def test_every_frame_goes_to_the_caller_and_what_it_raises_ends_the_run(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 60)
    config = settings(data, report={"every_s": 0.001}, model=SMALL_DLRM)
    frames: list[Frame] = []
    Job(config, out=tmp_path / "out").run(on_frame=frames.append)
    assert frames[-1].samples == 60
    assert frames[-1].queue_depth == {"trainer-0": 0}

    def refuse(frame: Frame) -> None:
        raise ShadowSyncError("enough")

    with pytest.raises(ShadowSyncError, match="enough"):
        Job(config, out=tmp_path / "other").run(on_frame=refuse)


def test_a_death_is_counted_in_the_frames_and_told_in_the_events(tmp_path: Path) -> None:
    def failures(rank: int, iteration: int) -> None:
        if rank == 1:
            raise TrainerLost("trainer 1 dies at once")

    config = settings(write_rows(tmp_path / "rows.parquet", 60), train={"trainers": 2})
    result, counts = train_counted(config, tmp_path / "out", failures=failures)
    assert counts == dict.fromkeys(range(60), 1)
    told = [(event.role, event.event) for event in read_events(tmp_path / "out") if event.role.startswith("trainer")]
    assert ("trainer-0", "alive") in told
    assert told[-1] == ("trainer-1", "dead")
    assert result.recovery.failures == 1


def test_an_emulated_step_lasts_as_long_as_it_should_and_the_result_says_so(tmp_path: Path) -> None:
    config = settings(write_rows(tmp_path / "rows.parquet", 12), train={"emulate_step_ms": 20.0})
    result, _ = train_counted(config, tmp_path / "out")
    assert result.throughput.emulated_step_ms == 20.0
    assert result.throughput.seconds >= 5 * 0.02, "six batches of two, timed from the end of the first"


@pytest.mark.parametrize(("given", "host"), [({}, "127.0.0.1"), ({"prometheus_host": "0.0.0.0"}, "localhost")])
def test_figures_can_be_scraped_while_the_job_runs(tmp_path: Path, given: dict[str, str], host: str) -> None:
    """On the address of the configuration, whose default is loopback: only from this machine."""
    pytest.importorskip("prometheus_client", reason="pip install prometheus-client to test its endpoint")
    report = {"prometheus_port": 0, "every_s": 0.001} | given
    config = settings(write_rows(tmp_path / "rows.parquet", 40), report=report, model=SMALL_DLRM)
    console = Console(record=True, file=io.StringIO(), width=300)
    pages: list[str] = []

    def scrape(frame: Frame) -> None:
        (url,) = re.findall(rf"figures for Prometheus: (http://{host}:\S+)", console.export_text(clear=False))
        with urllib.request.urlopen(url, timeout=120) as page:
            pages.append(page.read().decode())

    Job(config, out=tmp_path / "out").run(console, on_frame=scrape)
    assert "shadowsync_samples" in pages[-1]
