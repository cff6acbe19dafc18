"""A job's roles, put together and connected, wherever they run: what a run starts, watches, images and ends."""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from shadowsync.aggregation.aggregator import Worker
from shadowsync.aggregation.coordinator import StepCoordinator, StepRule
from shadowsync.aggregation.counts import AggregationState
from shadowsync.assembly import GIB, computing_here, disk_of, make_module, make_tables, planned
from shadowsync.checkpoint.job_state import DenseImage, course_of, job_state, restored_dense
from shadowsync.checkpoint.loading import LoadedCheckpoint, Written
from shadowsync.choices import Choices, warmup_samples
from shadowsync.cluster.context import EventLog, JobContext, Near, Newest, Own
from shadowsync.cluster.dense_side import DenseSide, Merged, Stepped
from shadowsync.cluster.endpoints import Endpoints
from shadowsync.cluster.images import Images, Moved
from shadowsync.cluster.manager import ClusterManager, ClusterSpec
from shadowsync.cluster.moves import Moves
from shadowsync.cluster.outages import Outages, ServerLoss
from shadowsync.cluster.records import RecordTaker
from shadowsync.cluster.roles import ROLES
from shadowsync.cluster.scheduler import RestartPolicy
from shadowsync.cluster.statuses import ServerCounts, Statuses
from shadowsync.cluster.supervisor import Member, NobodyLeft, Supervisor
from shadowsync.cluster.trainer import TrainerPart
from shadowsync.compression.codec import Codec
from shadowsync.compression.wire import WireCounter, WireTotals
from shadowsync.config import Config
from shadowsync.data.reader import Reader, ReaderOptions
from shadowsync.data.source import OpenSource
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.service import EmbeddingService
from shadowsync.embedding.table import Rows, RowSet, shares_of
from shadowsync.errors import ConfigError, RunError
from shadowsync.metrics.history import JobCounts, RoleState
from shadowsync.metrics.recorder import Recorder
from shadowsync.rpc.errors import GONE, PeerLost
from shadowsync.rpc.served import ask
from shadowsync.runtime.runtime import LaunchRequest, Runtime, waiting_for
from shadowsync.training.course import Course
from shadowsync.training.gate import Gate
from shadowsync.training.kernels import Computing, processor
from shadowsync.training.losses import own_losses
from shadowsync.training.replica import Replica

STATUS_S = 1.0
QUICK_STATUS_S = 0.05
KEYS_S = 5.0
FINISH_S = 60.0
SEARCH_S = 1.0
TRY_S = 300.0
"""How long a vital role is tried to be started where there is room, beyond `cluster.lost_after_s`."""
ATTEMPTS = 20
POOL = 64


