"""Runs the experiments that the documentation's tables come from, and writes those tables.

    python benchmarks/study.py run [NAME …] [--minutes 60]     runs what is missing; may be stopped at any time
    python benchmarks/study.py write                           docs/measurements.md gets the tables of what has been run
    python benchmarks/study.py stale                           tables whose code has changed since
    python benchmarks/study.py vouch NAME REASON               what has changed makes no difference to what is on record

What has been run stands in `benchmarks/records/NAME`: a line of `runs.jsonl` for each run, and of `sessions.jsonl` for
each time that some were added, with commit, processor and date: the commit is that of the code that was loaded when it
began, where a run itself names the one that lay there when it ended. A table is as old as the oldest of these. Beside
each experiment stand the files that its result hangs on (`depends`); where one of them or a default of training has
changed since, the table says so. Where somebody has looked and vouches for what was run before the change, it says
that, and why.

Tables stand in the documentation between a line `<!-- study NAME -->` and `<!-- end NAME -->`.
"""

import argparse
import datetime
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO, TypeVar

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from clustered import Cells
from machine import commit

from shadowsync.report.result import machine

T = TypeVar("T")
HERE = Path(__file__).parent
ROOT, RECORDS = HERE.parent, HERE / "records"
PAGE, IMAGES = ROOT / "docs" / "measurements.md", ROOT / "docs" / "img"
CODE = "src/shadowsync/"
ENDING_S = 60.0
"""How long a script may take to end when it is told to."""
LEARNS = (
    *(f"{CODE}training/{name}.py" for name in ("kernels", "losses", "optimizers", "replica", "worker")),
    *(f"{CODE}models/{name}.py" for name in ("dlrm", "layers")),
    *(f"{CODE}embedding/{name}.py" for name in ("optimizers", "server", "fbgemm_storage")),
)
"""Of every result that is a quality."""
SCHEDULES = "background", "every_k"
AVERAGES = tuple(f"{CODE}sync/{name}.py" for name in ("ma", "bmuf", "all_reduce", *SCHEDULES))
ELASTIC = tuple(f"{CODE}sync/{name}.py" for name in ("easgd", "dense", *SCHEDULES))
TRAINS = (*LEARNS, *AVERAGES, *ELASTIC)
"""Of every quality of replicas that are merged."""
DEFAULTS = "docs/configuration.md"
"""Says what every key is that an experiment leaves alone."""
_SECTIONS = re.compile(r"(model|embedding|train|sync|aggregation|compression)\b")
_DEFAULT = re.compile(r"\| `([^`]+)` \| .*? \| `([^`]*)` \|")
THRESHOLDS = f"{CODE}compression", f"{CODE}training/pieces.py"
"""Of a dense part that crosses in part."""


@dataclass(frozen=True)
class Experiment:
    """A script and how it is called.

    Attributes:
        depends: files and folders of the repository that its result hangs on.
        beside: an experiment whose runs are taken too, where they are those that this one asks for.
        root: it needs root rights.
        picture: it draws one.
    """

    script: str
    words: tuple[str, ...] = ()
    depends: tuple[str, ...] = TRAINS
    beside: str | None = None
    root: bool = False
    picture: bool = False


