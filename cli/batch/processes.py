"""Workers as processes of this machine."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from chipsparse.cli.batch.engine import Answer, Died, MakeWorker, Task
from chipsparse.cli.batch.members import Answers, Meetings
from chipsparse.cli.options import GenerateOptions
from chipsparse.cli.ranks import Rank, forget_launcher

SECONDS_TO_END = 5.0


@dataclass(frozen=True)
class _Running:
    """A worker: its processes, how each is talked to, and what they answered."""

    processes: Sequence[SpawnProcess]
    connections: Sequence[Connection]
    answers: Answers


class Processes:
    """See `Engine`. On GPUs every worker has its own; more workers than GPUs share them.

    Args:
        devices: that workers compute on, as PyTorch calls them.
        per_worker: processes of each worker, which take devices that follow each other.
    """

    page = ""

    def __init__(
        self, devices: Sequence[str], make_worker: MakeWorker, *, per_worker: int = 1
    ) -> None:
        self.device = devices[0]
        self.most = max(1, len(devices) // per_worker)
        self._devices = devices
        self._make_worker = make_worker
        self._per_worker = per_worker
        self._meetings = Meetings("localhost")
        self._running: dict[int, _Running] = {}

    def start(self, worker: int, options: GenerateOptions, threads: int | None) -> None:
        """See `Engine`."""
        self._end(worker)
        places = self._meetings.places(self._per_worker, options.guidance_parallel)
        first = worker % self.most * self._per_worker
        started = [
            self._started(
                dataclasses.replace(
                    options, device=self._devices[(first + place.rank) % len(self._devices)]
                ),
                threads,
                place,
            )
            for place in places
        ]
        processes, connections = zip(*started, strict=True)
        self._running[worker] = _Running(processes, connections, Answers(self._per_worker))

    def _started(
        self, options: GenerateOptions, threads: int | None, place: Rank
    ) -> tuple[SpawnProcess, Connection]:
        context = multiprocessing.get_context("spawn")  # CUDA survives no fork
        ours, theirs = context.Pipe()
        given = (theirs, self._make_worker, options, threads, place)
        process = context.Process(target=_serve, args=given, daemon=True)
        process.start()
        theirs.close()  # so that its end is seen here when the process ends
        return process, ours

    def submit(self, worker: int, task: Task) -> None:
        """See `Engine`."""
        for connection in self._running[worker].connections:
            with suppress(OSError):  # it ended, which `wait` will find
                connection.send(task)

    def wait(self, seconds: float) -> Sequence[tuple[int, Answer]]:
        """See `Engine`."""
        members = {
            connection: (worker, member)
            for worker, running in self._running.items()
            for member, connection in enumerate(running.connections)
            if not connection.closed
        }
        if not members:
            time.sleep(seconds)
        found = []
        for ready in wait(list(members), timeout=seconds):
            worker, member = members[ready]  # type: ignore[index]
            running = self._running[worker]
            answer = running.answers.take(member, _answer(running, member))
            if answer is not None:
                found.append((worker, answer))
        return found

    def close(self) -> None:
        """See `Engine`."""
        for running in self._running.values():
            for process in running.processes:
                process.terminate()
        for worker in list(self._running):
            self._end(worker)

    def _end(self, worker: int) -> None:
        running = self._running.pop(worker, None)
        if running is None:
            return
        for process in running.processes:
            process.terminate()
        for process, connection in zip(running.processes, running.connections, strict=True):
            process.join(SECONDS_TO_END)
            process.kill()
            process.join()
            connection.close()


def _answer(running: _Running, member: int) -> Answer:
    connection = running.connections[member]
    try:
        answer: Answer = connection.recv()
    except (EOFError, OSError):
        process = running.processes[member]
        process.join(SECONDS_TO_END)
        connection.close()
        return Died(_how(process.exitcode))
    return answer


def _how(code: int | None) -> str:
    if code is None:
        return "it does not answer"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _serve(
    connection: Connection,
    make_worker: MakeWorker,
    options: GenerateOptions,
    threads: int | None,
    place: Rank,
) -> None:
    """A worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the command ends this one
    signal.signal(signal.SIGTERM, _leave)
    forget_launcher()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = make_worker(options, threads, place)
    with suppress(EOFError, OSError):  # the command ended
        connection.send(worker.load())
        while True:
            connection.send(worker.make(connection.recv()))


def _leave(*_: Any) -> None:
    """Removes what is half on the way out, in which a second signal must not interrupt it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


def _end_with_parent() -> None:
    """A command that was killed leaves no worker behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
