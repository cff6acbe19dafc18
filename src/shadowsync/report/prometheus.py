"""Figures of a run for Prometheus to scrape while it lasts.

Needs the package prometheus-client, so `reporter` imports this module late.
"""

import socket
import socketserver
import threading
from collections.abc import Iterable
from typing import Any

from shadowsync.errors import ConfigError, MissingExtra
from shadowsync.metrics.history import Frame
from shadowsync.report.measures import LIVE

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.exposition import MetricsHandler
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtra("prometheus-client", "ray") from error

_REQUEST_TIMEOUT_S = 10
_EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 compared with, not opened


class PrometheusEndpoint(Collector):
    """Answers `GET /metrics` with the figures of the newest frame, from threads of its own; used as a context."""

    def __init__(self, port: int, host: str) -> None:
        """Opens `port` (0: any free one) on the address `host`.

        Raises:
            ConfigError: that cannot be done; another program has the port, say.
        """
        self._frame: Frame | None = None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        handler: Any = MetricsHandler.factory(registry)
        handler.timeout = _REQUEST_TIMEOUT_S  # somebody who connects and says nothing holds a thread no longer
        try:
            self._server = _HttpServer(host, port, handler)
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
        self._frame = frame

    def collect(self) -> Iterable[Metric]:
        """What a scrape gets: before the first frame nothing, and nothing of what is None there."""
        return [] if self._frame is None else [metric for metric in metrics(self._frame) if metric.samples]

    def __enter__(self) -> "PrometheusEndpoint":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _HttpServer(socketserver.ThreadingTCPServer):
    """Unlike `http.server`'s it does not ask the network for this machine's name, which can take many seconds."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int, handler: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever hung up in mid-answer does not matter to the run."""


def metrics(frame: Frame) -> list[Metric]:
    """The frame as metrics; what is None there has no sample."""
    found = []
    for measure in LIVE:
        if measure.key:
            kind: Any = GaugeMetricFamily if measure.kind == "gauge" else CounterMetricFamily
            family = kind(f"shadowsync_{measure.key}", measure.help, labels=measure.labels)
            for labels, value in measure.values(frame):
                family.add_metric(labels, value)
            found.append(family)
    return found
