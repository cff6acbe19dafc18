"""TensorBoard events of a run.

Written synchronously with TensorBoard's own record format: its `EventFileWriter` writes from a thread of its own, in
which a full disk shows up late; at a few frames a second there is nothing to gain from it. Imports TensorBoard, so
`reporter` imports this module late.
"""

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
from tensorboard.summary.writer.record_writer import RecordWriter

from shadowsync.errors import save_errors
from shadowsync.metrics.history import Frame
from shadowsync.report import words
from shadowsync.report.callback import flat
from shadowsync.report.measures import final_scalars, scalars
from shadowsync.report.result import Result

FOLDER_NAME = "tensorboard"


class TensorBoardLog:
    """Writes frames as scalars under `folder/tensorboard`; the step is the number of samples trained.

    Every method raises `SaveError` where it cannot write.
    """

    def __init__(
        self, folder: Path, resumed_at: int | None = None, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """`resumed_at`: samples at which a resumed run goes on; TensorBoard then hides later points of files there."""
        self._wall_clock = wall_clock
        # a name TensorBoard finds and reads in the order of the starts, and that no earlier start took
        stem = f"events.out.tfevents.{int(wall_clock()):010d}.{socket.gethostname()}"
        paths = (folder / FOLDER_NAME / f"{stem}.{number}" for number in itertools.count())
        self._path = next(path for path in paths if not path.exists())
        with save_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb")
        self._writer: Any = RecordWriter(self._file)  # type: ignore[no-untyped-call]
        self._write(file_version="brain.Event:2")
        if resumed_at is not None:
            self._write(step=resumed_at + 1, session_log=SessionLog(status=SessionLog.START))

    def append(self, frame: Frame) -> None:
        """Writes one frame; TensorBoard sees it at once."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(frame)]
        self._write(step=frame.samples, summary=Summary(value=values))

    def finish(self, result: Result) -> None:
        """Writes the measures of the test, and the configuration as hyper-parameters beside them."""
        from torch.utils.tensorboard.summary import hparams  # noqa: PLC0415 takes a while to load

        measures = dict(final_scalars(result))
        for summary in hparams(dict(hyper_parameters(result)), measures):  # type: ignore[no-untyped-call]
            self._write(step=result.data.trained_samples, summary=summary)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in measures.items()]
        self._write(step=result.data.trained_samples, summary=Summary(value=values))

    def _write(self, **fields: Any) -> None:
        with save_errors(self._path):
            self._writer.write(Event(wall_time=self._wall_clock(), **fields).SerializeToString())
            self._writer.flush()

    def close(self) -> None:
        with save_errors(self._path):
            self._writer.close()


def hyper_parameters(result: Result) -> Iterator[tuple[str, bool | float | str]]:
    """The configuration as TensorBoard compares runs by."""
    for key, value in flat(result.config).items():
        yield key, value if isinstance(value, bool | int | float) else words.setting(value)
