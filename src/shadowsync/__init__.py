"""shadowsync: trains recommendation models on the machines people really have, and nobody waits.

Names are loaded when they are first used, so that `import shadowsync` takes no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shadowsync.compression.cut import CompressedCut
    from shadowsync.config import Config
    from shadowsync.embedding.table import Table
    from shadowsync.errors import ShadowSyncError
    from shadowsync.inference import Trained
    from shadowsync.job import Interrupted, Job
    from shadowsync.models.inputs import Inputs
    from shadowsync.models.wrapping import Wrapped, wrap
    from shadowsync.report.callback import Callback
    from shadowsync.report.result import Result
    from shadowsync.training.worker import TrainerLost

__all__ = [
    "Callback",
    "CompressedCut",
    "Config",
    "Inputs",
    "Interrupted",
    "Job",
    "Result",
    "ShadowSyncError",
    "Table",
    "Trained",
    "TrainerLost",
    "Wrapped",
    "wrap",
]
__version__ = "0.1.0"

_HOMES = {
    "Callback": "shadowsync.report.callback",
    "CompressedCut": "shadowsync.compression.cut",
    "Config": "shadowsync.config",
    "Inputs": "shadowsync.models.inputs",
    "Interrupted": "shadowsync.job",
    "Job": "shadowsync.job",
    "Result": "shadowsync.report.result",
    "ShadowSyncError": "shadowsync.errors",
    "Table": "shadowsync.embedding.table",
    "Trained": "shadowsync.inference",
    "TrainerLost": "shadowsync.training.worker",
    "Wrapped": "shadowsync.models.wrapping",
    "wrap": "shadowsync.models.wrapping",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shadowsync' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
