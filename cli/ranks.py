"""The processes that make one generation together: which one this is, their start, how they meet.

Either a launcher of torch.distributed started them all, or ``--gpus`` starts the others.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from chipsparse.cli.errors import EXIT_FAILED, EXIT_USER_ERROR, UserError, user_errors
from chipsparse.cli.options import SHOWING, GenerationOptions, command_words, option_name
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.experiments.progress import Ranks
from chipsparse.parallel.degrees import Parallel

if TYPE_CHECKING:
    import torch

    from chipsparse.cli.model.description import ModelDescription
    from chipsparse.cli.plan import PlannedGeneration
    from chipsparse.parallel.peers import Peers
    from chipsparse.profiles.profile import Profile
    from chipsparse.report.generation import GenerationReport

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# How long the others wait for what the first process does alone, such as comparing long videos.
FIRST_SECONDS = 3600.0
WRITTEN = frozenset({"output", "report", "results"})  # options that may differ between processes
ERROR = "chipsparse: error: "

Value = TypeVar("Value")


@dataclass(frozen=True)
class Rank(Ranks):
    """A process of a launch; by default one that is alone.

    Attributes:
        rank: its number; the first one writes and tells.
        ranks: how many there are.
        local_rank: its number on this machine, which is also its GPU's.
        guidance: how many guidance branches are on processes of their own.
        starts: whether it is none of them, and starts them.
        peers: all of them, as soon as they have met.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    guidance: int = 1
    starts: bool = False
    peers: Peers | None = field(default=None, compare=False)

    @property
    def writes(self) -> bool:
        """Whether it writes files and tells what was done."""
        return self.rank == 0 and not self.starts

    @property
    def parallel(self) -> Parallel | None:
        """The degrees that `chipsparse.enable` is given."""
        return None if self.ranks == 1 else shared_by(self.ranks, self.guidance)

    def device(self, chosen: torch.device) -> torch.device:
        """Return where this process computes; raise `UserError` where it has no GPU."""
        if self.starts:
            check_gpus(self.ranks, chosen)
        if self.ranks == 1 or self.starts or chosen.type != "cuda":
            return chosen
        import torch

        there = torch.cuda.device_count()
        if self.local_rank >= there:
            raise UserError(
                f"a launcher started process {self.local_rank + 1} of this machine, which has "
                f"{there} GPUs; start one for each, or use --device cpu"
            )
        return torch.device("cuda", self.local_rank)

    def first(self, make: Callable[[], Value]) -> Value | None:
        """Return what the first process makes, as JSON values, which decides for all."""
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
        """Note in the first rank's report what ran dense on others alone."""
        if self.peers is None or report is None:
            return
        for rank, sentences in enumerate(self.peers.tell(list(report.fallbacks))):
            for sentence in sentences if self.writes else ():
                if sentence not in report.fallbacks:
                    report.fall_back(f"rank {rank}: {sentence}")


# Which process this is.


def launched() -> Rank:
    """Return the process of a launcher, or one that is alone.

    Raises `UserError` for variables of a launcher that are no numbers.
    """
    values = [os.environ.get(name) for name in LAUNCHED]
    if None in values:
        return Rank()
    try:
        rank, ranks, local_rank = (int(value or "") for value in values)
    except ValueError:
        said = ", ".join(f"{name}={value}" for name, value in zip(LAUNCHED, values, strict=True))
        raise UserError(f"the launcher's variables are no numbers: {said}") from None
    return Rank(rank, ranks, local_rank)


def check_alone(what: str) -> None:
    """Raise `UserError` under a launcher of several processes, which could not share this."""
    if (ranks := launched().ranks) > 1:
        raise UserError(
            f"{what} runs on one GPU, and a launcher started {ranks} processes; start one"
        )


