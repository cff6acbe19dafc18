"""When a running job saves, what a save holds and how it is put back, and what failures of embedding servers cost."""

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import msgspec
import torch

from shadowsync.aggregation.counts import AggregationState
from shadowsync.checkpoint.format import order, plain_name
from shadowsync.checkpoint.job_state import (
    JobState,
    check_layout,
    column_difference,
    course_of,
    job_state,
    layout,
    restored_dense,
)
from shadowsync.checkpoint.loading import LoadedCheckpoint, written_rows
from shadowsync.checkpoint.saver import AsyncSaver
from shadowsync.checkpoint.snapshot import GivenUp, Snapshot
from shadowsync.checkpoint.store import CheckpointStore, ParentLost
from shadowsync.cluster.outages import ServerLoss
from shadowsync.cluster.session import Session
from shadowsync.data.frame import TableOptions
from shadowsync.embedding.table import Rows, RowSet, Shard
from shadowsync.errors import CheckpointError, NonFiniteLoss, SaveError
from shadowsync.recovery.failures import FailureScript
from shadowsync.recovery.policy import PlsAccount
from shadowsync.recovery.scheduler import CheckpointScheduler, Due
from shadowsync.recovery.settings import EVERYTHING
from shadowsync.rpc.errors import GONE

AGAIN_S = 0.5
"""Until a save is tried again that a failure prevented."""
PROBE_S = 600.0
"""The first save comes after this time if not sooner, to learn what one costs."""
MOST_LAYERS = 16
"""Of a chain, the whole one included: each is opened to load the newest."""
MOST_SHARE = 1.0
"""Bytes of the deltas over those of the whole one below them: all of them are kept, and read to load the newest."""


def take_snapshot(
    session: Session, given: Mapping[str, Any], pls: float = 0.0, rows: Sequence[Rows] | None = None
) -> Snapshot:
    """A copy of everything that moves; everybody must stand still.

    Replicas of trainers that died are left out and the others numbered through, so that nobody goes on from them.
    `given` is the configuration as the user gave it; `rows` come in place of copies of all rows. `NonFiniteLoss` if a
    dense parameter is NaN or infinite, which no checkpoint should hold.
    """
    image = session.dense_image()
    final = session.final_weights(image).clone()
    if not torch.isfinite(final).all():
        raise NonFiniteLoss(
            f"a dense parameter is no longer finite after {session.reader.trained} samples: lower train.lr or "
            "embedding.lr, or set train.clip_norm=1"
        )
    dense = {"final": final} | ({} if image.center is None else {"center": image.center})
    dense |= {f"feedback.{name}": tensor for name, tensor in image.feedback.items()}
    for number, trainer in enumerate(image.trainers):
        dense |= {f"replica.{number}.{name}": tensor for name, tensor in trainer.replica.items()}
        dense |= {f"sync.{number}.{name}": tensor for name, tensor in trainer.method.items()}
    source = session.choices.source
    learnt = source.learnt if isinstance(source, TableOptions) else None
    if learnt is not None:
        dense |= learnt.tensors()
    state = JobState(
        recorder=session.recorder.state(),
        syncs=session.sync_count,
        wire=session.wire_totals(),
        schema=session.schema,
        tables=[table.name for table in session.tables],
        trainers=len(image.trainers),
        layout=layout(session.template),
        own_model=session.choices.model is None,
        own_losses=list(session.job.losses),
        pls=pls,
        aggregation=session.aggregation or AggregationState(),
        data=session.train_source.marks(),
        course=session.course,
        columns=None if learnt is None else learnt.state(),
    )
    return Snapshot(
        config=dict(given),
        samples=session.reader.trained,
        tables=session.rows() if rows is None else tuple(rows),
        dense=dense,
        position=session.reader.state(),
        random={"torch": torch.get_rng_state()},
        extra=msgspec.to_builtins(state),
    )