class Session:
    """All roles of a run, which a `Runtime` starts: in processes, connected by the wire, or as objects of this process.

    Everybody gets a *part*: what its process serves. A *generation* of parts starts from one checkpoint. Whoever dies
    is replaced while the others go on; an embedding server's replacement takes its rows from the newest checkpoint.
    With `goes_back` the death of one ends the generation, and the next one starts from the newest checkpoint, in the
    same processes but the dead one's. In one process nobody dies by itself; deaths by script are emulated
    (`inject_failure`).

    The job's thread takes note of deaths and decides (`reap`). Threads of the pool put single members to work, or
    (`_go_back`, one at a time, and then nobody else) start a generation; they alone write `_must_go_back` besides it.

    Args:
        config, choices, own: of the job.
        train, test: the rows.
        position: in the training rows, of a checkpoint; None from the start.
        make_runtime: makes what starts processes; ended with this session.
        newest: loads the checkpoint to go back to.

    Attributes:
        schema: of the training rows.
        tables: the embedding tables, in the job's order.
        template: a replica with the initial values, which nobody trains.
        reader: who trains what, and how far it is.
        recorder: gathers what workers did.
        ended: set when something may have ended.
        events: what happened to roles.
        given_up: why the job cannot go on, once it cannot.
        course: how validations have gone; what is put in its place counts from `go_on_training` on.
        most_held_bytes: memory that gradients took at most while they waited for their global steps, as far as it was
            looked at; None where that is not known.

    Raises:
        UserError: the configuration does not fit the data.
        RunError: somebody finds no room, ended at once, or died again and again.
    """

    def __init__(
        self,
        config: Config,
        choices: Choices,
        own: Own,
        train: OpenSource,
        test: OpenSource | None,
        position: Mapping[str, Any] | None,
        make_runtime: Callable[[], Runtime],
        newest: Newest,
    ) -> None:
        self.config, self.choices = config, choices
        self.train_source, self.test_source, self.schema = train, test, train.schema
        own = replace(own, model=planned(own.model, choices, self.schema))
        self.tables = make_tables(config, self.schema, own.tables, choices.model, own.model)
        job = self._make_job(own)
        module = make_module(self.config, self.choices, self.schema, self.tables, job.model)
        self.template = job.replica(module)
        self.job = job = replace(job, computing=computing_here(config, module), processor=processor())
        kind = choices.source.tasks[0].kind
        self.recorder = Recorder(self.config.train.trainers, self.config.report.window, kind=kind)
        self.ended = threading.Event()
        self.events = EventLog()
        self.given_up: str | None = None
        self.course = Course()
        self.most_held_bytes: int | None = None
        self._keys = ServerCounts(EmbeddingService.key_counts)
        self._stored = ServerCounts(EmbeddingService.stored_counts)
        self._wire_before = WireTotals()
        self._syncs_before = 0
        self._position = position
        self._newest: Newest = lambda *_: nullcontext()  # a checkpoint is put back by whoever made this session
        self._beginning = self.recorder.state()
        cluster = self.config.cluster
        self._restarts = RestartPolicy(cluster.lost_after_s, cluster.min_trainers)
        self._scripted: set[str] = set()
        self._installs: dict[str, Future[None]] = {}
        self._must_go_back: str | None = None
        self._going_back: Future[None] | None = None
        self._failures = 0
        self._waiting: dict[str, str] = {}
        self._loading_at = self._loading_s = 0.0
        self._loaded: tuple[str | None, int] = (None, 0)
        self._searched_at = 0.0
        self._error: BaseException | None = None
        self._training = self._stopping = False
        self._closing = threading.Event()
        self._news = threading.Event()
        self._counter = WireCounter()
        with ExitStack() as stack:
            self.reader = Reader(self.train_source, reader_options(self.config), position)
            stack.callback(lambda: self.reader.close())  # noqa: PLW0108 another takes its place when the job goes back
            runtime = make_runtime()
            stack.callback(runtime.close)  # once more, should something fail before its turn among the others
            self._direct = runtime.direct
            spec = ClusterSpec.of(job, self.train_source, self.template, runtime.direct)
            self._manager = self._make_manager(runtime, spec, stack)
            stack.callback(self._manager.close_memory)
            self._outages = self._manager.outages = Outages(newest)
            self._images = self._manager.images = Images(self._manager)
            self._dense = self._manager.dense = self._make_dense()
            self._moves = Moves(self._manager, self.events, self._pool, self.standing_still, self.ended.set)
            stack.callback(self._moves.close)
            stack.callback(self._dense.close)
            self._manager.launch_all()
            self._begin()
            self._newest = newest
            if self._direct:
                self._hear()
            self._ends = stack.pop_all()

    def _make_job(self, own: Own) -> JobContext:
        total = self.total_samples
        # the storage is the one that this machine chose, whatever others would, and its memory alike
        disk = disk_of(self.config)
        memory = None if disk is None else disk.memory_bytes / GIB
        resolved = {"storage": self.choices.storage.name, "memory_gib": memory}
        chosen = self.config.embedding.model_copy(update=resolved)
        config = self.config.model_copy(update={"embedding": chosen})
        rows, warmup = self.train_source.rows, self.warmup_samples
        job = config, self.choices, self.schema, rows, self.tables, warmup, total
        return JobContext(*job, own.model, own.failures, own_losses(self.choices.source.tasks, own.loss))

    def _make_manager(self, runtime: Runtime, spec: ClusterSpec, stack: ExitStack) -> ClusterManager:
        """The driver's own parts; `stack` ends them, the last one first."""
        connector = runtime.connector()
        stack.callback(connector.close)
        keys, records = None if runtime.direct else runtime.keys, RecordTaker(self.recorder)
        endpoints = Endpoints(keys, runtime.host(), records, spec.forget_s)
        stack.callback(endpoints.close)
        self._pool = ThreadPoolExecutor(POOL, thread_name_prefix="session")
        stack.callback(self._pool.shutdown, wait=True, cancel_futures=True)
        stack.callback(runtime.close)
        supervisor = Supervisor(runtime, connector, self.config.cluster.lost_after_s, self.events, self.ended.set)
        stack.callback(supervisor.close)
        stack.callback(self._closing.set)
        return ClusterManager(spec, runtime, supervisor, endpoints, Statuses(self.ended.set), self._pool)

    def _make_dense(self) -> DenseSide:
        if (aggregating := self.choices.aggregation) is None:
            return Merged(self._manager, self._images)
        train, rows_lr = self.config.train, self.config.embedding.lr
        rule = StepRule(aggregating.size, train.lr, rows_lr, self.job.rates, aggregating.rows_by_buffer)
        return Stepped(aggregating.method, rule, self._manager, self._images)

    def _begin(self) -> None:
        """The first generation; whoever dies meanwhile is replaced."""
        try:
            self._begin_generation()
        except GONE as error:
            self._go_back(f"somebody died at the start: {error}")
            if self.given_up is not None:
                raise RunError(self.given_up) from error

    def _begin_generation(self, filled: bool = True) -> None:
        """Everybody gets a part with its initial values, but for rows that are not to be `filled`."""
        self._training = False
        self._manager.build_servers(self.reader, filled)
        self._dense.fill()
        if self._direct:
            self._manager.near = self._near()
        self._manager.build_trainers(self.reader)

    def _near(self) -> Near:
        """What trainers of this process have in common."""
        manager, gate, rows, driver = self._manager, Gate(), self._manager.near_rows(), self._manager.endpoints.driver
        assert driver is not None
        dense = self._dense.near(manager.near_dense(), rows, gate, self._counter)
        return Near(
            module=self.template.module,
            reader=self.reader,
            recorder=self.recorder,
            gate=gate,
            counter=self._counter,
            embedding=rows,
            dense=dense,
            place=driver.place,
            give_back=driver.abandon,
            news=self._hear_soon,
            fail=self._fail_with,
        )

    @property
    def goes_back(self) -> bool:
        """When the rows of an embedding server are lost everybody goes back to the last checkpoint, not only its
        replacement."""
        return self._manager.goes_back

    @goes_back.setter
    def goes_back(self, everybody: bool) -> None:
        self._manager.goes_back = everybody

    def _hear_soon(self) -> None:
        """Some worker of this process has ended."""
        self._news.set()
        self.ended.set()

    def _fail_with(self, error: BaseException) -> None:
        self._error = self._error or error

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.go_on_training()
        self._training = True
        self._manager.are_filled()
        for member in self._manager.statuses.at_work():
            self._manager.ask_to_start(member)

    def go_on_training(self) -> None:
        """Rows are handed out up to the next validation, and learning rates are those that `course` says."""
        every, course = self.validate_every, self.course
        barrier = None if every is None else (course.passed // every + 1) * every
        self.reader.leases.go_on_to(barrier, course.scale, self.ended.set)

    def take_up(self, course: Course) -> None:
        """Goes on from the course of a checkpoint; of what is validated no more only the learning rates are left."""
        self.course = course if self.config.data.valid is not None else Course(scale=course.scale)

    def alive(self) -> bool:
        """Somebody is still training, or will be."""
        if self._going_back is not None:
            return True
        if self.given_up is not None:
            return False
        if self._must_go_back is not None or self._manager.supervisor.anybody_died:
            return True
        trainers = self._manager.statuses.at_work()
        if self.reader.finished or self._stopping:
            return self._training and any(not self._manager.statuses.of(member).ended for member in trainers)
        if not self._manager.trainers() and not self._installs and not self._wanted_trainers():
            self.given_up = "every trainer died"
            return False
        return True

    def reap(self) -> None:
        """Sees to roles that died, and stops everybody if something failed.

        Raises:
            RunError: the job cannot go on.
        """
        if self._going_back is not None:
            if not self._going_back.done():
                return  # who dies meanwhile is seen to there
            going, self._going_back = self._going_back, None
            going.result()
        self._note_deaths()
        self._collect_installs()
        self._hear()
        self._dense.look()
        if self._must_go_back is not None and self.given_up is None:
            self._moves.abort()
            self._going_back = self._pool.submit(self._go_back, self._must_go_back)
            self._going_back.add_done_callback(lambda _: self.ended.set())
        else:
            self._replace()

    def settle(self) -> None:
        """Waits until whoever died was replaced.

        Raises:
            RunError: the job cannot go on.
        """
        while self._going_back is not None or self._must_go_back is not None or self._servers_are_missing():
            self.reap()
            if self._error is not None:
                raise self._error
            if self.given_up is not None:
                raise RunError(self.given_up)
            self.ended.wait(QUICK_STATUS_S)
            self.ended.clear()

    def _servers_are_missing(self) -> bool:
        """Or will be, once the dead were taken note of."""
        return self._manager.supervisor.anybody_died or not self._manager.all_servers_serve()

    def leave(self, machines: Collection[str]) -> None:
        """Machines of these names, or ids of the runtime, are to be shut down: everybody there goes elsewhere.

        Raises:
            ConfigError: roles of this job stay where they are.
        """
        if machines and self.config.cluster.max_servers is None:
            raise ConfigError(
                f"{', '.join(sorted(machines))} cannot be emptied: this job's servers stay where they are, as "
                "cluster.max_servers is not set"
            )
        self._moves.leave(machines)

    def can_fail(self) -> Mapping[str, int]:
        kinds = ("trainer", "embedding") if self._direct else ("trainer", "reader", "embedding", "dense")
        return {kind: len(self._manager.supervisor.of_kind(kind)) for kind in kinds}

    def inject_failure(self, kind: str, indices: Sequence[int]) -> None:
        """Makes these roles of a kind fail now, as by script; those that are down already are left alone.

        In one process, where nobody can be killed, a trainer dies at its next step, and stays dead. An embedding server
        loses its rows: they become those of the last checkpoint, while the others go on. Where everybody would go back
        (`goes_back`), nothing is done but to account for it: the course of the job would be the same once more (as in
        CPR's emulation, arXiv 2011.02999).
        """
        struck = [member for member in self._manager.supervisor.of_kind(kind) if member.index in indices]
        if not self._direct:
            for member in struck:
                member.process.kill()
        elif kind == "trainer":
            for member in struck:
                ask(member.connection, TrainerPart.die)
        else:
            self._lose_rows(indices)

    def _lose_rows(self, indices: Sequence[int]) -> None:
        samples, began, servers = self.reader.trained, time.monotonic(), self._manager.near_rows()
        with self._newest([shard for index in indices for shard in servers[index].shards]) as saved:
            name, loaded_samples = (None, 0) if saved is None else (saved.name, saved.samples)
            for index in indices:
                if not self.goes_back:
                    servers[index].lose(None if saved is None else saved.rows_of(servers[index].shards))
        self._failures += len(indices)
        for index in indices:
            self.events.add(f"embedding-{index}", "dead", "its rows are lost, by script")
            self.events.add(f"embedding-{index}", "restored")
        back_to, load_s = loaded_samples if self.goes_back else None, time.monotonic() - began
        self._outages.losses.append(ServerLoss(tuple(indices), samples, back_to, name, loaded_samples, 0.0, load_s))

    def losses(self) -> list[ServerLoss]:
        """Failures of embedding servers that are over and were not told yet, in order."""
        losses = self._outages.losses
        return [losses.popleft() for _ in range(len(losses))]

    def _note_deaths(self) -> None:
        dead = self._manager.supervisor.take_dead()
        for member in dead:
            self._moves.abort(member.role)
            if member.asked:
                continue
            self._failures += 1
            if member.role not in self._scripted:
                self._restarts.died(member.role, self.reader.trained, time.monotonic())
                self.given_up = self.given_up or self._restarts.hopeless(member.role)
        for kind, role in ROLES.items():
            if members := [member for member in dead if member.kind == kind]:
                over = self.reader.finished or self._stopping
                needed = not self._direct and (over or bool(self._wanted_trainers()))
                why = role.on_death(self._manager, members, self.reader.trained, needed)
                self._must_go_back = why or self._must_go_back

    def _hear(self) -> None:
        """Hears how trainers are."""
        every_s = QUICK_STATUS_S if self.reader.finished or self._stopping else STATUS_S
        if self._news.is_set():
            self._news.clear()
            every_s = 0.0
        for member, status in self._manager.statuses.ask(every_s):
            for decision in self._manager.statuses.untold(member):
                self.events.add(member.role, "decided", decision, "codec")
            if status.lost and status.ended:
                self._scripted.add(member.role)
                self._manager.supervisor.give_up(member, "it died by script", end=not self._direct)
            elif status.fault is not None:
                self._fail(member, status.fault.error())
            self._tell_of_waiting(member.role, status.waiting_for)
        members = [member for member in list(self._manager.supervisor.members.values()) if member.living]
        self._tell_of_waiting("driver", waiting_for((member.role, member.connection) for member in members))
        self._error = self._error or self._dense.error
        if self._error is not None:
            self.stop()

    def _tell_of_waiting(self, role: str, waiting: str) -> None:
        """Everybody lives, and yet somebody gets no answer: nobody is given up for that, but it is not kept quiet."""
        if waiting and waiting != self._waiting.get(role):
            self.events.add(role, "waiting", waiting)
        self._waiting[role] = waiting

    def _fail(self, member: Member, error: Exception) -> None:
        """Something went wrong in a trainer: it lost somebody, or it is a reason to end the job."""
        if isinstance(error, GONE):
            self._manager.supervisor.give_up(member, str(error))
        else:
            self._error = self._error or error
            self.stop()

    def stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._ask_to_stop()
        self.reader.close()

    def _ask_to_stop(self) -> None:
        self._dense.stop()  # first: the last worker to leave would otherwise complete a step with what there is
        self._manager.ask_to_stop()

    def finish(self) -> None:
        """Waits for everybody; raises what ended the job early."""
        self._moves.end()
        until = time.monotonic() + (math.inf if self._direct else FINISH_S)
        if self._going_back is not None:
            wait([self._going_back], FINISH_S)
        while self._training and self.given_up is None and time.monotonic() < until:
            if self._error is not None and not self._direct:
                break
            if all(self._manager.statuses.of(member).ended for member in self._manager.statuses.at_work()):
                break
            if not (self._direct or self._stopping or self.reader.finished):
                self.stop()
            self._hear()
            self.ended.wait(QUICK_STATUS_S)
            self.ended.clear()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._ends.close()

    # --- those who come in place of others ---------------------------------------------------------------------------

    def _wanted_trainers(self) -> list[str]:
        """Trainers that are not there and could be."""
        return [
            role
            for role in self._manager.vacant_trainers()
            if role not in self._scripted and role not in self._installs
        ]

    def _replace(self) -> None:
        """Has vacant places filled where there is room; gives up where there is none for too long."""
        now = time.monotonic()
        vacant = [request for request in self._manager.vacant_servers() if request.role not in self._installs]
        over = self.reader.finished or self._stopping or not self._training
        # a trainer needs all servers; and where nobody died there is no hurry to look for room
        wanted = [] if vacant or over or now < self._searched_at + SEARCH_S else self._wanted_trainers()
        if vacant or wanted:
            self._searched_at = now
            self._fill([*vacant, *map(self._manager.request, wanted)], now)
        if not over:
            expected = len(self._manager.trainers()) + len(self._scripted)
            self.given_up = self.given_up or self._restarts.too_few(expected, now)
        if self.given_up is not None:
            self.stop()
        elif self.config.cluster.max_servers is not None and not (vacant or over or self._installs):
            self._moves.look(now)

    def _fill(self, requests: list[LaunchRequest], now: float) -> None:
        scheduler = self._manager.scheduler()
        vital = ("embedding", "dense") if self._manager.serving("reader") else ("embedding", "dense", "reader")
        for request in requests:
            launch = self._manager.place(scheduler, request)
            if launch is not None:
                self._installs[request.role] = self._pool.submit(self._install, launch)
            if request.kind not in vital:
                continue
            if launch is None and self._restarts.too_long(request.role, now):
                self.given_up = scheduler.why_not(request)
            elif self._restarts.too_long(request.role, now - TRY_S):
                self.given_up = f"{request.role} could not be started again; events.jsonl says what was tried"

    def _collect_installs(self) -> None:
        for role, install in list(self._installs.items()):
            if install.done():
                del self._installs[role]
                error = install.exception()
                if error is None:
                    self._restarts.taken(role)
                elif not isinstance(error, GONE):
                    self._error = self._error or error
                    self.stop()

    def _install(self, launch: LaunchRequest) -> None:
        """Starts a process for a role and puts it to work, while the others go on."""
        supervisor = self._manager.supervisor
        member = supervisor.launch(launch)
        try:
            ROLES[member.kind].on_join(self._manager, member, self.reader, self._nobody_is_to_train)
        except BaseException as error:
            supervisor.give_up(member, f"it could not be put to work: {error}")
            if isinstance(error, NobodyLeft):
                self._must_go_back = str(error)
            raise
        self.events.add(member.role, "restored" if member.incarnation else "alive")

    def _nobody_is_to_train(self) -> bool:
        """The job stops, or goes back to a checkpoint, where everybody who lives gets a new part."""
        return self._stopping or self._must_go_back is not None or self._closing.is_set()

    # --- back to a checkpoint ----------------------------------------------------------------------------------------

    def _go_back(self, reason: str) -> None:
        """Ends this generation and starts the next one from the newest checkpoint, however often somebody dies."""
        began, trained, training = time.monotonic(), self.reader.trained, self._training
        dead = self._manager.vacant_row_servers()
        self._moves.end()
        wait(list(self._installs.values()))
        self._collect_installs()
        for _ in range(ATTEMPTS):
            self._note_deaths()
            try:
                self._next_generation(training)
            except GONE:
                if self.given_up is None and not self._closing.wait(SEARCH_S):
                    continue
            if self.given_up is None:
                name, samples = self._loaded
                seconds = (self._loading_at - began, self._loading_s)
                self._outages.losses.append(ServerLoss(dead, trained, samples, name, samples, *seconds))
            return
        self.given_up = self.given_up or f"too many roles died while the job went back to a checkpoint ({reason})"

    def _next_generation(self, training: bool) -> None:
        """`training`: everybody trained before somebody died, and is to do so again."""
        self._manager.end_trainers()
        launched = self._fill_places()
        if self.given_up is not None:
            return
        with self._newest(None, self._begin_from) as saved:
            if saved is None:
                self._begin_from(None)
        self._outages.forget()
        self._must_go_back = None
        self._restarts.clear()
        trainers = [member.role for member in self._manager.trainers()]
        for role in dict.fromkeys([*launched, *trainers]):
            self.events.add(role, "restored")
        if training and not self.reader.finished:
            self.start()
            if self._stopping:
                self._ask_to_stop()

    def _begin_from(self, saved: LoadedCheckpoint | None) -> None:
        """Everybody gets a fresh part and what the checkpoint holds for it; may be done again with an older one."""
        before, position = self.reader, self._position if saved is None else saved.position
        first_number = (self._manager.generation + 1) << 32
        self.reader = Reader(self.train_source, reader_options(self.config), position, first_number)
        self._loaded = (None if saved is None else saved.name, self.reader.trained)
        before.close()
        wire = self.wire_totals()
        self._begin_generation(filled=saved is None)
        self._loading_at = time.monotonic()
        self._load(saved, wire)
        self._loading_s = time.monotonic() - self._loading_at

    def _load(self, saved: LoadedCheckpoint | None, wire: WireTotals) -> None:
        """Rows, dense part and counts of a checkpoint into fresh parts; without one they are the initial ones."""
        if saved is None:
            self.recorder.rewind(self._beginning)
            self.go_on(0, wire, AggregationState())
            self.course = Course()
            return
        state = job_state(saved)
        self.take_up(course_of(saved))
        self._images.load_rows(saved)
        self._dense.load(restored_dense(saved, self.choices.method, self.template, self._dense.copies))
        self.recorder.rewind(state.recorder)
        self.go_on(state.syncs, wire, state.aggregation)

    def _fill_places(self) -> list[str]:
        """Launches for every place that is vacant, trainers where there is room and one at least; those roles."""
        until = time.monotonic() + self.config.cluster.lost_after_s
        while True:
            self._note_deaths()
            scheduler = self._manager.scheduler()
            trainers = [self._manager.request(role) for role in self._wanted_trainers()]
            requests = [*self._manager.vacant_servers(), *trainers]
            placed = {request: self._manager.place(scheduler, request, anew=True) for request in requests}
            homeless = [request for request, found in placed.items() if found is None and request not in trainers]
            found = [launch for launch in placed.values() if launch is not None]
            if not self._manager.trainers() and not any(launch.role.startswith("trainer") for launch in found):
                homeless += trainers[:1]
            if not homeless:
                break
            if time.monotonic() > until or self._closing.is_set():
                self.given_up = scheduler.why_not(homeless[0])
                return []
            self._closing.wait(SEARCH_S)
        self._manager.launch(found)
        if not self._manager.trainers():
            raise PeerLost("no trainer is there")
        return [launch.role for launch in found]

    # --- images ------------------------------------------------------------------------------------------------------

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Inside, nobody changes anything.

        Raises:
            PeerLost: somebody died before everybody stood still.
        """
        with self._images.standing_still(self._disturbed), self._dense.paused():
            while not self._dense.settle(QUICK_STATUS_S):
                if self._disturbed() or self._dense.error is not None:
                    raise PeerLost("somebody died or cannot be reached, so the job cannot stand still")
            yield

    def _disturbed(self) -> bool:
        """Somebody died or cannot be reached, so that an image would not be whole or take too long."""
        if self._going_back is not None or self._must_go_back is not None or self._manager.supervisor.anybody_died:
            return True
        servers = [*self._manager.serving("embedding"), *self._manager.serving("dense")]
        everybody = [*servers, *self._manager.statuses.at_work()]
        return not self._manager.all_servers_serve() or any(member.state != "alive" for member in everybody)

    def _check_settled(self) -> None:
        """Raises `PeerLost` while parts may hold anything."""
        if self._going_back is not None or self._must_go_back is not None:
            raise PeerLost("the job goes back to a checkpoint")

    def rows(self) -> tuple[Rows, ...]:
        """Copies of all rows with their optimizer state."""
        self._check_settled()
        return self._images.rows()

    def changed_rows(self, end_of_round: bool) -> tuple[Rows | RowSet, ...]:
        """The rows that are to be saved now, copied when they are read, while everybody goes on.

        Of each row everything is as of one moment between this call and its reading, which needs the memory of a few
        chunks and of the optimizer's state for the rows that are read together. Whoever reads hears of a server that
        is not there as whoever calls this.

        A save begins with this or with `rows_beside` and ends with `rows_saved`; they come from one thread at a time,
        which may be any. One that is never reported as saved comes up again in the next one.

        Args:
            end_of_round: tables that are not saved by priority are due too.

        Returns:
            As `Snapshot.tables` of a delta: of each shard of a table that is saved by priority those of its rows that
            are most worth it (under `recovery.priority=all` every row that changed), of others all or none.

        Raises:
            PeerLost: a server is not there.
        """
        self._check_settled()
        return self._images.changed_rows(end_of_round)

    def rows_beside(self) -> tuple[Rows, ...]:
        """All rows, copied when they are read, while everybody goes on; otherwise as `changed_rows`."""
        self._check_settled()
        return self._images.rows_beside()

    def rows_saved(self, rows: Sequence[Rows | RowSet], written: Written) -> float:
        """What the last `changed_rows` or `rows_beside` gave is safely written.

        Rows that were copied otherwise, or for an earlier save, may be given and change nothing: what was saved of
        them comes up once more.

        Args:
            rows: as given.
            written: their weights; asked for only where later ones will be compared with them.

        Returns:
            Seconds by which the save held training up in other processes (those of the processor, as a share of a
            machine's cores); what the threads of this one spent is not in it.

        Raises:
            PeerLost: a server is not there.
            CheckpointError: what was written cannot be read. What was not told by then comes up once more.
        """
        self._check_settled()
        return self._images.rows_saved(rows, written)

    def row_shares(self) -> tuple[float, ...]:
        """The share of all rows that each embedding server holds; they add up to 1."""
        return shares_of(self._manager.spec.shards)

    def load_rows(self, saved: LoadedCheckpoint) -> None:
        """Fills all rows.

        Raises:
            CheckpointError: it has other tables, another optimizer, or is damaged.
        """
        with self._all_or_again():
            self._images.load_rows(saved)

    def dense_image(self) -> DenseImage:
        """Copies of the dense part of every living trainer (where none lives, of the fallen), and the central one."""
        self._check_settled()
        return self._dense.image()

    def load_dense(self, image: DenseImage) -> None:
        """Fills the dense part of every trainer and the dense servers."""
        with self._all_or_again():
            self._dense.load(image)

    def begin_with(
        self, saved: LoadedCheckpoint, taken: Mapping[str, int | Moved], with_state: bool, image: DenseImage
    ) -> None:
        """Fills the first rows of tables, as many as are `taken`, by name, from a checkpoint, or all that are `Moved`,
        and the dense parts; `with_state`: with what the optimizer keeps for the rows."""
        with self._all_or_again():
            self._images.take_rows(saved, taken, with_state)
            self._dense.load(image)

    def go_on(self, syncs: int, wire: WireTotals, aggregation: AggregationState) -> None:
        """Counts on from a checkpoint's synchronisations, bytes and global steps."""
        self._syncs_before, self._wire_before = syncs, wire
        with self._all_or_again():
            self._dense.restart(aggregation)

    @property
    def aggregation(self) -> AggregationState | None:
        """What a gradient method has done, before a resume too; None where replicas are merged."""
        return self._dense.aggregation

    @property
    def coordinator(self) -> StepCoordinator | None:
        """Of the global steps; None where replicas are merged."""
        return self._dense.coordinator

    @contextmanager
    def _all_or_again(self) -> Iterator[None]:
        """Who dies meanwhile leaves parts half-filled: `settle` then starts all of them from the checkpoint."""
        try:
            yield
        except GONE as error:
            self._must_go_back = f"somebody died while a checkpoint was put back: {error}"
            raise

    def predicting_client(self) -> EmbeddingClient:
        self._check_settled()
        return self._images.predicting_client()

    @property
    def dense_copies(self) -> int:
        """Replicas of the dense part in an image: one for each trainer, or the one that global steps move."""
        return self.config.train.trainers if self.choices.aggregation is None else 1

    def final_weights(self, image: DenseImage) -> Tensor:
        """The dense parameters that the method would evaluate, `[P]`."""
        return self.choices.method.final([trainer.replica["weight"] for trainer in image.trainers], image.center)

    def evaluation_replica(self) -> Replica:
        """A replica with the final weights, apart from those that train; buffers are the first living trainer's."""
        image = self.dense_image()
        replica = self.job.replica(self.template.module)
        image.trainers[0].put_into(replica)
        replica.flat.copy_(self.final_weights(image))
        return replica

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def failures(self) -> int:
        return self._failures

    @property
    def moves(self) -> int | None:
        """Servers that have changed their machine; None where they stay."""
        return None if self.config.cluster.max_servers is None else self._manager.moved

    def computing(self) -> list[Computing]:
        """How workers compute, each way once; nothing as long as no trainer has said so."""
        return self._manager.statuses.computing()

    def role_states(self) -> dict[str, RoleState]:
        states = {role: member.state for role, member in list(self._manager.supervisor.members.items())}
        return states | dict.fromkeys(list(self._installs), "restarting")

    def places(self) -> dict[str, dict[str, str | int]]:
        """Where each role is that has a process of its own, by name."""
        return {} if self._direct else self._manager.supervisor.places()

    @property
    def total_samples(self) -> int:
        return self.train_source.rows * self.config.data.epochs

    @property
    def warmup_samples(self) -> int:
        """Samples over which the learning rates rise; Adagrad's first steps are long and kill ReLUs otherwise."""
        given = self.config.train.warmup_samples
        return given if given is not None else warmup_samples(self.config, self.total_samples)

    @property
    def validate_every(self) -> int | None:
        """Training rows, bad ones counted, between validations; None where there are none."""
        if self.config.data.valid is None:
            return None
        every = self.config.train.validate_every
        return every if isinstance(every, int) else self.train_source.rows

    @property
    def learning_rates(self) -> dict[str, float]:
        """As they are now."""
        train, rows_lr = self.config.train, self.config.embedding.lr
        factor = self.job.rates.factor(self.reader.trained) * self.course.scale
        return {"dense": train.lr * factor, "rows": rows_lr * factor}

    @property
    def sync_count(self) -> int:
        """Synchronisations so far, all trainers, those before a resume included."""
        return self._syncs_before + self._manager.statuses.syncs()

    def wire_totals(self) -> WireTotals:
        """What crossed so far, before a resume too."""
        statuses, counter = self._manager.statuses, self._counter
        here = counter.totals() if self._direct else statuses.wire()
        return self._wire_before.plus(here)

    def codecs(self, only_chosen: bool = False) -> dict[str, str]:
        """By kind of traffic, the codec in use; where trainers have chosen several, all of them."""
        given, now = self.choices.codecs, self._manager.statuses.codecs()
        kinds = [kind for kind, codec in given.items() if not only_chosen or len(codec.levels) > 1]
        return {kind: _in_order(given[kind], now.get(kind, ())) for kind in kinds}

    def key_counts(self, wait: bool = True) -> dict[str, int]:
        """Of dynamic tables, as `keys.Counts`: as heard last, or having waited for all servers. Empty without any."""
        if not any(table.ids is not None for table in self.tables):
            return {}
        return self._keys.ask(self._manager.serving("embedding"), KEYS_S if wait else 0.0)

    def stored_counts(self, wait: bool = True) -> dict[str, int]:
        """Of rows on disk, as `StorageCounts`; else as `key_counts`."""
        if not self.choices.storage.on_disk:
            return {}
        return self._stored.ask(self._manager.serving("embedding"), KEYS_S if wait else 0.0)

    def counts(self, saves: int, checkpointing: bool = False) -> JobCounts:
        """What the recorder does not know by itself, but for what failures have cost."""
        if self._direct:  # it costs nothing to be up to date
            self._news.set()
            self._hear()
        held = self._dense.held_bytes
        if held is not None:
            self.most_held_bytes = max(self.most_held_bytes or 0, held)
        return JobCounts(
            total_samples=self.total_samples,
            sync_count=self.sync_count,
            replica_distance=self._dense.distance(self._manager.statuses.sketches()),
            saves=saves,
            wire_codecs=self.codecs(only_chosen=True),
            checkpointing=checkpointing,
            failures=self.failures,
            roles=self.role_states(),
            queue_depth=self._manager.statuses.waiting(),
            emulated_step_ms=self.config.train.emulate_step_ms,
            step_seconds={} if self.coordinator is None else by_name(self.coordinator.recent_step_s()),
            held_bytes=held,
            keys=self.key_counts(wait=False),
            stored=self.stored_counts(wait=False),
            valid=self.course.measures,
            valid_samples=self.course.samples if self.course.validations else None,
            learning_rates={} if self.validate_every is None else self.learning_rates,
        )


def reader_options(config: Config) -> ReaderOptions:
    """How the training rows are read."""
    data, batch_size = config.data, config.train.batch_size
    return ReaderOptions(
        batch_size=batch_size,
        slice_rows=max(batch_size, data.slice_rows // batch_size * batch_size),
        epochs=data.epochs,
        shuffle=data.shuffle is not False,
        window=data.window,
        seed=config.train.seed,
        readers=data.readers,
        prefetch=data.prefetch,
    )


def by_name(step_s: Mapping[Worker, float]) -> dict[str, float]:
    """Seconds by `trainer.worker`, in their order, to the microsecond."""
    known = {worker if isinstance(worker, tuple) else (worker,): seconds for worker, seconds in step_s.items()}
    return {".".join(map(str, worker)): round(seconds, 6) for worker, seconds in sorted(known.items())}


def _in_order(codec: Codec, names: Collection[str]) -> str:
    """These codecs of the ladder, the weakest first; its first one where there are none."""
    chosen = [level.name for level in codec.levels if level.name in names]
    return ", ".join(chosen) or codec.levels[0].name
