"""Hosts on one machine: links hold their rate, cables can be pulled, hosts killed, and nothing is left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import testbed as library
from testbed import Testbed, TestbedError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PRINTED: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
ECHO = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as listening:
    print("ready", flush=True)
    connection, _ = listening.accept()
    while got := connection.recv(64):
        connection.sendall(got)
"""
ASK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000))
for line in sys.stdin:
    connection.sendall(line.strip().encode())
    connection.settimeout(float(sys.stdin.readline()))
    try:
        print(connection.recv(64).decode(), flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""


@pytest.fixture(scope="module")
def allowed() -> None:
    """Says why the tests of this file cannot run."""
    if (reason := library.obstacle()) is not None:
        pytest.skip(reason)


@pytest.fixture
def pair(allowed: None) -> Iterator[Testbed]:
    with Testbed(hosts=2, rate="200mbit") as made:
        yield made


class Dialogue:
    """A connection from host 0 to an echo in host 1."""

    def __init__(self, testbed: Testbed) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._echo = testbed.run(1, [sys.executable, "-c", ECHO], **pipes)
        assert self._echo.stdout.readline() == "ready\n"
        self._ask = testbed.run(0, [sys.executable, "-c", ASK, testbed.hosts[1].address], **pipes)

    def __enter__(self) -> "Dialogue":
        return self

    def ask(self, word: str, wait_s: float) -> str:
        """What comes back within `wait_s`, or `silence`."""
        self._ask.stdin.write(f"{word}\n{wait_s}\n")
        self._ask.stdin.flush()
        answer: str = self._ask.stdout.readline().strip()
        return answer

    def __exit__(self, *_: object) -> None:
        for process in (self._ask, self._echo):
            process.kill()
            process.communicate()


def alive(host: library.Host) -> list[str]:
    listed = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True)
    return listed.stdout.split()


def left_of(name: str) -> list[str]:
    there = Path("/run/netns")
    return [path.name for path in there.iterdir() if path.name.startswith(name)] if there.exists() else []


