"""What every benchmark needs: which machine it ran on, how fast that is, alternating runs, and a plain table.

python benchmarks/machine.py      prints the machine and the speed of its matrix products
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from shadowsync.report.result import machine, versions
from shadowsync.training.kernels import accelerate, multiplies_bf16, onednn_runs, parse_kernels


def describe() -> list[str]:
    """The machine, the versions and the commit, a line each."""
    facts = {**machine(), **versions(), "commit": commit()}
    return [f"{name}: {value}" for name, value in facts.items()]


def commit() -> str:
    """The commit that is checked out, with `+` behind it if files but records differ from it, or `unknown`."""
    here = Path(__file__).parent
    others = ("--", ":/", ":!/benchmarks/records")
    try:
        found = [
            subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (
                ["rev-parse", "--short", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no", *others],
            )
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found[0] + ("+" if found[1] else "")


def answer_apart(script: str, *words: str) -> Any:
    """What a script, called with these words in a process of its own, prints last, as JSON; its errors end this one."""
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def alternate(jobs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Runs every job once per round, in turn, so that whatever else the machine does hits all of them alike.

    Returns:
        Seconds of each run by job.
    """
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each."""
    return {name: statistics.median(values) for name, values in samples.items()}


def ratios(samples: Mapping[str, Sequence[float]], base: str) -> dict[str, float]:
    """The median, over the rounds, of each job's value over that of `base` in the same round."""
    pairs = {name: zip(values, samples[base], strict=True) for name, values in samples.items()}
    return {name: statistics.median(value / other for value, other in pair) for name, pair in pairs.items()}


QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of Student's t at 97.5 %, from one degree of freedom on."""


def _quantile(freedom: int) -> float:
    return QUANTILES[min(freedom, len(QUANTILES)) - 1]


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the mean's interval of 95 %; None of a single value."""
    if len(values) < 2:
        return None
    return _quantile(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5


def unpaired(first: Sequence[float], second: Sequence[float]) -> str:
    """How far the first mean is from the second, with Welch's interval of 95 %; without one where either is of a single
    value, or all are equal."""
    told = f"{statistics.fmean(first) - statistics.fmean(second):+.4f}"
    if min(len(first), len(second)) < 2:
        return told
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    if not sum(parts):
        return told
    lost = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True))
    free = max(1, int(sum(parts) ** 2 / lost))  # Welch and Satterthwaite
    return f"{told} ±{_quantile(free) * sum(parts) ** 0.5:.4f}"


def with_interval(values: Sequence[float], signed: bool = False, digits: int = 4) -> str:
    """The mean, and behind it half the width of its interval."""
    half, sign = interval(values), "+" if signed else ""
    return f"{statistics.fmean(values):{sign}.{digits}f}" + ("" if half is None else f" ±{half:.{digits}f}")


Way = TypeVar("Way", bound=Hashable)


def by_seed(
    rows: Iterable[Mapping[str, Any]], way_of: Callable[[Mapping[str, Any]], Way]
) -> dict[Way, dict[int, Mapping[str, Any]]]:
    """Runs of each way by their seed, ways in the order of the rows."""
    found: dict[Way, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(way_of(row), {})[row["seed"]] = row
    return found


def difference(first: Mapping[int, Mapping[str, Any]], second: Mapping[int, Mapping[str, Any]]) -> str:
    """Of the AUCs of two ways, paired by seed."""
    pairs = [first[seed]["auc"] - second[seed]["auc"] for seed in sorted(first.keys() & second.keys())]
    return with_interval(pairs, signed=True) if pairs else "-"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they need be: the first to the left, the others to the right; floats with 4 digits."""
    cells = [list(header), *([f"{c:,.4g}" if isinstance(c, float) else str(c) for c in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def product_speed(dtype: torch.dtype, threads: int, library: str, rows: int = 1024) -> float:
    """GFLOP/s of `[rows, 512] @ [512, 512]`, the best of many runs.

    Args:
        dtype: of both factors.
        threads: torch's threads inside the product.
        library: as in `train.kernels`.
        rows: rows of the left factor.
    """
    layer = torch.nn.Linear(512, 512, bias=False).to(dtype)
    accelerate(holder := torch.nn.ModuleList([layer]), parse_kernels(library))
    layer = holder[0]  # type: ignore[assignment]
    inputs = torch.randn(rows, 512).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            return 2e-9 * rows * 512 * 512 / _best_seconds(lambda: layer(inputs))
    finally:
        torch.set_num_threads(before)


def _best_seconds(job: Callable[[], Tensor], runs: int = 100) -> float:
    return min(alternate({"job": job}, runs)["job"])


def libraries(dtype: torch.dtype) -> list[str]:
    """The libraries that multiply it on this machine, as in `train.kernels`."""
    return ["torch", *(["onednn"] if onednn_runs(dtype) else [])]


def product_table() -> str:
    """Matrix-product speeds of this machine with one and two threads."""
    rows = [
        (f"{name}, {library}", *(product_speed(dtype, threads, library) for threads in (1, 2)))
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        for library in libraries(dtype)
        if dtype == torch.float32 or multiplies_bf16("cpu")
    ]
    return table(["matrix products, GFLOP/s", "1 thread", "2 threads"], rows)


if __name__ == "__main__":
    print("\n".join(describe()), product_table(), sep="\n\n")
