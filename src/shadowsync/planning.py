"""`shadowsync plan recovery`: what full and partial recovery would cost, from numbers given or from a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.manifest import MANIFEST
from shadowsync.checkpoint.store import CheckpointStore
from shadowsync.choices import server_count
from shadowsync.config import parse
from shadowsync.embedding.table import Table
from shadowsync.errors import CheckpointError, ConfigError
from shadowsync.recovery.costs import Costs, Scale
from shadowsync.recovery.decision import Decision, Goal, decide
from shadowsync.recovery.estimates import Priors, time_between_failures
from shadowsync.recovery.settings import RecoverySettings, recovery_settings
from shadowsync.report import result
from shadowsync.runs import CONFIG_FILE, load_checkpoint

GIVEN = "given"
_ASSUMED = {
    "load_s": "as long as a save",
    "restart_s": "assumed",
    "fail_s": "assumed",
    "target_pls": "assumed",
    "share": "assumed",
    "hours": "not known",
}
_LIMITS = {"target_pls": 1.0, "share": 1.0}
_MAY_BE_ZERO = ("save_s", "load_s", "restart_s")
_MAY_BE_INFINITE = ("fail_s", "hours")


@dataclass(frozen=True)
class Numbers:
    """What a plan is made from; None where it is not known.

    Attributes:
        save_s: seconds that training loses to a save.
        load_s: to a load.
        restart_s: to finding out about a failure and starting a replacement.
        fail_s: mean time between failures.
        servers: embedding servers.
        target_pls: portion of lost samples that partial recovery may expect.
        hours: length of the job.
        rows: of all tables that are saved by priority.
        dim: width of their rows.
        share: of the rows in one save by priority.
    """

    save_s: float | None = None
    load_s: float | None = None
    restart_s: float | None = None
    fail_s: float | None = None
    servers: int | None = None
    target_pls: float | None = None
    hours: float | None = None
    rows: int | None = None
    dim: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.known().items():
            _check(name, value)
        if (self.rows is None) != (self.dim is None):
            raise ConfigError("--rows and --dim belong together: how many rows the tables have, and how wide they are")

    def known(self) -> dict[str, float]:
        """What is known, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Figure:
    """A number of the plan and where it is from, in words."""

    value: float
    source: str


@dataclass(frozen=True)
class Weights:
    """Rows that would be saved by priority, and the bytes of their weights."""

    rows: int
    weight_bytes: int


@dataclass(frozen=True)
class RecoveryPlan:
    """What `shadowsync plan recovery` prints.

    Attributes:
        figures: what it was made from, by the names of `Numbers`.
        decision: with full and partial recovery at their intervals.
        weights: None where no tables are known.
        share: of the rows in one save by priority.
    """

    figures: Mapping[str, Figure]
    decision: Decision
    weights: Weights | None
    share: float


def plan_recovery(folder: Path | None, given: Numbers) -> RecoveryPlan:
    """Plans from the numbers given; what is missing comes from the run or the checkpoints in `folder`.

    Raises:
        ConfigError: a number that nobody can guess is missing, or the folder does not exist.
        CheckpointError: no checkpoint in the folder can be loaded.
        DataError: its result.json is not one.
    """
    run = _Run(folder) if folder is not None else None
    figures = {name: Figure(value, GIVEN) for name, value in given.known().items()}
    for name, figure in (run.figures() if run is not None else {}).items():
        figures.setdefault(name, figure)
    _check_enough(figures)
    _assume(figures)
    values = {name: figure.value for name, figure in figures.items()}
    costs = Costs(values["save_s"], values["load_s"], values["restart_s"], values["fail_s"])
    scale = Scale(int(values["servers"]), 3600 * values["hours"])
    interval_s = run.settings.goal.interval_s if run is not None else None
    decision = decide(Goal(target_pls=values["target_pls"], interval_s=interval_s), costs, scale)
    return RecoveryPlan(figures, decision, _weights(given, run), values["share"])


