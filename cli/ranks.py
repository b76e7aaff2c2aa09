"""The processes that make one generation together: which one this is, their start, how they meet.

Either a launcher of torch.distributed started them all, or ``--gpus`` starts the others.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from chipsparse.cli.errors import EXIT_FAILED, EXIT_USER_ERROR, UserError, user_errors
from chipsparse.cli.options import SHOWING, GenerationOptions, command_words, option_name
from chipsparse.common import stopping
from chipsparse.common.files import scratch_folder
from chipsparse.experiments.progress import Ranks
from chipsparse.parallel.degrees import Parallel

if TYPE_CHECKING:
    import torch

    from chipsparse.parallel.peers import Peers
    from chipsparse.profiles.profile import Profile
    from chipsparse.reasons.calls import on_rank
from chipsparse.report.generation import GenerationReport

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# How long the others wait for what the first process does alone, such as comparing long videos.
FIRST_SECONDS = 3600.0
WRITTEN = frozenset({"output", "report", "results"})  # options that may differ between processes
ERROR = "chipsparse: error: "

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


def this_rank(options: GenerationOptions) -> Rank:
    """Return this process's place, which may be to start the others; raise `UserError`."""
    rank = launched()
    gpus = options.gpus or 1
    guidance = options.guidance_parallel or 1
    if rank.ranks == 1:
        shared_by(gpus, guidance)
        return Rank(ranks=gpus, guidance=guidance, starts=gpus > 1)
    shared_by(rank.ranks, guidance)
    if options.gpus not in (None, rank.ranks):
        raise UserError(
            f"--gpus {gpus}, but torchrun started {rank.ranks} processes; leave --gpus out",
        )
    return replace(rank, guidance=guidance)


# Start and meeting.


def start_others(command: str, options: GenerationOptions, gpus: int) -> None:
    """Run the command again in so many processes on this machine, by torchrun.

    The first one's output is this one's; what the others say shows only where one of them fails.
    Raises `typer.Exit` with the status of the process that failed first.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import api, errors

    words = command_words(command, options, {})[1:]
    words[1:1] = [option_name(name) for name in sorted(SHOWING) if getattr(options, name, False)]
    for name in ("elastic", "elastic.agent.server.api", "run"):
        logging.getLogger(f"torch.distributed.{name}").setLevel(logging.CRITICAL)
    others = ",".join(f"{rank}:3" for rank in range(1, gpus))  # both of their streams
    # The others come to their ends first, and torchrun waits for them.
    with scratch_folder(prefix="chipsparse-ranks-") as folder, stopping.patiently():
        launch = ["--standalone", f"--nproc-per-node={gpus}", "--monitor-interval=0.2"]
        launch += [f"--log-dir={folder}", f"--redirects={others}", "-m", "chipsparse", *words]
        try:
            torchrun.run(torchrun.parse_args(launch))
        except api.SignalException as error:  # the first process said so
            raise typer.Exit(128 + error.sigval) from error
        except errors.ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if rank != 0:
                logs = [*folder.rglob(f"{rank}/stderr.log")]
                lines = "".join(log.read_text("utf-8", "replace") for log in logs).splitlines()
                said = [line for line in lines if line.startswith(ERROR)]
                why = said[-1].removeprefix(ERROR) if said else "it ended without a word"
                print(f"{ERROR}rank {rank}: {why}", file=sys.stderr)
            ours = failure.exitcode in (EXIT_FAILED, EXIT_USER_ERROR)
            raise typer.Exit(failure.exitcode if ours else EXIT_FAILED) from error


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


def called(
    options: GenerationOptions,
    *profiles: Profile | None,
    prompts: Sequence[str] = (),
) -> dict[str, str]:
    """Return what processes must have been called with alike, wherever they write."""
    from chipsparse.profiles.tuned_range import digest

    names = [field.name for field in dataclasses.fields(options)]
    typed = {name: str(getattr(options, name)) for name in names if name not in SHOWING | WRITTEN}
    digests = [digest(profile.sparsity.words()) for profile in profiles if profile]
    computed = ", ".join(digests)
    said = digest({"prompts": list(prompts)})
    return {**typed, "what the profile says": computed, "what the prompts say": said}
