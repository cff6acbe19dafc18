"""When a running job saves, what a save holds, and what failures of embedding servers have cost it."""

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shadowsync.checkpoint.chain import Chain, rows_bytes
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.names import plain_name
from shadowsync.checkpoint.saver import AsyncSaver
from shadowsync.checkpoint.snapshot import DeltaOf, Snapshot
from shadowsync.checkpoint.store import CheckpointStore, GivenUp, ParentLost
from shadowsync.checkpoint.written import WrittenRows
from shadowsync.embedding.table import Shard
from shadowsync.errors import CheckpointError, SaveError
from shadowsync.imaging import take
from shadowsync.job_state import job_state
from shadowsync.recovery.costs import Scale
from shadowsync.recovery.estimates import Estimates
from shadowsync.recovery.failures import FailureScript
from shadowsync.recovery.governor import Due, Governor
from shadowsync.recovery.pls import PlsAccount
from shadowsync.recovery.settings import EVERYTHING
from shadowsync.rpc.errors import GONE
from shadowsync.session import ServerLoss, Session

AGAIN_S = 0.5
"""Until a save is tried again that a failure prevented."""
PROBE_S = 600.0
"""The first save comes after this time if not sooner, to learn what one costs."""


@dataclass
class Spent:
    """Seconds that recovery has cost so far, by kind, as in `result.json`."""

    save: float = 0.0
    load: float = 0.0
    lost: float = 0.0
    wait: float = 0.0


@dataclass(frozen=True)
class Rhythm:
    """The clock by which a job saves and fails: its own, or that of the longer job that it stands for.

    Attributes:
        job_s: seconds of that longer job; None for the job's own clock.
        total_samples: of the job.
    """

    job_s: float | None
    total_samples: int

    def now(self, seconds: float, samples: int) -> float:
        """The time after so many seconds and samples."""
        return seconds if self.job_s is None else self.job_s * samples / self.total_samples


