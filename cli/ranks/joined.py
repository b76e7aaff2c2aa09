"""This process among those that make one generation together, as their launcher names it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from chipsparse.cli.errors import UserError
from chipsparse.parallel.degrees import Parallel

if TYPE_CHECKING:
    import torch

    from chipsparse.report.generation import GenerationReport

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Joined:
    """A process of a launch; by default one that is alone.

    Attributes:
        rank: its number; the first one writes and tells.
        ranks: how many there are.
        local_rank: its number on this machine, which is also its GPU's.
        guidance: how many guidance branches are on processes of their own.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    guidance: int = 1

    @property
    def writes(self) -> bool:
        """Whether it writes files and tells what was done."""
        return self.rank == 0

    @property
    def parallel(self) -> Parallel | None:
        """What `chipsparse.enable` is told."""
        return None if self.ranks == 1 else shared_by(self.ranks, self.guidance)

    def device(self, chosen: torch.device) -> torch.device:
        """Where this process computes, where the first would on the chosen device."""
        import torch

        if self.ranks == 1 or chosen.type != "cuda":
            return chosen
        return torch.device("cuda", self.local_rank)

    def join(self, device: torch.device) -> None:
        """Meets the others, for the life of the process."""
        if self.ranks == 1:
            return
        import torch
        import torch.distributed as dist

        from chipsparse.parallel.peers import TIMEOUT_SECONDS

        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:  # they share the machine's cores
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.ranks))
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
        )

    def gather_fallbacks(self, report: GenerationReport | None) -> None:
        """Notes in the first rank's report what ran dense on others alone."""
        if self.ranks == 1 or report is None:
            return
        import torch.distributed as dist

        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, list(report.fallbacks))
        for rank, sentences in enumerate(found):
            for sentence in sentences if self.writes else ():
                if sentence not in report.fallbacks:
                    report.fall_back(f"rank {rank}: {sentence}")


def launched(environment: Mapping[str, str] | None = None) -> Joined | None:
    """What the launcher of torch.distributed, or another with its variables, says; None: nothing.

    Raises:
        UserError: its variables are no numbers.
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


def shared_by(processes: int, guidance: int | None) -> Parallel:
    """What so many processes share, with guidance branches on so many of them.

    Raises:
        UserError: the one is no multiple of the other.
    """
    guidance = 1 if guidance is None else guidance
    if processes % guidance:
        raise UserError(
            f"--guidance-parallel {guidance} needs a multiple of {guidance} GPUs, and there are to "
            f"be {processes}; give --gpus"
        )
    return Parallel(ulysses=processes // guidance, guidance=guidance)


def joined(gpus: int | None, guidance: int | None = None) -> Joined | None:
    """This process's place; None where it is to start the others.

    Args:
        gpus: of ``--gpus``, or None.
        guidance: of ``--guidance-parallel``, or None.

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
