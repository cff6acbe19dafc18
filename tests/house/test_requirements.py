"""The pinned requirements: what is installed is what was pinned."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text("utf-8")


def entries() -> dict[str, str]:
    """By name, what stands behind it up to the next one."""
    found = re.split(r"^([A-Za-z0-9._-]+)==", LOCK, flags=re.M)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def test_every_requirement_but_torch_has_a_version_and_hashes() -> None:
    assert len(entries()) > 100
    for name, rest in entries().items():
        assert re.fullmatch(r"\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+", rest), name
    assert "torch" not in entries()


def test_torch_is_pinned_alone_to_the_version_that_fbgemm_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = [line for line in (ROOT / "torch.lock").read_text("utf-8").splitlines() if not line.startswith("#")]
    assert pinned == [line for line in project["optional-dependencies"]["fbgemm"] if line.startswith("torch==")]


def test_make_checks_the_hashes_and_installs_both_files() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "--no-deps --require-hashes -r requirements.lock" in makefile
    assert "-r torch.lock" in makefile


def test_every_direct_requirement_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in entries()} | {"torch"}
    for line in [
        *project["dependencies"],
        *(one for some in project["optional-dependencies"].values() for one in some),
    ]:
        assert re.split(r"[\[<>=]", line)[0].lower() in pinned, line


def test_the_package_says_where_to_read_on() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["urls"]
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = "".join(page.read_text("utf-8") for page in pages)
    for address in project["urls"].values():
        assert address.rpartition("/")[2] in named


def test_the_small_build_of_torch_is_named_before_anything_is_installed() -> None:
    installing = (ROOT / "README.md").read_text("utf-8").partition("## Installing")[2]
    commands = re.findall(r"^    (pip install .*)$", installing, re.M)
    assert "https://download.pytorch.org/whl/cpu" in commands[0]
