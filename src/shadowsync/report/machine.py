"""What a result says about where it was made."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shadowsync.memory.pages import memory_bytes

_PACKAGES = ("shadowsync", "torch", "fbgemm-gpu-cpu", "numpy", "polars", "pyarrow")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages a result depends on; those not installed are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str | int | float]:
    """System, processor, cores this process may use, and memory in GB (10⁹ bytes); no name or address."""
    facts: dict[str, str | int | float] = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": cores(),
    }
    memory = memory_bytes()
    return {**facts, "memory_gb": round(memory / 1e9, 1)} if memory else facts


def _processor() -> str:
    """Its name, and family and model, since virtual machines name several generations alike."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    name = found.get("model name") or platform.processor() or platform.machine()
    about = [f"{word} {found[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if found.get(key)]
    return f"{name} ({', '.join(about)})" if about else name


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
