"""What a program has done around a run, and how it is told what happens there."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shadowsync.errors import ConfigError, blamed
from shadowsync.metrics.history import Frame
from shadowsync.registry import imported_class, names_code, nearest
from shadowsync.report.result import Result

READY: Mapping[str, str] = {
    "mlflow": "shadowsync.report.trackers:MLflow",
    "wandb": "shadowsync.report.trackers:WeightsAndBiases",
}
"""Those that `report.callbacks` takes by a short name."""


class Callback:
    """Override what is wanted. All are called in the thread that drives the job, one after the other, and whatever is
    raised there is one warning: it never ends the training, and the next calls come all the same.
    """

    def on_start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Training is about to begin; `config` is the whole configuration with every default, without secrets."""

    def on_frame(self, frame: Frame) -> None:
        """A line of the history was written (`report.every_s`)."""

    def on_validation(self, samples: int, measures: Mapping[str, float]) -> None:
        """The state after so many trained samples was measured; what is not defined is not there."""

    def on_checkpoint(self, place: str, samples: int) -> None:
        """A checkpoint of the state after so many samples is complete, at a path or URL."""

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """The run is over: with its result, once all files are written, or with what ended it."""


class Watching(Callback):
    """A function given to `Job.run(on_frame=…)`; what it raises ends the run, which is how a program stops one."""

    def __init__(self, function: Callable[[Frame], object]) -> None:
        self._function = function

    def on_frame(self, frame: Frame) -> None:
        self._function(frame)


class Callbacks:
    """Tells all of them; `warn` is given a sentence for each one that fails, once."""

    def __init__(self, members: Sequence[Callback], warn: Callable[[str], object]) -> None:
        self._members, self._warn = members, warn
        self._failed: set[int] = set()

    def tell(self, event: str, *about: object) -> None:
        """Calls `event` of each."""
        for number, member in enumerate(self._members):
            try:
                getattr(member, event)(*about)
            except Exception as error:
                if isinstance(member, Watching):
                    raise
                if number not in self._failed:
                    self._failed.add(number)
                    self._warn(f"the callback {type(member).__name__} failed in {event}: {blamed(error)}")

    @contextlib.contextmanager
    def around(self, folder: Path, config: Mapping[str, Any]) -> Iterator[None]:
        """The run is the block; whoever ends it well tells its result."""
        self.tell("on_start", folder, config)
        try:
            yield
        except BaseException as error:
            self.tell("on_end", None, error)
            raise


def checked(given: object) -> tuple[Callback, ...]:
    """Those that were given; raises `ConfigError` for what is no callback, or none in a list."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"callbacks={given!r} is no list: give callbacks=[…] of instances of shadowsync.Callback")
    for one in given:
        if not isinstance(one, Callback):
            shown = f"the class {one.__name__}: call it" if isinstance(one, type) else repr(one)
            raise ConfigError(f"callbacks: each is an instance of a subclass of shadowsync.Callback, not {shown}")
    return tuple(one for one in given if isinstance(one, Callback))


def named(names: Sequence[str]) -> tuple[Callback, ...]:
    """Those of `report.callbacks`.

    Raises:
        ConfigError: there is none of a name, it cannot be made, or it needs a package that is not installed.
    """
    made = []
    for name in names:
        if name not in READY and not names_code(name):
            raise ConfigError(
                f"report.callbacks={name} is not known{nearest(name, READY)}; allowed: {', '.join(READY)}, or "
                "package.module:Class of your own"
            )
        member = imported_class("report.callbacks", READY.get(name, name), Callback)
        try:
            made.append(member())
        except ConfigError:
            raise
        except Exception as error:  # whatever a class of the user's raises
            raise ConfigError(f"report.callbacks={name} cannot be made without arguments: {blamed(error)}") from error
    return tuple(made)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration by `section.key`, without what only says how a run is shown."""
    sections = {name: keys for name, keys in config.items() if name != "report" and isinstance(keys, Mapping)}
    return {f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()}
