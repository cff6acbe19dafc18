"""The account of embedding servers that are lost: since when, and from which checkpoint they go on."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.cluster.context import Newest


@dataclass
class ServerLoss:
    """Embedding servers failed at once.

    Attributes:
        servers: which.
        samples: trained by the whole job when they failed.
        back_to: samples of the checkpoint to which everybody went back; None where only these servers did.
        loaded: name of the oldest checkpoint that one of them took its rows from; None where there was none, so that
            they begin with initial values.
        loaded_samples: trained when it was taken.
        restart_s: seconds until the slowest replacement stood ready to load.
        load_s: seconds that it loaded.
        missing: those that are not there again.
        at: when they failed, as `time.monotonic`.
    """

    servers: tuple[int, ...]
    samples: int
    back_to: int | None = None
    loaded: str | None = None
    loaded_samples: int = 0
    restart_s: float = 0.0
    load_s: float = 0.0
    missing: set[int] = field(default_factory=set)
    at: float = field(default_factory=time.monotonic)


@dataclass
class Outages:
    """Losses that are not over; any thread may tell.

    Attributes:
        newest: opens the checkpoint from which an embedding server takes its rows.
        losses: those that are over and were not told yet.
    """

    newest: Newest
    losses: deque[ServerLoss] = field(default_factory=deque)
    _lasting: list[ServerLoss] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def begin(self, servers: Sequence[int], samples: int) -> None:
        """Embedding servers died at once after so many samples; one that was not there again yet counts from before."""
        with self._lock:
            known = {index for loss in self._lasting for index in loss.missing}
            if indices := tuple(index for index in servers if index not in known):
                self._lasting.append(ServerLoss(indices, samples, missing=set(indices)))

    def dismiss(self, index: int) -> None:
        """What an embedding server held was not lost after all."""
        with self._lock:
            for loss in [loss for loss in self._lasting if index in loss.missing]:
                loss.servers = tuple(server for server in loss.servers if server != index)
                self._is_back(index, loss)

    def forget(self) -> None:
        """Everybody has gone back to a checkpoint."""
        with self._lock:
            self._lasting.clear()

    def over(self, index: int, saved: LoadedCheckpoint | None, began: float) -> None:
        """An embedding server has its rows again; when all of its loss have, that is over."""
        name, samples = (None, 0) if saved is None else (saved.name, saved.samples)
        with self._lock:
            for loss in [loss for loss in self._lasting if index in loss.missing]:
                if len(loss.missing) == len(loss.servers) or samples < loss.loaded_samples:
                    loss.loaded, loss.loaded_samples = name, samples
                loss.restart_s = max(loss.restart_s, began - loss.at)
                loss.load_s = max(loss.load_s, time.monotonic() - began)
                self._is_back(index, loss)

    def _is_back(self, index: int, loss: ServerLoss) -> None:
        loss.missing.discard(index)
        if not loss.missing:
            self._lasting.remove(loss)
            if loss.servers:
                self.losses.append(loss)
