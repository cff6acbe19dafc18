"""What workers elsewhere did, on its way to the driver's recorder: collected, and sent a few times a second.

`n` batches, `S` samples of those that are measured.
"""

import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from typing import NamedTuple

import torch
from torch import Tensor

from shadowsync.errors import DataError
from shadowsync.metrics.recorder import Recorder
from shadowsync.rpc.connection import Answer, Connection
from shadowsync.rpc.service import Meta, Reply, Request

EVERY_S = 0.2
UNDER_WAY = 4
"""Messages without an answer; beyond them batches are counted, but not measured."""
MOST_TRAINERS = 1 << 16


class Records(Meta, frozen=True):
    """Batches of one trainer.

    Its tensors: samples of each batch (int32 `[n]`), seconds since its end (float32 `[n]`), and for those that are
    measured logits (float16 `[S]`, which moves NE by less than 0.0001) and labels (uint8 `[S]`).

    Attributes:
        trainer: its rank.
        generation: of the job's parts (see `session.ClusterSession`).
        measured: logits and labels are there, of all batches.
    """

    trainer: int
    generation: int
    measured: bool


class _Step(NamedTuple):
    at: float
    logits: Tensor
    labels: Tensor


class RecordSender:
    """A trainer's end: `record` costs a queue's append, a thread of its own sends."""

    def __init__(self, connection: Connection, trainer: int, generation: int) -> None:
        self._connection = connection
        self._about = trainer, generation
        self._queue: deque[_Step] = deque()
        self._under_way: deque[Future[Answer]] = deque()
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def record(self, trainer: int, logits: Tensor, labels: Tensor) -> None:
        """As `Recorder.record`, of this trainer."""
        self._queue.append(_Step(time.monotonic(), logits, labels))

    def flush(self, timeout_s: float) -> bool:
        """Sends what is there and waits until the driver has it; false if it does not after that time."""
        self._send()
        return not wait(list(self._under_way), timeout_s).not_done

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
            measured, now = len(self._under_way) < UNDER_WAY, time.monotonic()
            sizes = torch.tensor([len(step.labels) for step in steps], dtype=torch.int32)
            ages = torch.tensor([now - step.at for step in steps])
            tensors = [sizes, ages]
            if measured:
                logits = torch.cat([step.logits.reshape(-1) for step in steps])
                tensors += [logits.to(torch.float16), torch.cat([step.labels for step in steps]).to(torch.uint8)]
            self._under_way.append(self._connection.call("records", Records(*self._about, measured), tensors))


class RecordTaker:
    """The driver's end.

    Attributes:
        generation: the one whose records count; those of parts that were replaced are dropped.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.generation = 0
        self._recorder = recorder

    def take(self, request: Request) -> Reply:
        """Hands the batches to the recorder."""
        about = request.read(Records)
        sizes, ages, logits, labels = _checked(about, request.tensors)
        if about.generation != self.generation:
            return Reply()
        start = 0
        for size, age in zip(sizes, ages, strict=True):
            if about.measured:
                of_batch = slice(start, start + size)
                self._recorder.record(about.trainer, logits[of_batch], labels[of_batch], age)
            else:
                self._recorder.count(about.trainer, size, age)
            start += size
        return Reply()


def _checked(about: Records, tensors: tuple[Tensor, ...]) -> tuple[list[int], list[float], Tensor, Tensor]:
    """Sizes, ages, logits and labels.

    Raises:
        DataError: they do not fit each other.
    """
    wanted = [torch.int32, torch.float32, torch.float16, torch.uint8][: 4 if about.measured else 2]
    fits = [tensor.dtype for tensor in tensors] == wanted and all(tensor.dim() == 1 for tensor in tensors)
    if not fits or not 0 <= about.trainer < MOST_TRAINERS or len(tensors[0]) != len(tensors[1]):
        raise DataError("records are sizes, ages and, if measured, logits and labels of a trainer's batches")
    sizes: list[int] = tensors[0].tolist()
    ages: list[float] = tensors[1].clamp(min=0).nan_to_num().tolist()
    if min(sizes, default=1) < 1 or any(len(tensor) != sum(sizes) for tensor in tensors[2:]):
        raise DataError("records hold another number of samples than their sizes say")
    logits, labels = tensors[2:] if about.measured else (torch.empty(0), torch.empty(0))
    return sizes, ages, logits, labels.float()
