"""One line of a run's history: what the progress line, metrics.jsonl, TensorBoard and the report are made from."""

import msgspec


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job at one moment. Rates are over the interval since the frame before.

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
