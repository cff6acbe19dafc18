"""Everything a job writes and shows about itself, behind one object."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console

from shadowsync.config import ReportConfig
from shadowsync.metrics.history import Frame, RoleEvent
from shadowsync.report.files import write_events, write_frames
from shadowsync.report.progress import Progress, final_table
from shadowsync.report.result import Result, warnings, write_result

if TYPE_CHECKING:
    from shadowsync.report.prometheus import Endpoint
    from shadowsync.report.tensorboard import EventLog


class Reporter:
    """Takes a job's frames, the events of its roles and its result; used as a context.

    The folder must exist. A resumed run gives the `earlier` frames up to its checkpoint and all `earlier_events`, from
    its own folder or from the one it goes on from: what happened to a machine did happen, whatever training was lost.
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        config: ReportConfig,
        earlier: Sequence[Frame] = (),
        resumed_at: int | None = None,
        earlier_events: Sequence[RoleEvent] = (),
    ) -> None:
        self._folder, self._console, self._config = folder, console, config
        self._earlier, self._resumed_at, self._earlier_events = earlier, resumed_at, earlier_events
        self._endpoint: Endpoint | None = None
        self._events: EventLog | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Reporter":
        """Opens the files and the port.

        Raises:
            SaveError: a file cannot be written.
            ConfigError: the port cannot be opened.
            MissingExtra: a port is wanted, but prometheus-client is not installed.
        """
        config = self._config
        with ExitStack() as opened:
            if config.prometheus_port is not None:  # first: nothing is written if that cannot be had
                from shadowsync.report.prometheus import Endpoint  # noqa: PLC0415 an extra

                self._endpoint = opened.enter_context(Endpoint(config.prometheus_port, config.prometheus_host))
                self._console.print(f"figures for Prometheus: {self._endpoint.url}", highlight=False)
            self._history = write_frames(self._folder, self._earlier)
            opened.callback(self._history.close)
            self._roles = write_events(self._folder, self._earlier_events)
            opened.callback(self._roles.close)
            if config.tensorboard:
                from shadowsync.report.tensorboard import EventLog  # noqa: PLC0415 it would slow every start

                self._events = EventLog(self._folder, self._resumed_at)
                opened.callback(self._events.close)
            self._progress = opened.enter_context(Progress(self._console))
            self._stack = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def show(self, frame: Frame) -> None:
        """Shows and writes one frame.

        Raises:
            SaveError: it cannot be written.
        """
        self._history.append(frame)
        if self._events is not None:
            self._events.append(frame)
        if self._endpoint is not None:
            self._endpoint.show(frame)
        self._progress.show(frame)

    def note(self, event: RoleEvent) -> None:
        """Writes what happened to a role; may be called from any thread, also too late, when nothing is written.

        Raises:
            SaveError: it cannot be written.
        """
        self._roles.append(event)

    def finish(self, result: Result) -> list[Path]:
        """Ends the progress line, writes result.json and the page, prints the final table; returns what was written.

        Raises:
            SaveError: a file cannot be written.
        """
        if self._events is not None:
            self._events.finish(result)
        self._stack.close()
        written = [write_result(self._folder, result)]
        if self._config.html:
            from shadowsync.report.page import FILE_NAME, write_page  # noqa: PLC0415 so would matplotlib

            written.append(self._folder / FILE_NAME)
            write_page(written[-1], result, self._history.lines, self._roles.lines)
        self._console.print(final_table(result))
        for warning in warnings(result):
            self._console.print(f"warning: {warning}", highlight=False, markup=False, soft_wrap=True)
        return written
