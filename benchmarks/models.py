"""Quality and speed of every model on the demo, each as it comes.

    python benchmarks/models.py [--rows 200000] [--seeds 2] [--out FOLDER]

One trainer with one worker and no synchronisation, so that a run differs from another by its model and seed only; the
sequence models read `recent_categories` as a sequence, the others pool it.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from shadowsync import Job

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe, table

MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {"name": "dlrm"},
    "fm": {"name": "fm"},
    "deepfm": {"name": "deepfm"},
    "deepfm, projected first order": {"name": "deepfm", "first_order": "projection"},
    "wide_deep": {"name": "wide_deep"},
    "youtube_dnn": {"name": "youtube_dnn"},
    "dcn": {"name": "dcn"},
    "din": {"name": "din"},
    "dien": {"name": "dien"},
    "dien, auxiliary loss": {"name": "dien", "auxiliary": 1.0},
}


def measure(model: dict[str, Any], rows: int, seed: int, out: Path) -> tuple[float, float, float]:
    """Test AUC, test NE and examples per second."""
    config = {
        "data": {"rows": rows},
        "model": model,
        "train": {"trainers": 1, "seed": seed},
        "sync": {"method": "none"},
        "report": {"html": False, "tensorboard": False},
    }
    result = Job(config, out=out).run()
    assert result.test is not None
    return result.test.auc, result.test.ne, result.throughput.eps


def main() -> None:
    """Runs every model with every seed and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="rows to train on")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="keep the runs here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.out or Path(temporary)
        lines: list[list[object]] = []
        for name, model in MODELS.items():
            runs = [measure(model, given.rows, seed, folder / f"{name}-{seed}") for seed in range(given.seeds)]
            for seed, (auc, ne, eps) in enumerate(runs):
                lines.append([name, seed, f"{auc:.4f}", f"{ne:.4f}", f"{eps:,.0f}"])
                print(*lines[-1], flush=True)
    print("\n".join(describe()))
    print(table(["model", "seed", "test AUC", "test NE", "examples/s"], lines))


if __name__ == "__main__":
    main()
