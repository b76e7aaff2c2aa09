"""A pipeline with random weights, made from a model's configs: for its times, not its results."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from chipsparse.cli.errors import user_errors
from chipsparse.cli.model.description import ModelDescription, read_json
from chipsparse.cli.model.modular import ModularDescription, quiet
from chipsparse.cli.model.weights import component_class, made_from, stays_float32

SEED = 0


def random_pipeline(model: ModelDescription, *, device: torch.device, dtype: torch.dtype) -> Any:
    """The pipeline of a model, every component with weights made where it runs.

    Tokenizers and schedulers come from the model's files; weights are the same at every call. The
    global random state is left as it was.

    Raises:
        UserError: a component cannot be made from its config, or its files are missing.
    """
    if isinstance(model, ModularDescription):
        pipe = model.blocks.init_pipeline()
        for name in model.components:
            made = _component(model, name, device=device, dtype=dtype)
            pipe.update_components(**{name: made})
        return quiet(pipe)
    index = read_json(model.location, "model_index.json")
    arguments: dict[str, Any] = {
        name: value
        for name, value in index.items()
        if name in inspect.signature(model.pipeline_class.__init__).parameters  # type: ignore[misc]
    }
    for name, entry in arguments.items():
        if isinstance(entry, list):
            arguments[name] = None
            if name in model.components:
                arguments[name] = _component(model, name, device=device, dtype=dtype)
    pipe = model.pipeline_class(**arguments)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _component(
    model: ModelDescription, name: str, *, device: torch.device, dtype: torch.dtype
) -> Any:
    library, class_name = model.components[name]
    found = component_class(library, class_name)
    with user_errors(Exception, what=f"the {name} of {model.location} could not be made"):
        if found is None:
            loaded = getattr(importlib.import_module(library), class_name)
            return loaded.from_pretrained(model.location, subfolder=name)
        config = read_json(model.location, f"{name}/config.json")
        return _made(found, config, device=device, dtype=dtype)


def _made(
    found: Any, config: dict[str, Any], *, device: torch.device, dtype: torch.dtype
) -> torch.nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        gpus = [device] if device.type == "cuda" else []
        with torch.device(device), torch.random.fork_rng(gpus), torch.no_grad():
            torch.manual_seed(SEED)
            module = made_from(found, config)
    finally:
        torch.set_default_dtype(before)
    for path, parameter in module.named_parameters():
        wanted = torch.float32 if stays_float32(found, path, dtype) else dtype
        parameter.data = parameter.data.to(wanted)
    return module.eval().requires_grad_(False)
