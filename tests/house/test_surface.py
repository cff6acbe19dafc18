"""What a user imports is small, complete and quick to load."""

import ast
import subprocess
import sys

import pytest
from repository import SOURCE, tree_of

import shadowsync

HEAVY = ("torch", "numpy", "polars", "pyarrow", "pydantic", "omegaconf", "fbgemm_gpu", "matplotlib", "tensorboard")


def test_exported_names_are_sorted_and_found_in_their_homes() -> None:
    assert sorted(shadowsync.__all__) == shadowsync.__all__
    assert set(shadowsync._HOMES) == set(shadowsync.__all__)
    for name, home in shadowsync._HOMES.items():
        assert getattr(shadowsync, name).__module__ == home
    assert dir(shadowsync) == shadowsync.__all__


def test_a_type_checker_sees_the_same_names() -> None:
    (guarded,) = (node for node in tree_of(SOURCE / "__init__.py").body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == shadowsync._HOMES


def test_a_name_that_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Jop'"):
        _ = shadowsync.Jop


def test_importing_is_light() -> None:
    modules = "shadowsync, shadowsync.errors, shadowsync.cli"
    program = f"import sys, {modules}; print(*(name for name in {HEAVY} if name in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == []


def test_public_classes_say_what_they_are() -> None:
    for name in shadowsync.__all__:
        assert (getattr(shadowsync, name).__doc__ or "").strip(), name
