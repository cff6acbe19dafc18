"""`benchmarks/leaderboard.py`: one replica is plain PyTorch within rounding, each method is compared, runs are kept."""

import json
import re
import subprocess
import sys
from pathlib import Path

from shadowsync.aggregation.aggregator import Aggregation
from shadowsync.registry import members
from shadowsync.sync.method import SyncMethod

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "leaderboard.py"


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        str(SCRIPT),
        "--out",
        str(folder),
        "--small",
        "--models",
        "deepfm",
        "--seeds",
        "1",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    return done


def kept(folder: Path, way: str) -> dict[str, float]:
    (file,) = folder.glob(f"small-deepfm-{way}-*.json")
    found: dict[str, float] = json.loads(file.read_text("utf-8"))
    return found


def test_all_ways_are_compared_with_plain_pytorch_and_none_is_run_twice(tmp_path: Path) -> None:
    first = run(tmp_path)
    ways = {"plain", "one replica", *members("shadowsync.sync", SyncMethod)}
    ways |= set(members("shadowsync.aggregation", Aggregation))
    assert set(re.findall(r"^(\w+(?: replica)?) +1/1 +0\.\d{5}", first.stdout, re.M)) == ways
    again = run(tmp_path, "--report")
    assert again.stdout == first.stdout
    (tmp_path / "small-deepfm-ma-adagrad-rows-all-seed0.json").unlink()
    assert run(tmp_path).stderr.count("{") == 1, "only what is missing is run"


def test_one_replica_decides_as_plain_pytorch_does(tmp_path: Path) -> None:
    for recipe in ("adagrad", "adam"):
        run(tmp_path / recipe, "--ways", "plain", "one replica", "--recipe", recipe)
        plain, ours = (kept(tmp_path / recipe, way) for way in ("plain", "one_replica"))
        assert abs(plain["auc"] - ours["auc"]) < 1e-4
        assert all(plain[figure] == ours[figure] for figure in ("validations", "best_samples", "samples"))
        assert ours["samples"] > ours["best_samples"], "the task is one that a model overfits on"
