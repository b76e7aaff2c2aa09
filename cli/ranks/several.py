"""A command on several processes: which one this is, and the start of those of `--gpus`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from chipsparse.cli.command_line import SHOWING, command_words
from chipsparse.cli.generation_options import GenerationOptions
from chipsparse.cli.model.description import ModelDescription, quiet_libraries
from chipsparse.cli.model.schedulers import shifted_scheduler
from chipsparse.cli.options import option_name
from chipsparse.cli.planning.planned import planned_if_known
from chipsparse.cli.planning.request import Request, look_up, required_profile
from chipsparse.cli.progress import ProgressDisplay, silent_display
from chipsparse.cli.prompts import Prompt
from chipsparse.cli.ranks.gpus import check_gpus
from chipsparse.cli.ranks.joined import Joined, joined, shared_by
from chipsparse.cli.ranks.launch import launch
from chipsparse.cli.ranks.meeting import meet
from chipsparse.cli.ranks.sharing import check_sharing
from chipsparse.parallel.degrees import Parallel
from chipsparse.profiles.profile import Profile
from chipsparse.profiles.tuned_range import digest

WRITTEN = frozenset({"output", "report", "results"})
Options = TypeVar("Options", bound=GenerationOptions)
# Raises `UserError` where these processes cannot share what the options ask for; loads no weight.
Check = Callable[[Options, Parallel, ProgressDisplay], None]


def check_profile_shared(
    options: GenerationOptions, parallel: Parallel, display: ProgressDisplay
) -> None:
    """The `Check` of commands that generate with one profile."""
    model = look_up(options, display)
    _ = shifted_scheduler(model, options.flow_shift)  # which raises where it has no flow shift
    check_shared(options, model, required_profile(options, model), parallel)


def check_shared(
    options: GenerationOptions,
    model: ModelDescription,
    profile: Profile | None,
    parallel: Parallel | None,
) -> None:
    """Raises `UserError` where processes cannot share generations of this profile."""
    if profile is not None and parallel is not None:
        check_sharing(model, planned_if_known(options, model, profile), parallel)


def met(
    process: Joined,
    options: GenerationOptions,
    request: Request,
    profiles: Collection[Profile | None],
    prompts: Iterable[Prompt] = (),
) -> Joined:
    """The process with its peers, which were called alike and can share what is generated."""
    for profile in profiles:
        check_shared(options, request.model, profile, process.parallel)
    facts = called(options, *profiles, prompts=[prompt.text for prompt in prompts])
    return meet(process, request.device, facts)


def taking_part(command: str, options: Options, check: Check[Options]) -> Joined | None:
    """This process's place; None where it has started the others, which have done the work.

    Args:
        check: asked before any process is started.

    Raises:
        UserError: the processes cannot be, or `check` says so.
    """
    process = joined(options.gpus, options.guidance_parallel)
    if process is not None:
        return process
    assert options.gpus is not None
    check_gpus(options.gpus, options.device)
    with silent_display() as display, quiet_libraries(debug=options.debug):
        check(options, shared_by(options.gpus, options.guidance_parallel), display)
    words = command_words(command, options, {})[1:]
    shown = [option_name(name) for name in sorted(SHOWING) if getattr(options, name, False)]
    launch([words[0], *shown, *words[1:]], options.gpus)
    return None


def called(
    options: GenerationOptions, *profiles: Profile | None, prompts: Sequence[str] = ()
) -> dict[str, str]:
    """What processes must have been called with alike, wherever they write."""
    left_out = SHOWING | WRITTEN
    facts = {
        field.name: str(getattr(options, field.name))
        for field in dataclasses.fields(options)
        if field.name not in left_out
    }
    computed = [digest(dataclasses.asdict(each.sparsity)) for each in profiles if each is not None]
    return {
        **facts,
        "what the profile says": ", ".join(computed),
        "what the prompts say": digest({"prompts": list(prompts)}),
    }
