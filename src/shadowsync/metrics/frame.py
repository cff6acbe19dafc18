"""One line of a run's history: what the progress line, metrics.jsonl, TensorBoard and the report are made from."""

import msgspec

from shadowsync.metrics.roles import RoleState


class Frame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a job at one moment. Rates are over the interval since the frame before.

    What has a default is left out of a line of metrics.jsonl where it does not apply.

    Attributes:
        seconds: since the first batch.
        samples: trained so far, all trainers.
        total_samples: to be trained in all.
        eps: examples per second over the interval.
        eps_per_trainer: the same, for each trainer.
        auc: of the progressive predictions (each sample predicted before it was trained on) so far; None before both
            labels were seen.
        ne_window: normalized entropy over the last `report.window` samples; None as above.
        ne_lifetime: normalized entropy over all samples so far; None as above.
        loss: mean log loss over the interval.
        sync_count: synchronisations so far, all trainers.
        sync_gap: iterations per synchronisation over the interval; None if there was none.
        replica_distance: mean over trainers of ‖w_i − mean w‖ / ‖mean w‖; None with one trainer.
        wire_bytes: bytes between roles so far, by kind (`pull`, `push`, `dense`).
        saves: checkpoints written so far.
        wire_raw_bytes: what `wire_bytes` would be with every float as fp32; empty where that was not counted.
        wire_codecs: by kind, the codec in use where `auto` chooses it; several, with commas between, where trainers
            have chosen different ones.
        wire_kept_share: share of the elements that crossed over the interval, by kind; kinds whose codec sends all of
            them are not there.
        wire_refreshes: thresholds chosen so far for that, by kind.
        checkpointing: a checkpoint is being written.
        failures: roles that died so far.
        roles: state of each role on a cluster (see `roles`); empty in one process.
        queue_depth: requests that wait, by the server's role.
        staleness: mean age of the gradients applied over the interval, in global steps; None if none was, and where
            replicas are merged.
        emulated_step_ms: what a step was made to take, so that the rates are those of an emulated machine; None where
            they are real.
        pls: portion of samples that failures have lost so far; None with `recovery.mode=none`, unless something was
            lost all the same.
        target_pls: what `pls` may come to at the end; None where recovery is not partial now.
        recovery_seconds: what recovery has cost since the last start, by kind (`save`, `load`, `lost`, `wait`, as in
            `result.RecoverySeconds`); empty where `pls` is None.
        emulated_job_s: `recovery_seconds` are those of a job of this length; None where they have passed.
        global_steps: of a gradient method so far; None where replicas are merged.
        dropped: gradients that it has left out so far; None as above.
        aggregation_mode: the gradient method at work; None as above.
        step_seconds: what each worker at work takes for a batch now, smoothed, by `trainer.worker`; empty as above.
        held_bytes: memory of the gradients that wait for their step, all servers; None where that is not known.
    """

    seconds: float
    samples: int
    total_samples: int
    eps: float
    eps_per_trainer: tuple[float, ...]
    auc: float | None
    ne_window: float | None
    ne_lifetime: float | None
    loss: float | None
    sync_count: int
    sync_gap: float | None
    replica_distance: float | None
    wire_bytes: dict[str, int]
    saves: int
    wire_raw_bytes: dict[str, int] = {}
    wire_codecs: dict[str, str] = {}
    wire_kept_share: dict[str, float] = {}
    wire_refreshes: dict[str, int] = {}
    checkpointing: bool = False
    failures: int = 0
    roles: dict[str, RoleState] = {}
    queue_depth: dict[str, int] = {}
    staleness: float | None = None
    emulated_step_ms: float | None = None
    pls: float | None = None
    target_pls: float | None = None
    recovery_seconds: dict[str, float] = {}
    emulated_job_s: float | None = None
    global_steps: int | None = None
    dropped: int | None = None
    aggregation_mode: str | None = None
    step_seconds: dict[str, float] = {}
    held_bytes: int | None = None
