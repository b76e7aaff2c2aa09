"""What the command asks of its workers, what they answer, and what it asks of what runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from chipsparse.cli.options import GenerateOptions
from chipsparse.cli.ranks import Rank


@dataclass(frozen=True)
class Task:
    """A file to make.

    Attributes:
        name: the file's, whose suffix says what it is.
        options: of `generate`, without a prompt.
    """

    name: str
    prompt: str
    seed: int
    options: GenerateOptions


@dataclass(frozen=True)
class Loaded:
    """The worker has its pipeline."""

    version: str
    where: str


@dataclass(frozen=True)
class NotLoaded:
    """It has none, and another worker would have none either."""

    sentence: str


@dataclass(frozen=True)
class Made:
    """A finished file.

    Attributes:
        thumbnail: a JPEG of one frame.
        seconds: that the generation took, with text and decoding.
        notes: what ran otherwise than the profile asks, and what else is worth knowing.
    """

    content: bytes
    thumbnail: bytes
    seconds: float
    warnings: Sequence[str]
    notes: Sequence[str]


@dataclass(frozen=True)
class Refused:
    """The prompt or its settings are wrong: another try would end the same way."""

    sentence: str


@dataclass(frozen=True)
class Failed:
    """An error that may come from the worker's state, which is not to be used again.

    Attributes:
        of_another: whether another of the worker's processes failed first.
    """

    sentence: str
    of_another: bool = False


@dataclass(frozen=True)
class Died:
    """The worker ended."""

    sentence: str


@dataclass(frozen=True)
class Unavailable:
    """The worker could not be reached, and may be there again.

    Attributes:
        in_part: whether some of its processes go on, so that it must be started anew all the same.
    """

    in_part: bool = False


Answer = Loaded | NotLoaded | Made | Refused | Failed | Died | Unavailable


class Worker(Protocol):
    """What an engine runs; see `PipelineWorker`."""

    def load(self) -> Loaded | NotLoaded:
        """Loads what it needs."""

    def make(self, task: Task) -> Made | Refused | Failed:
        """Makes a file."""


# Makes a worker where it is to run, and is pickled on its way there: of a worker's options, the
# number of threads on a CPU, and its place where several processes are one worker.
MakeWorker = Callable[[GenerateOptions, int | None, Rank], Worker]


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
