"""Trainers and roles in as few characters as a progress line has left."""

import statistics
from collections.abc import Mapping, Sequence

from shadowsync.metrics.roles import RoleState, role_order
from shadowsync.report import words

_TRAINERS_LISTED = 8
_ROLES_NAMED = 2
_FINE: tuple[RoleState, ...] = ("alive", "saving", "left")


def trainer_speeds(each: Sequence[float], room: int | None) -> str:
    """Examples per second of every trainer, or their range, in at most `room` characters (None: no limit).

    Empty with one trainer, or where not even the range fits.
    """
    if len(each) < 2:
        return ""
    speeds = [words.brief(eps) for eps in each]
    least, middle, most = (words.brief(eps) for eps in (min(each), statistics.median(each), max(each)))
    forms = [f"{len(each)} trainers {least}/{middle}/{most}"]
    if room is not None or len(each) <= _TRAINERS_LISTED:
        forms.insert(0, " ".join(["trainers", *speeds]))
    return next((form for form in forms if room is None or len(form) <= room), "")


def roles_in_trouble(roles: Mapping[str, RoleState]) -> str:
    """The roles that are not at work, the first ones by name; empty where all are."""
    troubled = [f"{role} {roles[role]}" for role in sorted(roles, key=role_order) if roles[role] not in _FINE]
    more = len(troubled) - _ROLES_NAMED
    return ", ".join(troubled[:_ROLES_NAMED]) + (f" and {more} more" if more > 0 else "")
