"""Schedules of failures, how they strike a run, and what is said of it; the job is a fake with real processes."""

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import pytest
import testbed as library
from failures import KINDS, ROLES, Chaos, Failure, RunFiles, schedules
from testbed import Testbed

FAKE_JOB = """
import json, os, subprocess, sys, time
folder, namespaces, seconds = sys.argv[1], sys.argv[2].split(","), float(sys.argv[3])
os.makedirs(folder)
places = {"trainer-0": 0, "trainer-1": 1, "reader-0": 0, "embedding-0": 1, "dense-0": 1}
processes, roles = {}, {}

def start(name):
    inside = ["ip", "netns", "exec", namespaces[places[name]]]
    processes[name] = subprocess.Popen([*inside, "sleep", "600"])
    before = roles[name]["incarnation"] if name in roles else -1
    roles[name] = {"pid": processes[name].pid, "host": "h", "incarnation": before + 1}

def write(name, text, mode="w"):
    with open(os.path.join(folder, name), mode) as file:
        file.write(text)

def event(name, happening):
    line = {"seconds": time.monotonic() - begin, "role": name, "event": happening}
    write("events.jsonl", json.dumps(line) + "\\n", "a")

begin = time.monotonic()
for name in places:
    start(name)
write("roles.json", json.dumps(roles))
write("metrics.jsonl", json.dumps({"samples": 0}) + "\\n" + json.dumps({"samples": 9}) + "\\n" + '{"samp')
end = time.monotonic() + seconds
died = 0
while time.monotonic() < end:
    for name, process in list(processes.items()):
        if process.poll() is not None:
            died += 1
            event(name, "dead")
            places[name] = 0
            start(name)
            write("roles.json", json.dumps(roles))
    time.sleep(0.02)
write("result.json", json.dumps({"died": died}))
for process in processes.values():
    process.kill()
    process.wait()
"""


@pytest.fixture
def pair() -> Iterator[Testbed]:
    if (reason := library.obstacle()) is not None:
        pytest.skip(reason)
    with Testbed(hosts=2, rate=None) as made:
        yield made


def fake_run(testbed: Testbed, out: Path, failures: list[Failure], seconds: float) -> tuple[Chaos, float, list[int]]:
    """Runs the fake; what was seen, the seconds it took, and the hosts that were brought back."""
    back: list[int] = []
    struck = Chaos(testbed, RunFiles(out), back.append)
    namespaces = ",".join(host.namespace for host in testbed.hosts)
    process = testbed.run(0, [sys.executable, "-c", FAKE_JOB, str(out), namespaces, str(seconds)])
    took = struck.watch(process, failures, 1.0)
    assert process.returncode == 0
    return struck, took, back


def test_schedules_are_a_function_of_the_seed_and_every_kind_comes_equally_often() -> None:
    made = schedules(7, runs=20, per_run=2)
    assert made == schedules(7, runs=20, per_run=2)
    assert made != schedules(8, runs=20, per_run=2)
    assert [len(run) for run in made] == [2] * 20
    counts = Counter(failure.kind for run in made for failure in run)
    assert set(counts) == set(KINDS)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert all(a.share <= b.share for a, b in made)
    assert all((failure.seconds > 0) == (failure.kind in ("host", "cut")) for run in made for failure in run)


@pytest.mark.parametrize("kind", ROLES)
def test_a_killed_role_is_seen_to_die_and_to_come_back(pair: Testbed, tmp_path: Path, kind: str) -> None:
    struck, took, back = fake_run(pair, tmp_path / "run", [Failure(0.1, kind, 0.99, 0.0)], 1.0)
    (found,) = struck.struck
    assert found.target == {"trainer": "trainer-1"}.get(kind, f"{kind}-0")
    assert found.victims == {found.target: 0}
    assert found.noticed_s is not None
    assert found.back_s is not None
    assert 0 <= found.noticed_s <= found.back_s < took < 10
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == {"died": 1}
    assert back == []


def test_a_killed_host_takes_its_roles_along_and_is_brought_back(pair: Testbed, tmp_path: Path) -> None:
    struck, _, back = fake_run(pair, tmp_path / "run", [Failure(0.1, "host", 0.0, 0.2)], 1.5)
    (found,) = struck.struck
    assert found.target == "host 1", "the driver's host is spared"
    assert found.victims == {"trainer-1": 0, "embedding-0": 0, "dense-0": 0}
    assert found.back_s is not None
    assert back == [1]
    assert pair.measure(0, 1, 0.1) > 1e6


def test_a_cut_kills_nobody_and_is_mended(pair: Testbed, tmp_path: Path) -> None:
    struck, _, back = fake_run(pair, tmp_path / "run", [Failure(0.1, "cut", 0.6, 60.0)], 0.5)
    assert [(found.target, found.victims, found.back_s) for found in struck.struck] == [("host 1", {}, None)]
    assert back == []
    assert pair.measure(0, 1, 0.1) > 1e6, "also where the run ended before its time"


