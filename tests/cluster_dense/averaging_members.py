"""Trainers that do nothing but average, each in a process forked from this one, which has imported everything.

`python averaging_members.py FOLDER ADDRESS ROUNDS DEAF_ROUND…`, with one `DEAF_ROUND` for each trainer, 0 for none, and
the job's keys as JSON on stdin. In `FOLDER/RANK.txt` every round leaves its number, the mean's first value and a digest
of all. In its deaf round a trainer joins the ring, says so, and sends nothing. `FOLDER/RANK.pid` says whom to kill.
"""

import hashlib
import os
import sys
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec
import torch
from torch import Tensor

from shadowsync.compression.plain import Plain
from shadowsync.metrics.wire import WireCounter
from shadowsync.rpc.client import WireClient
from shadowsync.rpc.connection import JobKeys
from shadowsync.sync.all_reduce import RemoteAveraging, Ring, Seat
from shadowsync.sync.gloo import GlooRing

SIZE = 100_003


class Going:
    """A Gloo ring that turns deaf in one round."""

    def __init__(self, seat: Seat, deaf_round: int, out: TextIO) -> None:
        self._ring, self._rounds, self._deaf_round, self._out = GlooRing(seat), 0, deaf_round, out

    def mean(self, vector: Tensor) -> Future[Tensor]:
        self._rounds += 1
        if self._rounds == self._deaf_round:
            self._out.write("deaf\n")
            return Future()
        return self._ring.mean(vector)

    def gather(self, message: Tensor, most: int) -> Future[tuple[Tensor, ...] | None]:
        return self._ring.gather(message, most)

    def close(self) -> None:
        self._ring.close()


@dataclass(frozen=True)
class Job:
    """What all trainers are told."""

    keys: JobKeys
    folder: Path
    address: str
    rounds: int


def average(job: Job, rank: int, deaf_round: int, out: TextIO) -> None:
    """One trainer."""
    torch.set_num_threads(1)

    def make_ring(seat: Seat) -> Ring:
        return Going(seat, deaf_round, out)

    with closing(WireClient(job.keys)) as connector:
        connection = connector.connect(job.address)
        end = RemoteAveraging(rank, connection, make_ring, Plain(), WireCounter(), check_s=0.05)
        for number in range(job.rounds):
            mean = end.mean(torch.full((SIZE,), float(10 * number + rank)))
            digest = hashlib.sha256(mean.numpy().tobytes()).hexdigest()
            out.write(f"{number} {float(mean[0])} {digest}\n")
        end.leave()


def fork(job: Job, rank: int, deaf_round: int) -> int:
    """Starts one trainer; its process id."""
    pid = os.fork()
    if pid:
        (job.folder / f"{rank}.pid").write_text(str(pid))
        return pid
    status = 1
    try:
        with (job.folder / f"{rank}.txt").open("w", buffering=1) as out:
            average(job, rank, deaf_round, out)
        status = 0
    finally:
        os._exit(status)


def main(folder: str, address: str, rounds: str, *deaf_rounds: str) -> int:
    """Starts all trainers and waits; 0 if every one of them ended well or was killed."""
    keys = msgspec.json.decode(sys.stdin.readline(), type=JobKeys)
    job = Job(keys, Path(folder), address, int(rounds))
    pids = [fork(job, rank, int(deaf_round)) for rank, deaf_round in enumerate(deaf_rounds)]
    return sum(os.waitpid(pid, 0)[1] > 255 for pid in pids)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
