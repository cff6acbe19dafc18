"""The section `recovery` of the configuration as the parts of this folder take it, checked."""

from dataclasses import dataclass

from shadowsync.checkpoint.values import EXACT, row_values
from shadowsync.config import ClusterConfig, RecoveryConfig
from shadowsync.embedding.watching import RowPriority, RowTracking, exactly
from shadowsync.errors import ConfigError
from shadowsync.recovery.failures import FailureTimes, parse_schedules
from shadowsync.recovery.policy import AUTO, Goal, policies
from shadowsync.recovery.priority import EveryRow
from shadowsync.recovery.scheduler import Priors
from shadowsync.registry import choose

EVERYTHING = "all"


@dataclass(frozen=True)
class RecoverySettings:
    """How a job recovers.

    Attributes:
        priority: which rows are saved first; `all` makes no difference between them.
        share: of the rows in one save: 1 where no difference is made.
        min_rows: of a table that is saved by priority.
        job_s: seconds of the job that this one stands for; None where it is what it is.
    """

    goal: Goal
    priors: Priors
    priority: str
    share: float
    min_rows: int
    schedules: tuple[FailureTimes, ...]
    job_s: float | None = None

    @property
    def saves(self) -> bool:
        return self.goal.mode != "none"


def recovery_settings(config: RecoveryConfig, runtime: str) -> RecoverySettings:
    """The settings of a section of the configuration, with the mode resolved.

    By itself only a job on several machines saves to recover: on one, what a killed process held outlives it.
    `ConfigError` if `inject` is not in the language of failures, or a key was set to something else than its default
    and has no effect beside the others.
    """
    schedules = () if config.inject is None else parse_schedules(config.inject)
    mode = config.mode or (AUTO if runtime == "ray" or schedules else "none")
    policy = policies(config.target_pls).get(mode)
    idle: dict[str, str] = {}
    if runtime in ("processes", "ray"):
        idle["emulate_job_s"] = f"cluster.runtime={runtime}: set cluster.runtime=inprocess"
    if config.priority == EVERYTHING:
        idle |= dict.fromkeys(("share", "min_rows"), "recovery.priority=all: set scar, mfu or ssu")
    if policy is not None and not policy.by_priority:
        by_priority = ("priority", "share", "min_rows", "target_pls", "prior_lost_servers")
        idle |= dict.fromkeys(by_priority, f"recovery.mode={mode}: set partial or auto")
    if policy is not None and not policy.saves:
        keys = ("interval_s", "prior_fail_s", "prior_save_s", "prior_load_s", "prior_restart_s", "emulate_job_s")
        idle |= dict.fromkeys(keys, f"recovery.mode={mode}: set partial, full or auto")
    for key, where in sorted(idle.items()):
        if getattr(config, key) != RecoveryConfig.model_fields[key].default:
            raise ConfigError(f"recovery.{key}={getattr(config, key)} has no effect with {where}, or leave it out")
    return RecoverySettings(
        goal=Goal(mode, config.target_pls, config.interval_s),
        priors=Priors(
            config.prior_save_s,
            config.prior_load_s,
            config.prior_restart_s,
            config.prior_fail_s,
            lost_servers=config.prior_lost_servers,
        ),
        priority=config.priority,
        share=1.0 if config.priority == EVERYTHING else config.share,
        min_rows=config.min_rows,
        schedules=schedules,
        job_s=config.emulate_job_s,
    )


def moving_rows(cluster: ClusterConfig, seed: int) -> RowTracking | None:
    """What follows rows on their way to another machine; None where they stay, and nothing is to be paid for it."""
    return None if cluster.max_servers is None else RowTracking(EveryRow, 1.0, 1, seed)


def row_tracking(settings: RecoverySettings, seed: int, values: str = EXACT) -> RowTracking | None:
    """The tracking of a job; None where rows are never saved a share at a time, and nothing is to be paid for it.

    Under `all` every table is tracked. `values` are those of its checkpoints (`train.save_values`).
    """
    policy = policies(settings.goal.target_pls).get(settings.goal.mode)
    if policy is not None and not policy.by_priority:
        return None
    priority = choose("recovery.priority", settings.priority, "shadowsync.recovery", RowPriority)
    min_rows = 1 if settings.priority == EVERYTHING else settings.min_rows
    kind = row_values(values)
    return RowTracking(priority, settings.share, min_rows, seed, exactly if kind is None else kind.restored)