def test_two_failures_of_one_role_are_two_losses(pair: Testbed, tmp_path: Path) -> None:
    twice = [Failure(0.1, "dense", 0.0, 0.0), Failure(0.6, "dense", 0.0, 0.0)]
    struck, _, _ = fake_run(pair, tmp_path / "run", twice, 1.5)
    assert [found.victims for found in struck.struck] == [{"dense-0": 0}, {"dense-0": 1}]
    assert all(found.back_s is not None for found in struck.struck)


def test_nobody_is_struck_where_no_role_runs(pair: Testbed, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"samples": 1}\n')
    (tmp_path / "roles.json").write_text(json.dumps({"trainer-0": {"pid": 0, "host": "h", "incarnation": 0}}))
    process = pair.run(0, ["sleep", "0.4"])
    watching = Chaos(pair, RunFiles(tmp_path), lambda host: None)
    watching.watch(process, [Failure(0.0, "trainer", 0.0, 0.0)], 1.0)
    assert watching.struck == []
    assert process.returncode == 0, "pid 0 would have been this whole group"


def row(name: str, **changes: Any) -> dict[str, Any]:
    failures = [] if name.startswith("undisturbed") else [{"kind": "trainer"}]
    struck = [{"kind": "trainer", "target": "trainer-0", "at_s": 2.0, "victims": {"trainer-0": 0}} for _ in failures]
    struck = [failure | {"noticed_s": 1.0, "back_s": 4.0} for failure in struck]
    plain = {"name": name, "failures": failures, "struck": struck, "wall_s": 20.0, "auc": 0.94}
    return {**plain, "train_samples": 100, "trained_samples": 100, "seconds": 15.0, "load": 0.0, **changes}


def test_verdicts() -> None:
    assert chaos.verdict(row("run-00"), 0.9401) is None
    assert chaos.verdict(row("run-00", error="status 1: no"), 0.94) == "status 1: no"
    assert chaos.verdict(row("run-00", trained_samples=99), 0.94) == "samples are lost or were trained twice"
    assert chaos.verdict(row("run-00"), 0.95) == "the AUC differs by more than 0.002"
    assert chaos.verdict(row("run-00", struck=[]), 0.94) == "it ended before every failure could strike"
    late = [{"target": "trainer-0", "at_s": 2.0, "victims": {"trainer-0": 0}, "noticed_s": 5.1}]
    assert chaos.verdict(row("run-00", struck=late), 0.94) == "the loss of trainer-0 was noticed after more than 5 s"
    unseen = [{"target": "trainer-0", "at_s": 14.9, "victims": {"trainer-0": 0}, "noticed_s": None}]
    assert chaos.verdict(row("run-00", struck=unseen), 0.94) == "the loss of trainer-0 was never noticed"
    assert chaos.verdict(row("run-00", struck=[{**unseen[0], "at_s": 15.1}]), 0.94) is None


def test_the_tables_and_the_picture_are_made_from_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row("undisturbed-00"), row("run-00", wall_s=26.0, auc=0.9395), row("run-01", error="status 1: it broke")]
    kept = chaos.Cells(tmp_path)
    for one in rows:
        kept.write(one["name"], one)
    picture = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", ["chaos", "--out", str(tmp_path), "--report", "--picture", str(picture)])
    chaos.main()
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if "ndisturbed-" in line or "run-0" in line] == [
        *("undisturbed-00", "run-00", "run-01")
    ]
    assert next(line for line in said.splitlines() if line.startswith("run-00")).split()[-2:] == ["-0.0005", "good"]
    assert "status 1: it broke" in said
    trainer = next(line.split() for line in said.splitlines() if line.startswith("trainer "))
    assert trainer == ["trainer", "2", "1.0", "(1.0)", "4.0", "(4.0)", "6.0"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_a_failure_costs_is_told_apart_where_runs_have_two() -> None:
    def struck(wall_s: float, *kinds: str) -> dict[str, Any]:
        return row(f"run-{'-'.join(kinds)}", wall_s=wall_s, struck=[{"kind": kind} for kind in kinds])

    rows = [row("undisturbed-00"), struck(22.0, "trainer", "trainer"), struck(51.0, "host", "trainer")]
    assert chaos.lost_seconds(rows) == pytest.approx({"trainer": 1.0, "host": 30.0})
    assert chaos.lost_seconds(rows[1:]) == {}
    rows = [row("undisturbed-00"), row("run-00", auc=0.9395), row("run-01", auc=0.9393)]
    assert chaos.against_undisturbed(rows).endswith("others (0.9400 to 0.9400): -0.0006")
    rows.append(row("undisturbed-01", auc=0.9402))  # two of each, equally far apart: 2 degrees of freedom
    assert chaos.against_undisturbed(rows).endswith("others (0.9400 to 0.9402): -0.0007 ±0.0006")
    assert "no disturbed run" in chaos.against_undisturbed(rows[:1])


def test_a_run_that_hangs_is_ended(pair: Testbed, tmp_path: Path) -> None:
    process = pair.run(0, ["sleep", "600"], stdout=subprocess.DEVNULL)
    Chaos(pair, RunFiles(tmp_path), lambda host: None).watch(process, [], 1.0, limit_s=0.2)
    assert process.returncode == -signal.SIGKILL
