"""Figures of a run for Prometheus to scrape while it lasts.

Needs the package prometheus-client, so `reporter` imports this module late.
"""

import socket
import socketserver
import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, get_args

from shadowsync.errors import ConfigError, MissingExtra
from shadowsync.metrics.frame import Frame
from shadowsync.metrics.roles import RoleState

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.exposition import MetricsHandler
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtra("prometheus-client", "ray") from error

_REQUEST_TIMEOUT_S = 10
_EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 compared with, not opened


class Endpoint:
    """Answers `GET /metrics` with the figures of the newest frame, from threads of its own; used as a context."""

    def __init__(self, port: int, host: str) -> None:
        """Opens `port` (0: any free one) on the address `host`.

        Raises:
            ConfigError: that cannot be done; another program has the port, say.
        """
        self._figures = _Figures()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._figures)
        handler: Any = MetricsHandler.factory(registry)
        handler.timeout = _REQUEST_TIMEOUT_S  # somebody who connects and says nothing holds a thread no longer
        try:
            self._server = _server_class(host)((host, port), handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"report.prometheus_port={port} cannot be opened on report.prometheus_host={host}: {reason}; give "
                "a free port and an address of this machine, or report.prometheus_port=null for none"
            ) from error
        self.port: int = self._server.server_address[1]
        self.url = f"http://{'localhost' if host in _EVERYWHERE else host}:{self.port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="prometheus", daemon=True)

    def show(self, frame: Frame) -> None:
        """What is scraped from now on."""
        self._figures.frame = frame

    def __enter__(self) -> "Endpoint":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """Unlike `http.server`'s it does not ask the network for this machine's name, which can take many seconds."""

    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever hung up in mid-answer does not matter to the run."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def _server_class(host: str) -> type[_Server]:
    return _Server6 if ":" in host else _Server


class _Figures(Collector):
    """Makes the samples of a scrape from the newest frame; before the first there are none."""

    frame: Frame | None = None

    def collect(self) -> Iterable[Metric]:
        """Every metric that the frame has a value for."""
        frame = self.frame
        return [] if frame is None else [metric for metric in metrics(frame) if metric.samples]


def metrics(frame: Frame) -> list[Metric]:
    """The frame as metrics; what is None there has no sample."""
    return [
        *_progress(frame),
        *_quality(frame),
        *_aggregation(frame),
        *_traffic(frame),
        *_roles(frame),
        *_recovery(frame),
    ]


def _progress(frame: Frame) -> list[Metric]:
    trainers = {str(rank): eps for rank, eps in enumerate(frame.eps_per_trainer)}
    return [
        _gauge("examples_per_second", "Samples trained per second by the whole job.", frame.eps),
        _gauges("trainer_examples_per_second", "Samples trained per second by each trainer.", "trainer", trainers),
        _counter("samples", "Samples trained, those before a resume included.", frame.samples),
        _gauge("planned_samples", "Samples to be trained in all.", frame.total_samples),
        _counter("training_seconds", "Time since the first batch, pauses before resumes left out.", frame.seconds),
        _counter("checkpoints", "Checkpoints written.", frame.saves),
        _gauge("checkpointing", "1 while a checkpoint is being written.", float(frame.checkpointing)),
        _gauge(
            "emulated_step_seconds",
            "There only if the machine is emulated: the time that each step is made to take.",
            None if frame.emulated_step_ms is None else frame.emulated_step_ms / 1e3,
        ),
    ]


def _quality(frame: Frame) -> list[Metric]:
    entropies = {"window": frame.ne_window, "lifetime": frame.ne_lifetime}
    return [
        _gauges("normalized_entropy", "Of predictions made before training on them.", "over", entropies),
        _gauge("auc", "Of all predictions so far, each made before training on it.", frame.auc),
        _gauge("log_loss", "Mean over the last interval, in nats.", frame.loss),
        _counter("syncs", "Synchronisations of replicas, all trainers.", frame.sync_count),
        _gauge("sync_gap_iterations", "Steps of a trainer between two synchronisations.", frame.sync_gap),
        _gauge("replica_distance_ratio", "Mean distance of replicas from their mean.", frame.replica_distance),
    ]


def _aggregation(frame: Frame) -> list[Metric]:
    mode = {} if frame.aggregation_mode is None else {frame.aggregation_mode: 1.0}
    return [
        _counter("global_steps", "Steps that a gradient method has made.", frame.global_steps),
        _counter("dropped_gradients", "Gradients that no global step took.", frame.dropped),
        _gauge("staleness_steps", "Mean age of the gradients applied over the last interval.", frame.staleness),
        _gauges("aggregation_mode", "1 for the gradient method at work.", "mode", mode),
        _gauges("worker_step_seconds", "What a worker takes for a batch, smoothed.", "worker", frame.step_seconds),
        _gauge("held_gradient_bytes", "Memory of gradients that wait for their step.", frame.held_bytes),
    ]


def _traffic(frame: Frame) -> list[Metric]:
    return [
        _counters("wire_bytes", "Bytes between roles as sent.", "kind", frame.wire_bytes),
        _counters("wire_raw_bytes", "The same with every float as fp32.", "kind", frame.wire_raw_bytes),
        _codecs(frame.wire_codecs),
        _gauges("wire_kept_ratio", "Share of elements that crossed of late.", "kind", frame.wire_kept_share),
        _counters("wire_refreshes", "Thresholds chosen exactly.", "kind", frame.wire_refreshes),
        _gauges("queue_depth", "Requests that wait at a role.", "role", frame.queue_depth),
    ]


def _codecs(chosen: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily(
        "shadowsync_wire_codec", "1 for a codec that a trainer has chosen.", labels=["kind", "codec"]
    )
    for kind, codecs in chosen.items():
        for codec in codecs.split(", "):
            family.add_metric([kind, codec], 1.0)
    return family


def _roles(frame: Frame) -> list[Metric]:
    states = list(frame.roles.values())
    counts = {state: states.count(state) for state in get_args(RoleState)} if states else {}
    alive = {role: float(state in ("alive", "saving")) for role, state in frame.roles.items()}
    return [
        _counter("failures", "Roles that died.", frame.failures),
        _gauges("roles", "How many roles are in a state.", "state", counts),
        _gauges("role_up", "1 where a role is alive, saving included.", "role", alive),
    ]


def _recovery(frame: Frame) -> list[Metric]:
    return [
        _gauge("pls", "Portion of samples that failures have lost.", frame.pls),
        _gauge("target_pls", "What it may come to; only where recovery is partial.", frame.target_pls),
        _counters("recovery_seconds", "What recovery has cost.", "kind", frame.recovery_seconds),
        _gauge(
            "emulated_job_seconds",
            "There only if the job stands for another: its length; recovery_seconds are those of that job.",
            frame.emulated_job_s,
        ),
    ]


def _gauge(name: str, meaning: str, value: float | None) -> Metric:
    return GaugeMetricFamily(f"shadowsync_{name}", meaning, value=value)


def _counter(name: str, meaning: str, value: float | None) -> Metric:
    return CounterMetricFamily(f"shadowsync_{name}", meaning, value=value)


def _gauges(name: str, meaning: str, label: str, values: Mapping[str, float | None]) -> Metric:
    family = GaugeMetricFamily(f"shadowsync_{name}", meaning, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([key], value)
    return family


def _counters(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"shadowsync_{name}", meaning, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
