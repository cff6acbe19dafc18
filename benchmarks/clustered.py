"""What the benchmarks of a cluster share: runs inside a testbed, and results that are kept, so that they go on."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe
from namespaces import TestbedError
from testbed import RayNode, Testbed

PUBLISHED: Mapping[str, object] = {"correction": 0, "band": 1e9, "refresh": 100}
"""DCT as published: τ stays as it was chosen for `refresh` messages, and values cross in fp32. What is not sent of the
dense part is sent later, and lost at a cut."""


def codec(kind: str, name: str, **options: object) -> tuple[str, ...]:
    """Overrides that choose a codec for one kind of traffic."""
    given = (f"compression.{kind}.{option}={value}" for option, value in options.items())
    return (f"compression.{kind}.name={name}", *given)


_INT4 = ("compression.pull=int4", "compression.push.name=int4", "compression.push.rounding=stochastic")
WIRES: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "bf16": ("compression.pull=bf16", "compression.push=bf16", "compression.dense=bf16"),
    "int8": ("compression.pull=int8", "compression.push=int8", "compression.dense=int8"),
    "int4": (*_INT4, "compression.dense=int8"),
    "int4, threshold": (*_INT4, "compression.dense.name=threshold", "compression.dense.values=int8"),
    "both thresholds": (
        *codec("dense", "threshold", values="int8"),
        *codec("pull", "threshold", keep=0.2, values="int8"),
    ),
    "DCT": (*codec("dense", "threshold", **PUBLISHED), *codec("pull", "threshold", keep=0.2, **PUBLISHED)),
    "auto": ("compression.pull=auto", "compression.push=auto", "compression.dense=auto"),
}
"""Codecs of all traffic by the name that tables have; DCT is both thresholds as published, with values in fp32."""


T = TypeVar("T")


class _Kept(msgspec.Struct):
    """A line of the file."""

    cell: str
    result: dict[str, Any]


class Cells:
    """Results by name, a line of JSON each in a folder's `runs.jsonl`: what is there need not be run again.

    One script at a time writes; of a name the last line counts, and a line that was cut, or is no record, is none.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "runs.jsonl"

    def read(self, name: str) -> dict[str, Any] | None:
        """The result called `name`; None if it has not been run yet."""
        return self._found().get(name)

    def write(self, name: str, result: dict[str, Any]) -> None:
        """Keeps a result."""
        whole = not self._path.exists() or self._path.read_bytes()[-1:] in (b"", b"\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("" if whole else "\n") + json.dumps({"cell": name, "result": result}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def run_missing(self, cells: Iterable[T], name: Callable[[T], str], run: Callable[[T], dict[str, Any]]) -> None:
        """Runs those that are not here yet, in their order, and keeps what comes of each."""
        for cell in cells:
            if self.read(name(cell)) is None:
                self.write(name(cell), run(cell))
                print(name(cell), file=sys.stderr, flush=True)

    def those(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """The results of these that have been run, in their order."""
        found = self._found()
        return [found[name] for name in names if name in found]

    def all(self) -> list[dict[str, Any]]:
        """Every result, by name."""
        return [result for _, result in sorted(self._found().items())]

    def _found(self) -> dict[str, dict[str, Any]]:
        found = {}
        for line in self._path.read_bytes().split(b"\n")[:-1] if self._path.exists() else ():
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                kept = msgspec.json.decode(line, type=_Kept)
                found[kept.cell] = kept.result
        return found


def run_and_report(
    parser: argparse.ArgumentParser,
    run_all: Callable[[argparse.Namespace, Cells], None],
    report: Callable[[Sequence[Mapping[str, Any]]], str],
    picture: Callable[[Sequence[Mapping[str, Any]], Path], None] | None = None,
) -> None:
    """A script's work: what is missing is run and kept in the folder `--out`, then all results are reported, and drawn
    where `--picture` says; with `--report` nothing is run."""
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", action="store_true")
    if picture is not None:
        parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    kept = Cells(given.out)
    if not given.report:
        run_all(given, kept)
    rows = kept.all()
    print("\n".join(describe()), report(rows), sep="\n\n")
    if picture is not None and given.picture is not None and rows:
        picture(rows, given.picture)


def train_command(out: Path, overrides: Sequence[str]) -> list[str]:
    """`shadowsync train` on the Ray cluster of the testbed it runs in."""
    cluster = ["cluster.runtime=ray", "cluster.address=auto"]
    program = [sys.executable, "-c", "from shadowsync.cli import main; main()"]
    return [*program, "train", "--out", str(out), *cluster, *overrides]


def train(testbed: Testbed, out: Path, overrides: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Trains from host 0 of a testbed with Ray in it.

    Returns:
        What is in `result.json`.

    Raises:
        TestbedError: the run fails, or takes too long.
    """
    testbed.output(0, train_command(out, overrides), timeout_s)
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


AS_OTHERS = {"worker_niceness": 0}
"""Ray lets every other process of a machine go before its own; what is compared is to have the same rank."""


def start_ray(testbed: Testbed, nodes: Sequence[RayNode]) -> None:
    """A Ray node in every host, the head in host 0, the others a few at a time."""
    testbed.ray_start(0, head=True, node=replace(nodes[0], system={**AS_OTHERS, **nodes[0].system}))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(lambda host: testbed.ray_start(host, node=nodes[host]), range(1, len(nodes))):
            pass


def in_sentences(main: Callable[[], None]) -> None:
    """Runs a script; what keeps a testbed from being made ends it with that sentence alone."""
    try:
        main()
    except TestbedError as error:
        sys.exit(str(error))


def load_average() -> float:
    """Of the last minute: what else the machine was doing."""
    return os.getloadavg()[0]
