"""A pause for a checkpoint in one process never depends on another process."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from helpers import PackedConnection, pause
from rings import PATIENCE_S, Hall, until

from shadowsync.compression.channel import Channel
from shadowsync.compression.plain import Plain
from shadowsync.compression.wire import WireCounter
from shadowsync.rpc.served import Served
from shadowsync.sync.all_reduce import RemoteAveraging
from shadowsync.sync.averaging import AveragingService
from shadowsync.sync.background import Background
from shadowsync.sync.dense import CentralCopy
from shadowsync.sync.every_k import EveryK
from shadowsync.sync.ma import ModelAveraging
from shadowsync.sync.method import Group
from shadowsync.sync.schedule import Schedule, Synchronisation
from shadowsync.training.gate import Gate
from shadowsync.training.worker import Driver


class Process:
    """A trainer with two workers and what its process has of its own: the gate."""

    def __init__(self, rank: int, service: AveragingService, hall: Hall, schedule: Schedule) -> None:
        self.gate, self.weights = Gate(), torch.full((3,), float(rank))
        connection, counter, resting = PackedConnection(Served(service)), WireCounter(), self.gate.resting
        averaging = RemoteAveraging(rank, connection, hall.ring, Plain(), counter, resting, check_s=0.02)
        servers = CentralCopy(rank, [], [], Channel("dense", Plain(), counter))
        self.group = Group(averaging, servers)
        method = ModelAveraging(alpha=1.0)
        self.driver: Driver = schedule.drive(Synchronisation(method, self.weights, self.group, 2, self.gate))
        for _ in range(2):
            self.gate.join()

    def worker(self, index: int, iterations: int) -> None:
        """Trains so much, without changing anything but by averaging."""
        for iteration in range(1, iterations + 1):
            self.driver.after_step(index, iteration)
            self.gate.step()
        self.driver.worker_left(index)
        self.gate.leave()


class Cluster:
    """Two processes, threads, and pauses that are held until told otherwise."""

    def __init__(self, schedule: Schedule) -> None:
        self.service, self.hall = AveragingService(range(2)), Hall()
        self.processes = [Process(rank, self.service, self.hall, schedule) for rank in range(2)]
        self.threads = ThreadPoolExecutor(12)
        self.ends: list[threading.Event] = []

    def pause(self, process: Process) -> tuple[threading.Event, threading.Event, Future[None]]:
        """Two events, set when the pause is complete and to end it, and the thread that holds it."""
        complete, end = threading.Event(), threading.Event()
        self.ends.append(end)

        def hold() -> None:
            with pause(process.gate):
                complete.set()
                end.wait(PATIENCE_S)

        return complete, end, self.threads.submit(hold)

    def close(self) -> None:
        """Lets everybody go."""
        for end in self.ends:
            end.set()
        for rank in range(2):
            self.service.dead(rank)
        self.threads.shutdown()


@pytest.fixture
def make() -> Iterator[Callable[[Schedule], Cluster]]:
    clusters: list[Cluster] = []

    def cluster(schedule: Schedule) -> Cluster:
        clusters.append(Cluster(schedule))
        return clusters[-1]

    yield cluster
    for one in clusters:
        one.close()


def waits_at_driver(cluster: Cluster, rank: int) -> bool:
    return rank in cluster.service._book._arrived


def test_workers_that_average_with_a_paused_trainer_stand_still(make: Callable[[Schedule], Cluster]) -> None:
    """A is paused at a boundary; in B one worker averages and the other one waits for it."""
    cluster = make(EveryK(k=2))
    first, second = cluster.processes
    complete_a, end_a, held_a = cluster.pause(first)
    workers = [cluster.threads.submit(first.worker, index, 2) for index in range(2)]
    assert complete_a.wait(PATIENCE_S), "both of its workers stand behind their first step"
    workers += [cluster.threads.submit(second.worker, index, 2) for index in range(2)]
    until(lambda: waits_at_driver(cluster, 1))
    complete_b, end_b, held_b = cluster.pause(second)
    assert complete_b.wait(PATIENCE_S), "although B's average depends on A"
    end_a.set()
    held_a.result(PATIENCE_S)
    until(lambda: cluster.service._book.round == 1)
    until(lambda: first.weights.tolist() == [0.5] * 3)
    assert second.weights.tolist() == [1.0] * 3, "B is still paused"
    end_b.set()
    held_b.result(PATIENCE_S)
    for worker in workers:
        worker.result(PATIENCE_S)
    assert second.weights.tolist() == [0.5] * 3


def test_a_worker_that_comes_back_meanwhile_stands_still_too(make: Callable[[Schedule], Cluster]) -> None:
    """It waits for the two that average, who wait for A."""
    cluster = make(EveryK(k=1))
    second = cluster.processes[1]
    second.driver.worker_idle(1)
    averages = cluster.threads.submit(second.driver.after_step, 0, 1)
    until(lambda: waits_at_driver(cluster, 1))
    second.driver.worker_back(1)
    comes_back = cluster.threads.submit(second.driver.after_step, 1, 1)
    complete, end, held = cluster.pause(second)
    assert complete.wait(PATIENCE_S)
    end.set()
    held.result(PATIENCE_S)
    second.driver.worker_left(0)
    second.driver.stop()
    for worker in (averages, comes_back):
        worker.result(PATIENCE_S)
    assert second.weights.tolist() == [1.0] * 3


def test_a_shadow_that_averages_with_a_paused_trainer_stands_still(make: Callable[[Schedule], Cluster]) -> None:
    cluster = make(Background(max_share=1.0))
    second = cluster.processes[1]
    for _ in range(2):
        second.gate.leave()
    second.driver.start()
    until(lambda: waits_at_driver(cluster, 1))
    complete, end, held = cluster.pause(second)
    assert complete.wait(PATIENCE_S)
    end.set()
    held.result(PATIENCE_S)
    second.driver.stop()


def test_processes_that_average_and_pause_again_and_again_never_hang(make: Callable[[Schedule], Cluster]) -> None:
    cluster, rounds = make(EveryK(k=3)), 600
    workers = [
        cluster.threads.submit(process.worker, index, rounds) for process in cluster.processes for index in range(2)
    ]

    def pauses(process: Process) -> int:
        count, between = 0, threading.Event()
        while not all(worker.done() for worker in workers):
            with pause(process.gate):
                before = process.weights.clone()
                for _ in range(20):
                    assert torch.equal(process.weights, before)
            count += 1
            between.wait(0.001)  # back to back, pauses would leave no time for a step
        return count

    counts = [cluster.threads.submit(pauses, process) for process in cluster.processes]
    for worker in workers:
        worker.result(PATIENCE_S)
    assert all(count.result(PATIENCE_S) > 1 for count in counts)
    assert cluster.service._book.round == rounds // 3
