"""`metrics.jsonl`: one frame a line, flushed as it comes."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from shadowsync.metrics.frame import Frame
from shadowsync.report.json_lines import JsonLines, read_lines

FILE_NAME = "metrics.jsonl"


class History(JsonLines[Frame]):
    """Writes a run's frames; a resumed run is given the `earlier` ones it goes on from (see `frames_until`)."""

    def __init__(self, folder: Path, earlier: Sequence[Frame] = ()) -> None:
        """Starts `folder/metrics.jsonl` anew.

        Raises:
            SaveError: it cannot be written.
        """
        super().__init__(folder / FILE_NAME, earlier)


def read_frames(folder: Path, tell: Callable[[str], object] | None = None) -> list[Frame]:
    """The frames of the run in `folder`; none where it wrote no `metrics.jsonl`; `tell` as in `read_lines`.

    Raises:
        DataError: a line is not a frame; the message names it.
    """
    return read_lines(folder / FILE_NAME, Frame, "a frame", tell)


def frames_until(frames: Iterable[Frame], samples: int) -> list[Frame]:
    """The frames a run resumed at `samples` goes on from; later ones tell of training that was lost."""
    return [frame for frame in frames if frame.samples <= samples]
