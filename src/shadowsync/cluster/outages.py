"""The account of embedding servers that are lost: since when, and from which checkpoint they go on."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.cluster.context import Newest, ServerLoss


@dataclass
class _Outage:
    """Embedding servers that died at once.

    Attributes:
        at: when.
        samples: trained then.
        servers: which.
        missing: those that are not there again.
        loaded, loaded_samples: the oldest checkpoint that one of them took its rows from.
        restart_s, load_s: of the slowest of them.
    """

    at: float
    samples: int
    servers: tuple[int, ...]
    missing: set[int]
    loaded: str | None = None
    loaded_samples: int | None = None
    restart_s: float = 0.0
    load_s: float = 0.0

    def loss(self) -> ServerLoss:
        """As it is reported."""
        loaded_samples = self.loaded_samples or 0
        return ServerLoss(self.servers, self.samples, None, self.loaded, loaded_samples, self.restart_s, self.load_s)


@dataclass
class Outages:
    """Those that are not over; any thread may tell.

    Attributes:
        newest: opens the checkpoint from which an embedding server takes its rows.
        losses: those that are over and were not told yet.
    """

    newest: Newest
    losses: deque[ServerLoss] = field(default_factory=deque)
    _outages: list[_Outage] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def begin(self, servers: Sequence[int], samples: int) -> None:
        """Embedding servers died at once after so many samples; one that was not there again yet counts from before."""
        with self._lock:
            known = {index for outage in self._outages for index in outage.missing}
            if indices := tuple(index for index in servers if index not in known):
                self._outages.append(_Outage(time.monotonic(), samples, indices, set(indices)))

    def dismiss(self, index: int) -> None:
        """What an embedding server held was not lost after all."""
        with self._lock:
            for outage in [outage for outage in self._outages if index in outage.missing]:
                outage.missing.discard(index)
                outage.servers = tuple(server for server in outage.servers if server != index)
                self._end_if_over(outage)

    def forget(self) -> None:
        """Everybody has gone back to a checkpoint."""
        with self._lock:
            self._outages.clear()

    def over(self, index: int, saved: LoadedCheckpoint | None, began: float) -> None:
        """An embedding server has its rows again; when all of its outage have, that is over."""
        name, samples = (None, 0) if saved is None else (saved.name, saved.samples)
        with self._lock:
            outage = next((outage for outage in self._outages if index in outage.missing), None)
            if outage is None:
                return
            outage.missing.discard(index)
            if outage.loaded_samples is None or samples < outage.loaded_samples:
                outage.loaded, outage.loaded_samples = name, samples
            outage.restart_s = max(outage.restart_s, began - outage.at)
            outage.load_s = max(outage.load_s, time.monotonic() - began)
            self._end_if_over(outage)

    def _end_if_over(self, outage: _Outage) -> None:
        if not outage.missing:
            self._outages.remove(outage)
            if outage.servers:
                self.losses.append(outage.loss())
