"""A trainer: one dense replica, its Hogwild workers and its shadow."""

import threading
from collections.abc import Sequence

from shadowsync.training.gate import Gate
from shadowsync.training.replica import Replica
from shadowsync.training.worker import StepListener, TrainerLost, Worker


class Trainer:
    """Trains one replica with several workers in threads (a role).

    Args:
        rank: among the trainers.
        replica: the dense part, which the workers' modules alias.
        workers: the Hogwild workers.
        listener: synchronises the replica.
        gate: where threads stand still for a checkpoint.
    """

    def __init__(
        self, rank: int, replica: Replica, workers: Sequence[Worker], listener: StepListener, gate: Gate
    ) -> None:
        self.rank = rank
        self.replica = replica
        self.listener = listener
        self.error: BaseException | None = None
        self._workers = tuple(workers)
        self._gate = gate
        self._threads = [
            threading.Thread(target=self._run, args=(index, worker), name=f"worker-{rank}.{index}", daemon=True)
            for index, worker in enumerate(self._workers)
        ]

    @property
    def iterations(self) -> int:
        """Steps of all workers so far."""
        return sum(worker.iterations for worker in self._workers)

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
        self.listener.start()
        for thread in self._threads:
            self._gate.join()
            thread.start()

    def alive(self) -> bool:
        """Workers are still at work."""
        return any(thread.is_alive() for thread in self._threads)

    def finish(self) -> None:
        """Waits for the workers and stops the shadow."""
        for thread in self._threads:
            thread.join()
        try:
            self.listener.stop()
        except BaseException as error:
            self.error = self.error or error

    def _run(self, index: int, worker: Worker) -> None:
        try:
            worker.run()
        except BaseException as error:
            self.error = self.error or error
        finally:
            self.listener.worker_left(index)
            self._gate.leave()
