"""Folders import in one direction, and the package keeps off what spoils code bases of this field."""

import ast
from pathlib import Path

import pytest
from repository import PYTHON, ROOT, SOURCE, imports, name_of, tree_of

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
FREE = ("errors", "registry", "places", "config")
MODULES = sorted(SOURCE.rglob("*.py"))


def part_of(module: Path) -> str:
    """The folder, or for a module that is in none its name."""
    return module.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(module: Path) -> set[str]:
    """The parts of this package that a module imports."""
    dotted = (name.split(".") for name in imports(tree_of(module)))
    return {name[1] for name in dotted if name[0] == "shadowsync" and len(name) > 1}


def test_every_folder_has_its_place_in_the_order() -> None:
    assert {folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()} <= {*ORDER, *ASSEMBLING}


@pytest.mark.parametrize("module", [m for m in MODULES if part_of(m) in ORDER], ids=name_of)
def test_a_folder_imports_only_from_those_before_it(module: Path) -> None:
    allowed = {*ORDER[: ORDER.index(part_of(module)) + 1], *FREE}
    assert imported_parts(module) - allowed == set()


@pytest.mark.parametrize("name", FREE)
def test_what_everybody_may_import_imports_nothing_else(name: str) -> None:
    assert imported_parts(SOURCE / f"{name}.py") <= set(FREE)


def test_only_the_command_line_imports_the_job() -> None:
    users = {name_of(module) for module in MODULES if "job" in imported_parts(module)}
    assert users == {"src/shadowsync/__init__.py", "src/shadowsync/cli.py"}


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_nothing_is_pickled_and_the_environment_is_no_configuration(module: Path) -> None:
    tree = tree_of(module)
    # between a process and those that it started, over sockets of their own
    own = {"pickle", "cloudpickle"} if module.name == "control.py" else set()
    pickling = {"pickle", "marshal", "shelve", "dill", "cloudpickle"} - own
    assert not pickling & {name.split(".")[0] for name in imports(tree)}
    read = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    hands_on = {"os.environ"} if module.name == "ray_runtime.py" else set()  # Ray takes its token from nowhere else
    assert not ({"torch.load", "torch.save", "os.environ", "os.getenv"} - hands_on) & read


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_importing_a_module_starts_nothing(module: Path) -> None:
    """At the top there are definitions and constants; the one statement that acts names a main program."""
    acting = [
        node for node in tree_of(module).body if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    ]
    assert [ast.unparse(node) for node in acting] == []


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), f"{name_of(path)} has no docstring"


@pytest.mark.parametrize("path", [path for path in PYTHON if path.is_relative_to(SOURCE)], ids=name_of)
def test_functions_stay_small(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef):
            begin = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            assert (node.end_lineno or 0) - begin.lineno < 40, f"{node.name} is too long: cut it"


def test_tests_wait_for_nothing_blindly() -> None:
    sleeping = {
        name_of(path)
        for path in (ROOT / "tests").rglob("*.py")
        if any(
            ast.unparse(node.func).endswith("sleep") for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)
        )
    }
    assert sleeping == set()


def test_every_test_ends(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("timeout")) <= 600
    assert pytestconfig.pluginmanager.hasplugin("timeout")
    assert "error" in pytestconfig.getini("filterwarnings")


def test_test_files_have_names_of_their_own() -> None:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert len({path.name for path in paths}) == len(paths)
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_nothing_is_measured_by_a_clock_that_can_jump(module: Path) -> None:
    calls = {ast.unparse(node.func) for node in ast.walk(tree_of(module)) if isinstance(node, ast.Call)}
    allowed = {"datetime.now"} if module == SOURCE / "runs.py" else set()  # the name of a folder, with a random part
    assert calls & {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "time.localtime"} <= allowed
