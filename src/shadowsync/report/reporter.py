"""Everything a job writes and shows about itself, behind one object."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console

from shadowsync.metrics.frame import Frame
from shadowsync.report.history import History
from shadowsync.report.progress import Progress, final_table
from shadowsync.report.result import Result, write_result


@dataclass(frozen=True)
class Outputs:
    """What is written besides result.json and metrics.jsonl (the keys of the section `report`)."""

    tensorboard: bool = True
    html: bool = True


class Reporter:
    """Takes a job's frames and its result; used as a context.

    The folder must exist. A resumed run gives the `earlier` frames up to its checkpoint, from its own folder or from
    the one it goes on from.
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        outputs: Outputs,
        earlier: Sequence[Frame] = (),
        resumed_at: int | None = None,
    ) -> None:
        self._folder = folder
        self._console = console
        self._outputs = outputs
        self._frames = list(earlier)
        self._resumed_at = resumed_at
        self._stack = ExitStack()

    def __enter__(self) -> "Reporter":
        """Opens the files.

        Raises:
            SaveError: one cannot be written.
        """
        with ExitStack() as opened:
            self._history = opened.enter_context(History(self._folder, self._frames))
            self._events = None
            if self._outputs.tensorboard:
                from shadowsync.report.events import EventLog  # noqa: PLC0415 TensorBoard would slow every start

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
        self._frames.append(frame)
        self._history.append(frame)
        if self._events is not None:
            self._events.append(frame)
        self._progress.show(frame)

    def finish(self, result: Result) -> list[Path]:
        """Ends the progress line, writes result.json and the page, prints the final table; returns what was written.

        Raises:
            SaveError: a file cannot be written.
        """
        self._stack.close()
        written = [write_result(self._folder, result)]
        if self._outputs.html:
            from shadowsync.report.page import write_page  # noqa: PLC0415 so would matplotlib

            written.append(write_page(self._folder, result, self._frames))
        self._console.print(final_table(result))
        return written