EXPERIMENTS: Mapping[str, Experiment] = {
    "leaderboard": Experiment(
        "leaderboard.py",
        ("--sets", "demo", "--rows", "300000"),
        (*TRAINS, f"{CODE}models", f"{CODE}aggregation"),
    ),
    "quality": Experiment("quality.py", ("methods",), picture=True),
    "parameters": Experiment("quality.py", ("parameters",), beside="quality", picture=True),
    "hogwild": Experiment("quality.py", ("hogwild",), (*LEARNS, *ELASTIC), picture=True),
    "local_batches": Experiment("switching.py", ("--local",), (*LEARNS, f"{CODE}aggregation")),
    "switching": Experiment(
        "switching.py",
        ("--study",),
        (*LEARNS, f"{CODE}models", f"{CODE}aggregation"),
        picture=True,
    ),
    "switching_hosts": Experiment(
        "switching_hosts.py",
        depends=(*LEARNS, *(f"{CODE}{part}" for part in ("aggregation", "rpc", "cluster/trainer_dense.py"))),
        root=True,
    ),
    "tolerance": Experiment("delays.py", ("tolerance",), (*LEARNS, f"{CODE}aggregation")),
    "beginning": Experiment("delays.py", ("beginning",), (*LEARNS, f"{CODE}aggregation")),
    "stragglers": Experiment("stragglers.py", ("--study",), (f"{CODE}aggregation", f"{CODE}training"), picture=True),
    "compression": Experiment(
        "compression.py",
        ("quality",),
        (*LEARNS, *THRESHOLDS, f"{CODE}aggregation", f"{CODE}embedding/requests.py"),
        picture=True,
    ),
    "slow_network": Experiment(
        "slow_network.py",
        depends=(*LEARNS, *ELASTIC, *THRESHOLDS, f"{CODE}rpc", f"{CODE}cluster/trainer.py"),
        root=True,
        picture=True,
    ),
    "chaos": Experiment(
        "chaos.py",
        depends=(
            *(f"{CODE}{part}" for part in ("cluster", "recovery", "checkpoint", "rpc", "runtime")),
            *(f"{CODE}data/leases.py", f"{CODE}sync/averaging.py"),
        ),
        root=True,
        picture=True,
    ),
    "operating_point": Experiment(
        "partial_recovery.py",
        ("--operating",),
        (
            *LEARNS,
            *ELASTIC,
            *(f"{CODE}{part}" for part in ("recovery", "recovery_controller.py", "checkpoint/deltas.py")),
        ),
        picture=True,
    ),
    "slow_link": Experiment(
        "slow_link.py",
        depends=(*AVERAGES, f"{CODE}sync/ds_sync.py", f"{CODE}sync/averaging.py"),
        root=True,
    ),
    "slow_averages": Experiment("slow_averages.py", depends=(*LEARNS, *AVERAGES, "benchmarks/averages/slow.py")),
    "two_sites": Experiment("two_sites.py", ("--seeds", "3"), depends=(*TRAINS, *THRESHOLDS), root=True),
    "partial_averages": Experiment(
        "partial_averages.py",
        depends=(*LEARNS, *AVERAGES, *THRESHOLDS, "benchmarks/codecs/partial.py"),
    ),
    "placement": Experiment(
        "placement.py",
        depends=tuple(f"{CODE}embedding/{part}.py" for part in ("placement", "server", "fbgemm_storage", "client")),
        picture=True,
    ),
    "scaling": Experiment(
        "scaling.py",
        depends=(*AVERAGES, *ELASTIC, f"{CODE}sync/averaging.py", f"{CODE}rpc"),
        root=True,
        picture=True,
    ),
    "moving": Experiment(
        "moving.py",
        ("--seconds", "80"),
        (f"{CODE}embedding/moving.py", f"{CODE}cluster/manager.py", f"{CODE}checkpoint/remote_save.py"),
        root=True,
    ),
}


@dataclass(frozen=True)
class Session:
    """Runs that were added at one time."""

    commit: str
    processor: str
    date: str
    runs: int


@dataclass(frozen=True)
class Voucher:
    """Up to this commit nothing has changed that makes a difference to what is on record."""

    commit: str
    date: str
    reason: str


def folder_of(name: str) -> Path:
    """Of an experiment's records."""
    return RECORDS / name


def sessions_of(name: str) -> list[Session]:
    """In the order in which they were."""
    return _lines(folder_of(name) / "sessions.jsonl", Session)


def vouchers_of(name: str) -> list[Voucher]:
    """In the order in which they were given."""
    return _lines(folder_of(name) / "vouchers.jsonl", Voucher)


