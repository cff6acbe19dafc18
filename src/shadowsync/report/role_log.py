"""`events.jsonl`: what happened to the roles, one event a line, flushed as it comes."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from shadowsync.metrics.roles import RoleEvent
from shadowsync.report.files import save_errors
from shadowsync.report.json_lines import JsonLines, read_lines

FILE_NAME = "events.jsonl"


class RoleLog:
    """Writes a run's role events, from any thread; the file appears with the first one.

    A resumed run is given all `earlier` ones: what happened to a machine did happen, whatever training was lost.
    """

    def __init__(self, folder: Path, earlier: Sequence[RoleEvent] = ()) -> None:
        """Begins anew in `folder`.

        Raises:
            SaveError: it cannot be written.
        """
        self._path = folder / FILE_NAME
        self._told = list(earlier)
        self._lock = threading.Lock()
        self._closed = False
        with save_errors(self._path):
            self._path.unlink(missing_ok=True)
        self._lines = JsonLines(self._path, self._told) if self._told else None

    @property
    def told(self) -> list[RoleEvent]:
        """All events so far, the earlier ones included; a copy."""
        with self._lock:
            return list(self._told)

    def append(self, event: RoleEvent) -> None:
        """Writes one event. What is still reported once the log is closed comes too late to be told.

        Raises:
            SaveError: it cannot be written.
        """
        with self._lock:
            if self._closed:
                return
            if self._lines is None:
                self._lines = JsonLines(self._path)
            self._lines.append(event)
            self._told.append(event)

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._closed = True
            if self._lines is not None:
                self._lines.close()

    def __enter__(self) -> "RoleLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(folder: Path, tell: Callable[[str], object] | None = None) -> list[RoleEvent]:
    """What happened to the roles of the run in `folder`; nothing where it wrote no `events.jsonl`; `tell` as in
    `read_lines`.

    Raises:
        DataError: a line is not an event; the message names it.
    """
    return read_lines(folder / FILE_NAME, RoleEvent, "an event", tell)
