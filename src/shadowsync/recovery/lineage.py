"""Which checkpoint builds on which, and which may go: pure bookkeeping over names."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shadowsync.recovery.names import order, whole_name


@dataclass(frozen=True)
class Lineage:
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
            if parent is not None and (at := self.resolve(parent)) is None:
                return None
            at = None if parent is None else at
        return tuple(reversed(found))

    def restorable(self) -> list[str]:
        """Those that can be loaded, oldest first; of one that was rewritten as a whole only the rewritten one."""
        return [
            name
            for name in sorted(self.parents, key=order)
            if self.chain(name) is not None and self.resolve(name) == name
        ]

    def kept(self, keep: int, given_up: Collection[str], in_use: Collection[str]) -> set[str]:
        """The newest `keep` that can be loaded, those in use, and all that they build on.

        Args:
            keep: how many.
            given_up: checkpoints of a course that was left, not counted.
            in_use: names whose chains somebody reads.
        """
        newest = [name for name in self.restorable() if name not in given_up][-keep:]
        return {link for name in (*newest, *in_use) for link in self.chain(name) or ()}
