"""Actors of Ray that make clips: of the cluster that `RAY_ADDRESS` names, else of this machine."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import ray
import torch
import torch.distributed as dist
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import chipsparse
from chipsparse.cli.batch.entries import Entry
from chipsparse.cli.batch.maker import Made, Maker, Outcome, tried
from chipsparse.cli.batch.options import BatchOptions
from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.media.write import written_whole
from chipsparse.cli.progress import ProgressDisplay, silent_display
from chipsparse.cli.ranks import Meeting, Rank, meet
from chipsparse.cli.request import Request
from chipsparse.parallel.peers import PeerError

ADDRESS = "RAY_ADDRESS"  # which Ray itself reads
SECONDS_TO_CONNECT = 10.0
# How long the reason of a failure may come after the failures that it causes.
SECONDS_TO_SAY_WHY = 5.0
STORE_BYTES = 1 << 28  # of a Ray of our own: nothing passes through but finished files


class ActorDied(RuntimeError):
    """An actor's process ended, or cannot be reached."""


class RayActors:
    """Workers on Ray, each with an actor for each GPU that it has; a context manager.

    Attributes:
        device: that all of them compute on.
        count: how many workers there are at most.

    Raises:
        UserError: there is no cluster at the address, or it lacks the GPUs.
    """

    def __init__(self, options: BatchOptions) -> None:
        self._options, each = options, options.gpus_per_job
        if options.device.startswith("cuda:"):
            raise UserError(f"--device {options.device}: Ray chooses the GPUs; use --device cuda")
        _connect()
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        on_gpu = options.device != "cpu" and any(machine.get("GPU") for machine in machines)
        if options.device == "cuda" and not on_gpu:
            raise UserError("--device cuda: Ray has no GPU; use --device cpu")
        self.device, kind = torch.device("cuda" if on_gpu else "cpu"), "GPU" if on_gpu else "CPU"
        there = [int(machine.get(kind, 0)) for machine in machines]
        for name, asked, most in (
            ("--gpus-per-job", each, max(there)),  # on one machine
            ("--gpus", options.gpus or each, sum(there)),
        ):
            if asked > most:
                raise UserError(f"{name} {asked} is more than the {most} {kind}s that Ray has")
        usual = sum(count // each for count in there) if on_gpu else len(there)
        self.count = options.gpus // each if options.gpus else usual
        cpus = 1 if on_gpu else max(1, sum(there) // (self.count * each))
        self._needs = {"GPU": int(on_gpu), "CPU": cpus}
        self._makers: list[_RemoteMaker] = []

    def __enter__(self) -> RayActors:
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()

    def make(self, entries: Sequence[Entry], display: ProgressDisplay) -> Iterator[Outcome]:
        """Make files on all workers.

        Raises:
            UserError: the model cannot be loaded, or a machine has another version.
        """
        count, folder = min(self.count, len(entries)), self._options.output
        makers = [_RemoteMaker(self._options, self._needs) for _ in range(count)]
        idle: queue.SimpleQueue[_RemoteMaker] = queue.SimpleQueue()
        for maker in makers:
            idle.put(maker)

        def make(entry: Entry) -> Outcome:
            maker = idle.get()
            try:
                return tried(maker, entry, folder, self._options.tries)
            finally:
                idle.put(maker)

        with display.stage(f"making files with {count} workers"), ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(make, entry) for entry in entries]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for maker in makers:
                    maker.close()


class _RemoteMaker(Maker):
    """A maker whose pipeline is with actors, which make each file together."""

    def __init__(self, options: BatchOptions, needs: dict[str, int]) -> None:
        super().__init__(silent_display())
        self._options, self._needs, self._closed = options, needs, False
        self._actors: list[Any] = []
        self._group: Any = None

    def load(self, request: Request) -> None:
        """Start the actors where there are none, and let them load the pipeline."""
        if self._closed:
            raise ActorDied("the command ends")
        if self._actors:
            return
        count, needs = self._options.gpus_per_job, self._needs
        bundle = {name: number for name, number in needs.items() if number}
        self._group = placement_group([bundle] * count, strategy="STRICT_PACK")
        # What dies is started anew here, where tries are counted.
        kind = ray.remote(num_gpus=needs["GPU"], num_cpus=needs["CPU"], max_restarts=0)(_Actor)
        for rank in self._ranks(count):
            strategy = PlacementGroupSchedulingStrategy(self._group, rank.rank)
            self._actors.append(kind.options(scheduling_strategy=strategy).remote(rank))
        for version, machine in self._asked("load", request):
            if version != chipsparse.__version__:
                raise UserError(
                    f"{machine} has chipsparse {version}, and this machine "
                    f"{chipsparse.__version__}; install the same one on all"
                )

    def _ranks(self, count: int) -> list[Rank]:
        if count == 1:
            return [Rank()]
        host = get_node_ip_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        meeting = Meeting(host, self._store.port, "worker")
        guidance = self._options.guidance_parallel or 1
        return [Rank(rank, count, rank, guidance, meeting=meeting) for rank in range(count)]

    def make(self, entry: Entry, folder: Path) -> Made:
        """Let the actors make a file and its thumbnail, and write them."""
        (made, *parts), *_ = self._asked("make_bytes", entry)
        small = entry.thumbnail(folder)
        small.parent.mkdir(parents=True, exist_ok=True)
        for path, part in zip((small, folder / entry.name), parts, strict=True):
            with written_whole("--output", path) as file:
                file.write_bytes(part)
        return made

    def forget(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._actors, self._group = [], None

    def close(self) -> None:
        """End the actors for good."""
        self._closed = True
        self.forget()

    def _asked(self, method: str, *given: Any) -> list[Any]:
        """Return what all actors answer; raise the error that the others' come from."""
        refs = [getattr(actor, method).remote(*given) for actor in self._actors]
        waiting = refs
        while waiting:
            (ready, *_), waiting = ray.wait(waiting)
            if _error(ready) is not None:
                ended, _ = ray.wait(refs, num_returns=len(refs), timeout=SECONDS_TO_SAY_WHY)
                errors = [error for error in map(_error, ended) if error is not None]
                errors.sort(key=lambda error: isinstance(error, PeerError))
                if len(errors) < len(refs) or isinstance(errors[-1], PeerError):
                    self.forget()  # some went on without the others
                raise errors[0]
        return list(ray.get(refs))


def _error(ref: Any) -> Exception | None:
    """Return the error that an actor answers with; None where it answers."""
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause: Exception = error.cause or error
        return cause
    except ray.exceptions.RayError as error:
        memory = isinstance(error, ray.exceptions.OutOfMemoryError)
        return ActorDied("its machine ran out of memory" if memory else "its process ended")
    return None


class _Actor:
    """A maker where Ray runs it; of several the first one answers with the file."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def load(self, request: Request) -> tuple[str, str]:
        """Meet the others, load, and return the version and the machine."""
        self._rank = meet(self._rank, request.device)
        self._maker = Maker(silent_display(), self._rank)
        self._maker.load(request)
        return chipsparse.__version__, socket.gethostname()

    def make_bytes(self, entry: Entry) -> tuple[Made, bytes, bytes]:
        """Return what is known of a file, its thumbnail, and the file."""
        with TemporaryDirectory() as name:
            folder = Path(name)
            self._maker.load(entry.request)
            made = self._maker.make(entry, folder)
            if not self._rank.writes:
                return made, b"", b""
            return made, entry.thumbnail(folder).read_bytes(), (folder / entry.name).read_bytes()


def _connect() -> None:
    """Connect to a cluster, or to a Ray of our own."""
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    given = os.environ.get(ADDRESS)
    if not given:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", object_store_memory=STORE_BYTES, **quiet)
        return
    with user_errors(Exception, what=f"the Ray cluster at {given} cannot be used"):
        # Ray would wait for minutes for an address at which nothing listens.
        address = urlsplit(given if "//" in given else f"//{given}")
        if address.hostname and address.port:
            socket.create_connection((address.hostname, address.port), SECONDS_TO_CONNECT).close()
        ray.init(given, **quiet)
