"""`--scheduler` and `--flow-shift`: which scheduler runs, settled before any weight is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import diffusers
import torch

from chipsparse.cli.errors import UserError, first_line, user_errors
from chipsparse.cli.model.description import ModelDescription, read_json
from chipsparse.pipelines.denoising_loop import check_scheduler
from chipsparse.pipelines.flow_shift import with_flow_shift

TRIAL_STEPS = 4
FOLDER = "scheduler"  # also the component's name


def choose_scheduler(
    model: ModelDescription, name: str | None, *, sparse: bool, flow_shift: float | None = None
) -> Any | None:
    """The scheduler that replaces the model's own, with the config of that; None: its own stays.

    Args:
        name: a class of diffusers, or how its name begins, in any letters: ``unipc`` is
            UniPCMultistepScheduler.
        sparse: whether it must call the transformer once per step.
        flow_shift: see `shifted_scheduler`.

    Raises:
        UserError: there is no such scheduler, it does not go with the model or with sparsity, or it
            has no flow shift.
    """
    chosen = _of_name(model, name, sparse=sparse)
    return shifted_scheduler(model, flow_shift, chosen=chosen)


def shifted_scheduler(
    model: ModelDescription, flow_shift: float | None, *, chosen: Any | None = None
) -> Any | None:
    """The scheduler with another flow shift, for the pipeline; None: the model's own stays.

    Args:
        flow_shift: None leaves it as it is.
        chosen: the scheduler; None for the model's own.

    Raises:
        UserError: the scheduler has no flow shift, or there is none.
    """
    if flow_shift is None:
        return chosen
    scheduler = _own(model) if chosen is None else chosen
    if scheduler is None:
        raise UserError(f"{model.pipeline_class.__name__} has no scheduler; leave --flow-shift out")
    with user_errors(ValueError, what=f"--flow-shift {flow_shift:g} does not go with this model"):
        return with_flow_shift(scheduler, flow_shift)


def _of_name(model: ModelDescription, name: str | None, *, sparse: bool) -> Any | None:
    """See `choose_scheduler`."""
    own = _own(model)
    if name is None:
        if sparse and own is not None:
            with user_errors(ValueError):
                check_scheduler(own)
        return None
    if own is None:
        raise UserError(f"{model.pipeline_class.__name__} has no scheduler; leave --scheduler out")
    if not name.strip():
        raise UserError("--scheduler is empty; leave it out for the model's own")
    fitting = {found.__name__: found for found in own.compatibles}
    problems = {each: _problem(fitting[each], own.config, sparse) for each in _meant(name, fitting)}
    matches = _matching(name, _usable(problems))
    if len(matches) == 1:
        return fitting[matches[0]].from_config(own.config)
    if matches:
        raise UserError(f"--scheduler {name} may be {' or '.join(matches)}; write more of it")
    problems |= {
        each: _problem(found, own.config, sparse)
        for each, found in fitting.items()
        if each not in problems
    }
    choices = f"for this model use one of {', '.join(_usable(problems))}"
    for each in _matching(name, problems):
        raise UserError(f"--scheduler {each} does not work here: {problems[each]}; {choices}")
    for each in _matching(name, [each for each in dir(diffusers) if each.endswith("Scheduler")]):
        raise UserError(f"--scheduler {each} takes another config than this model has; {choices}")
    raise UserError(f"--scheduler {name} is none of diffusers' schedulers; {choices}")


def _own(model: ModelDescription) -> Any | None:
    """The model's scheduler, made from its files; None where there is none that diffusers knows."""
    library, class_name = model.components.get(FOLDER, ("", ""))
    found = getattr(diffusers, class_name, None) if library == "diffusers" else None
    if found is None:
        return None
    what = f"the scheduler of the model {model.location} cannot be made"
    with user_errors(TypeError, ValueError, what=what):
        return found.from_config(read_json(model.location, f"{FOLDER}/scheduler_config.json"))


def _problem(scheduler_class: Any, config: Any, sparse: bool) -> str | None:
    """Why a scheduler cannot run with a config, found out by running it for a few steps."""
    try:
        made = scheduler_class.from_config(config)
        if sparse:
            check_scheduler(made)
        made.set_timesteps(TRIAL_STEPS)
        sample = torch.ones(1, 1, 2, 2)
        for timestep in made.timesteps:
            sample = made.step(torch.zeros_like(sample), timestep, sample).prev_sample
    except Exception as error:  # whatever it is, the generation would end with it
        return first_line(error)
    return None


def _usable(problems: Mapping[str, str | None]) -> list[str]:
    return sorted(each for each, problem in problems.items() if problem is None)


def _matching(name: str, names: Iterable[str]) -> list[str]:
    """The names that are meant: one that is the same, else all that begin so."""
    found = _meant(name, names)
    return [each for each in found if _letters(each) == _letters(name)] or found


def _meant(name: str, names: Iterable[str]) -> list[str]:
    """All names that begin so, in any letters."""
    wanted = _letters(name)
    return [each for each in names if wanted and _letters(each).startswith(wanted)]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("scheduler")
