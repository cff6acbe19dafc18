"""The repository's files, for the tests that keep it honest."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shadowsync"
PYTHON = sorted(
    path for folder in ("src", "tests", "docs", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def imports(path: Path) -> Iterator[str]:
    """Dotted names of the modules that are imported, anywhere in the file."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def called(path: Path) -> set[str]:
    """What is called in the file, as it is written."""
    return {ast.unparse(node.func) for node in nodes_of(path) if isinstance(node, ast.Call)}


def attributes(path: Path) -> Iterator[tuple[str, str]]:
    """`(owner, name)` of every attribute that is read; the owner is the last name before the dot, or empty."""
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            last = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            yield last, node.attr