def is_dead(pid: str) -> bool:
    """It is gone, or only not yet waited for."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def owner(script: str) -> "subprocess.Popen[str]":
    """A process of its own with a testbed `t`; what it says on stderr ends when its reaper ends too."""
    begin = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\nfrom testbed import Testbed\n"
    command = [sys.executable, "-c", begin + script]
    return subprocess.Popen(command, **PRINTED)


HOLD = """
t = Testbed(2)
inner = t.run(1, ["sh", "-c", "echo inside; exec sleep 600"], stdout=-1)
inner.stdout.readline()
print(t.folder, inner.pid, t._reaper.pid, flush=True)
inner.wait()
"""


def test_a_link_carries_its_rate_both_ways_and_can_be_changed(pair: Testbed) -> None:
    assert 160e6 < pair.measure(0, 1, 0.5) < 210e6
    pair.rate(0, "40mbit")
    assert 32e6 < pair.measure(0, 1, 0.5) < 42e6
    assert 32e6 < pair.measure(1, 0, 0.5) < 42e6
    pair.rate(0, None)
    assert 160e6 < pair.measure(0, 1, 0.5) < 210e6, "the link of host 1 still holds"


def test_a_live_connection_is_silent_while_the_cable_is_out_and_goes_on_afterwards(pair: Testbed) -> None:
    with Dialogue(pair) as dialogue:
        assert dialogue.ask("one", 10) == "one"
        pair.cut(1)
        assert dialogue.ask("two", 0.3) == "silence"
        pair.restore(1)
        assert dialogue.ask(",three", 20) in ("two", "two,three"), "nothing that was sent is lost"


def test_a_killed_host_takes_everything_with_it_and_comes_again(pair: Testbed) -> None:
    stubborn = "trap '' TERM HUP; sleep 600 & setsid sleep 600 & wait"
    shell = pair.run(1, ["sh", "-c", stubborn], stdin=subprocess.DEVNULL)
    other = pair.run(0, ["sleep", "600"])
    pair.kill_host(1)
    assert shell.wait(120) == -signal.SIGKILL
    assert alive(pair.hosts[1]) == []
    assert other.poll() is None
    pair.restart_host(1)
    assert pair.measure(0, 1, 0.2) > 1e6, "its peers find it again at once"


def test_peers_of_a_killed_host_hear_nothing_of_its_end(pair: Testbed) -> None:
    with Dialogue(pair) as dialogue:
        assert dialogue.ask("one", 10) == "one"
        pair.kill_host(1)
        assert dialogue.ask("two", 0.3) == "silence", "a closed connection would have given an empty answer"


def test_hosts_are_held_to_their_cores(allowed: None) -> None:
    there = sorted(os.sched_getaffinity(0))
    with Testbed(hosts=3, rate=None, cores=1) as testbed:
        say = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
        found = [int(testbed.output(host, say)) for host in range(3)]
    assert found == [there[index % len(there)] for index in range(3)]
    with pytest.raises(TestbedError, match=f"1 to {len(there)} cores"):
        Testbed(cores=len(there) + 1)


def test_two_testbeds_at_a_time_know_nothing_of_each_other(pair: Testbed) -> None:
    with Testbed(hosts=2, rate="50mbit") as second:
        assert pair.hosts[0].address == second.hosts[0].address
        assert 160e6 < pair.measure(0, 1, 0.3) < 210e6
        assert 40e6 < second.measure(0, 1, 0.3) < 53e6
        assert left_of(second.folder.name)
    assert left_of(second.folder.name) == []
    assert pair.output(0, ["echo", "here"]) == "here\n"


def test_an_exception_leaves_nothing_behind(allowed: None) -> None:
    inner = None

    def fail() -> None:
        nonlocal inner
        with Testbed() as testbed:
            inner = testbed, testbed.run(0, ["sleep", "600"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    testbed, process = inner
    assert process.returncode == -signal.SIGKILL
    assert left_of(testbed.folder.name) == []
    assert not testbed.folder.exists()


def test_a_process_that_has_not_entered_its_host_yet_ends_too(allowed: None) -> None:
    for _ in range(3):
        with Testbed(hosts=1, rate=None) as testbed:
            started = [testbed.run(0, ["sleep", "600"]) for _ in range(4)]
            testbed.kill_host(0)
            assert [process.returncode for process in started] == [-signal.SIGKILL] * 4
            late = testbed.run(0, ["sleep", "600"])
        assert late.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_owner_leaves_nothing_behind(allowed: None, number: signal.Signals) -> None:
    with owner(HOLD) as process:
        assert process.stdout is not None
        folder, inner, _ = process.stdout.readline().split()
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    assert said == ""
    assert left_of(Path(folder).name) == []
    assert not Path(folder).exists()
    assert is_dead(inner)


def test_what_nobody_could_remove_is_swept_by_the_next(pair: Testbed) -> None:
    with owner(HOLD) as process:
        assert process.stdout is not None
        folder, _, reaper = process.stdout.readline().split()
        os.kill(int(reaper), signal.SIGKILL)
        process.kill()
        process.wait(120)
    assert left_of(Path(folder).name)
    assert library.sweep() == [Path(folder).name]
    assert left_of(Path(folder).name) == []
    assert not Path(folder).exists()
    assert pair.output(0, ["echo", "here"]) == "here\n", "one whose owner lives stays"


def test_the_command_line_runs_in_host_0_and_returns_its_status(allowed: None) -> None:
    command = [sys.executable, str(BENCHMARKS / "testbed.py"), "--no-ray", "--hosts", "1", "--rate", "1gbit", "--"]
    run = subprocess.run([*command, "sh", "-c", "ip -4 addr show eth0; exit 7"], check=False, **PRINTED)
    assert run.returncode == 7
    assert "10.0.0.1/24" in run.stdout
    assert run.stderr == "1 hosts on one machine, links 1gbit, free cores\n"


def test_the_command_line_removes_the_testbed_when_it_is_asked_to_end(allowed: None) -> None:
    command = [sys.executable, str(BENCHMARKS / "testbed.py"), "--no-ray", "--", "sh", "-c", "echo started; sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        assert left_of(f"ss{process.pid}n")
        process.terminate()
        assert process.wait(120) == 143
        assert left_of(f"ss{process.pid}n") == []


def test_mistakes_are_said_in_a_sentence(pair: Testbed) -> None:
    with pytest.raises(TestbedError, match="'fast' is not a rate: write a number and kbit, mbit or gbit"):
        Testbed(rate="fast")
    with pytest.raises(TestbedError, match="1 to 250 hosts, not 0"):
        Testbed(hosts=0)
    with pytest.raises(TestbedError, match="host 1: sh ended with 3: why"):
        pair.output(1, ["sh", "-c", "echo why; exit 3"])
    begin = time.monotonic()
    with pytest.raises(TestbedError, match=r"host 0: sleep was not done after 0\.1 s"):
        pair.output(0, ["sleep", "600"], timeout_s=0.1)
    assert time.monotonic() - begin < 120


def test_who_may_not_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert library.obstacle() == "a testbed needs root rights, for network namespaces: run this as root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert library.obstacle() == "a testbed needs ip and tc and taskset: install iproute2 and util-linux"


def test_a_ray_node_in_each_host(pair: Testbed) -> None:
    pytest.importorskip("ray")
    pair.ray_start(0, head=True)
    pair.ray_start(1)
    script = (
        "import ray; ray.init(log_to_driver=False); there = ray.remote(resources={'host1': 1})(lambda: "
        "ray.util.get_node_ip_address()); print(len(ray.nodes()), ray.get(there.remote()))"
    )
    said = pair.output(0, [sys.executable, "-W", "ignore", "-c", script])
    assert said.splitlines()[-1] == "2 10.0.0.2"
    pair.kill_host(1)
    assert alive(pair.hosts[1]) == []
    assert alive(pair.hosts[0])