def _lines(path: Path, kind: type[T]) -> list[T]:
    try:
        return msgspec.json.Decoder(kind).decode_lines(path.read_bytes()) if path.exists() else []
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        sys.exit(f"{path} has a line that is no {kind.__name__.lower()}: mend it, or take it out ({error})")


def runs_of(name: str) -> int:
    """How many are on record."""
    return len(Cells(folder_of(name)).all())


def command(name: str, *more: str) -> list[str]:
    """That runs an experiment's script."""
    experiment = EXPERIMENTS[name]
    drawn = ("--picture", str(IMAGES / f"{name}.png")) if experiment.picture else ()
    beside = ("--beside", str(folder_of(experiment.beside))) if experiment.beside else ()
    words = (*experiment.words, "--out", str(folder_of(name)), *beside, *drawn, *more)
    return [sys.executable, str(HERE / experiment.script), *words]


def run(name: str, until: float) -> int:
    """Runs what is missing until that moment, and says in the record what was; the status, 0 where all has been run.
    Ctrl-C ends it, and goes on to the caller."""
    if EXPERIMENTS[name].root and os.geteuid() != 0:
        print(f"{name} is skipped: it lays out hosts of its own, which takes root rights", file=sys.stderr)
        return 1
    folder_of(name).mkdir(parents=True, exist_ok=True)
    with (folder_of(name) / "sessions.jsonl").open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"{name} is skipped: it is being run by another process", file=sys.stderr)
            return 1
        return _run(name, until, file)