def shared_by(processes: int, guidance: int | None) -> Parallel:
    """Return what so many processes share, with guidance branches on so many of them.

    Raises `UserError` where the one is no multiple of the other.
    """
    guidance = 1 if guidance is None else guidance
    if processes % guidance:
        raise UserError(
            f"--guidance-parallel {guidance} needs a multiple of {guidance} GPUs, and there are to "
            f"be {processes}; give --gpus"
        )
    return Parallel(ulysses=processes // guidance, guidance=guidance)


def this_rank(options: GenerationOptions) -> Rank:
    """Return this process's place, which may be to start the others.

    Raises:
        UserError: a launcher started another number of processes, or they cannot share guidance.
    """
    rank, gpus, guidance = launched(), options.gpus, options.guidance_parallel or 1
    shared_by(rank.ranks if rank.ranks > 1 else gpus or 1, guidance)
    if rank.ranks == 1:
        return Rank(ranks=gpus or 1, guidance=guidance, starts=(gpus or 1) > 1)
    if gpus not in (None, rank.ranks):
        raise UserError(
            f"--gpus {gpus}, but torchrun started {rank.ranks} processes; leave --gpus out"
        )
    return replace(rank, guidance=guidance)


# What they can share.


def check_gpus(gpus: int, device: torch.device, *, option: str = "--gpus") -> None:
    """Raise `UserError` where there are fewer GPUs, or they cannot exchange tensors."""
    import torch

    check_exchange(device)
    if device.type != "cuda":
        return
    if device.index is not None:
        raise UserError(
            f"{option} {gpus} takes the first GPUs, and --device {device} is one; use "
            "--device cuda, and CUDA_VISIBLE_DEVICES to choose"
        )
    there = torch.cuda.device_count()
    if gpus > there:
        raise UserError(f"{option} {gpus} is more than the {there} GPUs that this machine has")
    kinds = {gpu_kind(index) for index in range(gpus)}
    if len(kinds) > 1:
        raise UserError(
            f"{option} {gpus} would run on GPUs of several kinds, {' and '.join(sorted(kinds))}, "
            "which wait for the slowest; choose equal ones with CUDA_VISIBLE_DEVICES"
        )


def check_exchange(device: torch.device) -> None:
    """Raise `UserError` where processes that compute on a device cannot exchange tensors."""
    import torch.distributed as dist

    if not dist.is_available():
        raise UserError("several processes need torch.distributed, which this PyTorch lacks")
    if device.type == "cuda" and not dist.is_nccl_available():
        raise UserError("several GPUs need NCCL, which this build of PyTorch lacks")


def gpu_kind(index: int) -> str:
    """Return a GPU's name and memory, as far as equal ones have the same."""
    import torch

    memory = torch.cuda.get_device_properties(index).total_memory
    return f"{torch.cuda.get_device_name(index)} ({format_bytes(memory >> 30 << 30)})"


def check_sharing(
    model: ModelDescription, planned: PlannedGeneration | None, parallel: Parallel | None
) -> None:
    """Raise `UserError` where so many processes cannot share the generation.

    Args:
        planned: what the configs tell of it; None where the model's own code decides.
        parallel: the processes; None for one.
    """
    if parallel is None:
        return
    from chipsparse.parallel.sequence_cut import check_heads, cut_sequence
    from chipsparse.pipelines.registry import ADAPTERS

    name, adapter = model.transformer_class, ADAPTERS.get(model.transformer_class)
    if adapter is None:
        raise UserError(f"a {name} has no adapter, so several processes cannot share it")
    if parallel.guidance > 1:
        reason = adapter.why_guidance_stays()
        if reason is None and planned is not None and planned.branches == 1:
            reason = "this generation has no guidance; raise --guidance-scale, or leave it out"
        if reason is not None:
            raise UserError(f"--guidance-parallel {parallel.guidance}: {reason}")
    if parallel.ulysses == 1:
        return
    reason = adapter.why_not_split(model.transformer_config)
    if reason is not None:
        raise UserError(f"a {name} cannot run on several processes: {reason}")
    if planned is not None:
        layout, config = planned.plan.layout, planned.plan.config
        with user_errors(ValueError):
            check_heads(layout, parallel.ulysses)
            cut_sequence(layout, parallel.ulysses, config.block_size if config.mlp.is_sparse else 1)


# Start and meeting.


def start_others(command: str, options: GenerationOptions, gpus: int) -> None:
    """Run the command again in so many processes on this machine, by torchrun.

    The first one's output is this one's; what the others say shows only where one of them fails.

    Raises:
        typer.Exit: with the status of the process that failed first.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    words = command_words(command, options, {})[1:]
    words[1:1] = [option_name(name) for name in sorted(SHOWING) if getattr(options, name, False)]
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    others = ",".join(f"{rank}:3" for rank in range(1, gpus))  # both of their streams
    with tempfile.TemporaryDirectory(prefix="chipsparse-ranks-") as folder:
        launch = ["--standalone", f"--nproc-per-node={gpus}", "--monitor-interval=0.2"]
        launch += [f"--log-dir={folder}", f"--redirects={others}", "-m", "chipsparse", *words]
        try:
            torchrun.run(torchrun.parse_args(launch))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if rank != 0:
                logs = [*Path(folder).rglob(f"{rank}/stderr.log")]
                lines = "".join(log.read_text("utf-8", "replace") for log in logs).splitlines()
                said = [line for line in lines if line.startswith(ERROR)]
                why = said[-1].removeprefix(ERROR) if said else "it ended without a word"
                print(f"{ERROR}rank {rank}: {why}", file=sys.stderr)
            ours = failure.exitcode in (EXIT_FAILED, EXIT_USER_ERROR)
            raise typer.Exit(failure.exitcode if ours else EXIT_FAILED) from error


def meet(rank: Rank, device: torch.device, facts: Mapping[str, Any] | None = None) -> Rank:
    """Return the process with its peers, for the rest of its life; as it is where it is alone.

    Args:
        facts: what must be equal on all of them, by its name in words, besides versions and GPUs.

    Raises:
        UserError: they cannot meet, or differ in something.
    """
    if rank.ranks == 1:
        return rank
    import diffusers
    import torch
    import torch.distributed as dist

    import chipsparse
    from chipsparse.parallel.peers import TIMEOUT_SECONDS, PeerError, Peers

    check_exchange(device)
    on_gpu = device.type == "cuda"
    if not on_gpu:  # they share the machine's cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // rank.ranks))
    elif device.index is not None:
        torch.cuda.set_device(device)
    with user_errors(RuntimeError, ValueError, what="the processes could not meet"):
        if not dist.is_initialized():
            backend, timeout = "nccl" if on_gpu else "gloo", timedelta(seconds=TIMEOUT_SECONDS)
            dist.init_process_group(backend, timeout=timeout)
        peers = Peers(range(rank.ranks), timeout_s=FIRST_SECONDS)
    with user_errors(PeerError):
        peers.check_same(
            {
                "version of chipsparse": chipsparse.__version__,
                "version of torch": torch.__version__,
                "version of diffusers": diffusers.__version__,
                "device": gpu_kind(torch.cuda.current_device()) if on_gpu else "cpu",
                **(facts or {}),
            }
        )
    return replace(rank, peers=peers)


def called(
    options: GenerationOptions, *profiles: Profile | None, prompts: Sequence[str] = ()
) -> dict[str, str]:
    """Return what processes must have been called with alike, wherever they write."""
    from chipsparse.profiles.tuned_range import digest

    typed = {field.name: str(getattr(options, field.name)) for field in dataclasses.fields(options)}
    computed = [digest(dataclasses.asdict(each.sparsity)) for each in profiles if each is not None]
    return {
        **{name: value for name, value in typed.items() if name not in SHOWING | WRITTEN},
        "what the profile says": ", ".join(computed),
        "what the prompts say": digest({"prompts": list(prompts)}),
    }
