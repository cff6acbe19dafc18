"""The pinned requirements: what is installed is what was pinned."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def entries(lock: str) -> dict[str, str]:
    """By name, what stands behind it up to the next one."""
    found = re.split(r"^([A-Za-z0-9._-]+)==", (ROOT / lock).read_text("utf-8"), flags=re.M)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


RUN, DEV = entries("requirements.lock"), entries("dev.lock")


def missing(lines: list[str], pinned: Iterable[str]) -> set[str]:
    """Requirements among `lines` that are not `pinned`."""
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in pinned} | {"torch"}
    return {re.split(r"[\[<>=]", line)[0].lower() for line in lines} - names


def test_every_requirement_but_torch_has_a_version_and_hashes() -> None:
    assert len(RUN) + len(DEV) > 100
    for name, rest in [*RUN.items(), *DEV.items()]:
        assert re.fullmatch(r"\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+", rest), name
    assert "torch" not in RUN | DEV


def test_torch_is_pinned_alone_to_the_version_that_fbgemm_needs() -> None:
    pinned = [line for line in (ROOT / "torch.lock").read_text("utf-8").splitlines() if not line.startswith("#")]
    assert pinned == [line for line in PROJECT["optional-dependencies"]["fbgemm"] if line.startswith("torch==")]


def test_make_checks_the_hashes_and_installs_the_files() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "--no-deps --require-hashes -r requirements.lock" in makefile
    assert "--no-deps --require-hashes -r dev.lock" in makefile
    assert "-r torch.lock" in makefile


def test_training_the_demo_installs_what_it_needs_and_nothing_of_tests() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not missing([*PROJECT["dependencies"], *extras["fbgemm"], *extras["demo"]], RUN)
    assert not missing([line for extra in ("ray", "dev", "docs") for line in extras[extra]], DEV | RUN)
    assert not RUN.keys() & (DEV.keys() | {"pytest", "ray", "wandb", "mkdocs"})


def test_the_package_says_where_to_read_on() -> None:
    assert PROJECT["urls"]
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = "".join(page.read_text("utf-8") for page in pages)
    for address in PROJECT["urls"].values():
        assert address.rpartition("/")[2] in named


def test_the_small_build_of_torch_is_named_before_anything_is_installed() -> None:
    installing = (ROOT / "README.md").read_text("utf-8").partition("## Installing")[2]
    commands = re.findall(r"^    (pip install .*)$", installing, re.M)
    assert "https://download.pytorch.org/whl/cpu" in commands[0]
