"""Workers as actors of Ray: of the cluster that `RAY_ADDRESS` names, else of this machine."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from chipsparse.cli.batch.answers import Answer, Died, Failed, Loaded, NotLoaded, Task, Unavailable
from chipsparse.cli.batch.engine import MakeWorker
from chipsparse.cli.commands.generate import GenerateOptions
from chipsparse.cli.errors import UserError, first_line, user_errors

ADDRESS = "RAY_ADDRESS"  # which Ray itself reads
SECONDS_TO_CONNECT = 10.0
STORE_BYTES = 1 << 28  # of a Ray of our own: nothing passes through but finished files


class RayActors:
    """See `Engine`. Every actor holds a GPU, or CPUs; Ray chooses the machine.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``, as it was typed.
        workers: how many there will be, where the user says so.
        make_worker: see `MakeWorker`.

    Raises:
        UserError: there is no cluster at the address, or it has no GPU and one was asked for.
    """

    def __init__(self, device: str, workers: int | None, make_worker: MakeWorker) -> None:
        import ray

        self._ray: Any = ray
        self._make_worker = make_worker
        self._actors: dict[int, Any] = {}
        self._asked: dict[Any, int] = {}
        if device.startswith("cuda:"):
            raise UserError(f"--device {device}: Ray chooses the GPUs; use --device cuda")
        self.page = self._connect()
        try:
            cpus, gpus, machines = self._resources()
            self.device = self._device(device, gpus)
        except BaseException:
            ray.shutdown()
            raise
        on_gpu = self.device == "cuda"
        self.most = gpus if on_gpu else machines
        spread = max(1, cpus // (workers or self.most))
        self._needs = {"num_gpus": int(on_gpu), "num_cpus": 1 if on_gpu else spread}

    def start(self, worker: int, options: GenerateOptions, threads: int | None) -> None:
        """See `Engine`."""
        self._end(worker)
        # What dies is started anew here, where tries are counted.
        kind = self._ray.remote(max_restarts=0, max_task_retries=0, **self._needs)(_Actor)
        own = threads and self._needs["num_cpus"]  # of its machine, which may be another one
        self._actors[worker] = kind.remote(self._make_worker, options, own)
        self._asked[self._actors[worker].load.remote()] = worker

    def submit(self, worker: int, task: Task) -> None:
        """See `Engine`."""
        self._asked[self._actors[worker].make.remote(task)] = worker

    def wait(self, seconds: float) -> Sequence[tuple[int, Answer]]:
        """See `Engine`."""
        if not self._asked:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._asked), timeout=seconds)
        return [(self._asked.pop(each), self._answer(each)) for each in ready]

    def close(self) -> None:
        """See `Engine`."""
        for worker in list(self._actors):
            self._end(worker)
        self._ray.shutdown()

    def _connect(self) -> str:
        """To a cluster, or to a Ray of our own; returns the address of its dashboard."""
        quiet = {"logging_level": "ERROR", "log_to_driver": False}
        given = os.environ.get(ADDRESS)
        if not given:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            context = self._ray.init("local", object_store_memory=STORE_BYTES, **quiet)
        else:
            with user_errors(Exception, what=f"the Ray cluster at {given} cannot be used"):
                _check_reachable(given)
                context = self._ray.init(given, **quiet)
        return str(context.dashboard_url or "")

    def _resources(self) -> tuple[int, int, int]:
        """CPUs, GPUs and machines."""
        found = self._ray.cluster_resources()
        machines = [each for each in self._ray.nodes() if each["Alive"]]
        return int(found.get("CPU", 1)), int(found.get("GPU", 0)), len(machines)

    def _device(self, name: str, gpus: int) -> str:
        if name == "cuda" and not gpus:
            raise UserError("--device cuda: Ray has no GPU; use --device cpu")
        return ("cuda" if gpus else "cpu") if name == "auto" else name

    def _answer(self, asked: Any) -> Answer:
        try:
            answer: Answer = self._ray.get(asked)
        except self._ray.exceptions.RayError as error:
            return answer_of(error)
        return answer

    def _end(self, worker: int) -> None:
        actor = self._actors.pop(worker, None)
        if actor is not None:
            self._asked = {each: other for each, other in self._asked.items() if other != worker}
            self._ray.kill(actor)


def _check_reachable(address: str) -> None:
    """Raises `OSError` where nothing listens; Ray would wait for it for minutes."""
    found = urlsplit(address if "//" in address else f"//{address}")
    if found.hostname and found.port:
        with socket.create_connection((found.hostname, found.port), SECONDS_TO_CONNECT):
            pass


def answer_of(error: Exception) -> Answer:
    """What an error of Ray says of a worker."""
    from ray import exceptions

    if isinstance(error, exceptions.ActorUnavailableError):
        return Unavailable()
    if isinstance(error, exceptions.RayTaskError):
        return Failed(first_line(error.cause or error))
    if isinstance(error, exceptions.OutOfMemoryError):
        return Died("ended by Ray: its machine ran out of memory")
    if isinstance(error, exceptions.NodeDiedError):
        return Died("its machine is gone")
    return Died("its process ended")


class _Actor:
    """A worker where Ray runs it."""

    def __init__(
        self, make_worker: MakeWorker, options: GenerateOptions, threads: int | None
    ) -> None:
        self._worker = make_worker(options, threads)

    def load(self) -> Loaded | NotLoaded:
        return self._worker.load()

    def make(self, task: Task) -> Answer:
        return self._worker.make(task)
