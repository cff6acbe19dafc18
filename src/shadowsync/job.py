"""A whole training run: the one place where parts are put together."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from rich.console import Console
from torch import nn

from shadowsync.aggregation.aggregator import Switch
from shadowsync.aggregation.counts import untold
from shadowsync.assembly import codec_remarks, prefetch
from shadowsync.checkpoint.format import plain_name
from shadowsync.checkpoint.job_state import column_difference, course_of, job_state, match_data, restore_final
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.saver import AsyncSaver
from shadowsync.checkpoint.store import CheckpointStore, as_whole
from shadowsync.checkpoint.values import row_values
from shadowsync.choices import Choices, as_trained, choose_all, global_batch, named_module, resumed, server_count
from shadowsync.cluster.context import Own, no_failures
from shadowsync.cluster.manager import cpus_needed, resources_needed
from shadowsync.cluster.session import Session
from shadowsync.config import Config, SplitConfig, load, merge, parse, read_given, with_data, with_written
from shadowsync.data.files import large_columns, largest_column
from shadowsync.data.frame import TableOptions
from shadowsync.data.labels import Loss, Task
from shadowsync.data.leases import Position
from shadowsync.data.source import OpenSource, settled
from shadowsync.data.splits import PARTS, open_parts, whole
from shadowsync.data.spooling import Given, Split, kept_path, with_kept_rows, with_rows_of
from shadowsync.draining import forget, to_leave
from shadowsync.embedding.table import Shard, Table
from shadowsync.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteLoss,
    RunError,
    SaveError,
    ShadowSyncError,
)
from shadowsync.inference import predictor, score
from shadowsync.measuring import Measuring
from shadowsync.memory.pages import keep_freed_memory
from shadowsync.memory.shared import can_share
from shadowsync.metrics.history import About, Frame
from shadowsync.metrics.named import compared_by
from shadowsync.metrics.quality import EXTREME_NATS, Scored, TestMetrics
from shadowsync.metrics.units import UnitActivity, Units
from shadowsync.models.wrapping import check_called
from shadowsync.places import advice, as_stored, local_path, unfollowed, without
from shadowsync.preparing import prepared
from shadowsync.recovery.scheduler import Due
from shadowsync.recovery.signals import StopRequest, stop_on_signals
from shadowsync.recovery_controller import RecoveryController, put_back
from shadowsync.registry import names_code, option_names
from shadowsync.report.callback import Callback, Callbacks, Watching, checked, named
from shadowsync.report.files import frames_until, read_events, read_frames, write_atomically
from shadowsync.report.reporter import Reporter
from shadowsync.report.result import EndedSection, Result, cores
from shadowsync.report.words import left_out
from shadowsync.rpc.errors import GONE
from shadowsync.runs import (
    check_folder,
    check_unused,
    checkpoint_root,
    load_checkpoint,
    load_to_resume,
    make_folder,
    new_folder,
    only_writer,
    open_store,
)
from shadowsync.runtime.control import Unsendable, packed
from shadowsync.runtime.inprocess import InProcess
from shadowsync.runtime.runtime import Runtime
from shadowsync.sections import make_result
from shadowsync.starting import Start
from shadowsync.training.losses import own_losses
from shadowsync.training.replica import Replica
from shadowsync.validation import Validation

_ODD_NATS = 20.0  # of mean log loss: what happens was predicted with a probability of 2e-9
_JUDGED_SAMPLES = 20_000  # a bad start of some thousand samples may be recovered from
_FEW_STEPS = 20  # below that a job learns next to nothing
_MOST_EXTREMES = 100  # samples in a window whose loss is extreme, as single rows that are wrong may make it

_LOOK_S, _QUICK_S = 0.25, 0.01
"""Longest wait between two looks: so that signals are seen; and where failures are to come at their very moment."""
_MANY_CORES = 4
"""With fewer, threads are about as fast as processes, which take two seconds more to start. Threads of one process
take turns at everything that Python itself does: 13 % of a step at batch 512, so that some eight of them fill one
process however many cores there are (docs/measurements.md)."""

T = TypeVar("T")


class Interrupted(ShadowSyncError):
    """Ctrl-C or SIGTERM ended the run; the message says from which checkpoint to go on."""

    exit_status = 130


class Job:
    """Trains one model.

    Args:
        config: a `Config`, nested dicts of the same keys, or None for the demo.
        model: a module of the user's own, `forward(dense [B, N], {feature: [B, D]}) → logits [B]`, or any
            module in `shadowsync.wrap`, instead of `config.model`.
        tables: embedding tables instead of `config.embedding.tables`.
        out: folder for results; None makes a new one in `runs/`.
        resume: folder of a run whose newest checkpoint to go on from, at the row where it was.
        start_from: folder of a run whose rows, weights and optimizer state this one begins with, on rows of its own.
        callbacks: what else is told of the run, beside those of `report.callbacks`.
        failures: called with a trainer's rank and iteration before each step; raises `TrainerLost` to script a death.
        data: the training rows, if no files hold them that the configuration names: a table of polars, pandas, pyarrow
            or Hugging Face, a dict of columns, or an iterable of those. They are kept in `out` and read from there.
        test_data: the test rows, likewise.
        loss: in place of the configured one, a function of logits `[B]` and labels `[B]` to the loss of each sample;
            of several labels a map of such functions by label.

    Raises:
        ConfigError: something is unknown or out of range; nothing was started.
    """

    def __init__(  # noqa: PLR0913 (all but the first by name)
        self,
        config: Config | Mapping[str, Any] | None = None,
        *,
        model: nn.Module | None = None,
        tables: Sequence[Table] | None = None,
        out: Path | str | None = None,
        resume: Path | str | None = None,
        failures: Callable[[int, int], None] = no_failures,
        data: object = None,
        test_data: object = None,
        loss: Loss | Mapping[str, Loss] | None = None,
        start_from: Path | str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.resume, self.start_from = _folder("resume", resume), _folder("start_from", start_from)
        if self.resume is not None and self.start_from is not None:
            raise ConfigError("resume goes on with a run, start_from (--from) begins another one: give one of them")
        self.out = _folder("out", out) or self.resume or new_folder()
        rows: dict[Split, object] = {"train": data, "test": test_data}
        names: Mapping[Split, str] = {"train": "data", "test": "test_data"}
        self._given = {split: Given(names[split], held) for split, held in rows.items() if held is not None}
        asked = config if isinstance(config, Config) else parse(dict(config or {}))
        if model is None:
            model = named_module(asked)
        elif names_code(asked.model.name):
            raise ConfigError(f"model.name={asked.model.name} and model=… are both given: leave one of them out")
        check_called(model)
        asked = with_kept_rows(asked, self._given, self.out, self.resume)
        self.callbacks = (*checked(callbacks), *named(asked.report.callbacks))
        self.own = Own(model, tables, failures, loss)
        runtime, self.why_there = where_roles_run(asked, self.own)
        self.config = with_runtime(asked, runtime)
        self.choices = choose_all(self.config, own_model=model is not None)
        source = self.choices.source
        if not (isinstance(source, TableOptions) and source.undeclared and not source.labels):  # else it is to be found
            own_losses(source.tasks, loss)

    def run(
        self,
        console: Console | None = None,
        on_frame: Callable[[Frame], None] | None = None,
        *,
        progress: bool = True,
    ) -> Result:
        """Trains to the end, evaluates on the test rows, and writes the results into `out`.

        Progress is shown on the console, stderr without one, or in the notebook; `progress=False` shows nothing.
        `on_frame` is called with each line of the history as it is written; what it raises ends the run.

        Raises:
            UserError: data, configuration or checkpoint cannot be used.
            RunError: something failed while the run was under way.
            Interrupted: a signal ended it; the checkpoint is written.
        """
        check_folder(self.out, self.resume)
        keep_freed_memory()
        with contextlib.ExitStack() as stack:
            stack.enter_context(only_writer(self.out))
            self._claim_place(stack)
            if self.out != self.resume:
                check_unused(self.out)
            console, began = console or Console(stderr=True, soft_wrap=True, quiet=not progress), time.monotonic()
            console.print(_headline(self), highlight=False)
            callbacks = (*self.callbacks, *([] if on_frame is None else [Watching(on_frame)]))
            self._keep_given(console)
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)  # workers are the parallelism: each operator runs in its worker's thread
            return _Run(self, began, console, callbacks, stack).to_the_end()

    def _keep_given(self, console: Console) -> None:
        """Puts rows that were given where the configuration says they are; a run has those that it began with."""
        for split, given in self._given.items():
            path = kept_path(self.out, split)
            if self.out == self.resume and path.exists():
                given.check_kept(path)
                told = "are kept in"
            else:
                told = f"({given.keep(path):,}) are now in"
            console.print(f"the rows of {given.name} {told} {path}", highlight=False)

    def _claim_place(self, stack: contextlib.ExitStack) -> None:
        """Nobody else may write to a folder of this machine that train.checkpoint_dir names."""
        place = self.config.train.checkpoint_dir
        path = None if place is None else local_path(place)
        if path is None or path.resolve() == self.out.resolve():
            return
        try:
            stack.enter_context(only_writer(path))
        except SaveError as error:
            raise SaveError(f"{error}, and nothing was trained: set train.checkpoint_dir to another place") from error


def _folder(name: str, given: object) -> Path | None:
    """What was given as `name`; raises `ConfigError` if that is no path."""
    if given is None:
        return None
    if not isinstance(given, str | PathLike):
        raise ConfigError(f"{name}={given!r} is no path: give a folder")
    return Path(given)


def train_from_command_line(
    path: Path | None,
    overrides: Sequence[str],
    out: Path | None,
    resume: Path | None,
    start_from: Path | None = None,
) -> None:
    """`shadowsync train`: shows progress and says where the results are."""
    if resume is not None and start_from is not None:
        raise ConfigError("--resume goes on with a run, --from begins another one: give one of them")
    if (before := resume or start_from) is None:
        config = load(path, overrides)
    else:
        config = _resumed_config(before, path, overrides, own=resume is not None and out in (None, resume))
    job = Job(config, out=out, resume=resume, start_from=start_from)
    console = Console(soft_wrap=True)
    try:
        job.run(console)
    except KeyboardInterrupt as interrupt:
        newest = CheckpointStore(checkpoint_root(job.out, job.config.train.checkpoint_dir)).newest()
        found = f"the newest checkpoint is {newest}: go on with shadowsync train --resume {job.out}"
        raise Interrupted(f"interrupted; {'nothing was saved' if newest is None else found}") from interrupt
    page, file = ("report", "report.html") if job.config.report.html else ("result", "result.json")
    console.print(f"{page}: {job.out / file}", highlight=False)


def where_roles_run(config: Config, own: Own) -> tuple[str, str]:
    """`cluster.runtime` and why; where it is `auto`, by what the job is and how many cores this process may use."""
    if config.cluster.runtime != "auto":
        return config.cluster.runtime, ""
    if config.cluster.address is not None:
        return "ray", "cluster.address is given"
    against = [
        (config.train.trainers == 1, "one trainer"),
        (cores() < _MANY_CORES, f"{cores()} cores"),
        (not can_share(), "this system has no memory that processes could share"),
        (config.train.device != "cpu", f"trainers share {config.train.device}"),
        (config.aggregation.method is not None, "gradients are gathered in one place"),
        ((config.recovery.inject or config.recovery.emulate_job_s) is not None, "failures are emulated"),
    ]
    for holds, why in against:
        if holds:
            return "inprocess", why
    try:
        packed(own)
    except Unsendable:
        return "inprocess", "what the job is made from cannot be sent to another process"
    return "processes", f"{config.train.trainers} trainers on {cores()} cores"


def with_runtime(config: Config, runtime: str) -> Config:
    """The configuration of a job there. What the user left open stays open in what is stored, for another machine."""
    if config.cluster.runtime == runtime:
        return config
    chosen = config.cluster.model_copy(update={"runtime": runtime})
    chosen.model_fields_set.discard("runtime")
    whole = config.model_copy(update={"cluster": chosen})
    whole.model_fields_set.intersection_update(set(config.model_fields_set))
    return whole


def _runtime_of(config: Config) -> Runtime:
    """What starts the roles of a job."""
    if config.cluster.runtime == "inprocess":
        return InProcess()
    if config.cluster.runtime == "processes":
        from shadowsync.runtime.processes import Processes  # noqa: PLC0415 an extra, as the next one

        return Processes(cpus_needed(config))
    from shadowsync.runtime.ray_runtime import RayRuntime  # noqa: PLC0415

    return RayRuntime(config.cluster.address, cpus_needed(config), resources_needed(config))


def given(config: Config) -> dict[str, Any]:
    """The configuration as the user gave it, without secrets: what goes into a checkpoint, so that defaults stay
    defaults, but for one that has changed."""
    stored = as_stored(config.model_dump(mode="json", by_alias=True, exclude_unset=True), config.written)
    if config.aggregation.method is not None:
        stored["aggregation"]["rows"] = config.aggregation.rows
    return stored


def _rows_before(stored: Mapping[str, Any]) -> str:
    """`aggregation.rows` of a stored configuration; one that lacks it is from when `containing` was the default."""
    return str((stored.get("aggregation") or {}).get("rows", "containing"))


def _divided_as_before(config: Config, saved: LoadedCheckpoint) -> Config | None:
    """With `aggregation.rows` as the checkpoint's steps were made, where nobody says otherwise; None if that is so."""
    own, before = config.aggregation, _rows_before(saved.config)
    merged = None in (own.method, parse(saved.config).aggregation.method)  # replicas, now or before
    if merged or "rows" in own.model_fields_set or before == own.rows:
        return None
    return config.model_copy(update={"aggregation": own.model_copy(update={"rows": before})})


