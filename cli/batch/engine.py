"""What the command asks of whatever runs its workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from chipsparse.cli.batch.answers import Answer, Failed, Loaded, Made, NotLoaded, Refused, Task
from chipsparse.cli.commands.generate import GenerateOptions
from chipsparse.cli.ranks.joined import Joined


class Worker(Protocol):
    """What an engine runs; see `PipelineWorker`."""

    def load(self) -> Loaded | NotLoaded:
        """Loads what it needs."""

    def make(self, task: Task) -> Made | Refused | Failed:
        """Makes a file."""


# Makes a worker where it is to run, and is pickled on its way there: of a worker's options, the
# number of threads on a CPU, and its place where several processes are one worker.
MakeWorker = Callable[[GenerateOptions, int | None, Joined], Worker]


class Engine(Protocol):
    """Workers by their numbers, from 0. A worker does one thing at a time, with all its processes.

    Attributes:
        device: that workers compute on, as PyTorch calls it.
        most: how many workers there can be unless the user says so.
        page: where its dashboard is; empty where it has none.
    """

    device: str
    most: int
    page: str

    def start(self, worker: int, options: GenerateOptions, threads: int | None) -> None:
        """Starts a worker, in place of the one of this number if there is one, and has it load."""

    def submit(self, worker: int, task: Task) -> None:
        """Has a worker that answered make a file."""

    def wait(self, seconds: float) -> Sequence[tuple[int, Answer]]:
        """The answers that came, with their workers; after so many seconds at most."""

    def close(self) -> None:
        """Ends all workers."""
