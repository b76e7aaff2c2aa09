"""Workers as actors of Ray: of the cluster that `RAY_ADDRESS` names, else of this machine."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from chipsparse.cli.batch.engine import (
    Answer,
    Died,
    Failed,
    Loaded,
    MakeWorker,
    NotLoaded,
    Task,
    Unavailable,
)
from chipsparse.cli.batch.members import Answers, Meetings
from chipsparse.cli.errors import UserError, first_line, user_errors
from chipsparse.cli.options import GenerateOptions
from chipsparse.cli.ranks import Rank

ADDRESS = "RAY_ADDRESS"  # which Ray itself reads
SECONDS_TO_CONNECT = 10.0
STORE_BYTES = 1 << 28  # of a Ray of our own: nothing passes through but finished files


@dataclass(frozen=True)
class _Worker:
    """Its actors, the room that they have on a machine, and what they answered."""

    actors: Sequence[Any]
    group: Any
    answers: Answers


class RayActors:
    """See `Engine`. Every actor holds a GPU, or CPUs; Ray chooses the machine.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``, as it was typed.
        workers: how many there will be, where the user says so.
        per_worker: actors of each worker, on one machine.

    Raises:
        UserError: there is no cluster at the address, or no machine of it has the GPUs.
    """

    def __init__(
        self, device: str, workers: int | None, make_worker: MakeWorker, *, per_worker: int = 1
    ) -> None:
        import ray

        self._ray: Any = ray
        self._make_worker = make_worker
        self._per_worker = per_worker
        self._workers: dict[int, _Worker] = {}
        self._asked: dict[Any, tuple[int, int]] = {}  # worker and member
        if device.startswith("cuda:"):
            raise UserError(f"--device {device}: Ray chooses the GPUs; use --device cuda")
        self.page = self._connect()
        self._meetings = Meetings(ray.util.get_node_ip_address())
        try:
            cpus, gpus = self._resources()
            self.device = self._device(device, sum(gpus))
            on_gpu = self.device == "cuda"
            self.most = sum(each // per_worker for each in gpus) if on_gpu else len(gpus)
            if self.most == 0:
                raise UserError(
                    f"--gpus-per-job {per_worker} is more than the {max(gpus)} GPUs that any "
                    "machine of Ray has"
                )
        except BaseException:
            ray.shutdown()
            raise
        spread = max(1, cpus // ((workers or self.most) * per_worker))
        self._needs = {"num_gpus": int(on_gpu), "num_cpus": 1 if on_gpu else spread}

    def start(self, worker: int, options: GenerateOptions, threads: int | None) -> None:
        """See `Engine`."""
        self._end(worker)
        # What dies is started anew here, where tries are counted.
        kind = self._ray.remote(max_restarts=0, max_task_retries=0, **self._needs)(_Actor)
        own = threads and self._needs["num_cpus"]  # of its machine, which may be another one
        places = self._meetings.places(self._per_worker, options.guidance_parallel)
        group = self._group()
        actors = []
        for place in places:
            at = kind if group is None else kind.options(scheduling_strategy=_in(group, place.rank))
            actors.append(at.remote(self._make_worker, options, own, place))
        self._workers[worker] = _Worker(actors, group, Answers(self._per_worker))
        self._ask(worker, [actor.load.remote() for actor in actors])

    def _group(self) -> Any:
        """Room for a worker's actors on one machine, all at once; None where one is enough."""
        if self._per_worker == 1:
            return None
        from ray.util import placement_group

        each = {"CPU": self._needs["num_cpus"], "GPU": self._needs["num_gpus"]}
        wanted = {name: count for name, count in each.items() if count}
        return placement_group([wanted] * self._per_worker, strategy="STRICT_PACK")

    def submit(self, worker: int, task: Task) -> None:
        """See `Engine`."""
        self._ask(worker, [actor.make.remote(task) for actor in self._workers[worker].actors])

    def _ask(self, worker: int, asked: list[Any]) -> None:
        self._asked |= {each: (worker, member) for member, each in enumerate(asked)}

    def wait(self, seconds: float) -> Sequence[tuple[int, Answer]]:
        """See `Engine`."""
        if not self._asked:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._asked), timeout=seconds)
        found = []
        for each in ready:
            worker, member = self._asked.pop(each)
            answer = self._workers[worker].answers.take(member, self._answer(each))
            if answer is not None:
                found.append((worker, answer))
        return found

    def close(self) -> None:
        """See `Engine`."""
        for worker in list(self._workers):
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

    def _resources(self) -> tuple[int, list[int]]:
        """CPUs of all machines, and the GPUs of each."""
        machines = [each["Resources"] for each in self._ray.nodes() if each["Alive"]]
        cpus = int(self._ray.cluster_resources().get("CPU", 1))
        return cpus, [int(each.get("GPU", 0)) for each in machines]

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
        running = self._workers.pop(worker, None)
        if running is None:
            return
        self._asked = {each: asked for each, asked in self._asked.items() if asked[0] != worker}
        for actor in running.actors:
            self._ray.kill(actor)
        if running.group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(running.group)


def _in(group: Any, place: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)


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
        self, make_worker: MakeWorker, options: GenerateOptions, threads: int | None, place: Rank
    ) -> None:
        self._worker = make_worker(options, threads, place)

    def load(self) -> Loaded | NotLoaded:
        return self._worker.load()

    def make(self, task: Task) -> Answer:
        return self._worker.make(task)
