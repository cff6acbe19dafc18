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
import fcntl
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

QUEUE_MS = 50  # what a link holds back before it drops, like the buffer of a switch's port
RAY_PORT = 6379
DIED_S = 10.0
_NAMES = re.compile(r"ss\d+n\d+(?:sw|h\d+)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class TestbedError(Exception):
    """What keeps a testbed from being made or changed, in one sentence."""

    __test__: ClassVar[bool] = False


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
            _bits_per_second(rate)
        _check_machine()
        sweep()
        self.folder, self._lock = _claim()
        self._reaper = _start_reaper(self.folder)
        self._processes: list[subprocess.Popen[Any]] = []
        self._closed = False
        self._variables = _ray_variables(self.folder)
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
        options["env"] = self.environment() | dict(options.get("env") or {})
        process = subprocess.Popen(self.hosts[host].command(command), **options)
        self._processes = [known for known in self._processes if known.poll() is None] + [process]
        return process

    def output(self, host: int, command: Sequence[str], timeout_s: float = 60.0) -> str:
        """What a command in a host prints.

        Raises:
            TestbedError: it fails, or is not done in time.
        """
        process = self.run(host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            printed: str = process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise TestbedError(f"host {host}: {command[0]} was not done after {timeout_s:g} s") from None
        if process.returncode:
            raise TestbedError(f"host {host}: {command[0]} ended with {process.returncode}: {printed.strip()[-600:]}")
        return printed

    def environment(self) -> dict[str, str]:
        """The variables of commands: this process's, less what it says of other Rays, and how to reach this one."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return inherited | self._variables

    def ray_start(
        self,
        host: int,
        head: bool = False,
        cpus: int = 16,
        system: Mapping[str, Any] | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        """Starts a Ray node in a host, with the custom resource `host0`, `host1` … of which it has one.

        Args:
            host: its index.
            head: it is the head; it comes first.
            cpus: what Ray may count on, which need not be there.
            system: Ray's internal settings, the head's only.
            extra: further arguments of `ray start`; the dashboard is off unless they turn it on.

        Raises:
            TestbedError: it does not start.
        """
        address = self.hosts[host].address
        folder = self.folder / f"ray{host}"
        folder.mkdir(exist_ok=True)
        there = f"{self.hosts[0].address}:{RAY_PORT}"
        place = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"] if head else [f"--address={there}"]
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *place, f"--node-ip-address={address}"),
            *(f"--num-cpus={cpus}", f"--resources={json.dumps({f'host{host}': 1})}", f"--temp-dir={folder}"),
            *("--object-store-memory=100000000", "--disable-usage-stats", *extra),
            *([f"--system-config={json.dumps(system)}"] if system else []),
        ]
        self._variables.pop("RAY_ADDRESS", None)  # a node that starts must not take itself for a part of another
        try:
            self.output(host, command, timeout_s=120.0)
        finally:
            self._variables["RAY_ADDRESS"] = there

    def kill_host(self, host: int) -> None:
        """Pulls the plug: the link falls silent, then every process of the host gets SIGKILL."""
        self.cut(host)
        _kill_all(self.hosts[host].namespace)

    def restart_host(self, host: int) -> None:
        """Gives a host a fresh network stack and its link again; nothing runs in it."""
        self.kill_host(host)
        _remove_namespace(self.hosts[host].namespace)
        with contextlib.suppress(TestbedError):
            _ip("-n", self._switch, "link", "del", f"p{host}")  # it goes with the namespace, but not at once
        self._make_host(self.hosts[host])

    def cut(self, host: int) -> None:
        """Pulls a host's cable: nothing goes in or out, and neither side is told."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "down")

    def restore(self, host: int) -> None:
        """Plugs the cable in again."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "up")

    def rate(self, host: int, rate: str | None) -> None:
        """Changes the rate of a host's link; None leaves it as fast as it goes."""
        self._rates[host] = rate
        _shape(self.hosts[host].namespace, "eth0", rate)
        _shape(self._switch, f"p{host}", rate)

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
        _remove(self.folder.name)
        for process in self._processes:
            process.wait()
        self._reaper.communicate()
        os.close(self._lock)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _switch(self) -> str:
        return f"{self.folder.name}sw"

    def _make_switch(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")

    def _make_host(self, host: Host) -> None:
        inside, port = host.namespace, f"p{host.index}"
        mac = f"02:00:00:00:00:{host.index + 1:02x}"  # a host that comes again is still known to its peers
        _ip("netns", "add", inside)
        _ip("-n", inside, "link", "set", "lo", "up")
        veth = ["link", "add", "eth0", "address", mac, "netns", inside, "type", "veth"]
        _ip(*veth, "peer", "name", port, "netns", self._switch)
        _ip("-n", inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        self.rate(host.index, self._rates[host.index])
        _ip("-n", inside, "link", "set", "eth0", "up")
        _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")


def obstacle() -> str | None:
    """Why no testbed can be made here, in one sentence; None if one can."""
    try:
        with Testbed(hosts=1, rate="1gbit"):
            return None
    except TestbedError as error:
        return str(error)


def sweep() -> list[str]:
    """Removes the testbeds whose owners are gone; their names."""
    owned = {folder.name for folder in Path(tempfile.gettempdir()).glob("ss*n*") if _is_owned(folder)}
    found = {re.sub(r"(sw|h\d+)$", "", name) for name in _namespaces()}
    found |= {lock.parent.name for lock in Path(tempfile.gettempdir()).glob("ss*n*/lock")}
    for name in sorted(found - owned):
        _remove(name)
        shutil.rmtree(Path(tempfile.gettempdir()) / name, ignore_errors=True)
    return sorted(found - owned)


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise TestbedError("a testbed needs root rights, for network namespaces: run this as root")
    missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if missing:
        raise TestbedError(f"a testbed needs {' and '.join(missing)}: install iproute2 and util-linux")


def _claim() -> tuple[Path, int]:
    """A folder whose name no other testbed has, and the lock that says that its owner lives."""
    root = Path(tempfile.gettempdir())
    for number in itertools.count():
        folder = root / f"ss{os.getpid()}n{number}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            break
    lock = os.open(folder / "lock.new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "lock.new").rename(folder / "lock")  # so that nobody ever sees it free
    return folder, lock


def _is_owned(folder: Path) -> bool:
    """Its lock is held, or has not been made yet."""
    try:
        with (folder / "lock").open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return folder.is_dir()
    except BlockingIOError:
        return True
    return False


def _start_reaper(folder: Path) -> "subprocess.Popen[bytes]":
    """A process that removes the testbed when this one is gone, which it sees by the end of its input."""
    command = [sys.executable, "-S", __file__, "reap", folder.name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _reap(name: str) -> None:
    sys.stdin.read()
    folder = Path(tempfile.gettempdir()) / name
    _remove(name)
    shutil.rmtree(folder, ignore_errors=True)


def _ray_variables(folder: Path) -> dict[str, str]:
    """A token of its own, so that no other Ray can be joined by mistake."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


def _cores_of(index: int, cores: int | None) -> tuple[int, ...] | None:
    there = sorted(os.sched_getaffinity(0))
    if cores is None:
        return None
    if not 1 <= cores <= len(there):
        raise TestbedError(f"a host may have 1 to {len(there)} cores on this machine, not {cores}")
    return tuple(there[(index * cores + k) % len(there)] for k in range(cores))


def _bits_per_second(rate: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if found is None or float(found[1]) == 0:
        raise TestbedError(f"{rate!r} is not a rate: write a number and kbit, mbit or gbit, for instance 100mbit")
    return float(found[1]) * _BITS[found[2]]


def _shape(namespace: str, device: str, rate: str | None) -> None:
    if rate is None:
        with contextlib.suppress(TestbedError):  # there was none
            _call(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"])
        return
    # A millisecond's worth at once, and not less than ten packets: more would hide the link from short exchanges.
    burst = max(int(_bits_per_second(rate) / 8e3), 15_140)
    bucket = ["tbf", "rate", rate, "burst", str(burst), "latency", f"{QUEUE_MS}ms"]
    _call(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket])


def _remove(name: str) -> None:
    """Every namespace of a testbed, with what runs there; some may be gone already."""
    for namespace in _namespaces():
        if re.fullmatch(rf"{name}(sw|h\d+)", namespace):
            _kill_all(namespace)
            _remove_namespace(namespace)


def _remove_namespace(namespace: str) -> None:
    with contextlib.suppress(TestbedError):  # another may have been quicker
        _ip("netns", "del", namespace)


def _namespaces() -> list[str]:
    """The namespaces of all testbeds."""
    here = Path("/run/netns")
    return sorted(path.name for path in here.iterdir() if _NAMES.fullmatch(path.name)) if here.is_dir() else []


def _kill_all(namespace: str) -> None:
    """Kills until nothing is left: a process may start another meanwhile."""
    for _ in _until(DIED_S):
        pids = _pids(namespace)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    raise TestbedError(f"processes {_pids(namespace)} in {namespace} did not end after SIGKILL")


def _pids(namespace: str) -> list[int]:
    """Its processes; those that are dead and only not yet waited for have no namespace any more."""
    try:
        return [int(pid) for pid in _ip("netns", "pids", namespace).split()]
    except TestbedError:
        return []


def _until(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.01)


def _ip(*arguments: str) -> str:
    return _call(["ip", *arguments])


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TestbedError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


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
            extra = ["--include-dashboard=true"] if arguments.dashboard and host == 0 else []
            testbed.ray_start(host, head=host == 0, extra=extra)
        process = testbed.run(0, command)
        try:
            return process.wait()
        except KeyboardInterrupt:
            return process.wait()  # it got the signal too, and may have a checkpoint to write


def main() -> int:
    """Runs a command, sweeps, or reaps."""
    if sys.argv[1:2] == ["reap"]:
        _reap(sys.argv[2])
        return 0
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
