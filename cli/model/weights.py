"""How large a model's weights are, counted on its configs without loading any."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers

from chipsparse.cli.errors import UserError
from chipsparse.cli.model.description import ModelDescription, read_json


@dataclass(frozen=True)
class ComponentWeights:
    """The weights of one component of a pipeline.

    Attributes:
        parameters: how many there are; None where its folder has no config.
        nbytes: how many bytes they take once loaded; likewise.
    """

    name: str
    parameters: int | None
    nbytes: int | None


def count_weights(model: ModelDescription, dtype: torch.dtype) -> list[ComponentWeights]:
    """The weights of every component that has some, largest first, as `load_pipeline` loads them.

    A config that says how weights are quantized changes nothing: they are counted as if they
    were not.
    """
    counted = []
    for name, (library, class_name) in model.components.items():
        found = component_class(library, class_name)
        if found is not None:
            counted.append(_count(model, name, found, dtype))
    return sorted(counted, key=lambda weights: -(weights.nbytes or 0))


def component_class(library: str, class_name: str) -> Any:
    """The class of a component that has weights, else None."""
    source = {"diffusers": diffusers, "transformers": transformers}.get(library)
    found = getattr(source, class_name, None)
    is_module = inspect.isclass(found) and issubclass(found, torch.nn.Module)
    return found if is_module else None


def made_from(found: Any, config: dict[str, Any]) -> torch.nn.Module:
    """A component of a class of diffusers or transformers, with the weights it begins with."""
    if hasattr(found, "from_config"):
        made: torch.nn.Module = found.from_config(config)
    else:  # of transformers
        made = found(found.config_class.from_dict(config))
    return made


def stays_float32(found: Any, path: str, dtype: torch.dtype) -> bool:
    """Whether a parameter is loaded in float32 where ``dtype`` is asked for."""
    of_diffusers = hasattr(found, "from_config")
    # transformers makes exceptions from float16 only.
    full_in = {torch.float16, torch.bfloat16} if of_diffusers else {torch.float16}
    kept = set(getattr(found, "_keep_in_fp32_modules", None) or [])
    return dtype in full_in and bool(kept & set(path.split(".")))


def _count(model: ModelDescription, name: str, found: Any, dtype: torch.dtype) -> ComponentWeights:
    try:
        config = read_json(model.location, f"{name}/config.json")
    except UserError:
        return ComponentWeights(name, None, None)
    with torch.device("meta"):
        module = made_from(found, config)
    parameters = nbytes = 0
    for path, parameter in module.named_parameters():
        size = torch.float32.itemsize if stays_float32(found, path, dtype) else dtype.itemsize
        parameters += parameter.numel()
        nbytes += size * parameter.numel()
    return ComponentWeights(name, parameters, nbytes)
