"""The page's section on recovery: what was chosen and why, what failures lost, and where the time went."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shadowsync.metrics.frame import Frame
from shadowsync.metrics.roles import RoleEvent
from shadowsync.recovery.costs import spoken
from shadowsync.report import words
from shadowsync.report.canvas import Axis
from shadowsync.report.charts import SAMPLES, Card
from shadowsync.report.plots import Bar, Chart, Line, Marks, Reference, bar_chart, line_chart
from shadowsync.report.result import Recovery, Result
from shadowsync.report.series import curve, kept
from shadowsync.report.summary import KeyNumber, switch_sentences

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


@dataclass(frozen=True)
class RecoverySection:
    """What the section holds.

    Attributes:
        why: what spoke for the mode at the end, as a sentence; empty where nothing was to be chosen.
        numbers: the rows of its table.
        cards: PLS over samples, and time by kind.
        decisions: time and sentence of the last decisions.
        left_out: of earlier ones.
        emulated: times are those of a job for which this one stands.
    """

    why: str
    numbers: Sequence[KeyNumber]
    cards: Sequence[Card]
    decisions: Sequence[tuple[str, str]]
    left_out: int
    emulated: bool


def notable_recovery(result: Result) -> Recovery | None:
    """None where there is nothing to tell: nothing was saved to recover from, and nobody failed."""
    recovery = result.recovery
    return None if recovery is None or (recovery.mode == "none" and not recovery.failures) else recovery


def make_recovery(result: Result, frames: Sequence[Frame], events: Sequence[RoleEvent]) -> RecoverySection | None:
    """None where there is nothing to tell."""
    recovery = notable_recovery(result)
    if recovery is None:
        return None
    switches = switch_sentences(result)
    decided_at_all = [event for event in events if event.event == "decided" and event.about != "codec"]
    decisions = [event for event in decided_at_all if event.detail not in switches]
    decided = [(words.clock(event.seconds), event.detail) for event in decisions]
    return RecoverySection(
        why=recovery.why or "",
        numbers=_numbers(recovery),
        cards=[_loss_card(recovery, frames), _time_card(recovery)],
        decisions=decided[-_DECISIONS:],
        left_out=max(0, len(decided) - _DECISIONS),
        emulated=recovery.emulated_job_s is not None,
    )


def _numbers(recovery: Recovery) -> list[KeyNumber]:
    interval = words.MISSING if recovery.interval_s is None else spoken(recovery.interval_s)
    rows = [
        KeyNumber("mode", recovery.mode, _MODES.get(recovery.mode, "")),
        KeyNumber(_named(recovery, "time between saves"), interval, "at the end of the run, from start to start"),
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


def _named(recovery: Recovery, what: str) -> str:
    return what if recovery.emulated_job_s is None else f"emulated {what}"


def _loss_card(recovery: Recovery, frames: Sequence[Frame]) -> Card:
    points = curve(kept(frames), _samples, lambda frame: frame.pls)
    target = recovery.target_pls
    chart = Chart(
        "pls",
        SAMPLES,
        Axis("portion of lost samples (PLS)", lambda value: f"{value:.3g}"),
        [Line(*points, label="lost", colour=4, steps=True)],
        reference=None if target is None else Reference(target, f"target {target:g}"),
        from_zero=True,
        marks=[
            _marks("failure", frames, lambda frame: frame.failures, lambda frame: frame.pls or 0.0, "x", None),
            _marks("checkpoint", frames, lambda frame: frame.saves, lambda _: 0.0, "|", 0),
        ],
    )
    return Card(
        "Lost samples",
        "What failures of embedding servers have lost so far. Crosses mark failures of any role, ticks checkpoints.",
        "steps that are small against the target and leave the curve below it at the end."
        if recovery.mode == "partial"
        else "flat; where everybody goes back nothing is lost, and the price is time.",
        line_chart(chart) if points[0] else None,
    )


def _marks(
    label: str,
    frames: Sequence[Frame],
    count: Callable[[Frame], int],
    height: Callable[[Frame], float],
    symbol: str,
    colour: int | None,
) -> Marks:
    """A mark where a count rose, at most one in each of `_PLACES` places. A count begins anew with a resume."""
    last = max((frame.samples for frame in frames), default=0) or 1
    before, found = 0, dict[int, Frame]()
    for frame in frames:
        if count(frame) and count(frame) != before:
            found[_PLACES * frame.samples // last] = frame
        before = count(frame)
    marked = found.values()
    return Marks(label, [frame.samples for frame in marked], [height(frame) for frame in marked], symbol, colour)


def _time_card(recovery: Recovery) -> Card:
    seconds = {kind: getattr(recovery.seconds, kind) for kind in _KINDS}
    unit_s, unit = next((unit_s, unit) for below, unit_s, unit in _UNITS if max(seconds.values()) < below)
    bars = [Bar(_KINDS[kind], value / unit_s) for kind, value in seconds.items()]
    total = spoken(sum(seconds.values()))
    axis = Axis(_named(recovery, unit), lambda value: f"{value:.3g}")
    return Card(
        "Emulated time that recovery took" if recovery.emulated_job_s is not None else "Time that recovery took",
        f"By kind, since the last start; {_named(recovery, total)} in all. While a replacement is made ready, the "
        "others go on training unless everybody goes back.",
        "little of the training time; where everybody goes back, saving and repeating cost about the same.",
        bar_chart(bars, "recovery-time", axis) if any(seconds.values()) else None,
        "Recovery took no time.",
    )


def _samples(frame: Frame) -> float:
    return frame.samples
