"""Names of checkpoints, which of them builds on which, and which may go: pure bookkeeping.

A name is `samples-000000001024`, of a second one of as many samples `samples-000000001024-1`. `NAME-whole` holds what
`NAME` holds, without a parent: wherever `NAME` is asked for, it can stand in.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shadowsync.errors import SaveError

NAME = re.compile(r"samples-(\d{12,18})(?:-([1-9]\d{0,5}))?(-whole)?")
STAGED = re.compile(rf"\.{NAME.pattern}\.part")
_WHOLE = "-whole"


class ParentLost(SaveError):
    """What a delta builds on cannot be built on any more; a whole checkpoint can be saved all the same."""


def order(name: str) -> tuple[int, int, bool]:
    """Sorts names from the oldest on: samples, number among those of as many samples, rewritten as a whole."""
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0), match[3] is not None


def new_name(samples: int, number: int) -> str:
    """The name of a new checkpoint, the `number`-th of so many samples."""
    return f"samples-{samples:012d}" + (f"-{number}" if number else "")


def whole_name(name: str) -> str:
    """The name of the checkpoint that holds the same as a whole."""
    return name if name.endswith(_WHOLE) else name + _WHOLE


def plain_name(name: str) -> str:
    """The name under which the state was saved first."""
    return name.removesuffix(_WHOLE)


@dataclass(frozen=True)
class Parents:
    """The complete checkpoints of a folder.

    Attributes:
        parents: by name what each builds on; None for a whole one.
    """

    parents: Mapping[str, str | None]

    def resolve(self, name: str) -> str | None:
        """Who holds the state called `name`: it as a whole if there is that, else itself; None if both are gone."""
        return next((found for found in (whole_name(name), name) if found in self.parents), None)

    def chain(self, name: str) -> tuple[str, ...] | None:
        """What must be read to load `name`, from the whole one on; None if something is missing."""
        found: list[str] = []
        at: str | None = name
        while at is not None:
            if at not in self.parents:
                return None
            found.append(at)
            parent = self.parents[at]
            at = None if parent is None else self.resolve(parent) or parent
        return tuple(reversed(found))

    def restorable(self) -> list[str]:
        """Those that can be loaded, oldest first; of one that was rewritten as a whole only the rewritten one."""
        names = sorted(self.parents, key=order)
        return [name for name in names if self.chain(name) is not None and self.resolve(name) == name]

    def kept(self, keep: int, given_up: Collection[str], in_use: Collection[str]) -> set[str]:
        """The newest that can be loaded of each of `keep` families, those in use, and what all of these need.

        A family is a whole checkpoint with all that builds on it. Two share no file, so that one wrong byte ends one
        of them at most. The newest of a family needs nearly all the rest of it, so little is on the disk beyond it:
        at most `keep` times a whole checkpoint with the deltas up to the next one, that next one while it is being
        written, and what is in use.

        Args:
            given_up: plain names of checkpoints of a course that was left, not counted.
            in_use: names whose chains somebody reads.
        """
        newest: dict[str, tuple[str, ...]] = {}
        for name in reversed(self.restorable()):
            chain = self.chain(name) or ()
            if plain_name(name) not in given_up:
                newest.setdefault(chain[0], chain)
        found = {link for chain in list(newest.values())[:keep] for link in chain}
        return found.union(*map(self.readable, in_use))

    def readable(self, name: str) -> set[str]:
        """What somebody who opened `name` may read: where a state is there twice, both."""
        found: set[str] = set()
        ahead = [name]
        while ahead:
            at = ahead.pop()
            there = {one for one in (plain_name(at), whole_name(at)) if one in self.parents} - found
            found |= there
            ahead += [parent for one in there if (parent := self.parents[one]) is not None]
        return found
