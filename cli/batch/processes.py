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

from chipsparse.cli.batch.answers import Answer, Died, Task
from chipsparse.cli.batch.engine import MakeWorker
from chipsparse.cli.batch.launched import forget_place
from chipsparse.cli.commands.generate import GenerateOptions

SECONDS_TO_END = 5.0


@dataclass(frozen=True)
class _Running:
    process: SpawnProcess
    connection: Connection


class Processes:
    """See `Engine`. On GPUs every worker has its own; more workers than GPUs share them.

    Args:
        devices: that workers compute on, one each, as PyTorch calls them.
        make_worker: see `MakeWorker`.
    """

    page = ""

    def __init__(self, devices: Sequence[str], make_worker: MakeWorker) -> None:
        self.device = devices[0]
        self.most = len(devices)
        self._devices = devices
        self._make_worker = make_worker
        self._running: dict[int, _Running] = {}

    def start(self, worker: int, options: GenerateOptions, threads: int | None) -> None:
        """See `Engine`."""
        self._end(worker)
        device = self._devices[worker % len(self._devices)]
        options = dataclasses.replace(options, device=device)
        context = multiprocessing.get_context("spawn")  # CUDA survives no fork
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, self._make_worker, options, threads), daemon=True
        )
        process.start()
        theirs.close()  # so that its end is seen here when the process ends
        self._running[worker] = _Running(process, ours)

    def submit(self, worker: int, task: Task) -> None:
        """See `Engine`."""
        with suppress(OSError):  # it ended, which `wait` will find
            self._running[worker].connection.send(task)

    def wait(self, seconds: float) -> Sequence[tuple[int, Answer]]:
        """See `Engine`."""
        numbers = {each.connection: number for number, each in self._running.items()}
        if not numbers:
            time.sleep(seconds)
        ready = wait(list(numbers), timeout=seconds)
        return [(numbers[each], self._answer(numbers[each])) for each in ready]  # type: ignore[index]

    def close(self) -> None:
        """See `Engine`."""
        for running in self._running.values():
            running.process.terminate()
        for worker in list(self._running):
            self._end(worker)

    def _answer(self, worker: int) -> Answer:
        running = self._running[worker]
        try:
            answer: Answer = running.connection.recv()
        except (EOFError, OSError):
            running.process.join(SECONDS_TO_END)
            del self._running[worker]
            running.connection.close()
            return Died(_how(running.process.exitcode))
        return answer

    def _end(self, worker: int) -> None:
        running = self._running.pop(worker, None)
        if running is None:
            return
        running.process.terminate()
        running.process.join(SECONDS_TO_END)
        running.process.kill()
        running.process.join()
        running.connection.close()


def _how(code: int | None) -> str:
    if code is None:
        return "it does not answer"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _serve(
    connection: Connection, make_worker: MakeWorker, options: GenerateOptions, threads: int | None
) -> None:
    """A worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the command ends this one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # on its way out it removes what is half
    forget_place()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = make_worker(options, threads)
    with suppress(EOFError, OSError):  # the command ended
        connection.send(worker.load())
        while True:
            connection.send(worker.make(connection.recv()))


def _end_with_parent() -> None:
    """A command that was killed leaves no worker behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