class _Run:
    """One run from the first part to the last file."""

    def __init__(
        self,
        job: Job,
        began: float,
        console: Console,
        callbacks: Sequence[Callback],
        stack: contextlib.ExitStack,
    ) -> None:
        self.job, self.config, self.choices, self.console = job, job.config, job.choices, console
        self.callbacks = Callbacks(callbacks, lambda sentence: self._tell(f"warning: {sentence}"))
        self.began = began
        self._ends_at = math.inf
        self._out_of_time = False
        values = row_values(self.config.train.save_values)
        place = checkpoint_root(job.out, self.config.train.checkpoint_dir)
        self.store = store = CheckpointStore(place, self.config.train.keep, values)
        self.saved = self._load(store)
        if self.saved is not None:
            self._go_on_with(self.saved)
        self.start = None if job.start_from is None else Start(job.start_from)
        if self.start is None:
            self.config, self.choices = prepared(self.config, self.choices, self.saved, self._print)
        else:
            for sentence in self.start.saved.skipped:
                self._print(sentence)
            self.config, self.choices = self.start.prepared(self.config, self.choices)
        self._check_losses()
        train, valid, test = open_sources(self.config, self.choices)
        self.config, self.choices = _settled(self.config, self.choices, whole(train))
        for source in (train, valid, test):
            if source is not None:
                stack.callback(source.close)
        tasks = self.choices.source.tasks
        self.measuring = None if test is None else Measuring(self.config, tasks, test)
        # of more or fewer rows the reader has its own to say
        if self.saved is not None and Position.of(self.saved.position).book.rows == train.rows:
            match_data(self.saved.name, job_state(self.saved).data, train.marks(), self.config.data.accept)
        for sentence in too_short(self.config, train.rows * self.config.data.epochs):
            self._print(sentence)  # before trainers are made: so many may take minutes
        position = None if self.saved is None else self.saved.position
        self.saver = AsyncSaver()
        make_runtime = partial(_runtime_of, self.config)
        self.session = Session(self.config, self.choices, job.own, train, test, position, make_runtime, self._newest)
        stack.callback(self.session.close)
        started = time.monotonic()
        if self.saved is not None:
            _check_same(self.saved, self.config)
            self._unless_somebody_dies(partial(put_back, self.session, self.saved))
        elif self.start is not None:
            self._unless_somebody_dies(partial(self.start.fill, self.session))
        self.load_s = time.monotonic() - started
        self.seconds_before = 0.0
        self._first_began = 0.0  # the training, before any resume; as `time.monotonic`
        self._places: Mapping[str, Mapping[str, str | int]] = {}
        self._saving = False
        self._told_ways: set[tuple[str, str]] = set()
        self._not_left = ""
        self._told_of_loss = self._told_of_labels = False
        self._switches: Sequence[Switch] = () if self.saved is None else job_state(self.saved).aggregation.switches
        own = self.saved is not None and job.resume == job.out
        self.keeping = RecoveryController(self.session, store, self.saver, given(self.config), self.saved, own)
        self.keeping.on_saved = lambda name, samples: self.callbacks.tell(
            "on_checkpoint", f"{checkpoint_root(job.out, self.config.train.checkpoint_dir)}/{name}", samples
        )
        self.validation = None if valid is None else Validation(self.session, self.keeping, valid, self._tell)

    def _go_on_with(self, saved: LoadedCheckpoint) -> None:
        """What the checkpoint decides, and what must be as it was there."""
        if (before := _divided_as_before(self.config, saved)) is not None:
            self.config, self.choices = before, choose_all(before, own_model=self.choices.model is None)
            self._print(f"aggregation.rows={before.aggregation.rows}, as steps were made up to {saved.name}")
        self.choices = as_trained(self.choices, self.config, job_state(saved).layout)
        _check_split(saved, self.config)
        _check_measure(saved, self.config, self.choices.source.tasks)

    def _check_losses(self) -> None:
        """Raises `ConfigError` if functions of the user's own are none of the labels', or if a resumed run would not
        learn by those that it learnt by; says so of a run that begins with what was learnt by them. A single label may
        have another name."""
        tasks = self.choices.source.tasks
        given = own_losses(tasks, self.job.own.loss)
        saved = self.start.saved if self.start is not None else self.saved
        if saved is None or (given and len(tasks) == 1 == len(job_state(saved).own_losses)):
            return
        if not (missing := sorted({*job_state(saved).own_losses} - {*given})):
            return
        was = f"{saved.name} was trained with a loss of your own for {', '.join(missing)}"
        if self.start is None:
            raise ConfigError(f"{was}: go on from Python with shadowsync.Job(config, loss=…, resume=…)")
        self._print(
            f"{was}, which this run lacks: give it as shadowsync.Job(config, loss=…, start_from=…) if it is to go on"
        )

    def _load(self, store: CheckpointStore) -> LoadedCheckpoint | None:
        if self.job.resume == self.job.out and store.newest() is not None:
            # The store that saves must know what it goes on from, so that it may drop checkpoints newer than that.
            saved = store.load()
        elif (other := store.newest()) is not None:
            raise ConfigError(
                f"train.checkpoint_dir={self.config.train.checkpoint_dir} holds {other} of another run: go on with "
                "--resume and no --out, or set train.checkpoint_dir to another place"
            )
        elif self.job.resume is None:
            return None
        else:
            saved = load_checkpoint(self.job.resume)
        for sentence in saved.skipped:
            self.console.print(sentence, highlight=False)
        return saved

    @contextlib.contextmanager
    def _newest(
        self, shards: Sequence[Shard] | None, load: Callable[[LoadedCheckpoint], None] | None = None
    ) -> Iterator[LoadedCheckpoint | None]:
        """As `Newest`."""
        if shards is None:
            self.saver.wait()
        else:
            # everybody waits for these rows: neither for a save that lacks them now, nor for chains to be rewritten
            with self.store.given_up():
                self.saver.settle()
        if self.store.newest() is None:
            if self.saved is not None and load is not None:
                load(self.saved)
            yield self.saved
            return
        with self.store.opened(None, shards, load or LoadedCheckpoint.verify) as found:
            for sentence in found.skipped:
                self._tell(sentence)
            yield self.store.load(found.name) if shards is None else found

    def to_the_end(self) -> Result:
        make_folder(self.job.out, given(self.config))
        config = resolved(self.config, self.choices, self.session.warmup_samples)
        with self.callbacks.around(self.job.out, config), self.saver, self._reporter() as reporter:
            with stop_on_signals() as request:
                with self.session.recorder:
                    started = time.monotonic()
                    self._first_began = started - self.seconds_before
                    self._save_start()
                    self._train(reporter, request)
                self.keeping.take_stock()
                self._show(reporter, ended=True)
                self.saver.wait()
            self._raise_if_unfinished(request)
            test, units = self._evaluate()
            self._check_rows(test)
            self.keeping.take_stock()
            self._notice(reporter, saving=False)  # who died meanwhile
            validated = None if self.validation is None else self.validation.section()
            startup_s = started - self.began
            result = make_result(
                config, self.session, self.keeping, startup_s, self.load_s, test, units, validated, self._why_ended()
            )
            reporter.finish(result)
        self.callbacks.tell("on_end", result, None)
        return result

    def _reporter(self) -> Reporter:
        if self.saved is None or self.job.resume is None:
            return Reporter(self.job.out, self.console, self.config.report)
        earlier = frames_until(read_frames(self.job.resume, self._print), self.saved.samples)
        events = read_events(self.job.resume, self._print)
        self.seconds_before = max([event.seconds for event in events] + [frame.seconds for frame in earlier[-1:]] + [0])
        return Reporter(self.job.out, self.console, self.config.report, earlier, self.saved.samples, events)

    def _train(self, reporter: Reporter, request: StopRequest) -> None:
        if self.job.resume is not None and self.job.resume != self.job.out:
            self._bring_best(self.job.resume)
        finished = self.session.reader.finished
        if finished or self._why_over is not None:
            self._validate_the_end(reporter)
            self.keeping.save_last()
            self._tell(
                f"nothing is left to train: every row of the {self.config.data.epochs} epoch(s) was trained before; to "
                f"train on, set data.epochs={self.config.data.epochs + 1}, or begin on other rows with what was "
                f"learnt: shadowsync train --from {self.job.resume} data.path=…"
                if finished
                else f"training has ended early before: {self._why_over}; to train on, raise it, or set it to null"
            )
            return  # a finished run was resumed: synchronising without training would still move the replicas
        if self.config.train.checkpoint_dir is not None:  # the run's own folder is being written already
            self.store.try_writing()
        look_s = _QUICK_S if self.keeping.lively else _LOOK_S
        next_frame = time.monotonic() + self.config.report.every_s
        self.keeping.begin()
        for sentence in (self.keeping.why, large_columns(whole(self.session.train_source))):
            if sentence:
                self._tell(sentence)
        for remark in codec_remarks(self.config, self.choices):
            self._tell(remark, "codec")
        forget(self.job.out)
        self._look()
        self._ends_at = time.monotonic() + self.config.train.limit_s
        self.session.start()
        try:
            while not self._ended(reporter):
                left_s = min(next_frame - time.monotonic(), self.keeping.seconds_left(), look_s)
                self.session.ended.wait(max(0.0, left_s))
                self.session.ended.clear()
                self.session.reap()
                self._look()
                self._notice(reporter, self.saver.busy)
                if request.requested:
                    self.session.stop()
                elif time.monotonic() >= self._ends_at:
                    self._end_in_time()
                elif self.validation is not None and self.validation.is_due:
                    self._validate(reporter, lambda: request.requested)
                if (now := time.monotonic()) >= next_frame:
                    next_frame = now + self.config.report.every_s
                    self._show(reporter)
                if (due := self.keeping.due()) is not Due.NOTHING:
                    self.keeping.save(due)
        except KeyboardInterrupt:  # the second one: a model may hang, so nobody is waited for
            self.session.stop()
            raise
        except BaseException:
            self.session.stop()
            self._finish(reporter)
            raise
        self._finish(reporter)

    def _save_start(self) -> None:
        """What the run begins with is its first checkpoint, if it begins with what another one has learnt."""
        if self.start is not None:
            self._tell(self.start.sentence)
            self.console.print(self.start.table())
            self.keeping.save_first()

    def _end_in_time(self) -> None:
        self._ends_at, reader = math.inf, self.session.reader
        if not reader.finished and self._why_over is None:
            self._out_of_time = True
            limit, of = self.config.train.time_limit, self.session.total_samples
            self._tell(
                f"training ends after train.time_limit={limit}, with {reader.trained:,} of {of:,} samples trained"
            )
            self.session.stop()

    def _finish(self, reporter: Reporter) -> None:
        try:
            self.session.finish()
        finally:
            self._tell_switches()
            self._notice(reporter, saving=False)

    def _notice(self, reporter: Reporter, saving: bool) -> None:
        """Reports what has happened to the roles since the last time, and writes where they are."""
        session = self.session
        if saving != self._saving:
            session.events.add("driver", "saving" if saving else "saved")
            self._saving = saving
        for happened in session.events.take(self._first_began):
            # who drives has told its own decisions
            if happened.event in ("waiting", "moved") or (happened.event == "decided" and happened.role != "driver"):
                self._print(f"{happened.role}: {happened.detail}")
            reporter.note(happened)
        if (places := session.places()) != self._places:
            self._places = places
            write_atomically(self.job.out / "roles.json", json.dumps(places, indent=1).encode() + b"\n")

    def _look(self) -> None:
        self._leave_machines()
        for computing in self.session.computing():
            if (way := (computing.precision, computing.why)) not in self._told_ways:
                self._told_ways.add(way)
                self._tell(computing.sentence)
        for sentence in self.keeping.look():
            self._tell(sentence)
        self._tell_switches()

    def _leave_machines(self) -> None:
        """What was asked for in the folder of the run (`draining`)."""
        try:
            names = to_leave(self.job.out)
            self.session.leave(names)
        except (ConfigError, DataError) as error:
            if (told := str(error)) != self._not_left:
                self._tell(told)
            self._not_left = told

    def _tell_switches(self) -> None:
        """Those from one gradient method to another that were not told yet."""
        if (done := self.session.aggregation) is None:
            return
        for switch in untold(self._switches, done.switches):
            self._tell(switch.sentence)
        self._switches = done.switches

    def _print(self, sentence: str) -> None:
        self.console.print(sentence, highlight=False)

    def _tell(self, decision: str, about: About = "") -> None:
        self._print(decision)
        self.session.events.add("driver", "decided", decision, about)

    def _ended(self, reporter: Reporter) -> bool:
        """Nobody trains any more and the last image is taken; a server that dies before that is a reason to go on."""
        if self.session.alive():
            return False
        self.session.finish()
        saved = self._validate_the_end(reporter) and self.keeping.save_last()
        return saved or self.session.given_up is not None

    @property
    def _why_over(self) -> str | None:
        return None if self.validation is None else self.validation.why_over

    def _validate(self, reporter: Reporter, broken_off: Callable[[], bool] = lambda: False) -> bool:
        """Validates while nobody trains, and has everybody go on or stop; as `Validation.validate`."""
        if self.validation is None or not self.validation.validate(broken_off):
            return self.validation is None
        course = self.session.course
        self.callbacks.tell("on_validation", course.samples, course.measures)
        self._show(reporter)
        if self._out_of_time:
            return True
        if self._why_over is None or self.session.reader.finished:
            self.session.go_on_training()
        else:
            self._tell(f"training ends early, after {self.session.reader.trained:,} samples: {self._why_over}")
            self.session.stop()
        return True

    def _validate_the_end(self, reporter: Reporter) -> bool:
        """The state after the last row is measured, too, unless it is; false if somebody died."""
        over = self.session.reader.finished or self._out_of_time
        done = self.validation is None or self.validation.is_done or not over
        return done or self._validate(reporter)

    def _bring_best(self, resumed: Path) -> None:
        """What a resumed run goes on from comes along into a new folder with the best checkpoint so far."""
        if self.saved is None or not (name := self.session.course.checkpoint):
            return
        earlier = open_store(resumed)
        try:
            best = earlier.open(name)
        except CheckpointError as error:
            self._tell(f"the best checkpoint so far does not come along: {error}")
            return
        brought = self.store.save(as_whole(best))
        self.session.course = msgspec.structs.replace(self.session.course, checkpoint=plain_name(brought))
        self.store.best = brought
        if best.samples != self.saved.samples:
            self.store.save(as_whole(self.saved))

    def _show(self, reporter: Reporter, *, ended: bool = False) -> None:
        session, keeping = self.session, self.keeping
        counts = session.counts(keeping.saves, self.saver.busy)
        if keeping.settings.saves or keeping.account.pls:  # else of no interest: nobody saves, and nothing was lost
            counts = msgspec.structs.replace(
                counts,
                pls=keeping.account.pls,
                target_pls=keeping.target_pls,
                recovery_seconds=keeping.seconds(self.load_s),
                emulated_job_s=keeping.settings.job_s,
            )
        frame = session.recorder.frame(counts, session.wire_totals(), session.aggregation, ended=ended)
        reporter.show(frame)
        self._check_sense(frame, ended)
        self._check_labels(ended)
        self.callbacks.tell("on_frame", frame)

    def _check_sense(self, frame: Frame, ended: bool) -> None:
        """Says once that the loss is enormous, and ends the run if that is so for more than a few extreme rows.

        Raises:
            RunError: nothing can come of it any more.
        """
        mean, extremes, samples = self.session.recorder.window_loss()
        if mean <= _ODD_NATS or frame.ne_window is None:
            return
        found = f"training NE is {frame.ne_window:,.3g}, where 1 predicts the mean label"
        judged = ended or samples >= min(self.config.report.window, _JUDGED_SAMPLES)
        if judged and mean > EXTREME_NATS and extremes >= _MOST_EXTREMES:
            raise RunError(f"{found}, and nothing can be learnt like that: {self._remedy('scale {} to about −1 … 1')}")
        if not self._told_of_loss:
            self._told_of_loss = True
            self._tell(f"{found}: {self._remedy('look for extreme values in {}')}")

    def _remedy(self, dense: str) -> str:
        """What to do about an enormous loss; `dense` says what to do with the dense columns, if there are any."""
        source = self.session.train_source
        if not source.schema.dense:
            return "lower embedding.lr, model.embedding_dim or train.lr"
        largest = largest_column(whole(source))
        columns = "the dense columns" if largest is None else f"the dense columns ({largest})"
        return f"{dense.format(columns)}, or lower train.lr and embedding.lr"

    def _check_labels(self, ended: bool) -> None:
        """Says once that all labels so far are the same."""
        label, samples = self.session.recorder.only_label()
        judged = ended or samples >= min(self.config.report.window, _JUDGED_SAMPLES)
        if label is not None and judged and not self._told_of_labels:
            self._told_of_labels = True
            column = getattr(self.choices.source, "label", None)
            asked = (
                "nothing can be learnt from them" if column is None else f"is data.label ({column}) the right column?"
            )
            self._tell(f"all {samples:,} labels so far are {label}: {asked}")

    def _check_rows(self, test: TestMetrics | None) -> None:
        """Says what is odd about the rows that were read."""
        session = self.session
        bad = session.reader.skipped
        example = next(iter(session.train_source.bad_rows.examples), None)
        found = [left_out(bad, bad + session.reader.trained, "training rows", example)]
        if (rows := session.test_source) is not None:
            used, example = 0 if test is None else test.samples, next(iter(rows.bad_rows.examples), None)
            found += [left_out(rows.rows - used, rows.rows, "test rows", example)]
        if test is not None:
            found += [test.undefined("the test rows")]
        for sentence in filter(None, found):
            self._tell(sentence)

    def _raise_if_unfinished(self, request: StopRequest) -> None:
        reader = self.session.reader
        early = self._why_over is not None or (self._out_of_time and not reader.finished)
        if early and self.session.given_up is None:
            return
        if reader.finished:
            if not reader.trained:
                raise DataError(f"none of the {self.session.train_source.rows} training rows can be used")
            return
        saved = f"a checkpoint is written: go on with shadowsync train --resume {self.job.out}"
        if self.store.newest() is None:
            saved = "nobody was left of whom a checkpoint could be written"
        if request.requested:
            raise Interrupted(f"stopped by {request.name} after {reader.trained} samples; {saved}")
        why = self.session.given_up or "every trainer died"
        raise RunError(f"{why}, after {reader.trained} of {self.session.total_samples} samples; {saved}")

    def _why_ended(self) -> EndedSection:
        """Of a job that has ended as it should."""
        reader, epochs, limit = self.session.reader, self.config.data.epochs, self.config.train.time_limit
        if reader.finished:
            return EndedSection(why="epochs", detail=f"data.epochs={epochs} came to the last row")
        done = f"after {reader.trained:,} of {self.session.total_samples:,} samples"
        if self._out_of_time:
            return EndedSection(why="time_limit", detail=f"train.time_limit={limit} was over {done}")
        return EndedSection(why="early_stopping", detail=f"{done}: {self._why_over}")

    def _evaluate(self) -> tuple[TestMetrics | None, Units | None]:
        if (test := self.session.test_source) is None or self.measuring is None:
            return None, None

        def scores() -> tuple[Scored, Units | None]:
            best = self._best()
            replica = self.session.evaluation_replica() if best is None else self._replica_of(best)
            activity = UnitActivity(replica.module)
            return score(predictor(replica, self.session.predicting_client()), test, activity), activity.units()

        scored, units = self._unless_somebody_dies(scores)  # if a server does, from the last checkpoint
        if not torch.isfinite(scored.logits).all():
            raise NonFiniteLoss(
                "a test prediction is not finite: lower train.lr or embedding.lr, or set train.clip_norm=1"
            )
        return (self.measuring.of(scored) if len(scored.logits) else None), units

    def _best(self) -> str | None:
        """The checkpoint of the best state; None if that is the one at the end, or there is none."""
        course = self.session.course
        if course.best is None or course.best_samples == self.session.reader.trained:
            return None
        if not course.checkpoint:
            self._tell(
                f"the best state, of {course.best_samples:,} samples, could not be saved: the last one is tested"
            )
        return course.checkpoint or None

    def _replica_of(self, name: str) -> Replica:
        """The dense part of a checkpoint, whose rows take the place of those that were trained last."""
        with self.store.opened(name) as saved:
            self.session.load_rows(saved)
            replica = self.session.job.replica(self.session.template.module)
            restore_final(saved, replica)
        return replica

    def _unless_somebody_dies(self, attempt: Callable[[], T]) -> T:
        """What the attempt gives; if a role dies meanwhile, it was replaced before the next attempt."""
        while True:
            try:
                return attempt()
            except GONE:
                self.session.settle()


