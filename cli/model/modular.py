"""Modular pipelines of diffusers: what their files say, loading them, and calling them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

from chipsparse.cli.errors import UserError
from chipsparse.cli.model.description import ModelDescription, component_config
from chipsparse.pipelines.call import GUIDANCE, guider_specs
from chipsparse.pipelines.denoising_loop import denoising_loops


@dataclass(frozen=True)
class ModularDescription(ModelDescription):
    """A model that a modular pipeline runs, whose blocks tell its inputs."""

    blocks: Any = None

    @property
    def has_guider(self) -> bool:
        """See `ModelDescription`."""
        return bool(guider_specs(self.blocks))

    @property
    def _call_parameters(self) -> dict[str, inspect.Parameter]:
        inputs = {each.name: each.default for each in self.blocks.inputs if each.name is not None}
        guiders = guider_specs(self.blocks)
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
