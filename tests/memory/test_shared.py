"""Memory that processes have in common: seen by all, kept when they are killed, gone with the last of them."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shadowsync.errors import ConfigError, RunError
from shadowsync.memory import shared
from shadowsync.memory.pages import limits_of_groups
from shadowsync.memory.shared import FileGate, SharedMemory, bytes_of, can_share

pytestmark = pytest.mark.skipif(not can_share(), reason="needs memory files and /proc, as Linux has them")
PARTS = [(1000, torch.float32), (3, torch.int64)]
DEADLINE_S = 120.0


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory.create(bytes_of(PARTS), "the rows")
    yield made
    made.close()


def in_another_process(program: str, *arguments: str) -> "subprocess.Popen[str]":
    given = f"if True:\n        import sys\n{program}"
    return subprocess.Popen(
        [sys.executable, "-c", given, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_what_one_process_writes_another_sees_also_when_the_writer_was_killed(memory: SharedMemory) -> None:
    floats, numbers = (memory.take(*part) for part in PARTS)
    assert not floats.any()
    numbers[2] = 7
    program = """
        import torch
        from shadowsync.memory.shared import SharedMemory
        memory = SharedMemory.open(sys.argv[1])
        floats, numbers = memory.take(1000, torch.float32), memory.take(3, torch.int64)
        floats[999] = float(numbers[2])
        print("written", flush=True)
        sys.stdin.read()
    """
    other = in_another_process(program, memory.path)
    assert other.stdout is not None
    assert other.stdout.readline() == "written\n"
    other.kill()
    other.communicate()
    assert floats[999] == 7


def test_it_lives_as_long_as_a_tensor_of_it_and_is_gone_then(memory: SharedMemory) -> None:
    path = memory.path
    (part,) = [SharedMemory.open(path).take(1000, torch.float32)]
    memory.close()
    part.fill_(3)
    assert part.sum() == 3000
    with pytest.raises(RunError, match="memory that the roles of this job have in common cannot be opened"):
        SharedMemory.open(path)


def test_nothing_of_it_has_a_name(memory: SharedMemory) -> None:
    assert os.fstat(int(memory.path.rpartition("/")[2])).st_nlink == 0


def test_more_than_the_machine_has_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "memory_bytes", lambda: 1 << 30)
    with pytest.raises(ConfigError, match=r"the rows of embedding-0 take 2\.0 GiB, and this machine has 1\.0 GiB"):
        SharedMemory.create(1 << 31, "the rows of embedding-0")


def test_memory_that_the_system_does_not_give_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", none_left)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigError, match=r"this machine does not give 0\.0 GiB for the rows: .*No space left"):
        SharedMemory.create(4096, "the rows")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_more_than_there_is_cannot_be_taken(memory: SharedMemory) -> None:
    memory.take(*PARTS[0])
    with pytest.raises(RunError, match="smaller than what is to be kept there"):
        memory.take(1 << 20, torch.float32)


GATE = """
        from shadowsync.memory.shared import FileGate, SharedMemory
        gate = FileGate(SharedMemory.open(sys.argv[1]))
        for _ in range(2):
            with gate if sys.argv[2] == "push" else gate.alone():
                print("inside", flush=True)
                sys.stdin.readline()
            sys.stdin.readline()
"""


@pytest.mark.parametrize(("first", "then"), [("push", "alone"), ("alone", "push"), ("alone", "alone")])
def test_one_is_alone_among_processes_also_when_somebody_inside_is_killed(
    memory: SharedMemory, first: str, then: str
) -> None:
    """The other process leaves once, goes in again, and is killed inside."""
    gate = FileGate(memory)
    other = in_another_process(GATE, memory.path, first)
    told, says = other.stdin, other.stdout
    assert told is not None
    assert says is not None

    def leaves() -> None:
        told.write("\n")
        told.flush()

    def go_in(came_in: threading.Event) -> None:
        with gate if then == "push" else gate.alone():
            came_in.set()

    for ends in (leaves, other.kill):
        assert says.readline() == "inside\n"
        came_in = threading.Event()
        thread = threading.Thread(target=go_in, args=(came_in,))
        thread.start()
        assert not came_in.wait(0.05)
        ends()
        assert came_in.wait(DEADLINE_S)
        thread.join()
        if ends is leaves:
            leaves()
    other.communicate()


def test_pushes_of_processes_and_threads_go_together(memory: SharedMemory) -> None:
    gate = FileGate(memory)
    other = in_another_process(GATE, memory.path, "push")
    assert other.stdout is not None
    assert other.stdout.readline() == "inside\n"

    def push() -> None:
        with gate:
            together.wait(DEADLINE_S)

    together = threading.Barrier(3)
    threads = [threading.Thread(target=push) for _ in range(2)]
    for thread in threads:
        thread.start()
    together.wait(DEADLINE_S)
    for thread in threads:
        thread.join()
    other.communicate("\n")


def test_a_thread_that_ends_leaves_no_handle_open(memory: SharedMemory) -> None:
    gate = FileGate(memory)

    def push() -> None:
        with gate:
            pass

    def handles() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = handles()
    for _ in range(20):
        thread = threading.Thread(target=push)
        thread.start()
        thread.join()
    assert handles() <= before + 1


def test_who_wants_to_be_alone_gets_a_turn_however_many_go_through(memory: SharedMemory) -> None:
    """Eight of them overlap all the time, so that without a turnstile there would be no moment with nobody inside."""
    gate, over, inside, pause = FileGate(memory), threading.Event(), threading.Semaphore(0), threading.Event()

    def goes_through() -> None:
        while not over.is_set():
            with gate:
                inside.release()
                pause.wait(0.005)

    threads = [threading.Thread(target=goes_through) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(16):
        assert inside.acquire(timeout=DEADLINE_S)
    turns = 0
    with contextlib.ExitStack() as ends:
        ends.callback(over.set)
        for _ in range(20):
            with gate.alone():
                turns += 1
    for thread in threads:
        thread.join(DEADLINE_S)
    assert turns == 20


def test_the_limits_of_all_groups_around_this_process_count(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("12:cpu,memory:/slurm/job_7\n3:pids:/user\n0::/user.slice/run-1\n")
    groups = tmp_path / "sys/fs/cgroup"
    found = {path.relative_to(groups).as_posix() for path in limits_of_groups(tmp_path)}
    assert found == {
        *(f"{place}memory.max" for place in ("", "user.slice/", "user.slice/run-1/")),
        *(f"memory/{place}memory.limit_in_bytes" for place in ("", "slurm/", "slurm/job_7/")),
    }
