"""A trainer: one dense replica, its Hogwild workers and its shadow."""

import threading

from shadowsync.training.gate import Gate
from shadowsync.training.replica import Replica
from shadowsync.training.worker import StepListener, TrainerLost, Worker


class Trainer:
    """Trains one replica with several workers in threads (a role).

    Args:
        rank: among the trainers.
        replica: the dense part, which the workers' modules alias.
        listener: synchronises the replica.
        gate: where threads stand still for a checkpoint.
    """

    def __init__(self, rank: int, replica: Replica, listener: StepListener, gate: Gate) -> None:
        self.rank = rank
        self.replica = replica
        self.gate = gate
        self.error: BaseException | None = None
        self.finished = False
        self._listener = listener
        self._workers: list[Worker] = []
        self._threads: list[threading.Thread] = []
        self._left: list[int] = []

    def add(self, worker: Worker) -> None:
        """Adds a Hogwild worker, before the start."""
        index = len(self._workers)
        self._workers.append(worker)
        name = f"worker-{self.rank}.{index}"
        self._threads.append(threading.Thread(target=self._run, args=(index, worker), name=name, daemon=True))

    @property
    def lost(self) -> bool:
        """This trainer died by script, so that its leases go to the others."""
        return isinstance(self.error, TrainerLost)

    @property
    def failed(self) -> bool:
        """Something went wrong that ends the job."""
        return self.error is not None and not self.lost

    def start(self) -> None:
        """Starts the shadow and the workers."""
        self._listener.start()
        for thread in self._threads:
            self.gate.join()
            thread.start()

    def alive(self) -> bool:
        """Workers are still at work, or wait for something to do."""
        return len(self._left) < len(self._threads)

    def stepping(self) -> bool:
        """Some worker is at a step, or about to be: what the trainer holds cannot be given to others yet."""
        return any(not worker.idle for index, worker in enumerate(self._workers) if index not in self._left)

    @property
    def quiet(self) -> bool:
        """All gradients are where they belong; to be asked while everybody stands still."""
        return all(worker.quiet for worker in self._workers)

    def finish(self) -> None:
        """Waits for the workers and stops the shadow; what went wrong is kept in `error`."""
        if self.finished:
            return
        for thread in self._threads:
            thread.join()
        self.finished = True
        try:
            self._listener.stop()
        except BaseException as error:
            self.error = self.error or error

    def _run(self, index: int, worker: Worker) -> None:
        try:
            worker.run()
        except BaseException as error:
            self.error = self.error or error
        finally:
            self._listener.worker_left(index)
            self.gate.leave()
            self._left.append(index)
            worker.ended()
