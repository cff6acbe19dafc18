"""Which generation of a job's parts a server belongs to, so that trainers of an earlier one change nothing any more."""

from dataclasses import dataclass

from shadowsync.errors import RunError


@dataclass(frozen=True)
class Generation:
    """Of a job's parts: those that started from one checkpoint."""

    number: int = 0

    def check(self, sent: int) -> None:
        """Refuses what a trainer of another generation sends.

        Raises:
            RunError: it is of another one.
        """
        if sent != self.number:
            raise RunError("this trainer was given up: all others have gone back to a checkpoint")


FIRST = Generation()
