"""A model's pipeline, loaded from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors import safe_open

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.views.units import counted
from chipsparse.pipelines.denoising_loop import denoising_loops
from chipsparse.pipelines.model_files import from_cache


def load_pipeline(
    model: ModelDescription,
    *,
    device: torch.device,
    dtype: torch.dtype,
    scheduler: Any | None = None,
) -> Any:
    """Return the pipeline on the device; raise `UserError` for missing or damaged weights."""
    with user_errors(Exception, what=f"the model {model.location} could not be loaded"):
        for name in model.components:
            for file in sorted((Path(model.location) / name).glob("*.safetensors")):
                what = f"{file} is damaged (incomplete download?)"
                with user_errors(Exception, what=what), safe_open(file, framework="numpy"):
                    pass
        transformers = {
            name: _load_transformer(model, name, dtype)
            for name in model.components
            if name.startswith("transformer")
            and (model.blocks is None or (Path(model.location) / name).is_dir())
        }
        if model.blocks is None:
            pipeline_class: Any = model.pipeline_class
            pipe = pipeline_class.from_pretrained(
                model.location,
                dtype=dtype,
                **transformers,
                **from_cache(model.location),
            )
            pipe.set_progress_bar_config(disable=True)
        else:
            pipe = _load_modular(model, dtype, transformers)
    if scheduler is not None:
        pipe.scheduler = scheduler
    return pipe.to(device)


def _load_transformer(model: ModelDescription, name: str, dtype: torch.dtype) -> Any:
    """Return a transformer; raise `UserError` where its config and its weights do not match.

    diffusers loads one whose config names another number of layers than its weights have, and
    makes a wrong result.
    """
    kind: Any = getattr(diffusers, model.components[name][1])
    with user_errors(Exception, what=f"the {name} of the model {model.location} cannot be loaded"):
        transformer, keys = kind.from_pretrained(
            model.location,
            subfolder=name,
            dtype=dtype,
            output_loading_info=True,
            **from_cache(model.location),
        )
    if "quantization_config" in transformer.config:
        return transformer  # its tensors have other names
    for names, fault in (
        (keys["missing_keys"], "asks for {} more than are there"),
        (keys["unexpected_keys"], "has no place for {} that are there"),
    ):
        if names:
            raise UserError(
                f"{name}/config.json of the model {model.location} does not fit the weights beside "
                f"it: it {fault.format(counted(len(names), 'tensor'))}, such as {min(names)}",
            )
    return transformer


def _load_modular(model: ModelDescription, dtype: torch.dtype, transformers: dict[str, Any]) -> Any:
    pipe = diffusers.ModularPipeline.from_pretrained(model.location, **from_cache(model.location))
    pipe.update_components(**transformers)
    pipe.load_components(dtype=dtype)  # which goes on where one could not be loaded
    missing = [name for name in model.components if getattr(pipe, name, None) is None]
    if missing:
        names = " and ".join(missing)
        raise UserError(f"the {names} of the model {model.location} could not be loaded")
    for block in denoising_loops(pipe._blocks):
        block.set_progress_bar_config(disable=True)
    return pipe
