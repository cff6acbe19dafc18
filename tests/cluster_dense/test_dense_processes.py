"""Averaging among real processes over the real wire, two of which are lost in the middle of a round."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from rings import until

from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.served import Served
from shadowsync.rpc.server import ServerOptions, WireServer
from shadowsync.sync.averaging import AveragingService

MEMBERS = Path(__file__).with_name("averaging_members.py")
ROUNDS, KILLED_IN, FROZEN_IN = 6, 2, 1


@contextmanager
def members(folder: Path, address: str, keys: JobKeys) -> Iterator[subprocess.Popen[str]]:
    """Trainers 0 and 1, 2, which turns deaf in round 2, and 3, which does so at once; all are gone at the end."""
    arguments = [str(MEMBERS), str(folder), address, str(ROUNDS), "0", "0", str(KILLED_IN), str(FROZEN_IN)]
    parent = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert parent.stdin is not None
        with parent.stdin as pipe:
            pipe.write(msgspec.json.encode(keys).decode() + "\n")
        yield parent
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()


def test_the_others_finish_with_the_mean_of_those_alive(tmp_path: Path) -> None:
    """One is killed, so that its connections close; of the other, which is frozen, nothing is ever heard again."""
    keys, service = JobKeys.make(), AveragingService(range(4))

    def lines(rank: int) -> list[str]:
        path = tmp_path / f"{rank}.txt"
        return path.read_text().splitlines() if path.exists() else []

    def send(rank: int, number: int) -> None:
        os.kill(int((tmp_path / f"{rank}.pid").read_text()), number)

    with closing(WireServer(Served(service), keys, ServerOptions(threads=1))) as server:
        server.start()
        with members(tmp_path, server.address, keys) as parent:
            until(lambda: lines(3) == ["deaf"])
            send(3, signal.SIGSTOP)
            service.dead(3)
            until(lambda: lines(2)[-1:] == ["deaf"])
            send(2, signal.SIGKILL)
            service.dead(2)
            until(lambda: len(lines(0)) == len(lines(1)) == ROUNDS)
            send(3, signal.SIGKILL)
            assert parent.wait(120) == 0
    assert lines(0) == lines(1), "the same bits for both"
    before = lines(2)[:-1]
    assert lines(0)[: len(before)] == before
    means = [float(line.split()[1]) for line in lines(0)]
    assert means[: len(before)] == [1.0 + 10 * number for number in range(len(before))], "of trainers 0, 1 and 2"
    assert means[len(before) :] == [0.5 + 10 * number for number in range(len(before), ROUNDS)], "of 0 and 1"
    assert len(before) == KILLED_IN - 1
    assert service._book.round == ROUNDS
