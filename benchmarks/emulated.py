"""What the benchmarks of gradient methods share: emulated workers, and runs that end in the middle with a checkpoint.

An emulated worker is a thread whose steps are made to last (`train.emulate_step_ms`). While it waits it holds gradients
that it computed with the parameters of the step's beginning, as a slow machine would. So N workers whose steps take N
times what a step really costs keep busy what cores there are, and every gradient of `async` gets N − 1 steps old.
"""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.nn import Module

from shadowsync import Interrupted, Job, Result, Trained
from shadowsync.config import Config, load
from shadowsync.metrics.history import Frame

QUIET = ("report.html=false", "report.tensorboard=false", "train.trainers=1")
SYNTHETIC = (
    "data.name=synthetic",
    "data.rows=1310720",
    "data.test_rows=262144",
    "data.dense=4",
    "data.features=12",
    "data.table_rows=20000",
)
"""As many rows as the demo, with a teacher whose AUC is known."""
METHODS = ("sync", "async", "bsp", "hop_bs", "hop_bw", "gba")


def workers(count: int, step_ms: float, stragglers: str | None) -> list[str]:
    """So many emulated workers, `stragglers` of them slow; with one, training as fast as it goes."""
    if count == 1:
        return ["train.workers=1"]
    found = [f"train.workers={count}", f"train.emulate_step_ms={step_ms:g}"]
    return found if stragglers is None else [*found, f"train.stragglers={stragglers}"]


def train(
    overrides: Sequence[str], out: Path, resume: Path | None = None, model: Callable[[Config], Module] | None = None
) -> Result:
    """Trains to the end; a `model` instead of the configured one is made for the job."""
    config = load(None, [*QUIET, *overrides])
    return Job(config, model=None if model is None else model(config), out=out, resume=resume).run()


def train_until(
    ended: Callable[[Frame], bool], overrides: Sequence[str], out: Path, resume: Path | None = None
) -> list[Frame]:
    """Trains until a frame says so, and writes a checkpoint, as Ctrl-C would.

    Returns:
        The frames up to there.

    Raises:
        Interrupted: it was told to end from outside, before a frame said so.
    """
    frames: list[Frame] = []
    sent = False

    def look(frame: Frame) -> None:
        nonlocal sent
        frames.append(frame)
        if not sent and ended(frame):
            sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        Job(load(None, [*QUIET, *overrides]), out=out, resume=resume).run(on_frame=look)
    except Interrupted:
        if not sent:
            raise
    return frames


def auc_of(folder: Path) -> float:
    """Of a run's newest checkpoint, on its own test rows."""
    found = Trained(folder).evaluate().auc
    assert found is not None
    return found