def put_back(session: Session, saved: LoadedCheckpoint) -> None:
    """Fills rows, the dense part of all trainers, method states and counts; the reader was made with the position.

    `CheckpointError` if it is of another model, other tables, another optimizer or other data.
    """
    state = job_state(saved)
    if (difference := column_difference(state.schema, session.schema)) is not None:
        raise CheckpointError(f"{saved.name} was trained on {difference}: give the same columns in the same order")
    if state.layout.keys() != layout(session.template).keys():
        check_layout(saved, session.template)  # another model may want other tables, too: it is what was changed
    session.load_rows(saved)
    session.load_dense(restored_dense(saved, session.choices.method, session.template, session.dense_copies))
    session.take_up(course_of(saved))
    session.go_on(state.syncs, state.wire, state.aggregation)
    try:
        torch.set_rng_state(saved.random["torch"])
        session.recorder.restore(state.recorder)
    except (LookupError, TypeError, ValueError, RuntimeError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{saved.name}: its counts or random state are not those of a job: {error}") from error


class Chain:
    """A whole checkpoint and the deltas on it, by the bytes of their rows; nothing before the first save."""

    def __init__(self, layers: Sequence[int] = ()) -> None:
        self._whole_bytes = layers[0] if layers else 0
        self._deltas = list(layers[1:])

    def whole(self, size: int) -> None:
        self._whole_bytes, self._deltas = size, []

    def delta(self, size: int) -> None:
        self._deltas.append(size)

    def takes(self, size: int) -> bool:
        """A delta of so many bytes is worth it: else a whole one costs little more and need not be rewritten soon."""
        return size <= MOST_SHARE * self._whole_bytes / 2

    @property
    def is_long(self) -> bool:
        """It is time to rewrite it. A single delta never is a reason: it can hardly be larger than a whole one."""
        large = len(self._deltas) > 1 and sum(self._deltas) > MOST_SHARE * self._whole_bytes
        return large or 1 + len(self._deltas) > MOST_LAYERS

    def rewritten(self) -> None:
        """It has become a whole checkpoint, as large as the one below was: tables do not grow."""
        self._deltas = []

    def put_off(self) -> None:
        """It could not be rewritten: it is long again when about half as much has been added once more."""
        self._deltas = [size // 2 for size in self._deltas[: MOST_LAYERS // 2 - 1]]


def rows_bytes(tables: Sequence[Rows | RowSet]) -> int:
    """Bytes of rows with all that belongs to them."""
    numbers = sum(rows.numbers.nbytes for rows in tables if isinstance(rows, RowSet))
    return numbers + sum(tensor.nbytes for rows in tables for tensor in rows.tensors.values())


class RecoveryController:
    """Has saved what a `CheckpointScheduler` says is due, makes fail what is to fail, and keeps the account.

    The job's thread calls it. What follows a save is noted by the saver's thread and taken up at the next `look`.
    `given` is the configuration as the user gave it; the job goes on from `resumed`, which is in this store if `own`.
    `rounds` counts whole saves, and ends of rounds of saves by priority; `on_saved` is called with each checkpoint's
    name and samples.
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
        self._session, self._store, self._given = session, store, given
        self._every_s = session.config.train.save_every_s
        self._spent_s = dict.fromkeys(("save", "load", "lost", "wait"), 0.0)
        self._total_samples, samples = max(1, session.total_samples), session.reader.trained
        self._servers = range(len(session.row_shares()))
        self.account = PlsAccount(self._total_samples, session.row_shares(), samples)
        if resumed is not None:
            self.account.pls = job_state(resumed).pls
            if not resumed.exact:
                self.account.failed(self._servers, resumed.samples, resumed.oldest)
        schedules = self.settings.schedules
        self._script = FailureScript(schedules, session.can_fail()) if schedules else None
        self._lock = threading.Lock()
        self._ended: list[Callable[[], None]] = []  # what to note of saves
        self._said: list[str] = []
        self._chain = Chain(() if resumed is None else [layer.byte_count for layer in resumed.layers])
        self._parent = resumed.name if resumed is not None and own else None
        self._of_one_moment = resumed is None or resumed.exact
        self._taken_course = session.course
        self._taken_samples = -1
        self._exact_samples = samples if self._parent is not None else -1
        self.saves = self.rounds = self._repeated = 0
        if own:
            store.best = session.course.checkpoint or None
        self._start_clock()
        self.on_saved: Callable[[str, int], None] = lambda *_: None
        session.goes_back = self._goes_back

    def _start_clock(self) -> None:
        self._began = time.monotonic()
        self._again_at = self._started = self._now()
        goal = replace(self.settings.goal, interval_s=self.settings.goal.interval_s or self._every_s)
        probe_s = PROBE_S if self.settings.job_s is None else math.inf  # what an emulated save costs is known
        job_s, share = self.settings.job_s or math.inf, self.settings.share
        self.scheduler = CheckpointScheduler(
            goal, self.settings.priors, len(self._servers), job_s, self._now(), share, probe_s=probe_s
        )

    def _now(self) -> float:
        """By the clock by which the job saves and fails: its own, or that of the longer job that it stands for."""
        if self.settings.job_s is not None:
            return self._emulated_s(self._session.reader.trained)
        return time.monotonic() - self._began

    def _emulated_s(self, samples: int) -> float:
        return (self.settings.job_s or 0.0) * samples / self._total_samples

    @property
    def mode(self) -> str:
        return self.scheduler.decision.mode

    @property
    def why(self) -> str:
        """The reason as a sentence; empty where nothing was to be chosen."""
        return self.scheduler.decision.why if self.settings.saves else ""

    @property
    def interval_s(self) -> float | None:
        """Seconds between saves, of whole rounds where rows are saved by priority; None for never."""
        interval_s = self.scheduler.decision.interval_s if self.settings.saves else self._every_s
        return interval_s if interval_s is not None and math.isfinite(interval_s) else None

    @property
    def target_pls(self) -> float | None:
        """What the PLS may come to; None where nothing is meant to be lost."""
        return self.settings.goal.target_pls if self.mode == "partial" else None

    @property
    def server_failures(self) -> int:
        """Failures of embedding servers; several at once are one."""
        return self.scheduler.failures

    @property
    def lost_servers(self) -> float | None:
        """That one of those took on average."""
        return self.scheduler.lost_servers

    def seconds(self, load_s: float) -> dict[str, float]:
        """As in `result.json`, with the seconds that a resume took to load."""
        return {**self._spent_s, "load": load_s + self._spent_s["load"]}

    @property
    def lively(self) -> bool:
        """Something may be due at any moment, so that whoever waits should look often."""
        return self._script is not None or self.settings.job_s is not None

    # --- in mid-run --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._start_clock()
        while self._script is not None and self._epochs and self._script.due(-1.0, self._epochs):
            pass  # those of before a resume have happened

    def take_stock(self) -> None:
        """Takes note of saves and failures that are over."""
        with self._lock:
            ended, self._ended = self._ended, []
        for note in ended:
            note()
        for loss in self._session.losses():
            self._note_loss(loss)

    def look(self) -> list[str]:
        """Takes note of what has happened, makes fail what is to fail now, and chooses anew if that is called for.

        Returns sentences for the user.
        """
        self.take_stock()
        if self._script is not None:
            for failure in self._script.due(self._now() - self._started, self._epochs):
                self._session.inject_failure(failure.kind, failure.indices)
            epochs = self._script.next_epochs
            if epochs is not None and epochs <= self._session.config.data.epochs:
                trained = math.ceil(epochs * self._session.train_source.rows)
                self._session.reader.leases.alarm(trained, self._session.ended.set)
        if self.settings.saves and (chosen := self.scheduler.revise(self._now())) is not None:
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
        if self.saver.busy or self.settings.job_s is not None:
            return math.inf
        return self._due_at - self._now()

    @property
    def _due_at(self) -> float:
        if self.mode == "full" and not self._of_one_moment:
            due_at = 0.0
        elif self.settings.saves:
            due_at = self.scheduler.due_at
        else:
            due_at = math.inf if self._every_s is None else self.scheduler.saved_at + self._every_s
        return max(due_at, self._again_at)

    def due(self) -> Due:
        """What is to be saved now; nothing while a save is under way: a slow disk costs checkpoints, not training."""
        if self.saver.busy or self._now() < self._due_at:
            return Due.NOTHING
        due = self.scheduler.due(self._now()) if self.settings.saves else Due.ROUND
        return Due.ROUND if due is Due.NOTHING else due

    # --- saves -------------------------------------------------------------------------------------------------------

    def save(self, due: Due) -> bool:
        """Has what is due saved in the background; false if somebody died, so that it is due still."""
        self.scheduler.saving(due, self._now())
        submitted = self._submit(due, "beside" if self.mode == "partial" else "copied")
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
            return self._submit(Due.NOTHING, "copied")
        submitted = self._submit(Due.NOTHING, "at rest")
        self.saver.settle()
        with self._lock:
            lost = self._note_failed_save in self._ended
        self.take_stock()
        return submitted and not lost

    def save_first(self) -> None:
        """Has the state saved that a run begins with, before anybody trains: who dies goes back to it."""
        self._submit(Due.NOTHING, "at rest")
        self.saver.wait()
        self.take_stock()

    def save_best(self, is_best: Callable[[], bool]) -> bool:
        """Has everything saved as it is now if `is_best`, asked while everybody stands still, says so; false if
        somebody died."""
        self.saver.settle()
        self.take_stock()
        return self._submit(Due.NOTHING, "copied", is_best)

    def _submit(
        self,
        due: Due,
        rows: Literal["copied", "at rest", "beside"],
        wanted: Callable[[], bool] | None = None,
    ) -> bool:
        """Has the state saved if there is news, or if it is `wanted`; false if somebody died.

        What of the rows is `due` is copied all at one moment, now (`copied`); when they are written, as nobody trains
        any more (`at rest`); or when they are written, while training goes on (`beside`): then a row may be some steps
        ahead of the dense part and the position. Partial recovery bears much larger differences.
        """
        began = time.monotonic()
        try:
            with self._session.standing_still():
                news = self._has_news(rows) if wanted is None else wanted()
                if news:
                    copied = None if rows == "copied" else ()
                    frame = take_snapshot(self._session, self._given, self.account.pls, copied)
                    self._taken_course = self._session.course
                    if rows == "beside":
                        self._taken_samples = frame.samples
                    else:
                        self._exact_samples = frame.samples
                    stood_s = time.monotonic() - began
                    self.saver.submit(partial(self._write, frame, rows, due, stood_s))
                if self.settings.job_s is not None:
                    self.saver.settle()  # next to the job that this one stands for, a save takes no time
        except GONE:
            return False
        return True

    def _has_news(self, rows: str) -> bool:
        trained, taken = self._session.reader.trained, self._taken_course.validations
        told = self._session.course.validations == taken
        return not told or (trained != self._exact_samples and (rows != "beside" or trained != self._taken_samples))

    def _write(self, frame: Snapshot, rows: str, due: Due, stood_s: float) -> None:
        """In the saver's thread, where the time that it takes the processors is what it costs training."""
        began_s, snapshot = time.thread_time(), frame
        try:
            if rows == "beside":
                snapshot = self._with_rows(frame, due)
            elif rows == "at rest":
                snapshot = replace(frame, tables=self._session.rows_beside())
            name = self._store.save(snapshot)
            self._note_best(name, snapshot.samples)
        except (*GONE, GivenUp, ParentLost) as error:  # it came to nothing, as somebody died or its parent is gone
            if isinstance(error, ParentLost):
                self._parent = None
            with self._lock:
                self._ended.append(self._note_failed_save)
                if rows == "copied" and self._is_unsaved_best(frame.samples):
                    self._ended.append(partial(self._save_again, frame, due))
            return
        self._parent, whole = name, snapshot.parent is None
        (self._chain.whole if whole else self._chain.delta)(rows_bytes(snapshot.tables))
        self._of_one_moment = snapshot.samples == self._exact_samples
        cost_s = stood_s + self._tell_servers(name, snapshot)
        cost_s += (time.thread_time() - began_s) / (os.cpu_count() or 1)
        with self._lock:
            self._ended.append(partial(self._note_save, due, snapshot.samples, whole, cost_s))
            self._ended.append(partial(self.on_saved, name, snapshot.samples))
        if self._parent is not None and self._chain.is_long:
            self._rewrite(name)
        self.saves += 1

    def _is_unsaved_best(self, samples: int) -> bool:
        course = self._session.course
        return course.best is not None and course.best_samples == samples and not course.checkpoint

    def _save_again(self, frame: Snapshot, due: Due) -> None:
        """The best state, which nobody has any more, unless something newer is saved or about to be."""
        newer = self.saver.busy or any(order(name)[0] > frame.samples for name in self._store.names())
        if self._is_unsaved_best(frame.samples) and not newer:
            self._exact_samples = frame.samples
            self.saver.submit(partial(self._write, frame, "copied", due, 0.0))

    def _with_rows(self, frame: Snapshot, due: Due) -> Snapshot:
        """In the saver's thread: with the rows that changed, on top of the last save, if that is worth it."""
        if self._parent is not None:
            rows = self._session.changed_rows(due is Due.ROUND)
            if self._chain.takes(rows_bytes(rows)):
                complete = self.settings.priority == EVERYTHING
                return replace(frame, tables=rows, parent=self._parent, complete=complete)
        return replace(frame, tables=self._session.rows_beside())

    def _note_best(self, name: str, samples: int) -> None:
        """In the saver's thread: a checkpoint is there; is it of the best state?"""
        course = self._session.course
        if course.best_of(name, samples) == name and not course.checkpoint:
            self._session.course = msgspec.structs.replace(course, checkpoint=plain_name(name))
        self._store.best = self._session.course.checkpoint or None

    def _tell_servers(self, name: str, snapshot: Snapshot) -> float:
        """Tells servers what is saved, for its cost as `Session.rows_saved`; what is not told comes up once more."""
        if snapshot.parent is None and snapshot.samples == self._exact_samples:
            return 0.0  # of one moment, so nobody copied them for a save
        whole = [Shard(table, 0, table.rows) for table in self._session.tables]
        try:
            with written_rows(lambda: self._store.opened(name, whole)) as written:
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

    def _note_save(self, due: Due, samples: int, whole: bool, cost_s: float) -> None:
        if whole or due is Due.ROUND:
            self.rounds += 1
            for server in self._servers:
                self.account.saved(server, samples)
        if self.settings.job_s is not None:  # the one at the end is not there for failures
            share = 1.0 if whole else self.settings.share
            cost_s = 0.0 if due is Due.NOTHING else self.settings.priors.save_s * share
        self._spent_s["save"] += cost_s
        if self.settings.saves:
            self.scheduler.saved(Due.ROUND if whole else due, cost_s)

    def _note_failed_save(self) -> None:
        self._again_at = self._now() + AGAIN_S  # it is due as before
        self._taken_samples = self._exact_samples = -1  # a save at these samples is on no disk
        self.scheduler.not_saved()

    def _note_loss(self, loss: ServerLoss) -> None:
        """Books a loss; one of embedding servers also says what the next one will cost."""
        load_s, restart_s = loss.load_s, loss.restart_s
        if loss.servers:
            self.scheduler.failed(len(loss.servers))
        if self.settings.job_s is not None:
            costs = self.scheduler.costs(self._now())
            load_s, restart_s = costs.load_s, costs.restart_s
        elif loss.servers:
            self.scheduler.measure("load_s", load_s)
            self.scheduler.measure("restart_s", restart_s)
        self._spent_s["load"] += load_s
        self._spent_s["wait"] += restart_s
        if self._parent is not None and plain_name(loss.loaded or "") != plain_name(self._parent):
            self._parent = None  # what was saved last was not what they loaded, so nothing may build on it
        if loss.back_to is None:
            self.account.failed(loss.servers, loss.samples, loss.loaded_samples)
        else:
            self.account.went_back(loss.back_to)
            self._repeated += loss.samples - loss.back_to
            self._spent_s["lost"] += self._seconds_of(loss.samples - loss.back_to)

    def _seconds_of(self, samples: int) -> float:
        """How long so many samples take to train, at the speed of the job while it trained."""
        if self.settings.job_s is not None:
            return self._emulated_s(samples)
        speed = self._session.recorder.speed()
        trained = speed.eps * speed.seconds + self._repeated
        training_s = speed.seconds - self._spent_s["load"] - self._spent_s["wait"]
        return samples * training_s / trained if trained > 0 and training_s > 0 else 0.0
