"""In what a run's calls are made: offloading, another dtype, autocast, compiled blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import accelerate
import torch
from accelerate.hooks import CpuOffload, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import apply_group_offloading

from benchmarks.soak.subjects import Place, transformers_of

WITH_HOOKS = ("model offload", "group offload", "sequential offload", "cache on top")


def _lower_precision(pipe: Any, _place: Place, _undo: ExitStack) -> None:
    pipe.to(torch.bfloat16)


def _in_groups(pipe: Any, place: Place, undo: ExitStack) -> None:
    for model in transformers_of(pipe):
        apply_group_offloading(
            model,
            onload_device=place.device,
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
        )
        undo.callback(model.to, place.device)
        undo.callback(_take_off_groups, model)


def _take_off_groups(model: Any) -> None:
    for name in ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"):
        model._diffusers_hook.remove_hook(name, recurse=True)


def _one_module_at_a_time(pipe: Any, place: Place, undo: ExitStack) -> None:
    for model in transformers_of(pipe):
        accelerate.cpu_offload(model, execution_device=place.device)
        undo.callback(remove_hook_from_module, model, recurse=True)


def _compiled(pipe: Any, _place: Place, undo: ExitStack) -> None:
    undo.callback(torch._dynamo.reset)
    for model in transformers_of(pipe):
        for child in model.children():
            for block in child if isinstance(child, torch.nn.ModuleList) else ():
                block.compile(backend="eager", fullgraph=True)
                undo.callback(delattr, block, "_compiled_call_impl")


# What brings a pipeline into the surroundings that last for a whole run.
PREPARATIONS: dict[str, Callable[[Any, Place, ExitStack], None]] = {
    "bfloat16": _lower_precision,
    "autocast": lambda *_: None,  # around each call
    "group offload": _in_groups,
    "sequential offload": _one_module_at_a_time,
    "compiled blocks": _compiled,
}


class Leaving(CpuOffload):
    """As accelerate's hook of a model that is offloaded as a whole, also where all is one memory.

    There the model before this one, where it was called since this one was, gets its weights in
    other memory, as if it had left and were brought back.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.is_there = False
        self.before: tuple[Any, Leaving] | None = None

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """See `CpuOffload`."""
        assert self.before is not None
        model, hook = self.before
        if hook.is_there:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        hook.is_there, self.is_there = False, True
        return super().pre_forward(module, *args, **kwargs)


def offload_models(pipe: Any, place: Place, undo: ExitStack) -> None:
    """What ``pipe.enable_model_cpu_offload()`` does; also acted where all is one memory."""
    if place.device.type == "cuda":
        pipe.enable_model_cpu_offload(device=place.device)
        undo.callback(pipe.to, place.device)
        undo.callback(pipe.remove_all_hooks)
        return
    models = [*transformers_of(pipe), pipe.vae]
    hooks = [Leaving(place.device) for _ in models]
    for place_in_chain, (model, hook) in enumerate(zip(models, hooks, strict=True)):
        hook.before = models[place_in_chain - 1], hooks[place_in_chain - 1]
        add_hook_to_module(model, hook, append=True)
        undo.callback(remove_hook_from_module, model, recurse=True)
