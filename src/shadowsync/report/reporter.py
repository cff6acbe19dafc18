"""Everything a job writes and shows about itself, behind one object."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console

from shadowsync.metrics.frame import Frame
from shadowsync.metrics.roles import RoleEvent
from shadowsync.report.history import History
from shadowsync.report.progress import Progress, final_table
from shadowsync.report.result import Result, write_result
from shadowsync.report.role_log import RoleLog
from shadowsync.report.summary import warnings

if TYPE_CHECKING:
    from shadowsync.report.events import EventLog
    from shadowsync.report.prometheus import Endpoint


@dataclass(frozen=True)
class Outputs:
    """What there is besides result.json and metrics.jsonl (the keys of the section `report`).

    Attributes:
        tensorboard, html: whether these are written.
        prometheus_port: where figures can be scraped while the run lasts; None for nowhere, 0 for any free port.
        prometheus_host: the address on which that port is opened; `0.0.0.0` for all of this machine's.
    """

    tensorboard: bool = True
    html: bool = True
    prometheus_port: int | None = None
    prometheus_host: str = "127.0.0.1"


class Reporter:
    """Takes a job's frames, the events of its roles and its result; used as a context.

    The folder must exist. A resumed run gives the `earlier` frames up to its checkpoint and all `earlier_events`, from
    its own folder or from the one it goes on from.
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        outputs: Outputs,
        earlier: Sequence[Frame] = (),
        resumed_at: int | None = None,
        earlier_events: Sequence[RoleEvent] = (),
    ) -> None:
        self._folder = folder
        self._console = console
        self._outputs = outputs
        self._frames = list(earlier)
        self._resumed_at = resumed_at
        self._earlier_events = earlier_events
        self._stack = ExitStack()

    def __enter__(self) -> "Reporter":
        """Opens the files and the port.

        Raises:
            SaveError: a file cannot be written.
            ConfigError: the port cannot be opened.
            MissingExtra: a port is wanted, but prometheus-client is not installed.
        """
        with ExitStack() as opened:
            self._endpoint = self._open_endpoint(opened)  # first: nothing is written if that cannot be had
            self._history = opened.enter_context(History(self._folder, self._frames))
            self._roles = opened.enter_context(RoleLog(self._folder, self._earlier_events))
            self._events = self._open_events(opened)
            self._progress = opened.enter_context(Progress(self._console))
            self._stack = opened.pop_all()
        return self

    def _open_endpoint(self, opened: ExitStack) -> "Endpoint | None":
        if self._outputs.prometheus_port is None:
            return None
        from shadowsync.report.prometheus import Endpoint  # noqa: PLC0415 an extra

        endpoint = opened.enter_context(Endpoint(self._outputs.prometheus_port, self._outputs.prometheus_host))
        self._console.print(f"figures for Prometheus: {endpoint.url}", highlight=False)
        return endpoint

    def _open_events(self, opened: ExitStack) -> "EventLog | None":
        if not self._outputs.tensorboard:
            return None
        from shadowsync.report.events import EventLog  # noqa: PLC0415 TensorBoard would slow every start

        events = EventLog(self._folder, self._resumed_at)
        opened.callback(events.close)
        return events

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def show(self, frame: Frame) -> None:
        """Shows and writes one frame.

        Raises:
            SaveError: it cannot be written.
        """
        self._frames.append(frame)
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
        if self._outputs.html:
            from shadowsync.report.page import FILE_NAME, write_page  # noqa: PLC0415 so would matplotlib

            write_page(page := self._folder / FILE_NAME, result, self._frames, self._roles.told)
            written.append(page)
        self._console.print(final_table(result))
        for warning in warnings(result):
            self._console.print(f"warning: {warning}", highlight=False, markup=False, soft_wrap=True)
        return written