def _check(name: str, value: float) -> None:
    least = 0.0 if name in _MAY_BE_ZERO else math.ulp(0.0)
    most = math.inf if name in _MAY_BE_INFINITE else _LIMITS.get(name, 1e18)
    if not least <= value <= most:
        below = "" if math.isinf(most) else f" and at most {most:g}"
        raise ConfigError(f"{option(name)} {value:g}: it must be {'above 0' if least else '0 or above'}{below}")


def option(name: str) -> str:
    """The option of the command line for a number."""
    return "--" + name.replace("_", "-")


def _check_enough(figures: Mapping[str, Figure]) -> None:
    missing = [name for name in ("save_s", "servers") if name not in figures]
    if missing:
        raise ConfigError(
            f"{' and '.join(map(option, missing))} must be given, or the folder of a run in which it was measured: "
            "shadowsync plan recovery --save-s 318 --servers 8"
        )


def _assume(figures: dict[str, Figure]) -> None:
    """Adds what is neither given nor measured."""
    priors, goal = Priors(), Goal()
    values = {
        "load_s": figures["save_s"].value,
        "restart_s": priors.restart_s,
        "fail_s": priors.fail_s,
        "target_pls": goal.target_pls,
        "hours": math.inf,
        "share": 0.125,
    }
    for name, value in values.items():
        figures.setdefault(name, Figure(value, _ASSUMED[name]))


class _Run:
    """What the folder of a run, of its checkpoints, or of one of them tells."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder; give the folder of a run, or numbers instead")
        self._saved = _checkpoint_in(folder)
        self._config = parse(self._saved.config)
        self.settings: RecoverySettings = recovery_settings(self._config.recovery, self._config.cluster.runtime)
        self._result = result.read_result(folder) if (folder / result.FILE_NAME).exists() else None

    def figures(self) -> dict[str, Figure]:
        """Numbers by name, with the measured ones where there is a result."""
        configured = {
            "servers": server_count(self._config),
            "target_pls": self.settings.goal.target_pls,
            "fail_s": self.settings.priors.fail_s,
            "share": self._config.recovery.share,
        }
        found = {name: Figure(value, "the run's configuration") for name, value in configured.items()}
        return found | self._measured()

    def tables(self) -> list[Table]:
        """Those that are large enough to be saved by priority."""
        return [table for table in self._saved.tables if table.rows >= self.settings.min_rows]

    def _measured(self) -> dict[str, Figure]:
        if self._result is None or (recovery := self._result.recovery) is None:
            return {}
        found = {}
        seconds = recovery.seconds
        saves, saved = (recovery.saves, "saves") if recovery.rounds is None else (recovery.rounds, "rounds of saves")
        failures = recovery.failures if recovery.server_failures is None else recovery.server_failures
        if saves:
            found["save_s"] = Figure(seconds.save / saves, f"measured: {saves} {saved}")
        if failures:
            found["load_s"] = Figure(seconds.load / failures, f"measured: {failures} failures")
            found["restart_s"] = Figure(seconds.wait / failures, f"measured: {failures} failures")
            seconds_in_all = recovery.emulated_job_s or self._result.throughput.seconds
            fail_s = time_between_failures(self.settings.priors, failures, seconds_in_all)
            found["fail_s"] = Figure(fail_s, f"recovery.prior_fail_s and {failures} failures")
        return found


def _checkpoint_in(folder: Path) -> LoadedCheckpoint:
    if (folder / MANIFEST).exists():
        return CheckpointStore(str(folder.parent)).load(folder.name)
    if (folder / CONFIG_FILE).exists() or (folder / "checkpoints").is_dir():
        return load_checkpoint(folder, verify=False)
    store = CheckpointStore(str(folder))
    if (newest := store.newest()) is None:
        raise CheckpointError(f"{folder} holds no checkpoint: give the folder of a run, or numbers instead")
    return store.load(newest)


def _weights(given: Numbers, run: _Run | None) -> Weights | None:
    if given.rows is not None and given.dim is not None:
        return Weights(given.rows, 4 * given.rows * given.dim)
    if run is None:
        return None
    tables = run.tables()
    return Weights(sum(table.rows for table in tables), sum(4 * table.rows * table.dim for table in tables))
