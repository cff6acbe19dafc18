"""Where the roles of a job run, if the user leaves that open: threads of one process, or processes of this machine.

Threads of one process take turns at everything that Python itself does: 13 % of a step at batch 512, so that some eight
of them fill one process however many cores there are (docs/measurements.md). Processes take two seconds more to start.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from shadowsync.cluster.context import Own
from shadowsync.config import Config
from shadowsync.memory.shared import can_share
from shadowsync.report.result import cores
from shadowsync.runtime.control import Unsendable, packed

MANY_CORES = 4
"""With fewer, threads are about as fast."""


class Where(NamedTuple):
    """Attributes:
    runtime: as in `cluster.runtime`, and not `auto`.
    why: in words; empty where the user has chosen.
    """

    runtime: str
    why: str


def where_roles_run(config: Config, own: Own) -> Where:
    """`cluster.runtime`, where it is `auto` by what the job is and how many cores this process may use."""
    given = config.cluster.runtime
    if given != "auto":
        return Where(given, "")
    if config.cluster.address is not None:
        return Where("ray", "cluster.address is given")
    for holds, why in _for_threads(config, own):
        if holds():
            return Where("inprocess", why)
    return Where("processes", f"{config.train.trainers} trainers on {cores()} cores")


def with_runtime(config: Config, where: Where) -> Config:
    """The configuration of a job there. What the user left open stays open in what is stored, for another machine."""
    if config.cluster.runtime == where.runtime:
        return config
    chosen = config.cluster.model_copy(update={"runtime": where.runtime})
    chosen.model_fields_set.discard("runtime")
    before = set(config.model_fields_set)
    whole = config.model_copy(update={"cluster": chosen})
    whole.model_fields_set.intersection_update(before)
    return whole


def _for_threads(config: Config, own: Own) -> Iterator[tuple[Callable[[], bool], str]]:
    """What speaks against processes, and how it is said."""
    yield lambda: config.train.trainers == 1, "one trainer"
    yield lambda: cores() < MANY_CORES, f"{cores()} cores"
    yield lambda: not can_share(), "this system has no memory that processes could share"
    yield lambda: config.train.device != "cpu", f"trainers share {config.train.device}"
    yield lambda: config.aggregation.method is not None, "gradients are gathered in one place"
    recovery = config.recovery
    yield lambda: (recovery.inject or recovery.emulate_job_s) is not None, "failures are emulated"
    yield lambda: not _can_be_sent(own), "what the job is made from cannot be sent to another process"


def _can_be_sent(own: Own) -> bool:
    try:
        packed(own)
    except Unsendable:
        return False
    return True
