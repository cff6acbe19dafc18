"""Every error this package raises on purpose; foreign errors are mapped to one of these at the seam.

    ShadowSyncError
    ├── UserError           what the user gave is wrong: exit status 2
    │   ├── ConfigError     a key, a value or a combination of them
    │   ├── DataError       a file, a row, a schema
    │   ├── CheckpointError a checkpoint that cannot be loaded
    │   └── MissingExtra    an optional dependency is not installed
    └── RunError            the run failed while it was under way: exit status 1
        ├── NonFiniteLoss   the loss became NaN or infinite
        ├── NonFiniteTensor what was to be sent became NaN or infinite
        └── SaveError       results or a checkpoint could not be written (a full disk, say)

A message is one sentence that names the thing, its place, what is allowed and, where there is one, the line that
fixes it: it is shown to the user as it stands, without a traceback.
"""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST_WORD, _LONGEST = 200, 2000


def shortened(message: str) -> str:
    """A message of bounded length: what a user gave may be of any, and is echoed in it."""
    words = re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", lambda word: f"{word[0][:80]}…{word[0][-40:]}", message)
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST // 2]} … {words[-_LONGEST // 2 :]}"


class ShadowSyncError(Exception):
    """Base of every error that shadowsync raises on purpose."""

    exit_status = 1

    def __str__(self) -> str:
        return shortened(super().__str__())


class UserError(ShadowSyncError):
    """What the user gave is wrong: the configuration, the data (which may show in mid-run) or a checkpoint."""

    exit_status = 2


class ConfigError(UserError):
    """A configuration key, value or combination that cannot be used."""


class DataError(UserError):
    """Data that cannot be read; the message names the file and, where there is one, the row."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another model."""


class MissingExtra(UserError):
    """An optional dependency is not installed; the message holds the line that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'shadowsync[{extra}]'")


class RunError(ShadowSyncError):
    """The run failed while it was under way."""


class NonFiniteLoss(RunError):
    """The loss became NaN or infinite."""


class NonFiniteTensor(RunError):
    """A tensor that was to be sent holds NaN or infinities; the message names it."""


class SaveError(RunError):
    """Results or a checkpoint could not be written."""


def blamed(error: BaseException) -> str:
    """What code of the user's raised, and where: `KeyError: 'user' (model.py, line 7)`."""
    reason, line = next(iter(str(error).splitlines()), ""), line_of(error)
    return f"{type(error).__name__}{': ' if reason else ''}{reason}{'' if line is None else f' ({line})'}"


def line_of(error: BaseException) -> str | None:
    """The innermost line from which it came that is neither ours nor PyTorch's."""
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    ours = ("shadowsync", "torch", "importlib")
    own = ((f, line) for f, line in frames if str(f.f_globals.get("__name__")).partition(".")[0] not in ours)
    return next((f"{frame.f_code.co_filename}, line {line}" for frame, line in own), None)


def lacks_memory(error: BaseException) -> bool:
    """Whether the machine gave no memory, or no thread; torch has no error of its own for it on the CPU."""
    said = ("can't allocate memory", "bad_alloc", "can't start new thread")
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in said))


@contextmanager
def save_errors(path: Path) -> Iterator[None]:
    """Turns the system's refusal to write `path` into a `SaveError` that names it."""
    try:
        yield
    except OSError as error:
        raise SaveError(f"{path}: cannot be written: {error.strerror or error}") from error
