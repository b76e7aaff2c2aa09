"""This process among those that make one generation together, as their launcher names it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from chipsparse.cli.errors import UserError
from chipsparse.parallel.degrees import Parallel

if TYPE_CHECKING:
    import torch

    from chipsparse.cli.progress import ProgressDisplay
    from chipsparse.parallel.peers import Peers
    from chipsparse.report.generation import GenerationReport

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# How long they wait before they end for a reason that the first one is likely to tell.
QUIET_SECONDS = 5.0

Value = TypeVar("Value")


@dataclass(frozen=True)
class Meeting:
    """Where processes meet that no launcher started: a key-value store that another one has."""

    host: str
    port: int
    name: str  # of these processes, since others meet there, too


@dataclass(frozen=True)
class Joined:
    """A process of a launch; by default one that is alone.

    Attributes:
        rank: its number; the first one writes and tells.
        ranks: how many there are.
        local_rank: its number on this machine, which is also its GPU's.
        guidance: how many guidance branches are on processes of their own.
        meeting: where they meet; None where a launcher says so.
        peers: all of them, as soon as they have met.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    guidance: int = 1
    meeting: Meeting | None = None
    peers: Peers | None = field(default=None, compare=False)

    @property
    def writes(self) -> bool:
        """Whether it writes files and tells what was done."""
        return self.rank == 0

    @property
    def parallel(self) -> Parallel | None:
        """What `chipsparse.enable` is given."""
        return None if self.ranks == 1 else shared_by(self.ranks, self.guidance)

    def display(self) -> ProgressDisplay:
        """What shows its progress: one of several processes is enough to look at."""
        from chipsparse.cli.progress import ProgressDisplay, silent_display

        return ProgressDisplay() if self.writes else silent_display()

    def device(self, chosen: torch.device) -> torch.device:
        """Where this process computes, where the first would on the chosen device.

        Raises `UserError` where its machine has no GPU for it.
        """
        if self.ranks == 1 or chosen.type != "cuda":
            return chosen
        from chipsparse.cli.ranks.gpus import gpu_of

        return gpu_of(self.local_rank)

    def first(self, make: Callable[[], Value]) -> Value | None:
        """What the first process makes, as JSON values, which decides for all; the others wait."""
        if self.peers is None:
            return make()
        try:
            value = make() if self.writes else None
        except BaseException as error:
            self.peers.failed(error)
            raise
        found: Value | None = self.peers.first(value)
        return found

    @contextmanager
    def after_first(self) -> Iterator[None]:
        """Lets the first process tell what is the user's to put right, where all find it."""
        try:
            yield
        except UserError:
            if not self.writes:
                time.sleep(QUIET_SECONDS)
            raise

    def gather_fallbacks(self, report: GenerationReport | None) -> None:
        """Notes in the first rank's report what ran dense on others alone."""
        if self.peers is None or report is None:
            return
        for rank, sentences in enumerate(self.peers.tell(list(report.fallbacks))):
            for sentence in sentences if self.writes else ():
                if sentence not in report.fallbacks:
                    report.fall_back(f"rank {rank}: {sentence}")


def launched(environment: Mapping[str, str] | None = None) -> Joined | None:
    """What the launcher of torch.distributed, or another with its variables, says; None: nothing.

    Raises `UserError` for variables that are no numbers.
    """
    environment = os.environ if environment is None else environment
    if any(name not in environment for name in LAUNCHED):
        return None
    try:
        rank, ranks, local_rank = (int(environment[name]) for name in LAUNCHED)
    except ValueError:
        said = ", ".join(f"{name}={environment[name]}" for name in LAUNCHED)
        raise UserError(f"the launcher's variables are no numbers: {said}") from None
    return Joined(rank, ranks, local_rank)


def forget_launcher() -> None:
    """For what this process starts, which is none of the launcher's."""
    for name in LAUNCHED:
        os.environ.pop(name, None)


def check_alone(what: str) -> None:
    """Raises `UserError` under a launcher of several processes, which could not share this."""
    found = launched()
    if found is not None and found.ranks > 1:
        raise UserError(
            f"{what} runs on one GPU, and a launcher started {found.ranks} processes; start one"
        )


def shared_by(processes: int, guidance: int | None, *, option: str = "--gpus") -> Parallel:
    """What so many processes share, with guidance branches on so many of them.

    Raises `UserError` where the one is no multiple of the other.
    """
    guidance = 1 if guidance is None else guidance
    if processes % guidance:
        raise UserError(
            f"--guidance-parallel {guidance} needs a multiple of {guidance} GPUs, and there are to "
            f"be {processes}; give {option}"
        )
    return Parallel(ulysses=processes // guidance, guidance=guidance)


def joined(gpus: int | None, guidance: int | None = None) -> Joined | None:
    """This process's place; None where it is to start the others.

    Raises:
        UserError: a launcher started another number of processes, or they cannot share guidance.
    """
    found = launched()
    shared_by(found.ranks if found is not None and found.ranks > 1 else gpus or 1, guidance)
    if found is None or found.ranks == 1:
        return None if gpus is not None and gpus > 1 else Joined()
    if gpus is not None and gpus != found.ranks:
        raise UserError(
            f"--gpus {gpus}, but torchrun started {found.ranks} processes; leave --gpus out"
        )
    return replace(found, guidance=guidance or 1)
