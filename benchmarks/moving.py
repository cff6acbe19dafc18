"""Embedding servers that change their machine while training goes on: how long it takes, and what training feels of it.

    python benchmarks/moving.py --out FOLDER [--rounds 3] [--seconds 120] [--rate 1gbit]
    … --report      prints the tables of what has been run so far

DLRM on tables of Criteo Kaggle's sizes, synthetic rows that do not repeat, two trainers, four embedding servers on two
hosts (network namespaces, each link at that rate). After a quarter of the rows a third host comes, and takes servers
over; after half of them the second host is to be shut down, is emptied (`shadowsync drain`), and its Ray node is ended.
Runs in which nothing happens take turns with these. All hosts share the machine's cores. Root rights are needed.

A finished run is a line of FOLDER/runs.jsonl; started again, the script goes on where it stopped.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells, in_sentences, load_average, start_ray, train_command
from failures import RunFiles
from machine import commit, describe, table
from namespaces import TestbedError
from testbed import RayNode, Testbed
from throughput import KAGGLE_ROWS

from shadowsync.report.files import read_events, read_frames

HOSTS, COMES_AT, LEAVES_AT, LIMIT = 3, 0.25, 0.5, 5.0
EXPECTED_EPS = 65_000
OPTIONS = (
    *("report.html=false", "report.tensorboard=false", "report.every_s=0.5", "recovery.mode=none"),
    *("data.name=synthetic", f"data.table_rows={list(KAGGLE_ROWS)}".replace(" ", ""), "data.test_rows=50000"),
    *("train.trainers=2", "train.batch_size=1024", "embedding.servers=4"),
    *("cluster.max_servers=3", "cluster.max_trainers=2", "cluster.server_memory_gib=2"),
)


def run(moves: bool, seconds: float, rate: str) -> dict[str, Any]:
    """One run on two hosts, and on others if servers move."""
    with tempfile.TemporaryDirectory() as folder, Testbed(hosts=HOSTS, rate=rate) as testbed:
        start_ray(testbed, [RayNode()] * (HOSTS - 1))
        out, log = Path(folder) / "run", Path(folder) / "log"
        with log.open("w") as said:
            command = train_command(out, [*OPTIONS, f"data.rows={int(seconds * EXPECTED_EPS)}"])
            process = testbed.run(0, command, stdout=said, stderr=subprocess.STDOUT)
            if moves:
                script(testbed, out, process)
            process.wait(LIMIT * seconds)
        if process.returncode or not (out / "result.json").exists():
            return {"error": f"status {process.returncode}: {log.read_text()[-500:]}"}
        result = json.loads((out / "result.json").read_text())
        told = [event for event in read_events(out) if event.event in ("moved", "decided", "waiting", "left")]
        events = [event for event in told if event.event == "moved" or event.role != "driver" or "empt" in event.detail]
        frames = [(frame.seconds, frame.samples) for frame in read_frames(out)]
    return {
        "eps": result["throughput"]["eps"],
        "auc": result["test"]["auc"],
        "ne": result["test"]["ne"],
        "failures": result["recovery"]["failures"] if result.get("recovery") else 0,
        "moved": [(event.seconds, event.role, event.detail) for event in events],
        "rates": [
            (at, (after - before) / (at - since))
            for (since, before), (at, after) in itertools.pairwise(frames)
            if at > since
        ],
        "load": load_average(),
    }


def script(testbed: Testbed, out: Path, process: "subprocess.Popen[Any]") -> None:
    """A host comes, another is emptied and goes."""
    until_share(out, COMES_AT, process)
    testbed.ray_start(2)
    until_share(out, LEAVES_AT, process)
    leaving = RunFiles(out).roles()["trainer-1"]["machine"]
    program = [sys.executable, "-c", "from shadowsync.cli import main; main()"]
    try:
        print(testbed.output(0, [*program, "drain", str(out), leaving], 600.0), file=sys.stderr)
    except TestbedError as error:
        print(error, file=sys.stderr)


def until_share(out: Path, share: float, process: "subprocess.Popen[Any]") -> None:
    """Waits until that share of the rows is trained, or the run is over."""
    while process.poll() is None:
        frames = read_frames(out) if (out / "metrics.jsonl").exists() else []
        if frames and frames[-1].samples >= share * frames[-1].total_samples:
            return
        time.sleep(0.2)


def show(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each run, and one for each move."""
    lines = [
        (
            row["name"],
            *(
                ["-"] * 5
                if "error" in row
                else [f"{row['eps']:,.0f}", f"{row['auc']:.4f}", f"{row['ne']:.4f}", row["failures"], len(row["moved"])]
            ),
        )
        for row in rows
    ]
    moves = [(row["name"], f"{at:.0f}", role, detail) for row in rows for at, role, detail in row.get("moved", ())]
    runs = table(["run", "examples/s", "test AUC", "NE", "failures", "moves"], lines)
    speeds = {row["name"]: row["eps"] for row in rows if "error" not in row}
    pairs = [(speeds[f"moves-{n}"], speeds.get(f"stays-{n}")) for n in range(len(rows)) if f"moves-{n}" in speeds]
    over = sorted(moves / stays for moves, stays in pairs if stays)
    if over:
        runs += f"\n\nmoves over stays: {statistics.median(over):.2f} ({over[0]:.2f} … {over[-1]:.2f})"
    return f"{runs}\n\n{table(['run', 'at, s', 'role', 'what'], moves)}"


def main() -> None:
    """Runs what is missing, in turn, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    kept = Cells(arguments.out)
    names = [
        (f"{'moves' if moves else 'stays'}-{number}", moves)
        for number in range(arguments.rounds)
        for moves in (False, True)
    ]
    for name, moves in [] if arguments.report else names:
        if kept.read(name) is None:
            kept.write(name, {"name": name, "commit": commit(), **run(moves, arguments.seconds, arguments.rate)})
    rows = [row for name, _ in names if (row := kept.read(name)) is not None]
    print("\n".join(describe()), show(rows), sep="\n\n")


if __name__ == "__main__":
    in_sentences(main)
