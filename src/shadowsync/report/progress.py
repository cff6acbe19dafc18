"""What a person sees in the terminal while a job trains, and the tables at its end."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shadowsync.metrics.history import Frame
from shadowsync.metrics.quality import TestMetrics
from shadowsync.report import words
from shadowsync.report.measures import figures, key_numbers
from shadowsync.report.result import Result

TERMS = {
    "NE": "normalized entropy, log loss over that of predicting the mean label",
    "sync gap": "steps of a trainer between two synchronisations of its replica",
    "staleness": "global steps by which an applied gradient was late",
    "PLS": "portion of lost samples: learned by dead embedding servers since they were last saved",
}
"""Words of the progress line that are explained where they first stand."""
_PLAIN_EVERY_S = 10.0
_SPEED_FRAMES = 10
_BAR_CELLS = 20
_BAR_NEEDS_COLUMNS = 100
_TRAINERS_LISTED = 8
_GAP = "  "


class Progress:
    """One line that is redrawn with every frame; where the output is no terminal, a new line every ten seconds."""

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, plain_every_s: float = _PLAIN_EVERY_S
    ) -> None:
        """`plain_every_s`: least time between lines where the console is no terminal."""
        self._console = console
        self._clock = clock
        self._plain_every_s = plain_every_s
        self._recent: deque[Frame] = deque(maxlen=_SPEED_FRAMES)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._printed_at: float | None = None
        self._printed: Frame | None = None
        self._explained: set[str] = set()

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._recent and self._recent[-1] is not self._printed:
            self._print(self._recent[-1])

    def show(self, frame: Frame) -> None:
        """Takes one frame; draws it, or prints it when the last line is long enough ago."""
        self._recent.append(frame)
        said = " ".join(figures(frame))
        for term, meaning in TERMS.items():
            if term in said and term not in self._explained:
                self._explained.add(term)
                self._console.print(f"{term}: {meaning}", style="dim", highlight=False, soft_wrap=True)
        if self._live is not None:
            line = progress_line(frame, self._seconds_left(), self._console.width)
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._printed_at is None or self._clock() - self._printed_at >= self._plain_every_s:
            self._print(frame)

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
    line = _GAP.join([f"{drawn}{100 * share:3.0f} %", speed, *figures(frame), f"{words.clock(seconds_left)} left"])
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
    table.add_row("AUC", words.decimal(measured.auc))
    table.add_row("normalized entropy (NE)", words.decimal(measured.ne))
    table.add_row("log loss", words.decimal(measured.logloss))
    table.add_row("calibration (mean prediction / mean label)", words.decimal(measured.calibration))
    return table
