"""What happened to the roles of a job, when, and the state each was in: the tale that the report's timeline tells."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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


class RoleEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened to a role.

    Attributes:
        seconds: since the first start of the run.
        role: its name: `driver`, `reader-0`, `trainer-0`, `embedding-1`, `dense-0`.
        event: `restarted` says that a new process has taken the role's place; it is at work again with the `restored`
            or `alive` that follows. `left` says that it ended as it should; `decided` that the driver chose what
            happens after failures, or another gradient method, or that a trainer chose another codec, which changes
            nobody's state. `waiting` says that it has had no answer for too long, and to what.
        detail: a few words on why or where, for a person.
        about: of what is `decided`, `codec` where it is a codec; everything else is about recovery or methods.
    """

    seconds: float
    role: str
    event: Event
    detail: str = ""
    about: About = ""


@dataclass(frozen=True)
class Span:
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
