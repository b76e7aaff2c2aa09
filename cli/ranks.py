"""The processes that make one generation together: which one this is, and how they meet.

Either a launcher of torch.distributed started them all, or ``--gpus`` starts the others, as
`launching` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.experiments.progress import Ranks
from chipsparse.parallel.degrees import Parallel
from chipsparse.reasons.calls import on_rank

if TYPE_CHECKING:
    import torch

    from chipsparse.parallel.peers import Peers
    from chipsparse.report.generation import GenerationReport

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# How long the others wait for what the first process does alone, such as comparing long videos.
FIRST_SECONDS = 3600.0

Value = TypeVar("Value")


@dataclass(frozen=True)
class Rank(Ranks):
    """A process of a launch; by default one that is alone."""

    rank: int = 0  # the first one writes and tells
    ranks: int = 1  # how many there are
    local_rank: int = 0  # on this machine, also its GPU's number
    guidance: int = 1  # guidance branches on processes of their own
    starts: bool = False  # this process is none of them, and starts them
    # All of them, as soon as they have met.
    peers: Peers | None = field(default=None, compare=False)

    @property
    def writes(self) -> bool:
        """True where this process compares, prints and writes."""
        return self.rank == 0 and not self.starts

    @property
    def parallel(self) -> Parallel | None:
        """The parallel sizes of a generation; None for one process."""
        return None if self.ranks == 1 else shared_by(self.ranks, self.guidance)

    def device(self, chosen: torch.device) -> torch.device:
        """Return where this process computes; raise `UserError` where there are too few GPUs."""
        if self.ranks == 1 or chosen.type != "cuda":
            return chosen
        import torch

        there = torch.cuda.device_count()
        if self.starts and chosen.index is not None:
            raise UserError(
                f"--gpus {self.ranks} takes the first GPUs, and --device {chosen} is one; use "
                "--device cuda, and CUDA_VISIBLE_DEVICES to choose",
            )
        if self.starts and self.ranks > there:
            raise UserError(
                f"--gpus {self.ranks} is more than the {there} GPUs that this machine has",
            )
        if self.local_rank >= there:
            raise UserError(
                f"a launcher started process {self.local_rank + 1} of this machine, which has "
                f"{there} GPUs; start one for each, or use --device cpu",
            )
        return chosen if self.starts else torch.device("cuda", self.local_rank)

    def first(self, make: Callable[[], Value]) -> Value | None:
        """Return the first process's value in all of them; its error ends the others' wait."""
        if self.peers is None:
            return make()
        try:
            value = make() if self.writes else None
        except BaseException as error:
            self.peers.failed(error)
            raise
        shared: Value | None = self.peers.first(value)
        return shared

    def gather_fallbacks(self, report: GenerationReport | None) -> None:
        """Add the other processes' fallbacks to the first one's report, with their ranks."""
        if self.peers is None or report is None:
            return
        for rank, sentences in enumerate(self.peers.gather(list(report.fallbacks))):
            for sentence in sentences if self.writes else ():
                if sentence not in report.fallbacks:
                    report.add(on_rank(rank, sentence))


# Which process this is.


def launched() -> Rank:
    """Return the process of a launcher, or one that is alone; raise `UserError`."""
    values = {name: os.environ[name] for name in LAUNCHED if name in os.environ}
    if len(values) < len(LAUNCHED):
        return Rank()
    try:
        rank, ranks, local_rank = (int(value) for value in values.values())
    except ValueError:
        said = ", ".join(f"{name}={value}" for name, value in values.items())
        raise UserError(f"the launcher's variables are no numbers: {said}") from None
    return Rank(rank, ranks, local_rank)


def check_alone(what: str) -> None:
    """Raise `UserError` under a launcher of several processes, which could not share this."""
    if (ranks := launched().ranks) > 1:
        raise UserError(
            f"{what} runs on one GPU, and a launcher started {ranks} processes; start one",
        )


def shared_by(processes: int, guidance: int | None) -> Parallel:
    """Return what so many processes share; raise `UserError` for no multiple of ``guidance``."""
    guidance = guidance or 1
    if processes % guidance:
        raise UserError(
            f"--guidance-parallel {guidance} needs a multiple of {guidance} GPUs, and there are to "
            f"be {processes}; give --gpus",
        )
    return Parallel(ulysses=processes // guidance, guidance=guidance)


def this_rank(gpus: int | None, guidance: int | None) -> Rank:
    """Return this process's place, which may be to start the others; raise `UserError`.

    Args:
        gpus: the GPUs of ``--gpus``, or None.
        guidance: the value of ``--guidance-parallel``, or None.
    """
    rank = launched()
    guidance = guidance or 1
    if rank.ranks == 1:
        count = gpus or 1
        shared_by(count, guidance)
        return Rank(ranks=count, guidance=guidance, starts=count > 1)
    shared_by(rank.ranks, guidance)
    if gpus not in (None, rank.ranks):
        raise UserError(
            f"--gpus {gpus}, but torchrun started {rank.ranks} processes; leave --gpus out",
        )
    return replace(rank, guidance=guidance)


# Meeting.


def meet(rank: Rank, device: torch.device, facts: Mapping[str, Any]) -> Rank:
    """Return the process with its peers, for the rest of its life; as it is where it is alone.

    Raises `UserError` where they cannot meet, or differ in one of the facts (by name in words).
    """
    if rank.ranks == 1:
        return rank
    import torch
    import torch.distributed as dist

    from chipsparse.parallel.peers import TIMEOUT_SECONDS, PeerError, Peers

    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(rank.local_rank)
    else:  # they share the machine's cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // rank.ranks))
    with user_errors(RuntimeError, ValueError, what="the processes could not meet"):
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_SECONDS))
        peers = Peers(range(rank.ranks), timeout_s=FIRST_SECONDS)
    with user_errors(PeerError):
        peers.check_same(facts)
    return replace(rank, peers=peers)