def open_sources(config: Config, choices: Choices) -> tuple[OpenSource, OpenSource | None, OpenSource | None]:
    """The training rows and, where there are any, the validation rows and the test rows.

    Raises:
        DataError: there is nothing to train on, or the others have other columns.
    """
    parts = open_parts(choices.source, config.data, *PARTS)
    train, valid, test = (parts.get(part) for part in PARTS)
    if train is None:
        raise DataError(f"data.name={config.data.name} has no training rows")
    if not train.labelled:
        raise ConfigError("data.label is null: there is nothing to learn from rows without labels")
    for name, source in (("validation", valid), ("test", test)):
        if source is not None and (difference := column_difference(source.schema, train.schema)) is not None:
            raise DataError(f"the {name} rows have {difference} (the training rows): give both the same columns")
    return train, valid, test


def _settled(config: Config, choices: Choices, train: OpenSource) -> tuple[Config, Choices]:
    """With those options of the source that its training rows have decided."""
    if not train.settled:
        return config, choices
    return with_data(config, **train.settled), dataclasses.replace(choices, source=settled(choices.source, train))


def resolved(config: Config, choices: Choices, warmup_samples: int) -> dict[str, Any]:
    """The whole configuration with every default, those of the chosen members too, and without secrets."""
    plain = config.model_dump(mode="json", by_alias=True)
    plain["train"]["warmup_samples"] = warmup_samples
    plain["train"]["prefetch"] = prefetch(config, choices)
    plain["data"] |= _plain_options(choices.source)
    if choices.aggregation is None:
        plain["sync"] |= _plain_options(choices.method) | _plain_options(choices.schedule)
    else:
        del plain["sync"]
        batch = choices.aggregation.size * config.train.batch_size
        plain["aggregation"] |= {**_plain_options(choices.aggregation.method), "global_batch": batch}
    plain["compression"] = {
        kind: {"name": codec.name, **_plain_options(codec)} for kind, codec in choices.codecs.items()
    }
    if choices.model is not None:
        plain["model"] |= _plain_options(choices.model)
    plain["embedding"] |= {"storage": choices.storage.name, "servers": server_count(config)}
    return as_stored(plain, config.written)


