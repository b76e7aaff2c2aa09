"""`--scheduler` and `--flow-shift`: which scheduler runs, chosen before any weight is loaded."""

from __future__ import annotations

import re
from typing import Any

import diffusers
import torch

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.options import GenerationOptions
from chipsparse.pipelines.denoising_loop import check_scheduler
from chipsparse.pipelines.flow_shift import with_flow_shift
from chipsparse.pipelines.model_files import from_cache

FOLDER = "scheduler"  # also the component's name


def choose_scheduler(model: ModelDescription, options: GenerationOptions, *, sparse: bool) -> Any:
    """Return the scheduler that replaces the model's own, with its config; None: its own stays.

    The name of ``--scheduler`` is a class of diffusers, or how it begins, in any letters:
    ``unipc`` is UniPCMultistepScheduler. A sparse run needs one that calls the transformer once per
    step. Raises `UserError` where there is none, it does not go with this, or has no flow shift.
    """
    name = options.scheduler
    flow_shift = options.flow_shift
    if name is None and flow_shift is None and not sparse:
        return None
    own = _own(model)
    chosen = None
    if own is None:
        if name is None and flow_shift is None:
            return None
        option = "--scheduler" if name is not None else "--flow-shift"
        raise UserError(f"{model.pipeline_class.__name__} has no scheduler; leave {option} out")
    if name is not None:
        chosen = _of_name(name, own, sparse=sparse)
    elif sparse:
        with user_errors(ValueError):
            check_scheduler(own)
    if flow_shift is None:
        return chosen
    with user_errors(ValueError, what=f"--flow-shift {flow_shift:g} does not go with this model"):
        return with_flow_shift(own if chosen is None else chosen, flow_shift)


def compatible_schedulers(model: ModelDescription) -> list[str]:
    """Return the schedulers of diffusers that take the config of the model's own."""
    own = _own(model)
    return [] if own is None else sorted(kind.__name__ for kind in own.compatibles)


def _of_name(name: str, own: Any, *, sparse: bool) -> Any:
    wanted = _letters(name)
    if not wanted:
        raise UserError("--scheduler is empty; leave it out for the model's own")
    kinds = {kind.__name__: kind for kind in own.compatibles}
    longer = [kind for kind in kinds if _letters(kind).startswith(wanted)]
    matches = [kind for kind in longer if _letters(kind) == wanted] or longer
    if not matches:
        raise UserError(
            f"--scheduler {name} is none of diffusers' schedulers that take this model's config: "
            f"{', '.join(sorted(kinds))}",
        )
    if len(matches) > 1:
        raise UserError(f"--scheduler {name} may be {' or '.join(matches)}; write more of it")
    with user_errors(Exception, what=f"--scheduler {matches[0]} does not work here"):
        made = kinds[matches[0]].from_config(own.config)
        if sparse:
            check_scheduler(made)
        sample = torch.ones(1, 1, 2, 2)
        made.set_timesteps(2)  # some notice at their first step that the config is not theirs
        made.step(sample, made.timesteps[0], sample)
    return kinds[matches[0]].from_config(own.config)


def _own(model: ModelDescription) -> Any | None:
    """Return the model's scheduler, made from its files; None where diffusers knows none."""
    library, class_name = model.components.get(FOLDER, ("", ""))
    kind = getattr(diffusers, class_name, None) if library == "diffusers" else None
    if kind is None:
        return None
    what = f"the scheduler of the model {model.location} cannot be made"
    with user_errors(OSError, TypeError, ValueError, what=what):
        return kind.from_pretrained(model.location, subfolder=FOLDER, **from_cache(model.location))


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("scheduler")
