"""The start of the processes of ``--gpus``, and what all of them must have been called with."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from chipsparse.cli.errors import EXIT_FAILED, EXIT_USER_ERROR
from chipsparse.cli.options import SHOWING, GenerationOptions, command_words, option_name
from chipsparse.common import stopping
from chipsparse.common.files import scratch_folder

if TYPE_CHECKING:
    from chipsparse.profiles.profile import Profile

WRITTEN = frozenset({"output", "report", "results"})  # options that may differ between processes
ERROR = "chipsparse: error: "


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