def _plain_options(member: Any) -> dict[str, Any]:
    options = {name: getattr(member, name) for name in option_names(type(member))}
    builtins: dict[str, Any] = msgspec.to_builtins(options, str_keys=True)
    return builtins


def _check_same(saved: LoadedCheckpoint, config: Config) -> None:
    """Raises `ConfigError` if the order of the data, or what a step is made of, would not be that of the checkpoint."""
    there = parse(saved.config)
    for key, was, now in (
        ("train.seed", there.train.seed, config.train.seed),
        ("data.shuffle", there.data.shuffle, config.data.shuffle),
        ("data.slice_rows", there.data.slice_rows, config.data.slice_rows),
    ):
        if was != now:
            raise ConfigError(f"{key}={now}: {saved.name} was trained with {was}, which decides what is left to train")
    if None in (there.aggregation.method, config.aggregation.method) or config.aggregation.global_batch is not None:
        return
    if (was := global_batch(there)) != (now := global_batch(config)):
        same = f"{was} to go on with the same steps, or to " if was % config.train.batch_size == 0 else ""
        raise ConfigError(
            f"aggregation.global_batch: a global step of {saved.name} was made of {was} samples, and would be of {now} "
            f"with these trainers, workers and train.batch_size: set it to {same}{now} if you mean it"
        )


