"""When a job gives up: a pure account of places that nobody takes and of deaths without progress."""

from dataclasses import dataclass, field

MOST_DEATHS = 20


@dataclass
class Vacancies:
    """Since when places are vacant, and how often somebody died since the last progress; times are handed in.

    Args:
        lost_after_s: how long a place may be vacant, or trainers too few.
        min_trainers: below that the job is not worth its servers.
        most_deaths: without a row trained in between that was not trained before.
    """

    lost_after_s: float
    min_trainers: int
    most_deaths: int = MOST_DEATHS
    _since: dict[str, float] = field(default_factory=dict)
    _few_since: float | None = None
    _furthest: int = -1
    _deaths: int = 0

    def died(self, role: str, trained: int, now: float) -> None:
        """Somebody did, when so many rows were trained."""
        self._since.setdefault(role, now)
        if trained > self._furthest:
            self._furthest, self._deaths = trained, 0
        self._deaths += 1

    def taken(self, role: str) -> None:
        """Somebody has the place and is at work."""
        self._since.pop(role, None)

    def clear(self) -> None:
        """Everybody is at work."""
        self._since.clear()

    def too_long(self, role: str, now: float) -> bool:
        """The place has been vacant for longer than the job waits."""
        return now - self._since.get(role, now) > self.lost_after_s

    def too_few(self, trainers: int, now: float) -> str | None:
        """Why the job ends for lack of trainers, if it does."""
        if trainers >= self.min_trainers:
            self._few_since = None
            return None
        self._few_since = now if self._few_since is None else self._few_since
        if now - self._few_since <= self.lost_after_s:
            return None
        return f"fewer than cluster.min_trainers={self.min_trainers} trainers are left"

    def hopeless(self, role: str) -> str | None:
        """Why there is no use in replacing anybody any more, if so; `role` died last."""
        if self._deaths <= self.most_deaths:
            return None
        return f"{self._deaths} roles died in a row while nothing new was trained, {role} the last of them"
