"""Names of checkpoints: `samples-000000001024`, a second one of as many samples `-1`, rewritten as a whole `-whole`.

`NAME-whole` holds what `NAME` holds, without a parent: wherever `NAME` is asked for, it can stand in.
"""

import re

NAME = re.compile(r"samples-(\d{12,18})(?:-([1-9]\d{0,5}))?(-whole)?")
STAGED = re.compile(rf"\.{NAME.pattern}\.part")
_WHOLE = "-whole"


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
