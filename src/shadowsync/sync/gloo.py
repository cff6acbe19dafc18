"""A ring of trainers over torch.distributed's Gloo, without a global process group.

`P` parameters, `n` members, `c = ⌈P / n⌉` of the parameters are each member's to sum.
"""

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store  # torch.distributed hides them from type checkers

from shadowsync.sync.all_reduce import Board, Seat
from shadowsync.sync.averaging import RingBroken

T = TypeVar("T")
END_S = 1.0
"""How long the end of the process waits for a ring that a vanished peer may hold."""
SILENCE_S = 60.0
"""Longest silence in one step of a reduction. A member that died shows earlier, by its closed connections or by the
driver's word; this is for links that stay cut."""


def all_mean(group: dist.ProcessGroup, vector: Tensor) -> Tensor:
    """The mean of the members' `[P]` vectors, float32 `[P]`; every value crosses twice in the vector's type.

    Each member sums the c parameters that are its own, in the order of the members and in float32, and sends the mean
    of them to all. The bytes are those of a ring all-reduce, 2 (n − 1) / n of the vector from each member, in two
    steps instead of 2 (n − 1). A bfloat16 is rounded once on either way, where Gloo's own all-reduce rounds every
    partial sum; and with float32 the result is that of adding up in one process, bit for bit.
    """
    members, length = group.size(), len(vector)
    own = -(-length // members)
    sent = vector.new_zeros(members * own)
    sent[:length] = vector
    received = torch.empty_like(sent)
    group.alltoall_base(received, sent, [], []).wait()
    parts = received.view(members, own)
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total.add_(part)
    means = torch.empty_like(sent)
    group.allgather([list(means.view(members, own))], [total.div_(members).to(vector.dtype)]).wait()
    return means[:length].to(torch.float32)


def all_messages(group: dist.ProcessGroup, message: Tensor, most: int) -> tuple[Tensor, ...] | None:
    """The members' messages (uint8, of any lengths) in their order; None if they are more than `most` bytes together.

    Each goes to every other member directly, after its length (8 bytes), by which all members decide alike.
    """
    members = group.size()
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(members)]
    group.allgather([lengths], [torch.tensor([len(message)])]).wait()
    sizes = [int(length) for length in lengths]
    if sum(sizes) > most:
        return None
    received = torch.empty(sum(sizes), dtype=torch.uint8)
    group.alltoall_base(received, message.repeat(members), sizes, [len(message)] * members).wait()
    return received.split_with_sizes(sizes)


class _BoardStore(Store):
    """The store through which Gloo's members find each other, kept by the driver."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board

    def set(self, key: str, value: str | bytes) -> None:
        self._board.pin(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._board.read([key])[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._board.read(keys)


class GlooRing:
    """A member's end of one ring (an `all_reduce.Ring`); what its futures raise is `RingBroken`.

    A thread of its own builds the process group, reduces and ends it, because each of these may block on a peer that
    has vanished: the owner breaks off by `close`, and the thread ends when Gloo does.

    Args:
        host: address of this machine that the others can reach.
        timeout_s: as `SILENCE_S`.
    """

    def __init__(self, seat: Seat, host: str = "127.0.0.1", timeout_s: float = SILENCE_S) -> None:
        self._seat, self._host, self._timeout_s = seat, host, timeout_s
        self._work = queue.SimpleQueue[tuple[Callable[[dist.ProcessGroup], Any], Future[Any]] | None]()
        self._thread = threading.Thread(target=self._run, name=f"ring-{seat.epoch}", daemon=True)
        # A process that ends while Gloo takes a group apart is aborted by it.
        atexit.register(self._end)
        self._thread.start()

    def mean(self, vector: Tensor) -> Future[Tensor]:
        return self._do(lambda group: all_mean(group, vector))

    def gather(self, message: Tensor, most: int) -> Future[tuple[Tensor, ...] | None]:
        return self._do(lambda group: all_messages(group, message, most))

    def close(self) -> None:
        self._work.put(None)

    def join(self, timeout_s: float) -> bool:
        """Waits for the end of the thread after `close`; false if a vanished peer still holds it."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _do(self, work: Callable[[dist.ProcessGroup], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((work, future))
        return future

    def _end(self) -> None:
        self.close()
        self.join(END_S)

    def _run(self) -> None:
        group, reason = self._build()
        while (job := self._work.get()) is not None:
            work, future = job
            if group is None:
                future.set_exception(RingBroken(reason))
                continue
            try:
                future.set_result(work(group))
            except Exception as error:
                reason = _in_one_line(error)
            if not future.done():
                future.set_exception(RingBroken(reason))
                group = None  # its connections close, which tells the other members
        del group  # here, and not after the process may have ended
        atexit.unregister(self._end)

    def _build(self) -> tuple[dist.ProcessGroup | None, str]:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads = timedelta(seconds=self._timeout_s), 1
        try:
            options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
            store = _BoardStore(self._seat.board)
            return cast("dist.ProcessGroup", ProcessGroupGloo(store, self._seat.position, self._seat.size, options)), ""
        except Exception as error:
            return None, _in_one_line(error)


def _in_one_line(error: Exception) -> str:
    """Gloo's message without the place in its source and the advice behind the first sentence."""
    message = " ".join(str(error).split())
    return message.split("] ", 1)[-1].split(". ", 1)[0]
