"""Which role goes to which machine, and when there is no use in starting it again; pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from shadowsync.assembly import GIB
from shadowsync.runtime.runtime import LaunchRequest, Machine

MOST_DEATHS = 20
WORTH_MOVING = 0.1
"""Of the fullest machine's share that has to go, or rows would move for nothing."""


class Scheduler:
    """The machines with what is on them.

    Machines without CPUs are left to the driver, as on a KubeRay head.

    Args:
        machines: those that are there.
        placed: roles that have a place already.
        leaving: machines that are to be shut down, by id: they take nobody.
        most: machines that may hold embedding servers; None for all.
        avoided: machines that take nobody for now.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        placed: Iterable[LaunchRequest] = (),
        leaving: Collection[str] = (),
        most: int | None = None,
        avoided: Collection[str] = (),
    ) -> None:
        self._machines = [machine for machine in machines if machine.cpus > 0]
        self._placed = list(placed)
        self._leaving, self._most, self._avoided = leaving, most, avoided

    def put(self, request: LaunchRequest) -> LaunchRequest | None:
        """The best place for a role, which it takes; None if there is none now.

        Who fills memory goes where the least share of it is filled, everybody else where fewest of its kind are, and
        before that where those are whom it seeks. A doubtful machine is the last to be thought of.
        """
        able = [machine for machine in self._machines if self._can_take(machine, request)]
        if not able:
            return None
        best = min(able, key=lambda machine: self._rank(machine, request))
        self._placed.append(replace(request, machine=best.id))
        return self._placed[-1]

    def next_move(self, fewest: int) -> tuple[LaunchRequest, LaunchRequest] | None:
        """A server that should change its machine, as it is and as it would be; None if none should.

        First those on machines that are to be shut down: embedding servers, unless fewer than `fewest` machines would
        hold any then, and when trainers have gone, dense servers. Then those on one machine more than may hold some.
        Otherwise an embedding server off the machine of whose memory they fill the largest share, where that falls by a
        tenth at least.
        """
        rows, dense = self.leavers("embedding"), self.leavers("dense")
        for placed in sorted(rows, key=lambda server: (-server.bytes, server.role)):
            but = self.holding() if len(self.holding()) < fewest else ()
            if (found := self._elsewhere(placed, but)) is not None:
                return placed, found
        if not rows and not self.leavers("trainer"):  # which may reach a dense server in the memory of its machine
            for placed in dense:
                if (found := self._elsewhere(placed, ())) is not None:
                    return placed, found
        if rows or dense:
            return None
        return self._from_one_too_many() or self._off_the_fullest(fewest)

    def _from_one_too_many(self) -> tuple[LaunchRequest, LaunchRequest] | None:
        """A server off the machine with the fewest rows, where more hold some than may."""
        holding = self._that_hold()
        if self._most is None or len(holding) <= self._most:
            return None
        least = min(holding, key=lambda machine: (self._rows_on(machine), machine.id))
        without = {machine.id for machine in self._machines} - self.holding()
        moves = ((placed, self._elsewhere(placed, without)) for placed in self._embedding_on(least))
        return next(((placed, found) for placed, found in moves if found is not None), None)

    def _off_the_fullest(self, fewest: int) -> tuple[LaunchRequest, LaunchRequest] | None:
        holding = self._that_hold()
        fullest = max(holding, key=lambda machine: (self._share(machine), machine.id), default=None)
        if fullest is None or not self._share(fullest):
            return None
        there = self._embedding_on(fullest)
        moves = []
        for placed in there if len(there) > 1 or len(holding) > fewest else ():
            if (found := self._elsewhere(placed, ())) is not None:
                target = next(machine for machine in self._machines if machine.id == found.machine)
                share = max(self._share(fullest, -placed.bytes), self._share(target, placed.bytes))
                moves.append((share, placed.bytes, placed.role, placed, found))
        if not moves or (best := min(moves, key=lambda move: move[:3]))[0] > (1 - WORTH_MOVING) * self._share(fullest):
            return None
        return best[3], best[4]

    def to_let_go(self, fewest: int, with_trainers: bool) -> list[LaunchRequest]:
        """Trainers and readers on machines that are to be shut down that may go now.

        All of them where `fewest` trainers stay, and readers once trainers have gone. Else one trainer, if it finds
        another place and one stays from which it can go on there; where the dense part is not `with_trainers`, nobody
        has to.
        """
        trainers = [placed for placed in self._placed if placed.kind == "trainer"]
        guests = self.leavers("trainer")
        stay = len(trainers) - len(guests)
        if stay >= max(1, fewest):
            return [*guests, *self.leavers("reader")]
        movable = [trainer for trainer in guests if self._elsewhere(trainer, ()) is not None]
        return movable[:1] if stay or not with_trainers else []

    def leavers(self, *kinds: str) -> list[LaunchRequest]:
        """Roles of these kinds on machines that are to be shut down."""
        gone = [placed for placed in self._placed if placed.machine in self._leaving]
        return [placed for kind in kinds for placed in gone if placed.kind == kind]

    def _elsewhere(self, placed: LaunchRequest, but: Collection[str]) -> LaunchRequest | None:
        """The best place for a role on another machine than its own and these; None if there is none."""
        machines = [machine for machine in self._machines if machine.id not in (placed.machine, *but)]
        others = [other for other in self._placed if other is not placed]
        return Scheduler(machines, others, self._leaving, self._most, self._avoided).put(replace(placed, machine=None))

    def _that_hold(self) -> list[Machine]:
        return [machine for machine in self._machines if machine.id in self.holding()]

    def _embedding_on(self, machine: Machine) -> list[LaunchRequest]:
        return [placed for placed in self._on(machine) if placed.kind == "embedding"]

    def _rows_on(self, machine: Machine) -> int:
        """Bytes that embedding servers fill there."""
        return sum(placed.bytes for placed in self._embedding_on(machine))

    def _share(self, machine: Machine, more: int = 0) -> float:
        """Of its memory that embedding servers fill, and so many bytes more."""
        return (self._rows_on(machine) + more) / max(1, machine.memory_bytes)

    def machines_of(self, kind: str) -> int:
        """How many machines have a role of that kind."""
        return len({placed.machine for placed in self._placed if placed.kind == kind})

    def why_not(self, request: LaunchRequest) -> str:
        """Says what a role that found no place needs."""
        wanted = [
            *([f"{request.cpus:g} free CPU(s)"] if request.cpus else []),
            *([f"{request.bytes / GIB:.1f} GiB of memory"] if request.bytes else []),
            *([f"the resource {request.resource}"] if request.resource else []),
            *([f"no {request.keeps_off} server"] if request.keeps_off else []),
        ]
        what = f" with {' and '.join(wanted)}" if wanted else ""
        return f"{request.role} needs a machine{what}, and none of the {len(self._machines)} has room"

    def _can_take(self, machine: Machine, request: LaunchRequest) -> bool:
        there = self._on(machine)
        return (
            (machine.id not in self._leaving or machine.id == request.machine)
            and machine.id not in self._avoided
            and (request.kind != "embedding" or machine.id == request.machine or self._may_hold(machine))
            and request.machine in (None, machine.id)
            and (request.resource is None or request.resource in machine.resources)
            and machine.cpus - sum(other.cpus for other in there) >= request.cpus
            and all(other.kind != request.keeps_off for other in there)
            and request.bytes <= machine.memory_bytes - sum(other.bytes for other in there)
        )

    def _may_hold(self, machine: Machine) -> bool:
        """Rows, without too many machines doing so."""
        holding = self.holding()
        return self._most is None or machine.id in holding or len(holding) < self._most

    def holding(self) -> set[str]:
        """Machines with embedding servers that stay."""
        found = {placed.machine for placed in self._placed if placed.kind == "embedding"}
        return {machine for machine in found if machine is not None} - set(self._leaving)

    def _rank(self, machine: Machine, request: LaunchRequest) -> tuple[float, ...]:
        there = self._on(machine)
        kinds = Counter(other.kind for other in there)
        same = kinds[request.kind]
        if request.bytes:
            filled = sum(other.bytes for other in there) + request.bytes
            return (machine.doubtful, filled / max(1, machine.memory_bytes), same, len(there))
        if request.seeks:
            return (machine.doubtful, -min(1, kinds[request.seeks]), same, len(there))
        return (machine.doubtful, same, len(there), -machine.cpus)

    def _on(self, machine: Machine) -> list[LaunchRequest]:
        return [placed for placed in self._placed if placed.machine == machine.id]


@dataclass
class RestartPolicy:
    """Since when places are vacant, and how often somebody died since the last progress; times are handed in.

    Args:
        lost_after_s: how long a place may be vacant, or trainers too few.
        min_trainers: below that the job is not worth its servers.
        most_deaths: without a row trained in between that was not trained before.
    """

    lost_after_s: float
    min_trainers: int
    most_deaths: int = MOST_DEATHS
    _since: dict[str, float] = field(default_factory=dict)
    _few_since: float | None = None
    _furthest: int = -1
    _deaths: int = 0

    def died(self, role: str, trained: int, now: float) -> None:
        """Somebody did, when so many rows were trained."""
        self._since.setdefault(role, now)
        if trained > self._furthest:
            self._furthest, self._deaths = trained, 0
        self._deaths += 1

    def taken(self, role: str) -> None:
        """Somebody has the place and is at work."""
        self._since.pop(role, None)

    def clear(self) -> None:
        """Everybody is at work."""
        self._since.clear()

    def too_long(self, role: str, now: float) -> bool:
        """The place has been vacant for longer than the job waits."""
        return now - self._since.get(role, now) > self.lost_after_s

    def too_few(self, trainers: int, now: float) -> str | None:
        """Why the job ends for lack of trainers, if it does."""
        if trainers >= self.min_trainers:
            self._few_since = None
            return None
        self._few_since = now if self._few_since is None else self._few_since
        if now - self._few_since <= self.lost_after_s:
            return None
        return f"fewer than cluster.min_trainers={self.min_trainers} trainers are left"

    def hopeless(self, role: str) -> str | None:
        """Why there is no use in replacing anybody any more, if so; `role` died last."""
        if self._deaths <= self.most_deaths:
            return None
        return f"{self._deaths} roles died in a row while nothing new was trained, {role} the last of them"
