"""Runs the command line in this process, on small data."""

import gzip
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from omegaconf import OmegaConf

from shadowsync.cli import main
from shadowsync.job import train_from_command_line

ROWS = 50


@dataclass(frozen=True)
class Said:
    """What a command did: its exit status and what it wrote."""

    status: int
    out: str
    err: str


class CommandLine:
    """`shadowsync ARGUMENTS`, in a folder with data and configurations."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        monkeypatch.chdir(folder)
        write_data(folder)

    def __call__(self, *arguments: str) -> Said:
        self._monkeypatch.setattr(sys, "argv", ["shadowsync", *arguments])
        self._monkeypatch.setattr(os, "_exit", sys.exit)
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        written = self._capsys.readouterr()
        return Said(int(ended.value.code or 0), written.out, written.err)


def write_data(folder: Path) -> None:
    write_parquet(folder / "train.parquet", 60, 0)
    write_parquet(folder / "test.parquet", 30, 1)
    (folder / "log.tsv.gz").write_bytes(gzip.compress("\n".join(map(criteo_line, range(20))).encode() + b"\n"))
    OmegaConf.save(OmegaConf.create(parquet_settings()), folder / "run.yaml")
    OmegaConf.save(OmegaConf.create(criteo_settings()), folder / "criteo.yaml")


def trained_once(folder: Path, *settings: str) -> Path:
    """The folder of a run on that data, for tests that share it by copies."""
    write_data(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("shadowsync.job.cores", lambda: 2)
        train_from_command_line(Path("run.yaml"), settings, Path("out"), None)
    return folder / "out"


def columns(rows: int, seed: int = 0) -> pl.DataFrame:
    """A label, a dense column, two columns of ids and one of lists of ids."""
    draw = np.random.default_rng(seed)
    ids = {name: draw.integers(0, ROWS, rows) for name in ("item", "shop")}
    recent = pl.Series("recent", [draw.integers(0, ROWS, 2).tolist() for _ in range(rows)])
    return pl.DataFrame({"label": np.arange(rows) % 2, "price": draw.normal(size=rows), **ids}).with_columns(recent)


def write_parquet(path: Path, rows: int, seed: int = 0) -> None:
    columns(rows, seed).write_parquet(path)


def criteo_line(row: int) -> str:
    """A good line of the Criteo log."""
    return "\t".join([str(row % 2), *(str(k + row) for k in range(13)), *(f"{k * row:08x}" for k in range(26))])


def small() -> dict[str, Any]:
    return {
        "model": {"embedding_dim": 4, "bottom": [8], "top": [8]},
        "embedding": {"servers": 1, "storage": "torch"},
        "train": {"batch_size": 8, "precision": "fp32"},
        "report": {"tensorboard": False, "html": False},
    }


def parquet_settings() -> dict[str, Any]:
    data = {"name": "parquet", "path": "train.parquet", "test_path": "test.parquet"}
    return {"data": data | {"dense": ["price"], "categorical": ["item", "shop", "recent"], "rows": ROWS}, **small()}


def criteo_settings() -> dict[str, Any]:
    return {"data": {"name": "criteo", "path": "log.tsv.gz", "hash_size": 100}, **small()}


def train(*settings: str, config: str = "run.yaml") -> tuple[str, ...]:
    return ("train", config, *settings, "--out", "out")


def cut_in_half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def assert_sentence(said: Said, status: int, named: Sequence[str]) -> None:
    assert (said.status, said.err.count("\n")) == (status, 1), said.err
    assert said.err.startswith("shadowsync: ")
    assert "Traceback" not in said.err + said.out
    for part in named:
        assert part in said.err