def _check_split(saved: LoadedCheckpoint, config: Config) -> None:
    """Raises `ConfigError` if other rows would be kept from training than before."""

    def cut(split: SplitConfig | None) -> str:
        return "null" if split is None or split.path is not None else str(split)

    there = parse(saved.config).data
    for key, was, now in (
        ("test", cut(there.test), cut(config.data.test)),
        ("valid", cut(there.valid), cut(config.data.valid)),
        ("max_rows", str(there.max_rows or 0), str(config.data.max_rows or 0)),
    ):
        if was != now:
            raise ConfigError(
                f"data.{key}={now}: {saved.name} was trained with {was}, which decides what is left to train"
            )


def _check_measure(saved: LoadedCheckpoint, config: Config, tasks: Sequence[Task]) -> None:
    """Raises `ConfigError` if validations would be compared by another measure than the best one so far."""
    was, now = (compared_by(train, tasks) for train in (parse(saved.config).train, config.train))
    if config.data.valid is not None and was != now and course_of(saved).best is not None:
        raise ConfigError(
            f"train.best_by={now}: {saved.name} knows its best validation by {was}, which cannot be compared: leave it "
            "as it was"
        )


def _resumed_config(resume: Path, path: Path | None, overrides: Sequence[str], own: bool) -> Config:
    """What the run in a folder was configured with, and what is given now over it; it is its `own` folder to which
    results go."""
    given = read_given(path, overrides)
    changed = merge({}, given, [])
    train = changed.get("train")
    place = train.get("checkpoint_dir") if isinstance(train, dict) else None
    saved = load_to_resume(resume, place if own else None)
    sections = (changed.get("model"), saved.config.get("model"))
    named_it = any(names_code(str(section.get("name"))) for section in sections if isinstance(section, dict))
    if job_state(saved).own_model and not named_it:
        raise ConfigError(
            f"{resume} trained a module of your own: name its class with model.name=package.module:Class, or go on "
            f"from Python with shadowsync.Job(config, model=module, resume={str(resume)!r}), or start_from"
        )
    stored = _followed(with_rows_of(resume, saved.config), changed, resume, own)
    if (before := parse(stored)).aggregation.method is not None:  # what a step was made of stays, with more workers too
        made_of = {"global_batch": global_batch(before), "rows": _rows_before(saved.config)}
        stored = merge(stored, {"aggregation": made_of}, [])
    config = parse(resumed(stored, changed))
    given_batch = (changed.get("aggregation") or {}).get("global_batch")
    if config.aggregation.method is not None and not given_batch and global_batch(config) % config.train.batch_size:
        raise ConfigError(
            f"train.batch_size={config.train.batch_size}: a global step was made of {global_batch(config)} samples so "
            "far, which are not whole batches of that size: take one that divides them, or set "
            "aggregation.global_batch to a multiple of it"
        )
    return with_written(config, given)


