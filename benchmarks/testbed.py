"""Several hosts on one Linux machine: a network namespace each, joined by a bridge over links of a chosen rate.

    python benchmarks/testbed.py --hosts 2 --rate 1gbit -- shadowsync train cluster.runtime=ray cluster.address=auto
    python benchmarks/testbed.py sweep      removes what testbeds that were killed have left behind

The first form starts a Ray node in every host and runs the command in host 0; its exit status is the command's.

Each link is a veth pair with a token bucket (`tc … tbf`) on both ends, so that what a host sends and what it receives
are both held to the rate; nothing adds to the machine's own latency. The bridge has a namespace of its own, so nothing
of a testbed shows in the machine's network and any number of testbeds may run at once. Hosts share cores, memory and
files. A process of its own removes a testbed whose owner is gone, however it went. Root rights are needed.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parent))
from namespaces import (
    TestbedError,
    bits_per_second,
    check_machine,
    claim,
    ip,
    kill_all,
    remove,
    remove_namespace,
    shape,
    start_reaper,
    sweep,
)

RAY_PORT = 6379


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        index: from 0.
        namespace: its network namespace, for `ip netns exec`.
        address: its IP.
        cores: of the machine, to which its processes are held; None leaves them free.
    """

    index: int
    namespace: str
    address: str
    cores: tuple[int, ...] | None

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs `command` there, with no process in between."""
        pinned = [] if self.cores is None else ["taskset", "--cpu-list", ",".join(map(str, self.cores))]
        return ["ip", "netns", "exec", self.namespace, *pinned, *command]


@dataclass(frozen=True)
class RayNode:
    """How a Ray node is started.

    Attributes:
        cpus: what Ray may count on, which need not be there.
        resources: custom ones, besides `host0`, `host1` … of which each host has one.
        system: Ray's internal settings, of use at the head only.
        extra: further arguments of `ray start`.
    """

    cpus: int = 16
    resources: Mapping[str, float] = field(default_factory=dict)
    system: Mapping[str, Any] = field(default_factory=dict)
    extra: tuple[str, ...] = ()

    def arguments(self, host: int) -> list[str]:
        """Of `ray start`."""
        resources = {f"host{host}": 1.0, **self.resources}
        system = [f"--system-config={json.dumps(dict(self.system))}"] if self.system else []
        return [f"--num-cpus={self.cpus}", f"--resources={json.dumps(resources)}", *system, *self.extra]


class Testbed:
    """Hosts 0 … H−1 with addresses 10.0.0.1 … 10.0.0.H, which see each other and nothing else.

    Attributes:
        hosts: in their order.
        folder: of the testbed's own files; gone with it.
    """

    __test__: ClassVar[bool] = False  # pytest would take the class for a test

    def __init__(self, hosts: int = 2, rate: str | None = "1gbit", cores: int | None = None) -> None:
        """
        Args:
            hosts: `H`, at most 250.
            rate: of every link, each way: a number with kbit, mbit or gbit; None leaves them as fast as they go.
            cores: how many cores each host is held to; host h takes the next ones after those of host h−1, and the
                first again after the last. None holds it to none.

        Raises:
            TestbedError: it cannot be made here.
        """
        if not 1 <= hosts <= 250:
            raise TestbedError(f"a testbed has 1 to 250 hosts, not {hosts}")
        held = [_cores_of(index, cores) for index in range(hosts)]
        if rate is not None:
            bits_per_second(rate)
        check_machine()
        sweep()
        self.folder, self._lock = claim()
        self._reaper = start_reaper(self.folder)
        self._processes: list[tuple[int, subprocess.Popen[Any]]] = []
        self._changing = threading.Lock()
        self._closed = False
        _make_token(self.folder / "token")
        self._rates: list[str | None] = [rate] * hosts
        self.hosts = tuple(
            Host(index, f"{self.folder.name}h{index}", f"10.0.0.{index + 1}", held[index]) for index in range(hosts)
        )
        try:
            self._make_switch()
            for host in self.hosts:
                self._make_host(host)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Testbed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, host: int, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Starts a command in a host.

        Args:
            host: its index.
            command: program and arguments; its pid is the process's own.
            options: of `subprocess.Popen`; `env` is laid over what `environment` gives.
        """
        variables = self.environment() | dict(options.pop("env", None) or {})
        return self._start(host, command, env=variables, **options)

    def output(self, host: int, command: Sequence[str], timeout_s: float = 60.0) -> str:
        """What a command in a host prints.

        Raises:
            TestbedError: it fails, or is not done in time.
        """
        return self._check(host, command, self.environment(), timeout_s)

    def environment(self, ray_address: bool = True) -> dict[str, str]:
        """The variables of commands: this process's, less what it says of other Rays, and how to reach this one."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.folder / "token")}
        return inherited | ray | ({"RAY_ADDRESS": self._ray_address} if ray_address else {})

    def ray_start(self, host: int, head: bool = False, node: RayNode = RayNode()) -> None:
        """Starts a Ray node in a host, the head's first; its dashboard is off unless `node.extra` turns it on.

        Raises:
            TestbedError: it does not start.
        """
        folder = self.folder / f"ray{host}"
        folder.mkdir(exist_ok=True)
        place = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={self.hosts[host].address}"),
            *(place if head else [f"--address={self._ray_address}"]),
            *(f"--temp-dir={folder}", "--object-store-memory=100000000", "--disable-usage-stats"),
            *node.arguments(host),
        ]
        # Without an address: a node that starts must not take itself for a part of another cluster.
        self._check(host, command, self.environment(ray_address=False), timeout_s=120.0)

    def kill_host(self, host: int, silent: bool = True) -> None:
        """Every process of the host gets SIGKILL; if it is to be `silent`, as where a plug is pulled, the link goes
        first. Else its system closes what they had open, so that others know at once."""
        if silent:
            self.cut(host)
        self._kill_started([host])
        kill_all(self.hosts[host].namespace)

    def restart_host(self, host: int) -> None:
        """Gives a host a fresh network stack and its link again; nothing runs in it."""
        self.kill_host(host)
        remove_namespace(self.hosts[host].namespace)
        with contextlib.suppress(TestbedError):
            ip("-n", self._switch, "link", "del", f"p{host}")  # it goes with the namespace, but not at once
        self._make_host(self.hosts[host])

    def cut(self, host: int) -> None:
        """Pulls a host's cable: nothing goes in or out, and neither side is told."""
        ip("-n", self._switch, "link", "set", f"p{host}", "down")

    def restore(self, host: int) -> None:
        """Plugs the cable in again."""
        ip("-n", self._switch, "link", "set", f"p{host}", "up")

    def rate(self, host: int, rate: str | None) -> None:
        """Changes the rate of a host's link; None leaves it as fast as it goes."""
        self._rates[host] = rate
        shape(self.hosts[host].namespace, "eth0", rate)
        shape(self._switch, f"p{host}", rate)

    def measure(self, sender: int, receiver: int, seconds: float = 1.0) -> float:
        """Bit/s that one TCP connection carries."""
        command = [sys.executable, "-c", _RECEIVE, self.hosts[receiver].address]
        with self.run(receiver, command, stdout=subprocess.PIPE, text=True) as receiving:
            assert receiving.stdout is not None
            port = receiving.stdout.readline().strip()
            self.output(sender, [sys.executable, "-c", _SEND, self.hosts[receiver].address, port, str(seconds)])
            return float(receiving.stdout.readline())

    def describe(self) -> str:
        """The testbed in a line."""
        rates = ", ".join(sorted({rate or "unshaped" for rate in self._rates}))
        first = self.hosts[0].cores
        cores = "free cores" if first is None else f"{len(first)} core(s) each"
        return f"{len(self.hosts)} hosts on one machine, links {rates}, {cores}"

    def close(self) -> None:
        """Kills everything in it and leaves nothing behind."""
        if self._closed:
            return
        self._closed = True
        try:
            self._kill_started(range(len(self.hosts)))
            remove(self.folder.name)
        finally:
            self._reaper.communicate()
            os.close(self._lock)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _check(self, host: int, command: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> str:
        process = self._start(host, command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            printed: str = process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise TestbedError(f"host {host}: {command[0]} was not done after {timeout_s:g} s") from None
        if process.returncode:
            raise TestbedError(f"host {host}: {command[0]} ended with {process.returncode}: {printed.strip()[-600:]}")
        return printed

    def _start(self, host: int, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        process = subprocess.Popen(self.hosts[host].command(command), **options)
        with self._changing:
            self._processes = [*((at, known) for at, known in self._processes if known.poll() is None), (host, process)]
        return process

    def _kill_started(self, hosts: Sequence[int]) -> None:
        """Those that have only begun to start are in no namespace yet, so they are not found there."""
        with self._changing:
            started = [process for host, process in self._processes if host in hosts]
        for process in started:
            process.kill()
            process.wait()

    @property
    def _ray_address(self) -> str:
        return f"{self.hosts[0].address}:{RAY_PORT}"

    @property
    def _switch(self) -> str:
        return f"{self.folder.name}sw"

    def _make_switch(self) -> None:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")

    def _make_host(self, host: Host) -> None:
        inside, port = host.namespace, f"p{host.index}"
        mac = f"02:00:00:00:00:{host.index + 1:02x}"  # a host that comes again is still known to its peers
        ip("netns", "add", inside)
        ip("-n", inside, "link", "set", "lo", "up")
        veth = ["link", "add", "eth0", "address", mac, "netns", inside, "type", "veth"]
        ip(*veth, "peer", "name", port, "netns", self._switch)
        ip("-n", inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        self.rate(host.index, self._rates[host.index])
        ip("-n", inside, "link", "set", "eth0", "up")
        ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")


def obstacle() -> str | None:
    """Why no testbed can be made here, in one sentence; None if one can."""
    try:
        with Testbed(hosts=1, rate="1gbit"):
            return None
    except TestbedError as error:
        return str(error)


def _make_token(path: Path) -> None:
    """Of its own, so that no other Ray can be joined by mistake."""
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))


def _cores_of(index: int, cores: int | None) -> tuple[int, ...] | None:
    there = sorted(os.sched_getaffinity(0))
    if cores is None:
        return None
    if not 1 <= cores <= len(there):
        raise TestbedError(f"a host may have 1 to {len(there)} cores on this machine, not {cores}")
    return tuple(there[(index * cores + k) % len(there)] for k in range(cores))


_RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    connection, _ = listening.accept()
    with connection:
        count, begin = len(connection.recv(1 << 20)), time.perf_counter()
        while got := len(connection.recv(1 << 20)):
            count += got
        print(8 * count / (time.perf_counter() - begin))
"""
_SEND = """
import socket, sys, time
address, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with socket.create_connection((address, port)) as connection:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        connection.sendall(bytes(1 << 16))
"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of each link: 10gbit, 100mbit …, or none")
    parser.add_argument("--cores", type=int, help="cores each host is held to; all if left out")
    parser.add_argument("--ray", action=argparse.BooleanOptionalAction, default=True, help="a Ray node in each host")
    parser.add_argument("--dashboard", action="store_true", help="Ray's dashboard, reached from inside host 0")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="runs in host 0; or sweep")
    return parser.parse_args()


def _run_command(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    rate = None if arguments.rate == "none" else arguments.rate
    with Testbed(arguments.hosts, rate, arguments.cores) as testbed:
        print(testbed.describe(), file=sys.stderr)
        for host in range(arguments.hosts if arguments.ray else 0):
            extra = ("--include-dashboard=true",) if arguments.dashboard and host == 0 else ()
            testbed.ray_start(host, head=host == 0, node=RayNode(extra=extra))
        process = testbed.run(0, command)
        try:
            return process.wait()
        except KeyboardInterrupt:
            return process.wait()  # it got the signal too, and may have a checkpoint to write


def main() -> int:
    """Runs a command, or sweeps."""
    arguments = _arguments()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if command == ["sweep"]:
            print("\n".join(sweep()) or "nothing was left")
            return 0
        if not command:
            raise TestbedError("no command was given: write it after --")
        return _run_command(arguments, command)
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
