"""What a worker is asked, and what comes back: its answer, or what stands in place of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chipsparse.cli.commands.generate import GenerateOptions


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
        remarks: what ran otherwise than the profile asks, and what else is worth knowing.
    """

    content: bytes
    thumbnail: bytes
    seconds: float
    warnings: Sequence[str]
    remarks: Sequence[str]


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

    how: str


@dataclass(frozen=True)
class Unavailable:
    """The worker could not be reached, and may be there again.

    Attributes:
        in_part: whether some of its processes go on, so that it must be started anew all the same.
    """

    in_part: bool = False


Answer = Loaded | NotLoaded | Made | Refused | Failed | Died | Unavailable