def too_short(config: Config, total_samples: int) -> list[str]:
    """What is odd about a job of so few samples: nearly no steps, or learning rates that rise to its end."""
    train, found = config.train, []
    if config.aggregation.method is None:
        size, steps = train.batch_size * train.accumulate * train.trainers, "step(s) of each replica"
        made_of, lower = f"{train.batch_size:,} x {train.trainers:,} trainer(s)", "train.batch_size or train.trainers"
        if train.accumulate > 1:
            made_of, lower = f"{train.accumulate:,} x {made_of}", f"train.accumulate, {lower}"
    else:
        size, steps = global_batch(config), "global step(s)"
        made_of, lower = f"{size:,} samples", "aggregation.global_batch, train.batch_size or train.trainers"
    if total_samples <= (_FEW_STEPS - 1) * size:
        found.append(
            f"the job makes only {-(-total_samples // size)} {steps}, {total_samples:,} samples in all by {made_of}, "
            f"and learns next to nothing: lower {lower}, or raise data.epochs"
        )
    if train.warmup_samples is not None and train.warmup_samples >= total_samples:
        found.append(
            f"train.warmup_samples={train.warmup_samples} is not less than the {total_samples:,} samples of the job, "
            "so that the learning rates rise to its end and never reach what is set: lower it, or leave it out"
        )
    return found


