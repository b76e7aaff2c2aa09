"""`generate --gpus`: what is checked before the processes start, and their start."""

from __future__ import annotations

from chipsparse.cli.command_line import SHOWING, command_words
from chipsparse.cli.commands.generate import GenerateOptions
from chipsparse.cli.errors import UserError
from chipsparse.cli.generate.prepared import Job, prepare
from chipsparse.cli.model.description import quiet_libraries
from chipsparse.cli.options import option_name
from chipsparse.cli.planning.request import device_and_dtype
from chipsparse.cli.progress import silent_display
from chipsparse.cli.ranks.joined import shared_by
from chipsparse.cli.ranks.launch import check_gpus, launch
from chipsparse.cli.ranks.sharing import check_sharing
from chipsparse.parallel.degrees import Parallel


def start(options: GenerateOptions) -> None:
    """Starts the processes of ``--gpus`` where nothing speaks against it.

    Raises:
        UserError: before any process is started or weight loaded.
    """
    assert options.gpus is not None
    check_gpus(options.gpus, options.device)
    device, dtype = device_and_dtype(options)
    with silent_display() as display, quiet_libraries(debug=options.debug):
        job = prepare(options, device, dtype, display)
        check_shared(job, shared_by(options.gpus, options.guidance_parallel))
    words = command_words("generate", options, {})[1:]
    shown = [option_name(name) for name in SHOWING if getattr(options, name)]
    launch([words[0], *shown, *words[1:]], options.gpus)


def check_shared(job: Job, parallel: Parallel | None) -> None:
    """Raises `UserError` where so many processes cannot share the generation."""
    if parallel is not None and (job.profile is None or job.options.mode == "dense"):
        raise UserError("several processes share the sparse run, which --dense leaves out")
    check_sharing(job.model, job.planned, parallel)
