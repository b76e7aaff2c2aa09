"""Whether several processes can share what `generate` is to make."""

from __future__ import annotations

from chipsparse.cli.commands.generate import GenerateOptions
from chipsparse.cli.errors import UserError
from chipsparse.cli.generate.prepared import Job, prepare
from chipsparse.cli.planning.request import device_and_dtype
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.ranks.sharing import check_sharing
from chipsparse.parallel.degrees import Parallel


def check(options: GenerateOptions, parallel: Parallel, display: ProgressDisplay) -> None:
    """Raises `UserError` where so many processes cannot share it; loads no weight."""
    check_shared(prepare(options, *device_and_dtype(options), display), parallel)


def check_shared(job: Job, parallel: Parallel | None) -> None:
    """Raises `UserError` where so many processes cannot share the generation."""
    if parallel is not None and (job.profile is None or job.options.mode == "dense"):
        raise UserError("several processes share the sparse run, which --dense leaves out")
    check_sharing(job.model, job.planned, parallel)
