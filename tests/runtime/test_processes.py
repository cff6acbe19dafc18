"""Roles as processes of this machine: forked in no time, served, replaced, and gone with whoever started them."""

import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
from role_parts import Greeter, greeter, panics, refuses

from shadowsync.errors import ConfigError, RunError
from shadowsync.rpc.client import WireClient
from shadowsync.rpc.errors import PeerLost
from shadowsync.rpc.served import Served, ask
from shadowsync.runtime.processes import ForkedRole, Processes
from shadowsync.runtime.runtime import LaunchRequest, ProcessContext

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def runtime() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()


@pytest.fixture
def connector(runtime: Processes) -> Iterator[WireClient]:
    made = WireClient(runtime.keys)
    yield made
    made.close()


def forked(runtime: Processes, role: str) -> ForkedRole:
    process = runtime.start(LaunchRequest(role))
    assert isinstance(process, ForkedRole)
    return process


def gone(process: ForkedRole) -> str:
    """Why it ended, as soon as it has."""
    for _ in range(24):  # the first one waits until torch is loaded
        process.join()
        if (reason := process.ended()) is not None:
            return reason
    raise AssertionError("it has not ended")


def dies_in_a_thread(context: ProcessContext) -> Served:
    threading.Thread(target=refuses, args=("sand", context), name="shadow").start()
    return Served(None)


def says_what_is_loaded(_: ProcessContext) -> Served:
    loaded = [name for name in ("torch", "zmq", "ray", "pandas") if name in sys.modules]
    return Served(Greeter(json.dumps([*loaded, gc.isenabled()])))


def test_a_part_is_served_from_another_process_and_another_takes_its_place(
    runtime: Processes, connector: WireClient
) -> None:
    process = forked(runtime, "reader-0")
    place = process.endpoint(PATIENCE_S)
    assert place.pid != os.getpid()
    assert Path(place.log).is_file()
    connection = connector.connect(place.address)
    for spec in ("first", "second"):
        process.build(greeter(spec)).result(PATIENCE_S)
        assert ask(connection, Greeter.greet) == f"{spec} from reader-0"
    process.kill()
    assert gone(process) == "it was given up"


def test_what_cannot_be_built_comes_back_as_what_it_was(runtime: Processes) -> None:
    process = forked(runtime, "trainer-3")
    with pytest.raises(ConfigError, match="trainer-3 cannot be built from sand"):
        process.build(partial(refuses, "sand")).result(PATIENCE_S)
    with pytest.raises(RunError, match="build failed with Panic: trainer-3 met sand"):
        process.build(panics).result(PATIENCE_S)
    process.build(greeter("stone")).result(PATIENCE_S)
    process.kill()


def test_a_process_that_is_killed_is_known_to_be_gone_and_by_what(runtime: Processes) -> None:
    process = forked(runtime, "dense-0")
    os.kill(process.endpoint(PATIENCE_S).pid, signal.SIGKILL)
    assert gone(process) == "its process was ended by SIGKILL"
    with pytest.raises(PeerLost, match="dense-0 ended: its process was ended by SIGKILL"):
        process.build(greeter("late")).result(PATIENCE_S)


def test_a_build_under_way_ends_with_its_process(runtime: Processes) -> None:
    process = forked(runtime, "dense-1")
    built = process.build(lambda _: signal.pause())  # type: ignore[arg-type,return-value]
    os.kill(process.endpoint(PATIENCE_S).pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match="SIGKILL"):
        built.result(PATIENCE_S)


def test_a_thread_that_dies_ends_its_role_with_what_it_died_of(runtime: Processes) -> None:
    process = forked(runtime, "embedding-0")
    process.build(dies_in_a_thread)
    assert gone(process) == "its thread shadow died of ConfigError: embedding-0 cannot be built from sand"


class Stubborn:
    def __reduce__(self) -> str:
        raise RuntimeError("only deep copies of leaves")


def test_what_cannot_be_sent_is_the_users_to_mend(runtime: Processes) -> None:
    process = forked(runtime, "trainer-0")
    with pytest.raises(ConfigError, match="what trainer-0 is made from cannot be sent to another process"):
        process.build(greeter(threading.Lock()))
    with pytest.raises(ConfigError, match="cannot be sent to another process: only deep copies of leaves"):
        process.build(greeter(Stubborn()))
    process.build(greeter("stone")).result(PATIENCE_S)
    process.kill()


def test_a_class_whose_module_is_not_found_there_is_the_users_to_mend(runtime: Processes) -> None:
    lonely = types.ModuleType("lonely_module")
    exec("class Model: pass", vars(lonely))
    process = forked(runtime, "trainer-2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lonely_module", lonely)
        built = process.build(greeter(lonely.Model()))
    with pytest.raises(
        ConfigError, match=r"trainer-2 is made from cannot be read .*No module named 'lonely_module'.*put"
    ):
        built.result(PATIENCE_S)
    process.build(greeter("stone")).result(PATIENCE_S)
    process.kill()


