"""A log file for a role, found by the role's name."""

import contextlib
import logging
import os
import tempfile
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to(job: str, role: str) -> str:
    """Sends this process's log to a file named after job and role; its path.

    It lies beside what the process prints, if that goes to a file (with Ray that is the folder its dashboard shows),
    else in a new folder that only this user may enter.
    """
    path = _folder() / f"{job}-{role}.log"
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger("shadowsync")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.info("%s of %s is process %d", role, job, os.getpid())
    return str(path)


def _folder() -> Path:
    with contextlib.suppress(OSError):
        printed = Path("/proc/self/fd/1").readlink()
        if printed.is_file():
            return printed.parent
    return Path(tempfile.mkdtemp(prefix="shadowsync-"))
