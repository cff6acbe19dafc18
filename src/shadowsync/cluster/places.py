"""Which role goes to which machine: pure, from the machines that are there and what is on them already."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shadowsync.assembly import GIB
from shadowsync.config import ClusterConfig
from shadowsync.runtime.runtime import Machine, Order


@dataclass(frozen=True)
class Need:
    """A role that wants a place.

    Attributes:
        role: its name, `kind-index`.
        bytes: of memory that it will fill.
    """

    role: str
    bytes: int = 0

    @property
    def kind(self) -> str:
        """`reader`, `trainer`, `embedding` or `dense`."""
        return self.role.rpartition("-")[0]


@dataclass(frozen=True)
class Placed:
    """A role on a machine."""

    need: Need
    machine: str


class Map:
    """The machines with what is on them.

    Machines without CPUs are left to the driver, as on a KubeRay head.

    Args:
        cluster: what roles take and where they may go.
        machines: those that are there.
        placed: roles that have a place already.
    """

    def __init__(self, cluster: ClusterConfig, machines: Sequence[Machine], placed: Iterable[Placed] = ()) -> None:
        self.cluster = cluster
        self._machines = [machine for machine in machines if machine.cpus > 0]
        self._placed = list(placed)

    def put(self, need: Need) -> Order | None:
        """The best place for a role, which it takes; None if there is none now.

        Embedding servers go where they fill the least share of the memory, everything else where fewest of its kind
        are; trainers keep off machines with embedding servers if they are to be `apart`, and readers go where trainers
        are.
        """
        able = [machine for machine in self._machines if self._can_take(machine, need)]
        if not able:
            return None
        best = min(able, key=lambda machine: self._rank(machine, need))
        self._placed.append(Placed(need, best.id))
        return Order(need.role, best.id, self._cpus(need), self._resource(need))

    def trainer_machines(self) -> int:
        """How many machines have a trainer."""
        return len({placed.machine for placed in self._placed if placed.need.kind == "trainer"})

    def why_not(self, need: Need) -> str:
        """Says what a role that found no place needs."""
        resource = self._resource(need)
        wanted = [
            *([f"{self._cpus(need):g} free CPU(s)"] if self._cpus(need) else []),
            *([f"{need.bytes / GIB:.1f} GiB of memory"] if need.bytes else []),
            *([f"the resource {resource}"] if resource else []),
            *(["no embedding server"] if need.kind == "trainer" and self.cluster.placement == "apart" else []),
        ]
        what = f" with {' and '.join(wanted)}" if wanted else ""
        return f"{need.role} needs a machine{what}, and none of the {len(self._machines)} has room"

    def _cpus(self, need: Need) -> float:
        cpus = {"trainer": self.cluster.trainer_cpus, "reader": 0.0}
        return cpus.get(need.kind, self.cluster.server_cpus)

    def _resource(self, need: Need) -> str | None:
        near_trainers = need.kind in ("trainer", "reader")
        return self.cluster.trainer_resource if near_trainers else self.cluster.server_resource

    def _can_take(self, machine: Machine, need: Need) -> bool:
        resource, there = self._resource(need), self._on(machine)
        if resource is not None and resource not in machine.resources:
            return False
        if machine.cpus - sum(self._cpus(other) for other in there) < self._cpus(need):
            return False
        if need.kind == "trainer" and self.cluster.placement == "apart":
            return all(other.kind != "embedding" for other in there)
        return need.bytes <= self._free_bytes(machine)

    def _rank(self, machine: Machine, need: Need) -> tuple[float, ...]:
        there = Counter(other.kind for other in self._on(machine))
        same, all_there = there[need.kind], sum(there.values())
        if need.kind == "embedding":
            filled = sum(other.bytes for other in self._on(machine)) + need.bytes
            return (filled / max(1, machine.memory_bytes), same, all_there)
        if need.kind == "reader":
            return (-min(1, there["trainer"]), same, all_there)
        return (same, all_there, -machine.cpus)

    def _on(self, machine: Machine) -> list[Need]:
        return [placed.need for placed in self._placed if placed.machine == machine.id]

    def _free_bytes(self, machine: Machine) -> int:
        return machine.memory_bytes - sum(other.bytes for other in self._on(machine))
