"""Everything a job writes and shows about itself, behind one object; and what a person sees in the terminal."""

import html
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shadowsync.config import ReportConfig
from shadowsync.metrics.history import Frame, RoleEvent
from shadowsync.metrics.quality import TestMetrics
from shadowsync.report import words
from shadowsync.report.files import write_events, write_frames
from shadowsync.report.measures import asked_for, figures, key_numbers
from shadowsync.report.result import Result, warnings, write_result

if TYPE_CHECKING:
    from shadowsync.report.prometheus import PrometheusEndpoint
    from shadowsync.report.tensorboard import TensorBoardLog

_PLAIN_EVERY_S = 10.0
_SPEED_FRAMES = 10
_BAR_CELLS = 20
_BAR_NEEDS_COLUMNS = 100
_TRAINERS_LISTED = 8
_GAP = "  "


class Reporter:
    """Takes a job's frames, the events of its roles and its result; used as a context. What writes raises `SaveError`.

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
        self._endpoint: PrometheusEndpoint | None = None
        self._events: TensorBoardLog | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Reporter":
        """Opens the files and the port.

        Raises:
            ConfigError: the port cannot be opened.
            MissingExtra: a port is wanted, but prometheus-client is not installed.
        """
        config = self._config
        with ExitStack() as opened:
            if config.prometheus_port is not None:  # first: nothing is written if that cannot be had
                from shadowsync.report.prometheus import PrometheusEndpoint  # noqa: PLC0415 an extra

                self._endpoint = opened.enter_context(
                    PrometheusEndpoint(config.prometheus_port, config.prometheus_host)
                )
                self._console.print(f"figures for Prometheus: {self._endpoint.url}", highlight=False)
            self._history = write_frames(self._folder, self._earlier)
            opened.callback(self._history.close)
            self._roles = write_events(self._folder, self._earlier_events)
            opened.callback(self._roles.close)
            if config.tensorboard:
                from shadowsync.report.tensorboard import TensorBoardLog  # noqa: PLC0415 it would slow every start

                self._events = TensorBoardLog(self._folder, self._resumed_at)
                opened.callback(self._events.close)
            self._progress = opened.enter_context(Progress(self._console))
            self._stack = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, frame: Frame) -> None:
        self._history.append(frame)
        if self._events is not None:
            self._events.append(frame)
        if self._endpoint is not None:
            self._endpoint.show(frame)
        self._progress.show(frame)

    def note(self, event: RoleEvent) -> None:
        """Writes what happened to a role; may be called from any thread, also too late, when nothing is written."""
        self._roles.append(event)

    def finish(self, result: Result) -> list[Path]:
        """Ends the progress line, writes result.json and the page, prints the final table; returns what was written."""
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


class Progress:
    """One line, redrawn with every frame in a terminal or a notebook; elsewhere a new line every ten seconds."""

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, plain_every_s: float = _PLAIN_EVERY_S
    ) -> None:
        """`plain_every_s`: least time between lines where the console is no terminal."""
        self._console = console
        self._clock = clock
        self._plain_every_s = plain_every_s
        self._recent: deque[Frame] = deque(maxlen=_SPEED_FRAMES)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._cell: Any = None
        self._printed_at: float | None = None
        self._printed: Frame | None = None
        self._explained: set[str] = set()

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._recent and self._recent[-1] is not self._printed and self._cell is None:
            self._print(self._recent[-1])

    def show(self, frame: Frame) -> None:
        """Draws the frame, or prints it when the last line is long enough ago."""
        self._recent.append(frame)
        for _, term in figures(frame):
            if term and term not in self._explained:
                self._explained.add(term)
                self._console.print(term, style="dim", highlight=False, soft_wrap=True)
        if self._live is not None:
            line = progress_line(frame, self._seconds_left(), self._console.width)
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._console.is_jupyter and not self._console.quiet:
            self._draw_in_notebook(frame)
        elif self._printed_at is None or self._clock() - self._printed_at >= self._plain_every_s:
            self._print(frame)

    def _draw_in_notebook(self, frame: Frame) -> None:
        """In a cell's output of its own: rich redraws lines in notebooks only where ipywidgets is installed."""
        from IPython import display  # noqa: PLC0415 it is there in a notebook

        notebook: Any = display  # has no types
        line = html.escape(progress_line(frame, self._seconds_left(), None))
        shown = notebook.HTML(f"<progress max={frame.total_samples} value={frame.samples}></progress> {line}")
        if self._cell is None:
            self._cell = notebook.display(shown, display_id=True)
        else:
            self._cell.update(shown)

    def _print(self, frame: Frame) -> None:
        line = progress_line(frame, self._seconds_left(), None)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._printed_at, self._printed = self._clock(), frame

    def _seconds_left(self) -> float | None:
        """At the speed of the recent frames; None while there is none."""
        first, last = self._recent[0], self._recent[-1]
        seconds, samples = last.seconds - first.seconds, last.samples - first.samples
        if seconds <= 0 or samples <= 0:
            seconds, samples = last.seconds, last.samples
        if seconds <= 0 or samples <= 0:
            return None
        return max(0, last.total_samples - last.samples) * seconds / samples


