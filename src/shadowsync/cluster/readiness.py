"""What a process loads while it waits to become a role: most of the time that a start would take otherwise."""

from shadowsync.choices import choose_all
from shadowsync.cluster.parts import build_nothing
from shadowsync.cluster.stepper_part import build_stepper
from shadowsync.cluster.trainer_part import build_trainer
from shadowsync.config import Config

BUILDERS = (build_nothing, build_stepper, build_trainer)
"""Of any part; their modules are loaded with this one."""


def get_ready() -> None:
    """Finds the members of all seams, whose modules are loaded for that."""
    choose_all(Config(), own_model=False)
