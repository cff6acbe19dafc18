"""The page's sections on failures: what recovery chose and lost and took, and who was at work when."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shadowsync.metrics.history import Frame, RoleEvent, Span, role_order, spans
from shadowsync.recovery.policy import spoken
from shadowsync.report import words
from shadowsync.report.charts import SAMPLES, Card, curve, kept
from shadowsync.report.measures import KeyNumber
from shadowsync.report.plots import Axis, Bar, Line, Look, Marks, Row, Stretch, bar_chart, line_chart, timeline_chart
from shadowsync.report.result import Recovery, Result, notable_recovery

PLS_TERM = (
    "PLS",
    "Portion of lost samples: those trained since a dead embedding server was last saved as a whole, as a share of all "
    "samples, times its share of the rows; summed over the failures. AUC falls about in proportion to it.",
)
_MODES = {
    "full": "after a failure everybody goes back to the last checkpoint",
    "partial": "only the replacement of a dead server goes back to its checkpoint",
    "none": "nothing is saved for it: a replacement starts from what there is",
}
_KINDS = {
    "save": "saving held training up",
    "load": "loading checkpoints",
    "lost": "training repeated",
    "wait": "until replacements stood",
}
_UNITS = ((120, 1, "seconds"), (7200, 60, "minutes"), (math.inf, 3600, "hours"))
_PLACES = 300
_DECISIONS = 20
_ROWS = 24
_NAME_LENGTH = 18
_EVENTS_LISTED = 200
_LOOKS = {
    "alive": Look("alive", colour=2, height=0.3),
    "saving": Look("saving", colour=0),
    "restarting": Look("restarting", colour=1, hatch="////"),
    "unreachable": Look("unreachable", colour=6, hatch="...."),
    "dead": Look("dead", colour=4, hatch="xxxx"),
}


@dataclass(frozen=True)
class RecoverySection:
    """What the section holds.

    Attributes:
        why: what spoke for the mode at the end, as a sentence; empty where nothing was to be chosen.
        numbers: the rows of its table.
        cards: PLS over samples, and time by kind.
        decisions: time and sentence of the last decisions; `left_out` are earlier ones.
        emulated: times are those of a job for which this one stands.
    """

    why: str
    numbers: Sequence[KeyNumber]
    cards: Sequence[Card]
    decisions: Sequence[tuple[str, str]]
    left_out: int
    emulated: bool


def switch_sentences(result: Result) -> frozenset[str]:
    """What the driver said of switches from one gradient method to another."""
    return frozenset(switch.sentence for switch in (result.aggregation.switches if result.aggregation else ()))


def make_recovery(result: Result, frames: Sequence[Frame], events: Sequence[RoleEvent]) -> RecoverySection | None:
    """None where there is nothing to tell."""
    recovery = notable_recovery(result)
    if recovery is None:
        return None
    switches = switch_sentences(result)
    decisions = [
        (words.clock(event.seconds), event.detail)
        for event in events
        if event.event == "decided" and event.about != "codec" and event.detail not in switches
    ]
    return RecoverySection(
        why=recovery.why or "",
        numbers=_numbers(recovery),
        cards=[_loss_card(recovery, frames), _time_card(recovery)],
        decisions=decisions[-_DECISIONS:],
        left_out=max(0, len(decisions) - _DECISIONS),
        emulated=recovery.emulated_job_s is not None,
    )


def _numbers(recovery: Recovery) -> list[KeyNumber]:
    emulated = "" if recovery.emulated_job_s is None else "emulated "
    interval = words.MISSING if recovery.interval_s is None else spoken(recovery.interval_s)
    rows = [
        KeyNumber("mode", recovery.mode, _MODES.get(recovery.mode, "")),
        KeyNumber(f"{emulated}time between saves", interval, "at the end of the run, from start to start"),
        KeyNumber("checkpoints", words.count(recovery.saves), "written since the last start"),
        KeyNumber("failures", words.count(recovery.failures), "roles that died since the last start"),
        KeyNumber("PLS", f"{recovery.pls:.3g}", "portion of lost samples, resumes included"),
    ]
    if recovery.target_pls is not None:
        rows.append(KeyNumber("target PLS", f"{recovery.target_pls:g}", "what it is expected to come to, at most"))
    if recovery.priority is not None:
        rows.insert(1, KeyNumber("priority", recovery.priority, "which rows are saved first (recovery.priority)"))
    if recovery.emulated_job_s is not None:
        rows.append(KeyNumber("emulated job", spoken(recovery.emulated_job_s), "for which this run stands"))
    return rows


def _loss_card(recovery: Recovery, frames: Sequence[Frame]) -> Card:
    points = curve(kept(frames), SAMPLES, lambda frame: frame.pls)
    target = recovery.target_pls
    drawn = None
    if points[0]:
        failures = _risen(frames, lambda frame: frame.failures)
        saves = _risen(frames, lambda frame: frame.saves)
        drawn = line_chart(
            "pls",
            SAMPLES,
            Axis("portion of lost samples (PLS)", lambda value: f"{value:.3g}"),
            [Line(*points, label="lost", colour=4, steps=True)],
            reference=None if target is None else (target, f"target {target:g}"),
            from_zero=True,
            marks=[
                Marks("failure", [f.samples for f in failures], [f.pls or 0.0 for f in failures], "x"),
                Marks("checkpoint", [f.samples for f in saves], [0.0] * len(saves), "|", 0),
            ],
        )
    return Card(
        "Lost samples",
        "What failures of embedding servers have lost so far. Crosses mark failures of any role, ticks checkpoints.",
        "steps that are small against the target and leave the curve below it at the end."
        if recovery.mode == "partial"
        else "flat; where everybody goes back nothing is lost, and the price is time.",
        drawn,
    )


def _risen(frames: Sequence[Frame], count: Callable[[Frame], int]) -> list[Frame]:
    """Where a count rose, at most one in each of `_PLACES` places. A count begins anew with a resume."""
    last = max((frame.samples for frame in frames), default=0) or 1
    before, found = 0, dict[int, Frame]()
    for frame in frames:
        if count(frame) and count(frame) != before:
            found[_PLACES * frame.samples // last] = frame
        before = count(frame)
    return list(found.values())


def _time_card(recovery: Recovery) -> Card:
    emulated = "" if recovery.emulated_job_s is None else "emulated "
    seconds = {kind: getattr(recovery.seconds, kind) for kind in _KINDS}
    unit_s, unit = next((unit_s, unit) for below, unit_s, unit in _UNITS if max(seconds.values()) < below)
    bars = [Bar(_KINDS[kind], value / unit_s) for kind, value in seconds.items()]
    axis = Axis(f"{emulated}{unit}", lambda value: f"{value:.3g}")
    return Card(
        "Emulated time that recovery took" if emulated else "Time that recovery took",
        f"By kind, since the last start; {emulated}{spoken(sum(seconds.values()))} in all. While a replacement is made "
        "ready, the others go on training unless everybody goes back.",
        "little of the training time; where everybody goes back, saving and repeating cost about the same.",
        bar_chart("recovery-time", bars, axis) if any(seconds.values()) else None,
        "Recovery took no time.",
    )


@dataclass(frozen=True)
class Timeline:
    """The chart, and the events behind it in words: time, role, event, detail; `left_out` are too many to list."""

    card: Card
    events: Sequence[tuple[str, str, str, str]]
    left_out: int


def make_timeline(
    events: Sequence[RoleEvent], frames: Sequence[Frame], real: Collection[str] = (), *, emulated: bool = False
) -> Timeline | None:
    """None without events; `emulated`: the times that decisions speak of, but for `real` ones, are those of another
    job."""
    if not events:
        return None
    ordered = sorted(events, key=lambda event: event.seconds)
    # a little after the last event, so that what it led to is seen
    last = max(ordered[-1].seconds, frames[-1].seconds if frames else 0.0)
    end = max(last, ordered[-1].seconds + 0.02 * (last - ordered[0].seconds))
    states = spans(ordered, end)
    eventful = sorted(states, key=lambda role: -sum(span.state not in ("alive", "saving") for span in states[role]))
    rows = [_row(ordered, role, states[role]) for role in sorted(eventful[:_ROWS], key=role_order)]
    listed = ordered
    if len(listed) > _EVENTS_LISTED:
        listed = [event for event in listed if event.event not in ("saving", "saved")][:_EVENTS_LISTED]
    told = []
    for event in listed:
        of_another_job = emulated and event.event == "decided" and event.detail not in real
        detail = f"emulated: {event.detail}" if of_another_job else event.detail
        told.append((words.clock(event.seconds), event.role, event.event, detail))
    hidden = len(states) - len(rows)
    decided = " A diamond marks a decision." if any(row.notes for row in rows) else ""
    more = f" {words.plural(hidden, 'further role')} had fewer troubles and are not drawn." if hidden else ""
    card = Card(
        "Timeline of the roles",
        f"The state of each role over the run; a cross marks a death, however short.{decided}{more}",
        "long thin lines; a role that dies is back soon, and the others go on meanwhile.",
        timeline_chart("timeline", rows, list(_LOOKS.values()), Axis("seconds since the first start")),
    )
    return Timeline(card, told, len(ordered) - len(listed))


def _row(events: Sequence[RoleEvent], role: str, states: Sequence[Span]) -> Row:
    own = [event for event in events if event.role == role]
    deaths, decisions = ([event.seconds for event in own if event.event == kind] for kind in ("dead", "decided"))
    short = role if len(role) <= _NAME_LENGTH else f"{role[: _NAME_LENGTH // 2 - 1]}…{role[-_NAME_LENGTH // 2 :]}"
    return Row(short, [Stretch(span.start, span.end, _LOOKS[span.state]) for span in states], deaths, decisions)
