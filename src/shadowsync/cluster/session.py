"""The session whose roles are processes of their own, on any number of machines."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext

from shadowsync.aggregation.aggregator import Worker
from shadowsync.aggregation.counts import AggregationState
from shadowsync.assembly import step_rule
from shadowsync.checkpoint.loading import LoadedCheckpoint
from shadowsync.checkpoint.written import Written
from shadowsync.cluster.blueprint import Blueprint
from shadowsync.cluster.crew import Crew
from shadowsync.cluster.dense_side import DenseSide, NobodyLeft
from shadowsync.cluster.front import Doors
from shadowsync.cluster.images import Images
from shadowsync.cluster.merged import Merged
from shadowsync.cluster.newcomers import Newcomers
from shadowsync.cluster.places import Need
from shadowsync.cluster.records import RecordTaker
from shadowsync.cluster.staff import Member, Staff
from shadowsync.cluster.statuses import Statuses
from shadowsync.cluster.stepped import Stepped
from shadowsync.cluster.vacancies import Vacancies
from shadowsync.data.reader import Reader
from shadowsync.dense_state import DenseImage, restored_dense
from shadowsync.embedding.client import EmbeddingClient
from shadowsync.embedding.table import Rows, RowSet, shares_of
from shadowsync.errors import RunError
from shadowsync.job_state import job_state
from shadowsync.metrics.roles import RoleState
from shadowsync.rpc.client import Courier, CourierOptions
from shadowsync.rpc.errors import GONE, PeerLost
from shadowsync.runtime.host import CALL_S, waiting_for
from shadowsync.runtime.runtime import Order, Runtime
from shadowsync.session import Material, Newest, RolePlace, ServerLoss, Session, reader_options
from shadowsync.training.kernels import Computing
from shadowsync.training.rates import Rates

STATUS_S = 1.0
QUICK_STATUS_S = 0.05
FINISH_S = 60.0
SEARCH_S = 1.0
ATTEMPTS = 20
POOL = 64


class ClusterSession(Session):
    """All roles of a run as processes that a `Runtime` starts, connected by the wire.

    Everybody gets a *part*: what its process serves. A *generation* of parts starts from one checkpoint. Whoever dies
    is replaced while the others go on; an embedding server's replacement takes its rows from the newest checkpoint.
    With `goes_back` the death of one ends the generation, and the next one starts from the newest checkpoint, in the
    same processes but the dead one's.

    The job's thread takes note of deaths and decides (`reap`). Threads of the pool put single members to work, or
    (`_go_back`, one at a time, and then nobody else) start a generation; they alone write `_must_go_back` besides it.

    Args:
        material: what it is made of.
        make_runtime: makes what starts processes; ended with this session.
        newest: loads the checkpoint to go back to.

    Raises:
        UserError: the configuration does not fit the data; nothing was started.
        RunError: somebody finds no room, ended at once, or died again and again.
    """

    def __init__(self, material: Material, make_runtime: Callable[[], Runtime], newest: Newest) -> None:
        super().__init__(material)
        self._material = material
        self._newest: Newest = lambda *_: nullcontext()  # a checkpoint is put back by whoever made this session
        self._beginning = self.recorder.state()
        blueprint, cluster = Blueprint.of(material, self), self.config.cluster
        self._vacancies = Vacancies(cluster.lost_after_s, cluster.min_trainers)
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
        with ExitStack() as stack:
            self.reader = Reader(self.train_source, reader_options(self.config), material.position)
            stack.callback(self._close_reader)
            runtime = make_runtime()
            stack.callback(runtime.close)  # once more, should something fail before its turn among the others
            self._crew = self._make_crew(runtime, blueprint, stack)
            stack.callback(self._crew.close_memory)
            self._images = Images(self._crew)
            self._dense = self._make_dense()
            stack.callback(self._dense.close)
            self._newcomers = Newcomers(self._dense, newest, self._crew, self._images)
            self._crew.hire_all()
            self._begin()
            self._newest = newest
            self._ends = stack.pop_all()

    def _make_crew(self, runtime: Runtime, blueprint: Blueprint, stack: ExitStack) -> Crew:
        """The driver's own parts; `stack` ends them, the last one first."""
        courier = Courier(runtime.keys, CourierOptions(timeout_s=CALL_S))
        stack.callback(courier.close)
        doors = Doors(runtime.keys, runtime.host(), RecordTaker(self.recorder), blueprint.trainers, blueprint.forget_s)
        stack.callback(doors.close)
        self._pool = ThreadPoolExecutor(POOL, thread_name_prefix="session")
        stack.callback(self._pool.shutdown, wait=True, cancel_futures=True)
        stack.callback(runtime.close)
        staff = Staff(runtime, courier, self.config.cluster.lost_after_s, self.happenings, self.ended.set)
        stack.callback(staff.close)
        stack.callback(self._closing.set)
        return Crew(blueprint, runtime, staff, doors, Statuses(self.ended.set), self._pool)

    def _make_dense(self) -> DenseSide:
        if (aggregating := self.choices.aggregation) is None:
            initial = self.template.flat.detach().cpu()
            return Merged(self.choices.method, self._images, self._crew.statuses, initial)
        train = self.config.train
        rates = Rates(self.warmup_samples, train.decay, train.final_lr, self.total_samples)
        rule = step_rule(self.config, aggregating, rates)
        return Stepped(aggregating.method, rule, self._crew, self._images)

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
        self._crew.build_servers(self.reader, self._dense, filled)
        self._dense.fill()
        self._crew.build_trainers()

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._training = True
        for member in self._crew.statuses.at_work():
            self._crew.ask_to_start(member)

    def alive(self) -> bool:
        if self._going_back is not None:
            return True
        if self.given_up is not None:
            return False
        if self._must_go_back is not None or self._crew.staff.anybody_died:
            return True
        trainers = self._crew.statuses.at_work()
        if self.reader.finished or self._stopping:
            return self._training and any(not self._crew.statuses.of(member).ended for member in trainers)
        if not self._crew.trainers() and not self._installs and not self._wanted_trainers():
            self.given_up = "every trainer died"
            return False
        return True

    def reap(self) -> None:
        if self._going_back is not None:
            if not self._going_back.done():
                return  # who dies meanwhile is seen to there
            going, self._going_back = self._going_back, None
            going.result()
        self._mourn_all()
        self._collect_installs()
        self._hear()
        self._dense.look()
        if self._must_go_back is not None and self.given_up is None:
            self._going_back = self._pool.submit(self._go_back, self._must_go_back)
            self._going_back.add_done_callback(lambda _: self.ended.set())
        else:
            self._recruit()

    def settle(self) -> None:
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
        serving = sum(len(self._crew.serving(kind)) for kind in ("embedding", "dense"))
        return self._crew.staff.anybody_died or serving < len(self._crew.blueprint.servers())

    def strikable(self) -> Mapping[str, int]:
        kinds = ("trainer", "reader", "embedding", "dense")
        return {kind: len(self._crew.staff.of_kind(kind)) for kind in kinds}

    def strike(self, kind: str, indices: Sequence[int]) -> None:
        for member in self._crew.staff.of_kind(kind):
            if member.index in indices:
                member.process.kill()

    def losses(self) -> list[ServerLoss]:
        losses = self._newcomers.losses
        return [losses.popleft() for _ in range(len(losses))]

    def _mourn_all(self) -> None:
        dead = self._crew.staff.take_dead()
        for member in dead:
            self._mourn(member)
        if servers := [m for m in dead if m.kind == "embedding" and m.role not in self._crew.memory]:
            self._mourn_embedding_servers(servers)

    def _mourn(self, member: Member) -> None:
        """Takes note that somebody died."""
        self._failures += 1
        if member.role not in self._scripted:
            self._vacancies.died(member.role, self.reader.trained, time.monotonic())
            self.given_up = self.given_up or self._vacancies.hopeless(member.role)
        take_note = {
            "trainer": self._mourn_trainer,
            "reader": self._mourn_reader,
            "dense": self._mourn_dense_server,
        }
        if member.kind in take_note:
            take_note[member.kind](member)

    def _mourn_embedding_servers(self, members: Sequence[Member]) -> None:
        if self.goes_back:
            self._must_go_back = f"{members[0].role} died"
        else:
            self._newcomers.died(members, self.reader.trained)

    def _mourn_trainer(self, member: Member) -> None:
        self._crew.doors.give_up(member.index)
        self._crew.statuses.forget(member)
        if not self._dense.is_with_trainers or self._crew.statuses.at_work():
            return
        if self.reader.finished or self._stopping or self._wanted_trainers():
            self._must_go_back = "no trainer is left whose weights the others could go on from"

    def _mourn_dense_server(self, member: Member) -> None:
        if self._dense.is_with_servers:
            self._must_go_back = f"{member.role} died, and the dense part with it"

    def _mourn_reader(self, _: Member) -> None:
        if self._crew.serving("reader"):
            self._crew.tell_of_readers()  # another takes over at once

    def _hear(self) -> None:
        """Hears how trainers are."""
        quick = self.reader.finished or self._stopping
        for member, status in self._crew.statuses.ask(QUICK_STATUS_S if quick else STATUS_S):
            for decision in self._crew.statuses.untold(member):
                self.happenings.add(member.role, "decided", decision, "codec")
            if status.lost:
                self._scripted.add(member.role)
                self._crew.staff.give_up(member, "it died by script")
            elif status.fault is not None:
                self._fail(member, status.fault.error())
            self._tell_of_waiting(member.role, status.waiting_for)
        members = [member for member in list(self._crew.staff.members.values()) if member.living]
        self._tell_of_waiting("driver", waiting_for((member.role, member.connection) for member in members))
        if self._dense.error is not None and self._error is None:
            self._error = self._dense.error
            self.stop()

    def _tell_of_waiting(self, role: str, waiting: str) -> None:
        """Everybody lives, and yet somebody gets no answer: nobody is given up for that, but it is not kept quiet."""
        if waiting and waiting != self._waiting.get(role):
            self.happenings.add(role, "waiting", waiting)
        self._waiting[role] = waiting

    def _fail(self, member: Member, error: Exception) -> None:
        """Something went wrong in a trainer: it lost somebody, or it is a reason to end the job."""
        if isinstance(error, GONE):
            self._crew.staff.give_up(member, str(error))
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
        self._crew.ask_to_stop()

    def finish(self) -> None:
        until = time.monotonic() + FINISH_S
        if self._going_back is not None:
            wait([self._going_back], FINISH_S)
        while self._training and self.given_up is None and self._error is None and time.monotonic() < until:
            if all(self._crew.statuses.of(member).ended for member in self._crew.statuses.at_work()):
                break
            if not (self._stopping or self.reader.finished):
                self.stop()
            self._hear()
            self.ended.wait(QUICK_STATUS_S)
            self.ended.clear()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._ends.close()

    def _close_reader(self) -> None:
        self.reader.close()

    # --- those who come in place of others ---------------------------------------------------------------------------

    def _wanted_trainers(self) -> list[str]:
        """Trainers that are not there and could be."""
        return [
            role for role in self._crew.vacant_trainers() if role not in self._scripted and role not in self._installs
        ]

    def _recruit(self) -> None:
        """Has vacant places filled where there is room; gives up where there is none for too long."""
        now = time.monotonic()
        vacant = [need for need in self._crew.vacant_servers() if need.role not in self._installs]
        over = self.reader.finished or self._stopping or not self._training
        # a newcomer needs all servers; and where nobody died there is no hurry to look for room
        wanted = [] if vacant or over or now < self._searched_at + SEARCH_S else self._wanted_trainers()
        if vacant or wanted:
            self._searched_at = now
            self._fill([*vacant, *(Need(role) for role in wanted)], now)
        if not over:
            expected = len(self._crew.trainers()) + len(self._scripted)
            self.given_up = self.given_up or self._vacancies.too_few(expected, now)
        if self.given_up is not None:
            self.stop()

    def _fill(self, needs: list[Need], now: float) -> None:
        places = self._crew.map()
        vital = ("embedding", "dense") if self._crew.serving("reader") else ("embedding", "dense", "reader")
        for need in needs:
            order = self._crew.order(places, need)
            if order is not None:
                self._installs[need.role] = self._pool.submit(self._install, order)
            if need.kind in vital and self._vacancies.too_long(need.role, now):
                self.given_up = places.why_not(need)

    def _collect_installs(self) -> None:
        for role, install in list(self._installs.items()):
            if install.done():
                del self._installs[role]
                error = install.exception()
                if error is None:
                    self._vacancies.taken(role)
                elif not isinstance(error, GONE):
                    self._error = self._error or error
                    self.stop()

    def _install(self, order: Order) -> None:
        """Starts a process for a role and puts it to work, while the others go on."""
        try:
            member = self._newcomers.install(order, self.reader, self._nobody_is_to_train)
        except NobodyLeft as error:
            self._must_go_back = str(error)
            raise
        self.happenings.add(member.role, "restored" if member.incarnation else "alive")

    def _nobody_is_to_train(self) -> bool:
        """The job stops, or goes back to a checkpoint, where everybody who lives gets a new part."""
        return self._stopping or self._must_go_back is not None or self._closing.is_set()

    # --- back to a checkpoint ----------------------------------------------------------------------------------------

    def _go_back(self, reason: str) -> None:
        """Ends this generation and starts the next one from the newest checkpoint, however often somebody dies."""
        began, trained, training = time.monotonic(), self.reader.trained, self._training
        dead = self._crew.vacant_row_servers()
        wait(list(self._installs.values()))
        self._collect_installs()
        for _ in range(ATTEMPTS):
            self._mourn_all()
            try:
                self._next_generation(training)
            except GONE:
                if self.given_up is None and not self._closing.is_set():
                    continue
            if self.given_up is None:
                name, samples = self._loaded
                seconds = (self._loading_at - began, self._loading_s)
                self._newcomers.losses.append(ServerLoss(dead, trained, samples, name, samples, *seconds))
            return
        self.given_up = self.given_up or f"too many roles died while the job went back to a checkpoint ({reason})"

    def _next_generation(self, training: bool) -> None:
        """`training`: everybody trained before somebody died, and is to do so again."""
        self._crew.end_trainers()
        newcomers = self._fill_places()
        if self.given_up is not None:
            return
        with self._newest(None, self._begin_from) as saved:
            if saved is None:
                self._begin_from(None)
        self._newcomers.forget_deaths()
        self._must_go_back = None
        self._vacancies.clear()
        trainers = [member.role for member in self._crew.trainers()]
        for role in dict.fromkeys([*newcomers, *trainers]):
            self.happenings.add(role, "restored")
        if training and not self.reader.finished:
            self.start()
            if self._stopping:
                self._ask_to_stop()

    def _begin_from(self, saved: LoadedCheckpoint | None) -> None:
        """Everybody gets a fresh part and what the checkpoint holds for it; may be done again with an older one."""
        before, position = self.reader, self._material.position if saved is None else saved.position
        first_number = (self._crew.generation + 1) << 32
        self.reader = Reader(self.train_source, reader_options(self.config), position, first_number)
        self._loaded = (None if saved is None else saved.name, self.reader.trained)
        before.close()
        wire = self.wire_totals()
        self._begin_generation(filled=saved is None)
        self._loading_at = time.monotonic()
        self._load(saved, wire)
        self._loading_s = time.monotonic() - self._loading_at

    def _load(self, saved: LoadedCheckpoint | None, wire: dict[str, dict[str, int]]) -> None:
        """Rows, dense part and counts of a checkpoint into fresh parts; without one they are the initial ones."""
        if saved is None:
            self.recorder.rewind(self._beginning)
            self.go_on(0, wire, AggregationState())
            return
        state = job_state(saved)
        self._images.load_rows(saved)
        self._dense.load(restored_dense(saved, self.choices.method, self.template, self._dense.copies))
        self.recorder.rewind(state.recorder)
        self.go_on(state.syncs, wire, state.aggregation)

    def _fill_places(self) -> list[str]:
        """Hires for every place that is vacant, trainers where there is room and one at least; those roles."""
        until = time.monotonic() + self.config.cluster.lost_after_s
        while True:
            self._mourn_all()
            places = self._crew.map()
            trainers = [Need(role) for role in self._wanted_trainers()]
            needs = [*self._crew.vacant_servers(), *trainers]
            orders = {need: self._crew.order(places, need) for need in needs}
            homeless = [need for need, order in orders.items() if order is None and need not in trainers]
            found = [order for order in orders.values() if order is not None]
            if not self._crew.trainers() and not any(order.role.startswith("trainer") for order in found):
                homeless += trainers[:1]
            if not homeless:
                break
            if time.monotonic() > until or self._closing.is_set():
                self.given_up = places.why_not(homeless[0])
                return []
            self._closing.wait(SEARCH_S)
        self._crew.hire(found)
        if not self._crew.trainers():
            raise PeerLost("no trainer is there")
        return [order.role for order in found]

    # --- images ------------------------------------------------------------------------------------------------------

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        with self._images.standing_still(self._disturbed), self._dense.paused():
            while not self._dense.settle(QUICK_STATUS_S):
                if self._disturbed() or self._dense.error is not None:
                    raise PeerLost("somebody died or cannot be reached, so the job cannot stand still")
            yield

    def _disturbed(self) -> bool:
        """Somebody died or cannot be reached, so that an image would not be whole or take too long."""
        if self._going_back is not None or self._must_go_back is not None or self._crew.staff.anybody_died:
            return True
        servers = [*self._crew.serving("embedding"), *self._crew.serving("dense")]
        complete = len(servers) == len(self._crew.blueprint.servers())
        everybody = [*servers, *self._crew.statuses.at_work()]
        return not complete or any(member.state != "alive" for member in everybody)

    def _check_settled(self) -> None:
        """Raises `PeerLost` while parts may hold anything."""
        if self._going_back is not None or self._must_go_back is not None:
            raise PeerLost("the job goes back to a checkpoint")

    def rows(self) -> tuple[Rows, ...]:
        self._check_settled()
        return self._images.rows()

    def changed_rows(self, end_of_round: bool) -> tuple[Rows | RowSet, ...]:
        self._check_settled()
        return self._images.changed_rows(end_of_round)

    def rows_beside(self) -> tuple[Rows, ...]:
        self._check_settled()
        return self._images.rows_beside()

    def rows_saved(self, rows: Sequence[Rows | RowSet], written: Written) -> float:
        self._check_settled()
        return self._images.rows_saved(rows, written)

    def row_shares(self) -> tuple[float, ...]:
        return shares_of(self._crew.blueprint.shards)

    def load_rows(self, saved: LoadedCheckpoint) -> None:
        with self._all_or_again():
            self._images.load_rows(saved)

    def dense_image(self) -> DenseImage:
        self._check_settled()
        return self._dense.image()

    def load_dense(self, image: DenseImage) -> None:
        with self._all_or_again():
            self._dense.load(image)

    def go_on(self, syncs: int, wire: dict[str, dict[str, int]], aggregation: AggregationState) -> None:
        super().go_on(syncs, wire, aggregation)
        with self._all_or_again():
            self._dense.restart(aggregation)

    @property
    def aggregation(self) -> AggregationState | None:
        return self._dense.aggregation

    def _held_bytes(self) -> int | None:
        return self._dense.held_bytes

    def recent_step_s(self) -> Mapping[Worker, float]:
        return self._dense.recent_step_s()

    def mean_step_s(self) -> Mapping[Worker, float]:
        return self._dense.mean_step_s()

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

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def failures(self) -> int:
        return self._failures

    def _syncs_now(self) -> int:
        return self._crew.statuses.syncs()

    def _wire_now(self) -> dict[str, dict[str, int]]:
        return self._crew.statuses.wire()

    def _codecs_now(self) -> Mapping[str, Sequence[str]]:
        return self._crew.statuses.codecs()

    def computing(self) -> list[Computing]:
        return self._crew.statuses.computing()

    def _replica_distance(self) -> float | None:
        return self._dense.distance(self._crew.statuses.sketches())

    def role_states(self) -> dict[str, RoleState]:
        states = {role: member.state for role, member in list(self._crew.staff.members.items())}
        return states | dict.fromkeys(list(self._installs), "restarting")

    def _queue_depths(self) -> dict[str, int]:
        return self._crew.statuses.waiting()

    def places(self) -> dict[str, RolePlace]:
        return self._crew.staff.places()
