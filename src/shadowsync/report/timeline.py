"""The timeline of a run's roles: who was at work when, who was not, and why."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shadowsync.metrics.frame import Frame
from shadowsync.metrics.roles import RoleEvent, Span, role_order, spans
from shadowsync.report import words
from shadowsync.report.canvas import Axis
from shadowsync.report.charts import Card
from shadowsync.report.timeline_chart import Look, Row, Stretch, timeline_chart

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
_AXIS = Axis("seconds since the first start")


@dataclass(frozen=True)
class Timeline:
    """The chart, and the events behind it in words: time, role, event, detail; `left_out` are too many to list."""

    card: Card
    events: Sequence[tuple[str, str, str, str]]
    left_out: int


def make_timeline(
    events: Sequence[RoleEvent], frames: Sequence[Frame], real: Collection[str] = (), *, emulated: bool = False
) -> Timeline | None:
    """None where no role was told of; `emulated`: the times that decisions speak of, but for `real` ones, are those of
    another job."""
    if not events:
        return None
    ordered = sorted(events, key=lambda event: event.seconds)
    told = spans(ordered, _end(ordered, frames))
    drawn = _rows_drawn(told)
    rows = [_row(ordered, role, told[role]) for role in drawn]
    listed = [
        (words.clock(e.seconds), e.role, e.event, _detail(e, emulated and e.detail not in real))
        for e in _notable(ordered)
    ]
    return Timeline(_card(rows, len(told) - len(drawn)), listed, len(ordered) - len(listed))


def _detail(event: RoleEvent, emulated: bool) -> str:
    return f"emulated: {event.detail}" if emulated and event.event == "decided" else event.detail


def _notable(events: Sequence[RoleEvent]) -> Sequence[RoleEvent]:
    """The first of so many that a person reads; where there are more, checkpoints are passed over."""
    if len(events) > _EVENTS_LISTED:
        events = [event for event in events if event.event not in ("saving", "saved")]
    return events[:_EVENTS_LISTED]


def _end(events: Sequence[RoleEvent], frames: Sequence[Frame]) -> float:
    """When the run ended, as far as is known, and a little after the last event, so that what it led to is seen."""
    last = max(events[-1].seconds, frames[-1].seconds if frames else 0.0)
    return max(last, events[-1].seconds + 0.02 * (last - events[0].seconds))


def _rows_drawn(told: dict[str, list[Span]]) -> list[str]:
    """At most `_ROWS` roles; where there are more, those to which most happened."""
    eventful = sorted(told, key=lambda role: -sum(span.state not in ("alive", "saving") for span in told[role]))
    return sorted(eventful[:_ROWS], key=role_order)


def _short(role: str) -> str:
    return role if len(role) <= _NAME_LENGTH else f"{role[: _NAME_LENGTH // 2 - 1]}…{role[-_NAME_LENGTH // 2 :]}"


def _stretch(span: Span) -> Stretch:
    return Stretch(span.start, span.end, _LOOKS[span.state])


def _row(events: Sequence[RoleEvent], role: str, told: Sequence[Span]) -> Row:
    own = [event for event in events if event.role == role]
    deaths, decisions = ([event.seconds for event in own if event.event == kind] for kind in ("dead", "decided"))
    return Row(_short(role), [_stretch(span) for span in told], deaths, decisions)


def _card(rows: Sequence[Row], hidden: int) -> Card:
    decided = " A diamond marks a decision." if any(row.notes for row in rows) else ""
    more = f" {words.plural(hidden, 'further role')} had fewer troubles and are not drawn." if hidden else ""
    return Card(
        "Timeline of the roles",
        f"The state of each role over the run; a cross marks a death, however short.{decided}{more}",
        "long thin lines; a role that dies is back soon, and the others go on meanwhile.",
        timeline_chart(rows, list(_LOOKS.values()), "timeline", _AXIS),
    )
