"""A run in MLflow or Weights & Biases: configuration, figures by trained samples, the result's files.

Where to is a matter of the client's own settings (`MLFLOW_TRACKING_URI`, `WANDB_PROJECT`, `WANDB_MODE`). A run of the
client's that is active already is written into, and left open.
"""

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from shadowsync.errors import ConfigError
from shadowsync.metrics.history import Frame
from shadowsync.report import words
from shadowsync.report.callback import Callback, flat
from shadowsync.report.measures import final_scalars, scalars
from shadowsync.report.result import FILE_NAME, Result

_LONGEST = 500
"""Characters of a parameter, which every MLflow server takes."""


class _Tracker(Callback):
    """Imports the client, or says how it is installed."""

    package: ClassVar[str]
    install: ClassVar[str]

    def __init__(self) -> None:
        try:
            self.client: Any = importlib.import_module(self.package)
        except ImportError as error:
            raise ConfigError(
                f"report.callbacks={self.package} needs a package that is not installed: pip install {self.install}"
            ) from error
        self.run: Any = None
        self.folder, self.own = Path(), False

    def files(self) -> Iterator[str]:
        yield from (str(path) for name in (FILE_NAME, "report.html") if (path := self.folder / name).exists())


class MLflow(_Tracker):
    """`report.callbacks=[mlflow]`."""

    package, install = "mlflow", "mlflow-skinny"

    def on_start(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder, self.own = folder, self.client.active_run() is None
        self.run = self.client.start_run(run_name=folder.name) if self.own else self.client.active_run()
        self.client.log_params({key: words.setting(value)[:_LONGEST] for key, value in flat(config).items()})

    def on_frame(self, frame: Frame) -> None:
        self._log(scalars(frame), frame.samples)

    def _log(self, figures: Iterable[tuple[str, float]], samples: int) -> None:
        named = {re.sub(r"[^/\w.\- ]", "_", key): value for key, value in figures}  # no parentheses, no @
        self.client.log_metrics(named, step=samples)

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        try:
            if result is not None:
                self._log(final_scalars(result), result.data.trained_samples)
                for path in self.files():
                    self.client.log_artifact(path)
        finally:
            if self.own:
                self.client.end_run("FINISHED" if error is None else "FAILED")


class WeightsAndBiases(_Tracker):
    """`report.callbacks=[wandb]`."""

    package = install = "wandb"

    def on_start(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder, self.own = folder, self.client.run is None
        self.run = self.client.init(name=folder.name, dir=str(folder)) if self.own else self.client.run
        self.run.config.update(flat(config))

    def on_frame(self, frame: Frame) -> None:
        self.run.log(dict(scalars(frame)), step=frame.samples)

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        try:
            if result is not None:
                self.run.summary.update(dict(final_scalars(result)))
                name = re.sub(r"[^a-zA-Z0-9_.-]", "-", f"run-{self.folder.name}")
                artifact = self.client.Artifact(name, type="result")
                for path in self.files():
                    artifact.add_file(path)
                self.run.log_artifact(artifact)
        finally:
            if self.own and self.run is not None:
                self.run.finish(exit_code=0 if error is None else 1)
