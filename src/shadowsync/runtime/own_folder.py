"""A folder for the sockets and logs of a job whose roles are all on this machine."""

import tempfile
from pathlib import Path

USUAL_LENGTH = 15
"""Longest path of a folder for temporary files below which the paths of sockets are not too long."""


def make_folder() -> str:
    """A new folder that only this user may enter.

    The path of a Unix socket has room for 103 bytes, and those of Ray's take 88 behind the place of this folder.
    """
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="shadowsync-", dir=usual if len(usual) <= USUAL_LENGTH else "/tmp")  # noqa: S108


def remove_sockets(folder: str) -> None:
    """Removes the sockets that processes have left which were killed."""
    for path in Path(folder).glob("*"):
        if path.is_socket():
            path.unlink(missing_ok=True)
