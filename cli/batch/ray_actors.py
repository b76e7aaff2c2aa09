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

import chipsparse
from chipsparse.cli.batch.entries import Entry
from chipsparse.cli.batch.maker import Made, Maker, Outcome, tried
from chipsparse.cli.batch.options import BatchOptions
from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.media.write import written_whole
from chipsparse.cli.progress import ProgressDisplay, silent_display
from chipsparse.cli.request import Request

ADDRESS = "RAY_ADDRESS"  # which Ray itself reads
SECONDS_TO_CONNECT = 10.0
STORE_BYTES = 1 << 28  # of a Ray of our own: nothing passes through but finished files


class ActorDied(RuntimeError):
    """An actor's process ended, or cannot be reached."""


class RayActors:
    """Actors on Ray, each with a GPU of its own; a context manager.

    Attributes:
        device: that all of them compute on.
        count: how many actors there are at most.

    Raises:
        UserError: there is no cluster at the address, or it lacks the GPUs.
    """

    def __init__(self, options: BatchOptions) -> None:
        self._options = options
        if options.device.startswith("cuda:"):
            raise UserError(f"--device {options.device}: Ray chooses the GPUs; use --device cuda")
        _connect()
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        on_gpu = options.device != "cpu" and any(machine.get("GPU") for machine in machines)
        if options.device == "cuda" and not on_gpu:
            raise UserError("--device cuda: Ray has no GPU; use --device cpu")
        self.device, kind = torch.device("cuda" if on_gpu else "cpu"), "GPU" if on_gpu else "CPU"
        there = sum(int(machine.get(kind, 0)) for machine in machines)
        if (options.gpus or 1) > there:
            raise UserError(f"--gpus {options.gpus} is more than the {there} {kind}s that Ray has")
        self.count = options.gpus or (there if on_gpu else len(machines))
        cpus = 1 if on_gpu else max(1, there // self.count)
        # What dies is started anew by the makers, where tries are counted.
        self._actor = ray.remote(num_gpus=int(on_gpu), num_cpus=cpus, max_restarts=0)(_Actor)

    def __enter__(self) -> RayActors:
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()

    def make(self, entries: Sequence[Entry], display: ProgressDisplay) -> Iterator[Outcome]:
        """Make files on all actors.

        Raises:
            UserError: the model cannot be loaded, or a machine has another version.
        """
        count, folder = min(self.count, len(entries)), self._options.output
        makers = [_RemoteMaker(self._actor) for _ in range(count)]
        idle: queue.SimpleQueue[_RemoteMaker] = queue.SimpleQueue()
        for maker in makers:
            idle.put(maker)

        def make(entry: Entry) -> Outcome:
            maker = idle.get()
            try:
                return tried(maker, entry, folder, self._options.tries)
            finally:
                idle.put(maker)

        with display.stage(f"making files with {count} actors"), ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(make, entry) for entry in entries]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for maker in makers:
                    maker.close()


class _RemoteMaker(Maker):
    """A maker whose pipeline is with an actor."""

    def __init__(self, kind: Any) -> None:
        super().__init__(silent_display())
        self._kind, self._actor, self._closed = kind, None, False

    def load(self, request: Request) -> None:
        """Start the actor where there is none, and let it load the pipeline."""
        if self._closed:
            raise ActorDied("the command ends")
        if self._actor is not None:
            return
        self._actor = self._kind.remote()
        version, machine = _answer(self._actor.load.remote(request))
        if version != chipsparse.__version__:
            raise UserError(
                f"{machine} has chipsparse {version}, and this machine "
                f"{chipsparse.__version__}; install the same one on all"
            )

    def make(self, entry: Entry, folder: Path) -> Made:
        """Let the actor make a file and its thumbnail, and write them."""
        assert self._actor is not None
        made, *parts = _answer(self._actor.make_bytes.remote(entry))
        small = entry.thumbnail(folder)
        small.parent.mkdir(parents=True, exist_ok=True)
        for path, part in zip((small, folder / entry.name), parts, strict=True):
            with written_whole("--output", path) as file:
                file.write_bytes(part)
        done: Made = made
        return done

    def forget(self) -> None:
        """End the actor."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = None

    def close(self) -> None:
        """End the actor for good."""
        self._closed = True
        self.forget()


def _answer(ref: Any) -> Any:
    """Return what an actor answers, or raise its error."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise error.cause or error from None
    except ray.exceptions.RayError as error:
        memory = isinstance(error, ray.exceptions.OutOfMemoryError)
        why = "its machine ran out of memory" if memory else "its process ended"
        raise ActorDied(why) from None


class _Actor:
    """A maker where Ray runs it."""

    def load(self, request: Request) -> tuple[str, str]:
        """Load the pipeline; return the version and the machine."""
        self._maker = Maker(silent_display())
        self._maker.load(request)
        return chipsparse.__version__, socket.gethostname()

    def make_bytes(self, entry: Entry) -> tuple[Made, bytes, bytes]:
        """Return what is known of a file, its thumbnail, and the file."""
        with TemporaryDirectory() as name:
            folder = Path(name)
            self._maker.load(entry.request)
            made = self._maker.make(entry, folder)
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
