"""What workers elsewhere did, on its way to the driver's recorder: collected, and sent a few times a second.

`n` batches, `S` samples of those that are measured.
"""

import threading
import time
from collections import deque

import torch
from torch import Tensor

from shadowsync.errors import DataError
from shadowsync.metrics.recorder import Recorder
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.pending import Pending, ended
from shadowsync.rpc.served import later, served

EVERY_S = 0.2
UNDER_WAY = 4
"""Messages without an answer; beyond them batches are counted, but not measured."""
MOST_TRAINERS = 1 << 16
_CLICKS, _NUMBERS = (torch.float16, torch.uint8), (torch.float32, torch.float32)


class RecordSender:
    """A trainer's end: `record` costs a queue's append, a thread of its own sends. Labels are `clicks` or not."""

    def __init__(self, connection: Connection, trainer: int, generation: int, clicks: bool = True) -> None:
        self._connection = connection
        self._about = trainer, generation
        self._kinds = _CLICKS if clicks else _NUMBERS
        self._queue: deque[tuple[float, Tensor, Tensor]] = deque()  # of batches: when, logits, labels
        self._under_way: deque[Pending[None]] = deque()
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def record(self, trainer: int, logits: Tensor, labels: Tensor) -> None:
        """As `Recorder.record`, of this trainer."""
        self._queue.append((time.monotonic(), logits, labels))

    def flush(self, timeout_s: float) -> bool:
        """Sends what is there and waits until the driver has it; false if it does not after that time."""
        self._send()
        return ended(list(self._under_way), timeout_s)

    def close(self) -> None:
        """Ends the thread; nothing is sent any more."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._send()

    def _send(self) -> None:
        with self._sending:
            steps = [self._queue.popleft() for _ in range(len(self._queue))]
            while self._under_way and self._under_way[0].done():
                self._under_way.popleft()
            if not steps:
                return
            now, measured = time.monotonic(), None
            sizes = torch.tensor([len(labels) for _, _, labels in steps], dtype=torch.int32)
            ages = torch.tensor([now - at for at, _, _ in steps])
            if len(self._under_way) < UNDER_WAY:
                logits = torch.cat([logits.reshape(-1) for _, logits, _ in steps])
                labels = torch.cat([labels for *_, labels in steps])
                measured = logits.to(self._kinds[0]), labels.to(self._kinds[1])
            told = later(self._connection, RecordTaker.records, *self._about, sizes, ages, measured)
            self._under_way.append(told)


class RecordTaker:
    """The driver's end.

    Attributes:
        generation: the one whose records count; those of parts that were replaced are dropped.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.generation = 0
        self._recorder = recorder

    @served()
    def records(
        self, trainer: int, generation: int, sizes: Tensor, ages: Tensor, measured: tuple[Tensor, Tensor] | None
    ) -> None:
        """Hands batches of one trainer to the recorder.

        Args:
            trainer: its rank.
            generation: of the job's parts (see `session.Session`).
            sizes: samples of each batch, int32 `[n]`.
            ages: seconds since its end, float32 `[n]`.
            measured: of all batches, or none, logits and labels, `[S]` each: of clicks float16, which moves NE by less
                than 0.0001, and uint8, of other labels float32.

        Raises:
            DataError: they do not fit each other.
        """
        samples, seconds = _checked(trainer, sizes, ages, measured)
        if generation != self.generation:
            return
        logits, labels = measured or (torch.empty(0), torch.empty(0))
        labels, start = labels.float(), 0
        for size, age in zip(samples, seconds, strict=True):
            if measured is None:
                self._recorder.count(trainer, size, age)
            else:
                of_batch = slice(start, start + size)
                self._recorder.record(trainer, logits[of_batch], labels[of_batch], age)
            start += size


def _checked(
    trainer: int, sizes: Tensor, ages: Tensor, measured: tuple[Tensor, Tensor] | None
) -> tuple[list[int], list[float]]:
    """Sizes and ages.

    Raises:
        DataError: they do not fit each other, or what was measured.
    """
    tensors = [sizes, ages, *(measured or ())]
    given, fixed = tuple(tensor.dtype for tensor in tensors), (torch.int32, torch.float32)
    fits = given in (fixed, (*fixed, *_CLICKS), (*fixed, *_NUMBERS)) and all(tensor.dim() == 1 for tensor in tensors)
    if not fits or not 0 <= trainer < MOST_TRAINERS or len(sizes) != len(ages):
        raise DataError("records are sizes, ages and, if measured, logits and labels of a trainer's batches")
    samples: list[int] = sizes.tolist()
    if min(samples, default=1) < 1 or any(len(tensor) != sum(samples) for tensor in tensors[2:]):
        raise DataError("records hold another number of samples than their sizes say")
    return samples, ages.clamp(min=0).nan_to_num().tolist()
