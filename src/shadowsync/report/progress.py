"""What a person sees in the terminal while a job trains, and the table at its end."""

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shadowsync.metrics.frame import Frame
from shadowsync.report import words
from shadowsync.report.measures import figures
from shadowsync.report.result import Result
from shadowsync.report.summary import key_numbers
from shadowsync.report.trainer_words import trainer_speeds

_PLAIN_EVERY_S = 10.0
_SPEED_FRAMES = 10
_BAR_CELLS = 20
_BAR_NEEDS_COLUMNS = 100
_GAP = "  "


class Progress:
    """One line that is redrawn with every frame; where the output is no terminal, a new line every ten seconds."""

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, plain_every_s: float = _PLAIN_EVERY_S
    ) -> None:
        """`console`: where to print; `plain_every_s`: least time between lines where it is no terminal."""
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
        self._explain(frame)
        if self._live is not None:
            self._live.update(Text(self._line(frame), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._printed_at is None or self._clock() - self._printed_at >= self._plain_every_s:
            self._print(frame)

    def _print(self, frame: Frame) -> None:
        self._console.print(self._line(frame), markup=False, highlight=False, soft_wrap=True)
        self._printed_at, self._printed = self._clock(), frame

    def _explain(self, frame: Frame) -> None:
        """Says what a word of the line means, above the line in which it first stands."""
        said = " ".join(figures(frame))
        new = [term for term in words.TERMS if term in said and term not in self._explained]
        self._explained.update(new)
        for term in new:
            self._console.print(f"{term}: {words.TERMS[term]}", style="dim", highlight=False, soft_wrap=True)

    def _line(self, frame: Frame) -> str:
        columns = None if self._live is None else self._console.width
        return progress_line(frame, _seconds_left(self._recent), columns)


def _seconds_left(recent: "deque[Frame]") -> float | None:
    """At the speed of the recent frames; None while there is none."""
    first, last = recent[0], recent[-1]
    seconds, samples = last.seconds - first.seconds, last.samples - first.samples
    if seconds <= 0 or samples <= 0:
        seconds, samples = last.seconds, last.samples
    if seconds <= 0 or samples <= 0:
        return None
    return max(0, last.total_samples - last.samples) * seconds / samples


def progress_line(frame: Frame, seconds_left: float | None, columns: int | None) -> str:
    """The line of one frame: share done, examples/s, window NE, AUC so far, sync gap or global steps, trouble and
    loss, time left, trainers.

    `columns`: the width of the terminal, which decides whether there are a bar and the single trainers; None for a
    line of any length, without a bar.
    """
    share = min(1.0, frame.samples / frame.total_samples) if frame.total_samples else 0.0
    full = round(share * _BAR_CELLS)
    bar = columns is not None and columns >= _BAR_NEEDS_COLUMNS
    drawn = "━" * full + "╌" * (_BAR_CELLS - full) + " " if bar else ""
    line = _GAP.join([f"{drawn}{100 * share:3.0f} %", *figures(frame), f"{words.clock(seconds_left)} left"])
    trainers = trainer_speeds(frame.eps_per_trainer, None if columns is None else columns - len(line) - len(_GAP))
    return f"{line}{_GAP}{trainers}" if trainers else line


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
