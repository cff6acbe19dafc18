"""Rows that are on disk are read before a worker asks for them: what a trainer will train is known by its leases, some
slices ahead."""

import contextlib
import threading
from collections import deque
from collections.abc import Sequence

from shadowsync.data.batch import Batch, Jagged
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.errors import ShadowSyncError

MOST_BATCHES = 64
"""That wait; beyond, the oldest is left to the worker that trains it."""


class ReadAhead:
    """A thread that expects batches, in the order in which they were parsed.

    Args:
        client: its own, which admits no keys.
    """

    def __init__(self, client: EmbeddingClient) -> None:
        self._client = client
        self._coming: deque[Jagged] = deque(maxlen=MOST_BATCHES)
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def opened(self, batches: Sequence[Batch]) -> None:
        """These are trained next; returns at once."""
        with self._changed:
            self._coming.extend(batch.ids for batch in batches)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._coming)
                if self._closed:
                    return
                ids = self._coming.popleft()
            with contextlib.suppress(ShadowSyncError):  # a worker meets it, too, and tells
                self._client.expect(ids)
