"""The section `recovery` of the configuration as the parts of this folder take it, checked."""

from dataclasses import dataclass

from shadowsync.config import RecoveryConfig
from shadowsync.errors import ConfigError
from shadowsync.recovery.decision import AUTO, Goal
from shadowsync.recovery.estimates import Priors
from shadowsync.recovery.failures import FailureSchedule, parse_schedule
from shadowsync.recovery.policy import policies

EVERYTHING = "all"


@dataclass(frozen=True)
class RecoverySettings:
    """How a job recovers.

    Attributes:
        goal: policy, target and interval.
        priors: what is believed about failures at first.
        priority: which rows are saved first; `all` makes no difference between them.
        share: of the rows in one save: 1 where no difference is made.
        min_rows: of a table that is saved by priority.
        schedule: the failures to cause; None for none.
        job_s: seconds of the job that this one stands for; None where it is what it is.
    """

    goal: Goal
    priors: Priors
    priority: str
    share: float
    min_rows: int
    schedule: FailureSchedule | None
    job_s: float | None = None

    @property
    def saves(self) -> bool:
        """Whether rows are saved to recover from, or may be."""
        return self.goal.mode != "none"


def recovery_settings(config: RecoveryConfig, runtime: str) -> RecoverySettings:
    """The settings of a section of the configuration, with the mode resolved.

    Args:
        config: the section.
        runtime: `cluster.runtime`. By itself only a job on several machines saves to recover: on one, what a killed
            process held outlives it.

    Raises:
        ConfigError: `inject` is not in the language of failures, or a key has no effect beside the others.
    """
    schedule = parse_schedule(config.inject) if config.inject is not None else None
    mode = config.mode or (AUTO if runtime == "ray" or schedule is not None else "none")
    _check_used(config, mode, runtime)
    return RecoverySettings(
        goal=Goal(mode, config.target_pls, config.interval_s),
        priors=Priors(config.prior_save_s, config.prior_load_s, config.prior_restart_s, config.prior_fail_s),
        priority=config.priority,
        share=1.0 if config.priority == EVERYTHING else config.share,
        min_rows=config.min_rows,
        schedule=schedule,
        job_s=config.emulate_job_s,
    )


def _check_used(config: RecoveryConfig, mode: str, runtime: str) -> None:
    """Raises `ConfigError` for a key that was set to something else than its default and changes nothing."""
    policy = policies(config.target_pls).get(mode)
    idle: dict[str, str] = {}
    if runtime in ("processes", "ray"):
        idle["emulate_job_s"] = f"cluster.runtime={runtime}: set cluster.runtime=inprocess"
    if config.priority == EVERYTHING:
        idle |= dict.fromkeys(("share", "min_rows"), "recovery.priority=all: set scar, mfu or ssu")
    if policy is not None and not policy.by_priority:
        by_priority = ("priority", "share", "min_rows", "target_pls")
        idle |= dict.fromkeys(by_priority, f"recovery.mode={mode}: set partial or auto")
    if policy is not None and not policy.saves:
        keys = ("interval_s", "prior_fail_s", "prior_save_s", "prior_load_s", "prior_restart_s", "emulate_job_s")
        idle |= dict.fromkeys(keys, f"recovery.mode={mode}: set partial, full or auto")
    for key, where in sorted(idle.items()):
        if getattr(config, key) != RecoveryConfig.model_fields[key].default:
            raise ConfigError(f"recovery.{key}={getattr(config, key)} has no effect with {where}, or leave it out")
