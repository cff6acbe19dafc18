"""How uneven synchronisations in the background are: the average sync gap beside the one that iterations see.

    python benchmarks/gaps.py [--trainers 2 4 8] [--methods bmuf ma easgd] [--seeds 3]

The task is `dense` of `quality.py`. The average gap is iterations over synchronisations, as `result.json` has it. Where
trainers go unevenly, as many of them on few cores do, some synchronisations come without an iteration since the last
one, and most iterations lie before the others: the gap that they see is the mean of gap² over the mean of gap. In a
foreground every k iterations both are k.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe, table
from quality import METHODS, Cell, configuration

from shadowsync import Job
from shadowsync.sync.background import Background, Shadow
from shadowsync.sync.schedule import Synchronisation

ROWS = 400_000


class Counting(Shadow):
    """A shadow that notes the iterations of its trainer before each of its synchronisations."""

    def __init__(self, schedule: Background, synchronisation: Synchronisation, gaps: list[int]) -> None:
        super().__init__(schedule, synchronisation)
        self._once, self._gaps, self._before = synchronisation.once, gaps, 0
        synchronisation.once = self._counted  # type: ignore[method-assign]

    def _counted(self) -> None:
        self._once()
        made = sum(self._iterations)
        self._gaps.append(made - self._before)
        self._before = made


@contextmanager
def counted() -> Iterator[list[int]]:
    """The gaps of all trainers of the jobs of this process meanwhile."""
    gaps: list[int] = []
    plain = Background._drive
    Background._drive = lambda self, synchronisation: Counting(self, synchronisation, gaps)  # type: ignore[method-assign]
    try:
        yield gaps
    finally:
        Background._drive = plain  # type: ignore[method-assign]


def run(cell: Cell) -> tuple[Sequence[int], float]:
    """All gaps of a run, and its AUC."""
    with tempfile.TemporaryDirectory() as folder, counted() as gaps:
        config = configuration(cell, matched_k=1) | {"cluster": {"runtime": "inprocess"}}  # where they can be counted
        result = Job(config, out=Path(folder) / "run").run(progress=False)
    assert result.test is not None
    assert result.test.auc is not None
    return gaps, result.test.auc


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    print("\n".join(describe()))
    lines = []
    for method, trainers in itertools.product(given.methods, given.trainers):
        runs = [run(Cell("dense", ROWS, trainers, 1, method, "background", seed)) for seed in range(given.seeds)]
        means = [statistics.fmean(gaps) for gaps, _ in runs]
        seen = [sum(gap * gap for gap in gaps) / sum(gaps) for gaps, _ in runs]
        none = [sum(gap == 0 for gap in gaps) / len(gaps) for gaps, _ in runs]
        figures = *(f"{statistics.fmean(of):.1f}" for of in (means, seen)), f"{statistics.fmean(none):.0%}"
        lines.append((method, trainers, len(runs), *figures, f"{statistics.fmean(auc for _, auc in runs):.4f}"))
    head = ["method", "trainers", "seeds", "average gap", "gap that iterations see", "without an iteration", "AUC"]
    print("\n" + table(head, lines))


if __name__ == "__main__":
    main()