def _run(name: str, until: float, sessions: TextIO) -> int:
    before, interrupted = runs_of(name), False
    told = commit(), str(machine()["processor"]), _today()
    process = subprocess.Popen(command(name), pass_fds=[sessions.fileno()])  # with the lock, should it outlive this one
    try:
        status = process.wait(max(1.0, until - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as end:
        interrupted = isinstance(end, KeyboardInterrupt)
        process.terminate()
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
        status = process.wait() or 1
    if added := runs_of(name) - before:
        sessions.write(json.dumps(asdict(Session(*told, added))) + "\n")
    if interrupted:
        raise KeyboardInterrupt
    return status


def vouch(name: str, reason: str) -> None:
    """Puts on record that what has changed so far makes no difference to what was run."""
    if name not in dict(stale()):
        sys.exit(f"{name} is not older than the code: there is nothing to vouch for")
    voucher = Voucher(commit(), _today(), reason)
    with (folder_of(name) / "vouchers.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(voucher)) + "\n")


def _today() -> str:
    return str(datetime.datetime.now(datetime.UTC).date())


def defaults_at(revision: str) -> dict[tuple[str, str], str]:
    """Those that training hangs on, by section and key; empty where there were none yet."""
    told = subprocess.run(
        ["git", "show", f"{revision}:{DEFAULTS}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found, section = {}, ""
    for line in told.stdout.splitlines():
        if line.startswith("#"):
            section = line.strip("# ")
        elif _SECTIONS.match(section) and (default := _DEFAULT.match(line)):
            found[section, default[1]] = default[2]
    return found


def other_defaults(before: str, now: Mapping[tuple[str, str], str]) -> list[str]:
    """Those of `now` that were others at that commit, a line each."""
    return [
        f"{section}: {key} is {now[section, key]} by default, and was {default}"
        for (section, key), default in defaults_at(before.rstrip("+")).items()
        if now.get((section, key), default) != default
    ]


def changed_since(before: str, depends: Sequence[str]) -> list[str]:
    """Commits since that one that changed one of these files, newest first, a line each."""
    since = f"{before.rstrip('+')}..HEAD"
    told = subprocess.run(
        ["git", "log", "--format=%h %s", since, "--", *depends], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return told.stdout.splitlines() if not told.returncode else [f"{before} is not in this history"]


def stale() -> Iterator[tuple[str, list[str]]]:
    """Experiments whose code has changed since the oldest of their runs, or since somebody vouched for them, and by
    what."""
    now = defaults_at("HEAD")
    for name, experiment in EXPERIMENTS.items():
        if sessions := sessions_of(name):
            vouchers = vouchers_of(name)
            before = vouchers[-1].commit if vouchers else sessions[0].commit
            if changes := [*other_defaults(before, now), *changed_since(before, experiment.depends)]:
                yield name, changes


def told_of(sessions: Sequence[Session]) -> str:
    """Where, on which code, when, and how many."""
    commits, processors, dates = (
        list(dict.fromkeys(getattr(session, part) for session in sessions)) for part in ("commit", "processor", "date")
    )
    days = dates[0] if len(dates) == 1 else f"{min(dates)} to {max(dates)}"
    runs = sum(session.runs for session in sessions)
    return f"{', '.join(processors)}; {', '.join(commits)}; {days}; {runs} runs"


def table_of(name: str, old: Mapping[str, list[str]]) -> str:
    """What stands in the documentation."""
    told = subprocess.run(command(name, "--report"), capture_output=True, text=True, check=True).stdout
    tables = told.split("\n\n", 1)[1].strip("\n")  # before them is the machine that prints them
    beside = EXPERIMENTS[name].beside
    lines = [
        f"`benchmarks/study.py run {name}` ({told_of(sessions_of(name))}"
        + (f", beside runs of `{beside}`: {told_of(sessions_of(beside))}" if beside else "")
        + "):",
        *(
            f"The code has changed since, up to {voucher.commit}, in ways that move none of these figures: "
            f"{voucher.reason}."
            for voucher in vouchers_of(name)
        ),
        *([f"**Older than the code** (changes since: {len(old[name])})."] if name in old else []),
        f"```text\n{tables}\n```",
        *([f"![{name}](img/{name}.png)"] if EXPERIMENTS[name].picture else []),
    ]
    return "\n\n".join(lines)


def write() -> None:
    """Puts the tables of what has been run in their places."""
    page, old = PAGE.read_text("utf-8"), dict(stale())
    for name in EXPERIMENTS:
        if not sessions_of(name):
            continue
        begin, end = f"<!-- study {name} -->", f"<!-- end {name} -->"
        place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(place.findall(page)) != 1:
            sys.exit(f"{PAGE}: there must be one place for {name}, from {begin} to {end}")
        found = f"{begin}\n{table_of(name, old)}\n{end}"
        page = place.sub(lambda _, text=found: text, page)  # type: ignore[misc]
    PAGE.write_text(page, "utf-8")


def main() -> None:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    given = parts.add_parser("run")
    given.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXPERIMENTS)}; all")
    given.add_argument("--minutes", type=float, default=float("inf"))
    parts.add_parser("write")
    parts.add_parser("stale")
    vouched = parts.add_parser("vouch")
    vouched.add_argument("name", choices=EXPERIMENTS, metavar="NAME")
    vouched.add_argument("reason", metavar="REASON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, which a shell's background jobs ignore
    if arguments.part == "run":
        if unknown := set(arguments.names) - EXPERIMENTS.keys():
            parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(EXPERIMENTS)}")
        if not arguments.minutes > 0:
            parser.error("--minutes: a number above 0")
        until = time.monotonic() + 60 * min(arguments.minutes, 60 * 24 * 7)
        try:
            statuses = [run(name, until) for name in arguments.names or EXPERIMENTS if time.monotonic() < until]
        except KeyboardInterrupt:
            sys.exit(130)
        sys.exit(any(statuses))
    elif arguments.part == "write":
        write()
    elif arguments.part == "vouch":
        vouch(arguments.name, arguments.reason)
    else:
        for name, changes in stale():
            print(f"{name}: {len(changes)} changes since, the first of them {changes[0]}")


if __name__ == "__main__":
    main()
