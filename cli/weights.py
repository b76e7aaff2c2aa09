"""How large a model's weights are, counted on its configs without loading any."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from chipsparse.cli.errors import UserError
from chipsparse.cli.model import ModelDescription, read_json


@dataclass(frozen=True)
class ComponentWeights:
    """The weights of one component of a pipeline.

    Attributes:
        name: the component.
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
        found = _component_class(library, class_name)
        if found is not None:
            counted.append(_count(model, name, found, dtype))
    return sorted(counted, key=lambda weights: -(weights.nbytes or 0))


def _component_class(library: str, class_name: str) -> Any:
    import diffusers
    import transformers

    source = {"diffusers": diffusers, "transformers": transformers}.get(library)
    found = getattr(source, class_name, None)
    is_module = inspect.isclass(found) and issubclass(found, torch.nn.Module)
    return found if is_module else None


def _count(model: ModelDescription, name: str, found: Any, dtype: torch.dtype) -> ComponentWeights:
    try:
        config = read_json(model.location, f"{name}/config.json")
    except UserError:
        return ComponentWeights(name, None, None)
    with torch.device("meta"):
        if hasattr(found, "from_config"):
            module = found.from_config(config)
            full_in = {torch.float16, torch.bfloat16}
        else:  # of transformers, which makes exceptions from float16 only
            module = found(found.config_class.from_dict(config))
            full_in = {torch.float16}
    kept = set(getattr(found, "_keep_in_fp32_modules", None) or []) if dtype in full_in else set()
    parameters = nbytes = 0
    for path, parameter in module.named_parameters():
        size = torch.float32.itemsize if kept & set(path.split(".")) else dtype.itemsize
        parameters += parameter.numel()
        nbytes += size * parameter.numel()
    return ComponentWeights(name, parameters, nbytes)