def progress_line(frame: Frame, seconds_left: float | None, columns: int | None) -> str:
    """The line of one frame: share done, examples/s, the figures of the measures, time left, trainers.

    `columns`: the width of the terminal, which decides whether there are a bar and the single trainers; None for a
    line of any length, without a bar.
    """
    share = min(1.0, frame.samples / frame.total_samples) if frame.total_samples else 0.0
    full = round(share * _BAR_CELLS)
    bar = columns is not None and columns >= _BAR_NEEDS_COLUMNS
    drawn = "━" * full + "╌" * (_BAR_CELLS - full) + " " if bar else ""
    emulated = "" if frame.emulated_step_ms is None else "emulated "
    speed = f"{words.count(frame.eps)} {emulated}examples/s"
    shown = [part for part, _ in figures(frame)]
    line = _GAP.join([f"{drawn}{100 * share:3.0f} %", speed, *shown, f"{words.clock(seconds_left)} left"])
    trainers = trainer_speeds(frame.eps_per_trainer, None if columns is None else columns - len(line) - len(_GAP))
    return f"{line}{_GAP}{trainers}" if trainers else line


def trainer_speeds(each: Sequence[float], room: int | None) -> str:
    """Examples per second of every trainer, or their range, in at most `room` characters (None: no limit).

    Empty with one trainer, or where not even the range fits.
    """
    if len(each) < 2:
        return ""
    least, middle, most = (words.brief(eps) for eps in (min(each), statistics.median(each), max(each)))
    forms = [f"{len(each)} trainers {least}/{middle}/{most}"]
    if room is not None or len(each) <= _TRAINERS_LISTED:
        forms.insert(0, " ".join(["trainers", *map(words.brief, each)]))
    return next((form for form in forms if room is None or len(form) <= room), "")


def final_table(result: Result) -> Table:
    """The key numbers of a finished run, for the terminal; where it is narrow their meanings take more lines."""
    rows = key_numbers(result)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True, min_width=max(len(row.name) for row in rows))
    table.add_column(justify="right", no_wrap=True, min_width=max(len(row.value) for row in rows))
    table.add_column(style="dim")
    for row in rows:
        table.add_row(Text(row.name), Text(row.value), Text(row.meaning))
    return table


def quality_table(measured: TestMetrics) -> Table:
    """What `shadowsync evaluate` prints."""
    table = Table("measure", "value", title="Quality")
    table.columns[1].justify = "right"
    table.add_row("samples", words.count(measured.samples))
    if measured.loss == "logloss":
        table.add_row("AUC", words.decimal(measured.auc))
    table.add_row("normalized entropy (NE)", words.decimal(measured.ne))
    if measured.loss == "logloss":
        table.add_row("log loss", words.decimal(measured.logloss))
    table.add_row("calibration (mean prediction / mean label)", words.decimal(measured.calibration))
    for row in asked_for(measured):
        table.add_row(Text(row.name), row.value)
    return table
