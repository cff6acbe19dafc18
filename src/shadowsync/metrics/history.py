"""What a run's history is made of: frames, the lines of metrics.jsonl, and events of its roles, those of events.jsonl.

Progress line, TensorBoard, Prometheus and the report are made from them; `report.measures` says what the figures are.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

RoleState = Literal["alive", "saving", "restarting", "unreachable", "dead", "left"]
Event = Literal[
    "alive",
    "dead",
    "restarted",
    "unreachable",
    "reachable",
    "saving",
    "saved",
    "restored",
    "left",
    "decided",
    "waiting",
    "moved",
]
About = Literal["", "codec"]

_ENTERED: dict[Event, RoleState] = {
    "alive": "alive",
    "dead": "dead",
    "restarted": "restarting",
    "unreachable": "unreachable",
    "saving": "saving",
    "restored": "alive",
    "left": "left",
}
_ENDED: dict[Event, RoleState] = {"reachable": "unreachable", "saved": "saving"}
_ORDER = ("driver", "reader", "trainer", "embedding", "dense")


class JobCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a frame holds that the recorder is told; counts are cumulative over the job, resumes included.

    Attributes:
        sync_count: of all trainers.
        replica_distance: mean over trainers of ‖w_i − mean w‖ / ‖mean w‖; None with one trainer.
        wire_codecs: by kind, the codec in use where `auto` chooses it; several, with commas between, where trainers
            have chosen different ones.
        roles: by name, those in the driver's process too.
        queue_depth: requests that wait, by the server's role.
        emulated_step_ms: what a step was made to take, so that rates are those of an emulated machine; None: real ones.
        pls: None with `recovery.mode=none`, unless something was lost all the same.
        target_pls: what `pls` may come to at the end; None where recovery is not partial now.
        recovery_seconds: what recovery has cost since the last start, as `result.RecoverySeconds`; empty where `pls` is
            None.
        emulated_job_s: `recovery_seconds` are those of a job of this length; None where they have passed.
        step_seconds: of each worker of a gradient method, a batch, smoothed, by `trainer.worker`.
        held_bytes: memory of the gradients that wait for their step, all servers; None where that is not known.
        keys: of dynamic tables since the last start, `rows`, `keys`, `admitted`, `refused` and `evicted`, as
            `keys.Counts`; empty where there are none.
        stored: of rows on disk since the last start, `rows`, `slots`, `looked_up`, `missed`, `read_bytes` and
            `written_bytes`, as `storage.StorageCounts`; empty where all are in memory.
        valid: measures of the last validation, by name, and `valid_samples` how many samples had been trained by then.
        learning_rates: of the `dense` part and the `rows`, where there are validations, after which they may fall.
    """

    total_samples: int
    sync_count: int
    replica_distance: float | None
    saves: int
    wire_codecs: dict[str, str] = {}
    checkpointing: bool = False
    failures: int = 0
    roles: dict[str, RoleState] = {}
    queue_depth: dict[str, int] = {}
    emulated_step_ms: float | None = None
    pls: float | None = None
    target_pls: float | None = None
    recovery_seconds: dict[str, float] = {}
    emulated_job_s: float | None = None
    step_seconds: dict[str, float] = {}
    held_bytes: int | None = None
    keys: dict[str, int] = {}
    stored: dict[str, int] = {}
    valid: dict[str, float] = {}
    valid_samples: int | None = None
    learning_rates: dict[str, float] = {}


class Frame(JobCounts, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a job at one moment. Rates are over the interval since the frame before.

    What has a default is left out of a line of metrics.jsonl where it does not apply. Quality is that of predictions
    made before each sample was trained on, and None before both labels were seen.

    Attributes:
        seconds: since the first batch, pauses before resumes left out.
        ne_window: normalized entropy over the last `report.window` samples; `ne_lifetime` over all.
        loss: mean log loss over the interval, in nats.
        sync_gap: iterations per synchronisation; None if there was none.
        wire_bytes, wire_raw_bytes, wire_refreshes: so far, as `WireTotals`.
        wire_kept_share: share of the elements that crossed, by kind; kinds whose codec sends all are not there.
        global_steps, dropped, aggregation_mode: of a gradient method so far; None where replicas are merged.
        staleness: mean age of the gradients applied, in global steps; None if none was.
    """

    seconds: float
    samples: int
    eps: float
    eps_per_trainer: tuple[float, ...]
    auc: float | None
    ne_window: float | None
    ne_lifetime: float | None
    loss: float | None
    sync_gap: float | None
    wire_bytes: dict[str, int]
    wire_raw_bytes: dict[str, int] = {}
    wire_kept_share: dict[str, float] = {}
    wire_refreshes: dict[str, int] = {}
    global_steps: int | None = None
    dropped: int | None = None
    aggregation_mode: str | None = None
    staleness: float | None = None


class RoleEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened to a role.

    Attributes:
        seconds: since the first start of the run.
        role: its name: `driver`, `reader-0`, `trainer-0`, `embedding-1`, `dense-0`.
        event: `restarted` says that a new process has taken the role's place; it is at work again with the `restored`
            or `alive` that follows. `left` says that it ended as it should; `decided` that the driver chose what
            happens after failures, or another gradient method, or that a trainer chose another codec, which changes
            nobody's state. `waiting` says that it has had no answer for too long, and to what. `moved` says that a
            server is on another machine now, or (the driver's) that a machine is empty.
        detail: a few words on why or where, for a person.
        about: of what is `decided`, `codec` where it is a codec; everything else is about recovery or methods.
    """

    seconds: float
    role: str
    event: Event
    detail: str = ""
    about: About = ""


class Span(NamedTuple):
    """A stretch of time, in seconds since the first start, in which a role was in one state."""

    start: float
    end: float
    state: RoleState


def state_after(state: RoleState | None, event: Event) -> RoleState:
    """The state of a role that was in `state` (None: unknown so far) when `event` happens.

    The end of something ends only that: a save that is reported as done does not revive a role that died meanwhile.
    """
    if event in _ENTERED:
        return _ENTERED[event]
    return "alive" if state is None or state == _ENDED.get(event) else state


def role_order(role: str) -> tuple[int, str, int]:
    """Sorts roles as a batch meets them, and `trainer-10` behind `trainer-9`."""
    kind, _, number = role.rpartition("-")
    kind, rank = (kind, int(number)) if kind and number.isdecimal() else (role, -1)
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER), kind, rank


def spans(events: Sequence[RoleEvent], until: float) -> dict[str, list[Span]]:
    """The states of each role one after the other, up to `until` seconds; time after it left is in no span.

    Neighbours of one state are joined, spans of no length left out.
    """
    found: dict[str, list[Span]] = {}
    for role in sorted({event.role for event in events}, key=role_order):
        own = [event for event in events if event.role == role]
        states = found[role] = list[Span]()
        state: RoleState | None = None
        for event, end in zip(own, [*(later.seconds for later in own[1:]), until], strict=True):
            state = state_after(state, event.event)
            before = states[-1] if states else None
            if before is not None and before.state == state and before.end >= event.seconds:
                states[-1] = Span(before.start, max(end, before.end), state)
            elif state != "left" and end > event.seconds:
                states.append(Span(event.seconds, end, state))
    return found
