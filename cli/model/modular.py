"""Modular pipelines of diffusers: what their files say, loading them, and calling them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch

from chipsparse.cli.errors import UserError
from chipsparse.cli.model.description import ModelDescription, component_config
from chipsparse.pipelines.denoising_loop import denoising_loops, is_modular

# Called at the end of each step, from 0, with the latents that it made, None where the pipeline
# does not give them; where it returns True, the loop ends.
OnStepEnd = Callable[[int, "torch.Tensor | None"], bool]
GUIDANCE = "guidance_scale"
RESULTS = {"videos": "frames", "images": "images"}  # and what plain pipelines call them


@dataclass(frozen=True)
class ModularDescription(ModelDescription):
    """A model that a modular pipeline runs, whose blocks tell its inputs."""

    blocks: Any = None

    @property
    def has_guider(self) -> bool:
        """See `ModelDescription`."""
        return bool(_guider_specs(self.blocks))

    @property
    def _call_parameters(self) -> dict[str, inspect.Parameter]:
        inputs = {each.name: each.default for each in self.blocks.inputs if each.name is not None}
        guiders = _guider_specs(self.blocks)
        if guiders:
            inputs.setdefault(GUIDANCE, guiders[0].config.get(GUIDANCE))
        keyword = inspect.Parameter.KEYWORD_ONLY
        return {
            name: inspect.Parameter(name, keyword, default=default)
            for name, default in inputs.items()
        }


def describe_modular(location: str, index: dict[str, Any]) -> ModularDescription:
    """What its index and its configs say; raises `UserError` for what is wrong."""
    blocks = _blocks(location, index)
    components = {
        name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 3
    }
    # An entry without library and class is a component that was not loaded when this was saved.
    components = {name: entry for name, entry in components.items() if entry[1] is not None}
    transformers = [name for name in components if name.startswith("transformer")]
    if not transformers:
        raise UserError(
            f"the model {location} has no diffusion transformer (its components are "
            f"{', '.join(components) or 'none'}); chipsparse needs one"
        )
    configs = {
        name: component_config(*_place(location, name, components[name]), components[name][:2])
        for name in (transformers[0], "vae")
        if name in components
    }
    here = Path(location)
    return ModularDescription(
        location=location,
        pipeline_class=getattr(diffusers, index["_class_name"]),
        transformer_class=components[transformers[0]][1],
        transformer_config=configs[transformers[0]],
        vae_config=configs.get("vae", {}),
        components={
            name: entry[:2]
            for name, entry in components.items()
            if not here.is_dir() or (here / name).is_dir()
        },
        blocks=blocks,
    )


def _blocks(location: str, index: dict[str, Any]) -> Any:
    """The blocks of a model, of which one denoises."""
    names = {key: index.get(key) for key in ("_class_name", "_blocks_class_name")}
    for key, base in zip(names, ("ModularPipeline", "ModularPipelineBlocks"), strict=True):
        found = getattr(diffusers, str(names[key]), None)
        if not (isinstance(found, type) and issubclass(found, getattr(diffusers, base, ()))):
            raise UserError(
                f"the model {location} was made for another version of diffusers "
                f"({index.get('_diffusers_version', 'unknown')}): modular_model_index.json names "
                f"{names[key]} ({key}), which diffusers {diffusers.__version__} does not have"
            )
    blocks = getattr(diffusers, str(names["_blocks_class_name"]))()
    if not denoising_loops(blocks):
        raise UserError(
            f"the model {location} has no denoising loop (its blocks: "
            f"{', '.join(blocks.sub_blocks)}); chipsparse needs one"
        )
    return blocks


def _place(location: str, name: str, entry: list[Any]) -> tuple[str, str]:
    """Where a component is: in the model's own files, or in those that its index names."""
    if (Path(location) / name).is_dir():
        return location, name
    spec = entry[2]
    return spec.get("pretrained_model_name_or_path") or location, spec.get("subfolder") or name


def load_modular(model: ModularDescription, dtype: torch.dtype) -> Any:
    """The pipeline with all components that the model's index names; raises `UserError`."""
    pipe = diffusers.ModularPipeline.from_pretrained(model.location)
    pipe.load_components(dtype=dtype)  # which goes on where one could not be loaded
    missing = [name for name in model.components if getattr(pipe, name, None) is None]
    if missing:
        raise UserError(
            f"the {' and '.join(missing)} of the model {model.location} could not be loaded"
        )
    return quiet(pipe)


def quiet(pipe: Any) -> Any:
    """The pipeline, without a progress bar of its own."""
    for block in denoising_loops(pipe._blocks):
        block.set_progress_bar_config(disable=True)
    return pipe


def _guider_specs(blocks: Any) -> list[Any]:
    return [spec for spec in blocks.expected_components if spec.name.startswith("guider")]


def call_pipeline(
    pipe: Any,
    arguments: dict[str, Any],
    *,
    generator: torch.Generator,
    output_type: str,
    on_step_end: OnStepEnd,
) -> Any:
    """Calls a pipeline of either kind.

    Args:
        arguments: as a plain pipeline takes them. A guidance scale that a modular one takes from
            its guiders is given to those.
        generator: of the noise.
        output_type: "np", or "latent" for what is not to be decoded.
        on_step_end: see `OnStepEnd`.

    Returns:
        What has ``frames`` or ``images``; without decoding or where the loop was ended, anything.
    """
    options = {**arguments, "generator": generator, "output_type": output_type}
    if not is_modular(pipe):

        def callback(pipe: Any, step: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if on_step_end(step, tensors.get("latents")):
                pipe._interrupt = True  # diffusers' own switch: the rest is passed over
            return tensors

        return pipe(**options, callback_on_step_end=callback)
    inputs = {each.name for each in pipe._blocks.inputs}
    if GUIDANCE in options and GUIDANCE not in inputs:
        _guide(pipe, options[GUIDANCE])
    try:
        with _steps_watched(pipe.scheduler, on_step_end):
            state = pipe(**{name: value for name, value in options.items() if name in inputs})
    except _Ended:
        return None
    found = {name: state.get(name) for name in RESULTS}
    return SimpleNamespace(
        **{RESULTS[name]: value for name, value in found.items() if value is not None}
    )


def _guide(pipe: Any, scale: float) -> None:
    for spec in _guider_specs(pipe._blocks):
        guider = getattr(pipe, spec.name)
        if guider.guidance_scale != scale:
            pipe.update_components(**{spec.name: guider.new(guidance_scale=scale)})


class _Ended(BaseException):
    """Ends a denoising loop; no `Exception`, of which the blocks on the way out write traces."""


@contextmanager
def _steps_watched(scheduler: Any, on_step_end: OnStepEnd) -> Iterator[None]:
    """Tells of each call of the scheduler's ``step``: there is one at the end of each step."""
    own, done = scheduler.step, 0

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        result = own(*args, **kwargs)
        done += 1
        if on_step_end(done - 1, result[0]):  # a tuple, or what diffusers makes like one
            raise _Ended
        return result

    scheduler.step = step
    try:
        yield
    finally:
        del scheduler.step
