"""`generate --gpus`: what is checked before the processes start, and their start."""

from __future__ import annotations

from chipsparse.cli.command_line import SHOWING, command_words
from chipsparse.cli.commands.generate import GenerateOptions
from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.generate.prepared import Job, prepare
from chipsparse.cli.model.description import quiet_libraries
from chipsparse.cli.options import option_name
from chipsparse.cli.planning.request import device_and_dtype
from chipsparse.cli.progress import silent_display
from chipsparse.cli.ranks.joined import shared_by
from chipsparse.cli.ranks.launch import check_gpus, launch
from chipsparse.parallel.degrees import Parallel
from chipsparse.parallel.sequence_cut import check_heads, cut_sequence
from chipsparse.pipelines.registry import ADAPTERS


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
    if parallel is None:
        return
    name, adapter = job.model.transformer_class, ADAPTERS.get(job.model.transformer_class)
    if job.profile is None or job.options.mode == "dense":
        raise UserError("several processes share the sparse run, which --dense leaves out")
    if adapter is None:
        raise UserError(f"a {name} has no adapter, so several processes cannot share it")
    if parallel.guidance > 1:
        reason = adapter.why_guidance_stays()
        if reason is not None:
            raise UserError(f"--guidance-parallel {parallel.guidance}: {reason}")
    if parallel.ulysses == 1:
        return
    reason = adapter.why_not_split(job.model.transformer_config)
    if reason is not None:
        raise UserError(f"a {name} cannot run on several processes: {reason}")
    if job.planned is None:
        return
    layout, mlp = job.planned.plan.layout, job.planned.plan.config.mlp
    with user_errors(ValueError):
        check_heads(layout, parallel.ulysses)
        cut_sequence(layout, parallel.ulysses, mlp.block_size if mlp.enabled else 1)