def test_a_signal_to_the_whole_job_is_the_drivers_to_see_to(runtime: Processes) -> None:
    process = forked(runtime, "trainer-5")
    pid = process.endpoint(PATIENCE_S).pid
    assert os.getpgid(pid) != os.getpgid(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    process.build(greeter("stone")).result(PATIENCE_S)
    process.kill()
    assert gone(process) == "it was given up"


def test_who_is_stopped_while_it_is_told_something_can_still_be_ended(runtime: Processes) -> None:
    process = forked(runtime, "trainer-6")
    os.kill(process.endpoint(PATIENCE_S).pid, signal.SIGSTOP)
    built: list[Future[None]] = []
    telling = threading.Thread(target=lambda: built.append(process.build(greeter("x" * (8 << 20)))))
    telling.start()
    process.kill()
    assert gone(process) == "it was given up"
    telling.join(PATIENCE_S)
    with pytest.raises(PeerLost, match="it was given up"):
        built[0].result(PATIENCE_S)


def test_when_the_process_dies_that_the_others_are_forked_from_another_takes_its_place(runtime: Processes) -> None:
    before = forked(runtime, "reader-0")
    before.endpoint(PATIENCE_S)
    runtime._host._server._process.kill()
    runtime._host._server._process.wait()
    after = forked(runtime, "reader-1")
    for process in (before, after):
        process.build(greeter("stone")).result(PATIENCE_S)
        process.kill()
    assert gone(before) == "it was given up"


def test_a_module_of_the_working_directory_is_not_taken_for_pythons_own_and_after_the_end_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('mine')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [tmp_path / "added by a script", *sys.path])
    runtime = Processes()
    process = forked(runtime, "reader-0")
    process.build(greeter("stone")).result(PATIENCE_S)
    for _ in range(2):
        runtime.close()
    assert process.ended() is not None
    with pytest.raises(PeerLost, match="the job has ended"):
        runtime.start(LaunchRequest("trainer-0"))


def test_children_begin_with_what_takes_long_to_load(runtime: Processes, connector: WireClient) -> None:
    process = forked(runtime, "reader-1")
    process.build(says_what_is_loaded).result(PATIENCE_S)
    connection = connector.connect(process.endpoint(PATIENCE_S).address)
    assert json.loads(ask(connection, Greeter.greet)) == ["torch", "zmq", True]
    process.kill()


def test_what_is_preloaded_starts_no_thread_that_a_fork_would_lose() -> None:
    program = """if True:
        import importlib, os, shadowsync.runtime.fork_server as server
        from pathlib import Path
        for name in server.PRELOADED:
            importlib.import_module(name)
        names = [(path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
        print({name for name in names if not name.startswith("python")}, "polars" in __import__("sys").modules)
    """
    if not Path("/proc/self/task").exists():
        pytest.skip("only Linux says which threads there are")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() False"


def test_processes_know_what_stands_in_the_drivers_script_and_end_with_it_however_it_ends(tmp_path: Path) -> None:
    """What stands in `__main__`, unguarded, is neither looked for nor run again."""
    script = tmp_path / "own.py"
    script.write_text("""if True:
        import time
        from shadowsync.runtime.processes import Processes
        from shadowsync.runtime.runtime import LaunchRequest
        class Own:
            methods = {}
            def client_gone(self, client): pass
            def close(self): pass
        runtime = Processes()
        roles = [runtime.start(LaunchRequest(f"trainer-{rank}")) for rank in range(2)]
        roles[0].build(lambda home: Own()).result(100)
        print(*[role.endpoint(100).pid for role in roles], runtime._host._server._process.pid, flush=True)
        time.sleep(1000)
    """)
    pipe = subprocess.PIPE
    driver = subprocess.Popen([sys.executable, str(script)], stdout=pipe, stderr=pipe, text=True)
    assert driver.stdout is not None
    watched = [os.pidfd_open(int(pid)) for pid in driver.stdout.readline().split()]
    assert len(watched) == 3
    driver.kill()
    assert driver.communicate() == ("", "")
    for descriptor in watched:
        assert select.select([descriptor], [], [], PATIENCE_S)[0], "a process outlives its driver"
        os.close(descriptor)


def test_a_resource_that_only_ray_has_is_refused(runtime: Processes) -> None:
    with pytest.raises(RunError, match="needs the resource gpu_box: only Ray's machines have such"):
        runtime.reserve([LaunchRequest("trainer-0", resource="gpu_box")], 1.0)
