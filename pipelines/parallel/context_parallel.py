"""diffusers' own context parallelism on a transformer: seen, taken off while patched, put back.

Its hooks cut tokens inside of a module's ``forward``, before PyTorch's hooks see them, so hooks
that reorder tokens would come too late, and a block with one is no whole graph. Ours cut instead.
The interface is announced as experimental, and this is the only file that reads it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from chipsparse.pipelines.diffusers_hooks import hooks_on
from chipsparse.pipelines.patches import Patches

HOOKS = ("cp_input---", "cp_output---")


def sharing_group(transformer: Any) -> Any:
    """The group of processes over which diffusers was set to share tokens; None: it was not."""
    config = getattr(transformer, "_parallel_config", None)
    if config is None:
        return None
    context = getattr(config, "context_parallel_config", None)
    name = type(transformer).__name__
    if context is None or getattr(config, "tensor_parallel_config", None) is not None:
        raise ValueError(
            f"this {name} runs under tensor parallelism, which shares weights between processes; "
            "chipsparse runs under context parallelism: ContextParallelConfig(ulysses_degree=...)",
        )
    if context.ring_degree > 1:
        raise ValueError(
            f"this {name} runs with ring_degree={context.ring_degree}, and chipsparse has no ring; "
            "use ulysses_degree",
        )
    return context._flattened_mesh.get_group()


def take_off(transformer: Any, patches: Patches) -> None:
    """Lets a transformer run as if it were on one device, until the patches are undone."""
    if getattr(transformer, "_parallel_config", None) is None:
        return
    for module in transformer.modules():
        for name, hook in [*hooks_on(module).items()]:
            if name.startswith(HOOKS):
                module._diffusers_hook.remove_hook(name, recurse=False)
                patches.add_undo(partial(module._diffusers_hook.register_hook, hook, name))
    processors = [getattr(module, "processor", None) for module in transformer.modules()]
    for processor in {id(processor): processor for processor in processors}.values():
        if getattr(processor, "_parallel_config", None) is not None:
            patches.set_attribute(processor, "_parallel_config", None)
