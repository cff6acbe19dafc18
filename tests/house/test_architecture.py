"""Folders import in one direction, and the package keeps off what spoils code bases of this field."""

import ast
from pathlib import Path

import pytest
from repository import PYTHON, ROOT, SOURCE, attributes, called, imports, name_of, nodes_of, tree_of

ORDER = (
    "memory",
    "rpc",
    "compression",
    "data",
    "models",
    "embedding",
    "training",
    "sync",
    "aggregation",
    "checkpoint",
    "recovery",
    "runtime",
    "metrics",
    "report",
)
"""A folder may import from those before it, in the order in which the data moves."""
ASSEMBLING = ("cluster",)
"""Folders that put parts together, as the modules beside the folders do: they import any, and none of `ORDER` them."""
FREE = ("errors", "registry", "places", "config", "serving")
MODULES = sorted(SOURCE.rglob("*.py"))


def part_of(module: Path) -> str:
    """The folder, or for a module that is in none its name."""
    return module.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(module: Path) -> set[str]:
    """The parts of this package that a module imports."""
    dotted = (name.split(".") for name in imports(module))
    return {name[1] for name in dotted if name[0] == "shadowsync" and len(name) > 1}


def test_folders_import_only_from_those_before_them() -> None:
    assert {folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()} <= {*ORDER, *ASSEMBLING}
    for module in MODULES:
        if (part := part_of(module)) in ORDER:
            against = imported_parts(module) - {*ORDER[: ORDER.index(part) + 1], *FREE}
            assert against == set(), f"{name_of(module)} imports from behind it"
        elif part in FREE:
            assert imported_parts(module) <= set(FREE), f"{name_of(module)} is what everybody may import"


def test_only_the_command_line_imports_the_job() -> None:
    users = {name_of(module) for module in MODULES if "job" in imported_parts(module)}
    assert users == {"src/shadowsync/__init__.py", "src/shadowsync/cli.py"}


def test_nothing_is_pickled_and_the_environment_is_no_configuration() -> None:
    for module in MODULES:
        # between a process and those that it started, over sockets of their own
        own = {"pickle", "cloudpickle"} if module.name == "control.py" else set()
        pickling = {"pickle", "marshal", "shelve", "dill", "cloudpickle"} - own
        assert not pickling & {name.split(".")[0] for name in imports(module)}, name_of(module)
        hands_on = {("os", "environ")} if module.name == "ray_runtime.py" else set()  # Ray takes its token from there
        forbidden = {("torch", "load"), ("torch", "save"), ("os", "environ"), ("os", "getenv")} - hands_on
        assert not forbidden & set(attributes(module)), name_of(module)


def test_importing_a_module_starts_nothing() -> None:
    """At the top there are definitions and constants; the one statement that acts names a main program."""
    acting = [
        f"{name_of(module)}: {ast.unparse(node)}"
        for module in MODULES
        for node in tree_of(module).body
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    ]
    assert acting == []


def test_every_module_says_what_it_is() -> None:
    assert [name_of(path) for path in PYTHON if not ast.get_docstring(tree_of(path))] == []


def test_functions_stay_small() -> None:
    for module in MODULES:
        for node in nodes_of(module):
            if isinstance(node, ast.FunctionDef):
                begin = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                length = (node.end_lineno or 0) - begin.lineno
                assert length < 60, f"{name_of(module)}: {node.name} is too long: cut it"


def test_tests_wait_for_nothing_blindly() -> None:
    tests = (ROOT / "tests").rglob("*.py")
    assert [name_of(path) for path in tests if any(name.endswith("sleep") for name in called(path))] == []


def test_every_test_ends(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("timeout")) <= 600
    assert pytestconfig.pluginmanager.hasplugin("timeout")
    assert "error" in pytestconfig.getini("filterwarnings")


def test_test_files_have_names_of_their_own() -> None:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert len({path.name for path in paths}) == len(paths)
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_nothing_is_measured_by_a_clock_that_can_jump() -> None:
    clocks = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "time.localtime"}
    for module in MODULES:
        allowed = (
            {"datetime.now"} if module == SOURCE / "runs.py" else set()
        )  # the name of a folder, with a random part
        assert called(module) & clocks <= allowed, name_of(module)