def _followed(stored: dict[str, Any], changed: Mapping[str, Any], resume: Path, own: bool) -> dict[str, Any]:
    """A stored configuration without its cache, the address where figures are shown, and its place of checkpoints
    where results go elsewhere.

    Raises:
        ConfigError: the user has to give a place again that is not followed.
    """
    kept = without(without(stored, "data", "cache"), "report", "prometheus_host")
    if not own:
        kept = without(kept, "train", "checkpoint_dir")
    sections = {name: section for name, section in changed.items() if isinstance(section, dict)}
    given = {f"{name}.{key}" for name, section in sections.items() for key in section}
    again = {key: place for key, place in unfollowed(kept, resume).items() if key not in given}
    if again:
        raise ConfigError(
            f"{resume}: places beyond this folder, and code, that it stores are not followed ({', '.join(again)}): if "
            f"they are yours add {advice(again)}, or the configuration file that names them"
        )
    return kept


def _headline(job: Job) -> str:
    config, train, choices = job.config, job.config.train, job.choices
    if (steps := choices.aggregation) is None:
        method = f"{choices.method.name} {choices.schedule.name}"
    else:
        method = f"{steps.method.name} of {steps.size} x {train.batch_size:,} samples a step"
    where = "all in one process" if config.cluster.runtime == "inprocess" else "each role a process"
    if config.cluster.runtime == "ray":
        address = config.cluster.address
        where += f" on the Ray cluster at {address}" if address else " on a Ray started for this job"
    elif job.why_there:
        where += f" ({job.why_there})"
    return (
        f"{config.data.name}: {train.trainers} trainer(s) of {train.workers} worker(s), {server_count(config)} "
        f"embedding server(s) ({choices.storage.name}), {method}, {where}; results go to {job.out}"
    )