class Safekeeping:
    """Decides with a `Governor` what is saved when, carries it out, and keeps the account.

    The job's thread calls it. What follows a save is noted by the saver's thread and taken up at the next `look`.

    Args:
        session: whose state is saved.
        store: where to.
        given: the configuration as the user gave it, for checkpoints.
        resumed: what the job goes on from.
        own: `resumed` is in this store.
    """

    def __init__(
        self,
        session: Session,
        store: CheckpointStore,
        saver: AsyncSaver,
        given: Mapping[str, Any],
        resumed: LoadedCheckpoint | None = None,
        own: bool = False,
    ) -> None:
        self.settings = session.choices.recovery
        self.saver = saver
        self.spent = Spent()
        self._session, self._store, self._given = session, store, given
        self._every_s = session.config.train.save_every_s
        self._began = time.monotonic()
        self._rhythm = Rhythm(self.settings.job_s, max(1, session.total_samples))
        shares, samples = session.row_shares(), session.reader.trained
        self.account = PlsAccount(max(1, session.total_samples), shares, [samples] * len(shares))
        if resumed is not None:
            self._account_for(resumed)
        self._script = self._make_script()
        self.governor = self._make_governor()
        self._lock = threading.Lock()
        self._ended: list[_Saved | None] = []
        self._said: list[str] = []
        self._chain = Chain(() if resumed is None else [layer.byte_count for layer in resumed.layers])
        self._parent = resumed.name if resumed is not None and own else None
        self._of_one_moment = resumed is None or resumed.exact
        self._taken_samples = -1
        self._exact_samples = samples if self._parent is not None else -1
        self._again_at = self._started = self._now()
        self.rounds = self._repeated = 0
        session.goes_back = self._goes_back

    def _account_for(self, resumed: LoadedCheckpoint) -> None:
        """What had been lost before, and what a checkpoint whose rows are older than the rest loses now."""
        self.account.pls = job_state(resumed).pls
        if not resumed.exact:
            servers = range(len(self.account.shares))
            self.account.failed(servers, resumed.samples, resumed.oldest)

    def _make_script(self) -> FailureScript | None:
        schedule = self.settings.schedule
        return None if schedule is None else schedule.script(self._session.strikable())

    def _make_governor(self) -> Governor:
        goal = replace(self.settings.goal, interval_s=self.settings.goal.interval_s or self._every_s)
        scale = Scale(len(self.account.shares), self.settings.job_s or math.inf)
        estimates = Estimates(self.settings.priors, self._now())
        probe_s = PROBE_S if self.settings.job_s is None else math.inf  # what an emulated save costs is known
        return Governor(goal, scale, estimates, self.settings.share, probe_s=probe_s)

    @property
    def mode(self) -> str:
        """What happens after a failure now: `full`, `partial` or `none`."""
        return self.governor.decision.mode

    @property
    def why(self) -> str:
        """The reason as a sentence; empty where nothing was to be chosen."""
        return self.governor.decision.why if self.settings.saves else ""

    @property
    def interval_s(self) -> float | None:
        """Seconds between saves, of whole rounds where rows are saved by priority; None for never."""
        interval_s = self.governor.decision.interval_s if self.settings.saves else self._every_s
        return interval_s if interval_s is not None and math.isfinite(interval_s) else None

    @property
    def target_pls(self) -> float | None:
        """What the PLS may come to; None where nothing is meant to be lost."""
        return self.settings.goal.target_pls if self.mode == "partial" else None

    @property
    def server_failures(self) -> int:
        """Failures of embedding servers; several at once are one."""
        return self.governor.estimates.failures

    def seconds(self, load_s: float) -> dict[str, float]:
        """What recovery has cost by kind, with the seconds that a resume took to load."""
        return {**vars(self.spent), "load": load_s + self.spent.load}

    @property
    def lively(self) -> bool:
        """Something may be due at any moment, so that whoever waits should look often."""
        return self._script is not None or self.settings.job_s is not None

    # --- in mid-run --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Training starts now."""
        self._began = time.monotonic()
        self._again_at = self._started = self._now()
        self.governor = self._make_governor()
        while self._script is not None and self._epochs and self._script.due(-1.0, self._epochs):
            pass  # those of before a resume have happened

    def take_stock(self) -> None:
        """Takes note of saves and failures that are over."""
        with self._lock:
            ended, self._ended = self._ended, []
        for saved in ended:
            if saved is None:
                self._note_failed_save()
            else:
                self._note_save(saved)
        for loss in self._session.losses():
            self._note_loss(loss)

    def look(self) -> list[str]:
        """Takes note of what has happened, makes fail what is to fail now, and chooses anew if that is called for.

        Returns:
            Sentences for the user.
        """
        self.take_stock()
        if self._script is not None:
            for failure in self._script.due(self._now() - self._started, self._epochs):
                self._session.strike(failure.kind, failure.indices)
            epochs = self._script.next_epochs
            if epochs is not None and epochs <= self._session.config.data.epochs:
                trained = math.ceil(epochs * self._session.train_source.rows)
                self._session.reader.desk.alarm(trained, self._session.ended.set)
        if self.settings.saves and (chosen := self.governor.revise(self._now())) is not None:
            self._said.append(chosen)
        self._session.goes_back = self._goes_back
        with self._lock:
            said, self._said = self._said, []
        return said

    @property
    def _epochs(self) -> float:
        return self._session.reader.trained / max(1, self._session.train_source.rows)

    @property
    def _goes_back(self) -> bool:
        """There has to be something to go back to: after a change of mode that is the next save, due at once."""
        return self.mode == "full" and self._of_one_moment

    def seconds_left(self) -> float:
        """Until a save is due, as far as one can tell now."""
        if self.saver.busy or self._rhythm.job_s is not None:
            return math.inf
        return max(self._due_at, self._again_at) - self._now()

    @property
    def _due_at(self) -> float:
        if self.mode == "full" and not self._of_one_moment:
            return 0.0
        if self.settings.saves:
            return self.governor.due_at
        return math.inf if self._every_s is None else self.governor.saved_at + self._every_s

    def due(self) -> Due:
        """What is to be saved now; nothing while a save is under way: a slow disk costs checkpoints, not training."""
        if self.saver.busy or self._now() < max(self._due_at, self._again_at):
            return Due.NOTHING
        due = self.governor.due(self._now()) if self.settings.saves else Due.ROUND
        return Due.ROUND if due is Due.NOTHING else due

    def save(self, due: Due) -> bool:
        """Has what is due saved in the background; false if somebody died, so that it is due still."""
        self.governor.saving(due, self._now())
        submitted = self._submit(due, self._beside if self.mode == "partial" else self._whole)
        if not submitted:
            self._note_failed_save()
        return submitted

    def save_last(self) -> bool:
        """Has everything saved as it is now, unless it is; false if somebody died.

        Where nobody trains any more the rows are copied while they are written, and this waits for it.
        """
        self.saver.settle()
        self.take_stock()
        if self._session.alive() or self._session.given_up is not None:  # given up, trainers may be training still
            return self._submit(Due.NOTHING, self._whole)
        submitted = self._submit(Due.NOTHING, self._at_rest)
        self.saver.settle()
        with self._lock:
            lost = None in self._ended
        self.take_stock()
        return submitted and not lost

    def _submit(self, due: Due, make: Callable[[Due, float], None]) -> bool:
        began = time.monotonic()
        try:
            with self._session.standing_still():
                if self._session.reader.trained != self._exact_samples:
                    make(due, began)
                if self.settings.job_s is not None:
                    self.saver.settle()  # next to the job that this one stands for, a save takes no time
        except GONE:
            return False
        return True

    def _whole(self, due: Due, began: float) -> None:
        """Everything at one moment."""
        snapshot = take(self._session, self._given, self.account.pls)
        self._exact_samples = snapshot.samples
        self._have_saved(lambda: snapshot, due, time.monotonic() - began)

    def _at_rest(self, due: Due, began: float) -> None:
        """Everything at one moment, as nobody trains any more."""
        frame = take(self._session, self._given, self.account.pls, rows=())
        self._exact_samples = frame.samples
        self._have_saved(lambda: replace(frame, tables=self._session.rows_beside()), due, time.monotonic() - began)

    def _beside(self, due: Due, began: float) -> None:
        """The dense part and the position at one moment, and rows copied while training goes on, if there is news.

        A row may be some steps ahead of the position. Partial recovery bears much larger differences.
        """
        if self._session.reader.trained == self._taken_samples:
            return
        frame = take(self._session, self._given, self.account.pls, rows=())
        self._taken_samples = frame.samples
        self._have_saved(lambda: replace(frame, **self._rows(due)), due, time.monotonic() - began)

    def _have_saved(self, make: Callable[[], Snapshot], due: Due, stood_s: float) -> None:
        """What goes on in the saver's thread costs training the time that it takes the processors."""
        made: list[tuple[float, Snapshot]] = []

        def write() -> Snapshot:
            made.append((time.thread_time(), make()))
            return made[0][1]

        def saved(name: str) -> None:
            began_s, snapshot = made[0]
            self._after(name, due, snapshot, stood_s, began_s)

        self.saver.submit(write, saved, self._fails)

    def _fails(self, error: BaseException) -> bool:
        """In the saver's thread: a save that came to nothing because somebody died, or because its parent is gone."""
        if not isinstance(error, (*GONE, GivenUp, ParentLost)):
            return False
        if isinstance(error, ParentLost):
            self._parent = None
        with self._lock:
            self._ended.append(None)
        return True

    def _rows(self, due: Due) -> dict[str, Any]:
        """The rows of a save and what they build on, as fields of a `Snapshot`."""
        if self._parent is None:
            return {"tables": self._session.rows_beside()}
        rows = self._session.changed_rows(due is Due.ROUND)
        if not self._chain.takes(rows_bytes(rows)):
            return {"tables": self._session.rows_beside()}
        return {"tables": rows, "delta": DeltaOf(self._parent, self.settings.priority == EVERYTHING)}

    def _after(self, name: str, due: Due, snapshot: Snapshot, stood_s: float, began_s: float) -> None:
        """In the saver's thread, when a save is on the disk; it began at `began_s` of the thread's own time."""
        self._parent = name
        (self._chain.whole if snapshot.delta is None else self._chain.delta)(rows_bytes(snapshot.tables))
        self._of_one_moment = snapshot.samples == self._exact_samples
        report_s = self._report(name, snapshot)
        cost_s = stood_s + report_s + (time.thread_time() - began_s) / (os.cpu_count() or 1)
        with self._lock:
            self._ended.append(_Saved(due, snapshot.samples, snapshot.delta is None, cost_s))
        if self._parent is not None and self._chain.is_long:
            self._rewrite(name)

    def _report(self, name: str, snapshot: Snapshot) -> float:
        """Tells servers what is saved, for its cost as `Session.rows_saved`; what is not told comes up once more."""
        if snapshot.delta is None and snapshot.samples == self._exact_samples:
            return 0.0  # of one moment, so nobody copied them for a save
        whole = [Shard(table, 0, table.rows) for table in self._session.tables]
        try:
            with WrittenRows(lambda: self._store.opened(name, whole)) as written:
                return self._session.rows_saved(snapshot.tables, written)
        except GONE:
            pass
        except CheckpointError as error:
            self._parent = None  # nothing may build on what cannot be read
            with self._lock:
                self._said.append(str(error))
        return 0.0

    def _rewrite(self, name: str) -> None:
        """A delta and all that it builds on as one; if that fails nothing is lost but room, and it is tried again."""
        try:
            self._parent = self._store.compact(name)
            self._chain.rewritten()
        except (GivenUp, SaveError) as error:
            self._chain.put_off()
            if isinstance(error, SaveError):
                with self._lock:
                    self._said.append(str(error))

    # --- the account -------------------------------------------------------------------------------------------------

    def _note_save(self, saved: "_Saved") -> None:
        if saved.whole or saved.due is Due.ROUND:
            for server in range(len(self.account.shares)):
                self.account.saved(server, saved.samples)
        cost_s = saved.cost_s
        if self.settings.job_s is not None:
            cost_s = self._emulated_cost(saved)
        self.spent.save += cost_s
        self.rounds += saved.whole or saved.due is Due.ROUND
        if self.settings.saves:
            self.governor.saved(Due.ROUND if saved.whole else saved.due, cost_s)

    def _emulated_cost(self, saved: "_Saved") -> float:
        """The one at the end is not there for failures."""
        if saved.due is Due.NOTHING:
            return 0.0
        return self.settings.priors.save_s * (1.0 if saved.whole else self.settings.share)

    def _note_failed_save(self) -> None:
        """It is due as before, and tried again soon."""
        self._again_at = self._now() + AGAIN_S
        self._taken_samples = self._exact_samples = -1  # a save at these samples is on no disk
        self.governor.not_saved()

    def _note_loss(self, loss: ServerLoss) -> None:
        load_s, restart_s = self._cost_of(loss)
        self.spent.load += load_s
        self.spent.wait += restart_s
        if self._parent is not None and plain_name(loss.loaded or "") != plain_name(self._parent):
            self._parent = None  # what was saved last was not what they loaded, so nothing may build on it
        if loss.back_to is None:
            self.account.failed(loss.servers, loss.samples, loss.loaded_samples)
        else:
            self.account.went_back(loss.back_to)
            self._repeated += loss.samples - loss.back_to
            self.spent.lost += self._seconds_of(loss.samples - loss.back_to)

    def _cost_of(self, loss: ServerLoss) -> tuple[float, float]:
        """Seconds to load and to restart; a failure of embedding servers also says what the next one will cost."""
        estimates = self.governor.estimates
        if loss.servers:
            estimates.failed(len(loss.servers))
        if self.settings.job_s is not None:
            costs = estimates.costs(self._now())
            return costs.load_s, costs.restart_s
        if loss.servers:
            estimates.load.add(loss.load_s)
            estimates.restart.add(loss.restart_s)
        return loss.load_s, loss.restart_s

    def _seconds_of(self, samples: int) -> float:
        """How long so many samples take to train, at the speed of the job while it trained."""
        if self.settings.job_s is not None:
            return self._rhythm.now(0.0, samples)
        speed = self._session.recorder.speed()
        trained = speed.eps * speed.seconds + self._repeated
        training_s = speed.seconds - self.spent.load - self.spent.wait
        return samples * training_s / trained if trained > 0 and training_s > 0 else 0.0

    def _now(self) -> float:
        return self._rhythm.now(time.monotonic() - self._began, self._session.reader.trained)


class _Saved(NamedTuple):
    """A save that is on the disk."""

    due: Due
    samples: int
    whole: bool
    cost_s: float
