"""Writes docs/configuration.md from the schema and from the options of every member: `make docs`."""

from collections.abc import Iterator
from pathlib import Path

from shadowsync.reference import Group, groups

TARGET = Path(__file__).parent / "configuration.md"
HEAD = """# Configuration

Made from the schema by `make docs`; do not edit. Give keys as YAML sections in a file or as `section.key=value` on the
command line. Unknown keys are errors. `data.name`, `model.name`, `sync.method`, `sync.schedule` and
`aggregation.method` choose a member, whose own options stand in the same section; those of `recovery.inject` stand
behind its name ([how](recovery.md#scripted-failures)). `shadowsync options PATH` prints a part of this page.
"""


def reference() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for group in groups() for line in _written(group))])


def _written(group: Group) -> Iterator[str]:
    if group.title == "embedding.tables":
        yield "Keys of an entry of `embedding.tables`:\n"
    else:
        yield f"{'###' if '.' in group.title else '##'} {group.title}\n\n{group.says}\n"
    lines = [f"| `{o.name}` | {o.kind} | {_code(o.default)} | {o.meaning} |" for o in group.options]
    if lines:
        yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *lines, ""])


def _code(default: str) -> str:
    return default if default == "required" else f"`{default}`"


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
