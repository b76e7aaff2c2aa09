"""Actors of Ray that make clips: of the cluster that `RAY_ADDRESS` names, else of this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import ray
import torch

from chipsparse.cli.batch.entries import Entry, Maker
from chipsparse.cli.batch.options import BatchOptions
from chipsparse.cli.batch.record import BatchClip
from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.media.write import written_whole
from chipsparse.cli.progress import ProgressDisplay, silent_display
from chipsparse.common.version import __version__

if TYPE_CHECKING:
    from ray.actor import ActorHandle

ADDRESS = "RAY_ADDRESS"  # which Ray itself reads
SECONDS_TO_CONNECT = 10.0
STORE_BYTES = 1 << 28  # of a Ray of our own: nothing passes through but finished files


class RayActors:
    """Actors on Ray, each with a GPU of its own, to be closed.

    Raises `UserError` where there is no cluster at the address, or it lacks the GPUs.
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
        self.device = torch.device("cuda" if on_gpu else "cpu")
        kind = "GPU" if on_gpu else "CPU"
        there = sum(int(machine.get(kind, 0)) for machine in machines)
        if (options.gpus or 1) > there:
            raise UserError(f"--gpus {options.gpus} is more than the {there} {kind}s that Ray has")
        self.count = options.gpus or (there if on_gpu else len(machines))
        self._idle: list[Any] = []  # actors that have loaded the model, where they made a file
        cpus = 1 if on_gpu else max(1, there // self.count)
        self._kind = ray.remote(num_gpus=int(on_gpu), num_cpus=cpus, max_restarts=0)(_Actor)

    def close(self) -> None:
        """End the actors, and Ray in this process."""
        ray.shutdown()

    def make(self, entries: Sequence[Entry], display: ProgressDisplay) -> Iterator[BatchClip]:
        """Make files on all actors; one whose actor ends is tried again on a new actor.

        Raises `UserError` where the model cannot be loaded, or a machine has another version.
        """
        count = min(self.count, len(entries))
        most = self._options.tries
        waiting = [(entry, 0) for entry in reversed(entries)]  # with the tries that were made
        running: dict[Any, tuple[Any, Entry, int]] = {}
        idle = self._idle
        idle += [self._start() for _ in range(count - len(idle))]
        with display.stage(f"making files with {count} actors"):
            while waiting or running:
                while waiting and idle:
                    actor = idle.pop()
                    (entry, tries) = waiting.pop()
                    running[actor.make.remote(entry, most - tries)] = actor, entry, tries
                (ref, *_), _ = ray.wait([*running])
                actor, entry, tries = running.pop(ref)
                try:
                    clip, *parts = ray.get(ref)
                    idle.append(actor)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause or error from None
                except ray.exceptions.RayError as error:
                    idle.append(self._start())
                    if tries + 1 < most:
                        waiting.append((entry, tries + 1))
                        continue
                    memory = isinstance(error, ray.exceptions.OutOfMemoryError)
                    why = "machine ran out of memory" if memory else "process ended"
                    clip = entry.clip("failed", error=f"its {why}", tries=1)
                    parts = []
                folder = self._options.output
                files = (entry.thumbnail(folder), folder / entry.name) if parts else ()
                for path, part in zip(files, parts, strict=True):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with written_whole("--output", path) as file:
                        file.write_bytes(part)
                yield clip.model_copy(update={"tries": tries + clip.tries})

    def _start(self) -> ActorHandle:
        return self._kind.remote(__version__)


class _Actor:
    """A maker where Ray runs it, which must be of the command's version."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._maker = Maker(silent_display())

    def make(self, entry: Entry, tries: int) -> tuple[Any, ...]:
        """Return a file's record and, where it was made, the bytes of its thumbnail and its own."""
        if self._version != __version__:
            raise UserError(
                f"{socket.gethostname()} has chipsparse {__version__}, and the "
                f"command's machine {self._version}; install the same one on all",
            )
        with TemporaryDirectory() as name:
            folder = Path(name)
            clip = self._maker.tried(entry, folder, tries)
            files = (entry.thumbnail(folder), folder / entry.name) if clip.made else ()
            return clip, *(file.read_bytes() for file in files)


def _connect() -> None:
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
