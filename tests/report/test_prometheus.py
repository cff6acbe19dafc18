"""What Prometheus scrapes while a run lasts."""

import importlib
import io
import socket
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
from fake_runs import make_frames, make_result
from rich.console import Console

from shadowsync.config import ReportConfig
from shadowsync.errors import ConfigError, MissingExtra
from shadowsync.metrics.history import Frame
from shadowsync.report.reporter import Reporter

prometheus = pytest.importorskip("shadowsync.report.prometheus", reason="needs prometheus-client")
parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=120) as answer:
        text = answer.read().decode()
    families = list(parser.text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def full_frame() -> Frame:
    return msgspec.structs.replace(
        make_frames(4, trainers=2)[1],
        eps=3000.0,
        eps_per_trainer=(1000.0, 2000.0),
        samples=5000,
        total_samples=9000,
        seconds=4.5,
        sync_gap=11.0,
        ne_window=0.75,
        saves=3,
        wire_bytes={"pull": 10, "push": 20},
        wire_raw_bytes={"pull": 40},
        wire_codecs={"pull": "int8", "push": "bf16, int4"},
        wire_kept_share={"push": 0.01},
        wire_refreshes={"push": 6},
        failures=2,
        roles={"trainer-0": "alive", "trainer-1": "dead", "driver": "saving"},
        queue_depth={"embedding-0": 7},
        staleness=1.5,
        checkpointing=True,
        emulated_step_ms=20.0,
        pls=0.02,
        target_pls=0.1,
        recovery_seconds={"save": 1.5, "lost": 0.0},
        emulated_job_s=7200.0,
        global_steps=77,
        dropped=5,
        aggregation_mode="gba",
        step_seconds={"0.1": 0.5},
        held_bytes=4096,
    )


EXPECTED = {
    ("shadowsync_examples_per_second", ()): 3000.0,
    ("shadowsync_trainer_examples_per_second", (("trainer", "1"),)): 2000.0,
    ("shadowsync_samples_total", ()): 5000.0,
    ("shadowsync_planned_samples", ()): 9000.0,
    ("shadowsync_training_seconds_total", ()): 4.5,
    ("shadowsync_sync_gap_iterations", ()): 11.0,
    ("shadowsync_normalized_entropy", (("over", "window"),)): 0.75,
    ("shadowsync_checkpoints_total", ()): 3.0,
    ("shadowsync_checkpointing", ()): 1.0,
    ("shadowsync_wire_bytes_total", (("kind", "push"),)): 20.0,
    ("shadowsync_wire_raw_bytes_total", (("kind", "pull"),)): 40.0,
    ("shadowsync_wire_codec", (("codec", "int8"), ("kind", "pull"))): 1.0,
    ("shadowsync_wire_codec", (("codec", "bf16"), ("kind", "push"))): 1.0,
    ("shadowsync_wire_codec", (("codec", "int4"), ("kind", "push"))): 1.0,
    ("shadowsync_wire_kept_ratio", (("kind", "push"),)): 0.01,
    ("shadowsync_wire_refreshes_total", (("kind", "push"),)): 6.0,
    ("shadowsync_queue_depth", (("role", "embedding-0"),)): 7.0,
    ("shadowsync_staleness_steps", ()): 1.5,
    ("shadowsync_failures_total", ()): 2.0,
    ("shadowsync_roles", (("state", "alive"),)): 1.0,
    ("shadowsync_roles", (("state", "dead"),)): 1.0,
    ("shadowsync_roles", (("state", "left"),)): 0.0,
    ("shadowsync_role_up", (("role", "driver"),)): 1.0,
    ("shadowsync_role_up", (("role", "trainer-1"),)): 0.0,
    ("shadowsync_emulated_step_seconds", ()): 0.02,
    ("shadowsync_pls", ()): 0.02,
    ("shadowsync_target_pls", ()): 0.1,
    ("shadowsync_recovery_seconds_total", (("kind", "save"),)): 1.5,
    ("shadowsync_recovery_seconds_total", (("kind", "lost"),)): 0.0,
    ("shadowsync_emulated_job_seconds", ()): 7200.0,
    ("shadowsync_global_steps_total", ()): 77.0,
    ("shadowsync_dropped_gradients_total", ()): 5.0,
    ("shadowsync_aggregation_mode", (("mode", "gba"),)): 1.0,
    ("shadowsync_worker_step_seconds", (("worker", "0.1"),)): 0.5,
    ("shadowsync_held_gradient_bytes", ()): 4096.0,
}


def test_every_figure_of_a_frame_is_there() -> None:
    with prometheus.PrometheusEndpoint(0, "127.0.0.1") as endpoint:
        assert scrape(endpoint.url) == {}
        endpoint.show(full_frame())
        found = scrape(endpoint.url)
        assert {key: found.get(key) for key in EXPECTED} == EXPECTED
        endpoint.show(msgspec.structs.replace(full_frame(), samples=6000))
        assert scrape(endpoint.url)["shadowsync_samples_total", ()] == 6000.0


def test_what_is_not_known_has_no_sample() -> None:
    frame = msgspec.structs.replace(make_frames(1, trainers=1)[0], auc=None, ne_window=None, wire_bytes={})
    with prometheus.PrometheusEndpoint(0, "127.0.0.1") as endpoint:
        endpoint.show(frame)
        names = {name.removeprefix("shadowsync_") for name, _ in scrape(endpoint.url)}
    absent = {"auc", "sync_gap_iterations", "wire_bytes_total", "wire_codec", "queue_depth", "roles"}
    absent |= {"emulated_step_seconds", "pls", "target_pls", "recovery_seconds_total", "emulated_job_seconds"}
    assert not absent & names
    assert "normalized_entropy" in names


def test_a_port_that_is_taken_and_one_that_cannot_be() -> None:
    with prometheus.PrometheusEndpoint(0, "127.0.0.1") as endpoint:
        told = f"report.prometheus_port={endpoint.port} cannot be opened on report.prometheus_host=127.0.0.1: "
        with pytest.raises(ConfigError, match=told):
            prometheus.PrometheusEndpoint(endpoint.port, "127.0.0.1")
    for port, host in ((70_000, "127.0.0.1"), (-1, "127.0.0.1"), (0, "256.0.0.1")):
        with pytest.raises(ConfigError, match=rf"report\.prometheus_port={port} cannot be opened"):
            prometheus.PrometheusEndpoint(port, host)


def test_nothing_is_left_open() -> None:
    with prometheus.PrometheusEndpoint(0, "127.0.0.1") as endpoint:
        pass
    assert "prometheus" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(urllib.error.URLError):
        scrape(endpoint.url)
    prometheus.PrometheusEndpoint(endpoint.port, "127.0.0.1").__enter__().__exit__(None, None, None)


def test_who_connects_and_says_nothing_or_hangs_up_disturbs_nobody() -> None:
    with prometheus.PrometheusEndpoint(0, "127.0.0.1") as endpoint:
        endpoint.show(full_frame())
        with socket.create_connection(("127.0.0.1", endpoint.port)) as silent:
            with socket.create_connection(("127.0.0.1", endpoint.port)) as rude:
                rude.sendall(b"GET /metrics HTTP/1.1\r\n\xff\xfe\r\n\r\n")
            assert scrape(endpoint.url)
            assert silent.fileno() >= 0


def test_the_reporter_opens_it_if_asked(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    outputs = ReportConfig(tensorboard=False, html=False, prometheus_port=0, prometheus_host="127.0.0.1")
    with Reporter(tmp_path, console, outputs) as reporter:
        frame = full_frame()
        reporter.show(frame)
        (line,) = [line for line in console.file.getvalue().splitlines() if "Prometheus" in line]
        url = line.removeprefix("figures for Prometheus: ")
        assert scrape(url)["shadowsync_samples_total", ()] == 5000.0
        reporter.finish(make_result())
    with pytest.raises(urllib.error.URLError):
        scrape(url)


def test_a_port_that_is_taken_leaves_nothing_behind(tmp_path: Path) -> None:
    with prometheus.PrometheusEndpoint(0, "127.0.0.1") as endpoint:
        outputs = ReportConfig(prometheus_port=endpoint.port, prometheus_host="127.0.0.1")
        with pytest.raises(ConfigError):
            Reporter(tmp_path, Console(file=io.StringIO()), outputs).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_the_line_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "shadowsync.report.prometheus")
    with pytest.raises(MissingExtra, match=r"^prometheus-client is not installed: pip install 'shadowsync\[ray\]'$"):
        importlib.import_module("shadowsync.report.prometheus")
