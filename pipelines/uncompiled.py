"""One model without ``torch.compile`` for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from chipsparse.pipelines.patches import Patches


@contextlib.contextmanager
def uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """Runs the modules of a model as they are written, whichever of them are compiled.

    Compiled by ``module.compile()``, wrapped by ``torch.compile(module)``, or with a compiled
    ``forward``. ``torch.compiler.set_stance`` would do the same to all models of all threads.
    """
    patches = Patches()
    try:
        for module in model.modules():
            if module._compiled_call_impl is not None:
                patches.set_attribute(module, "_compiled_call_impl", None)
            original = _original(vars(module).get("forward"))
            if original is not None:
                patches.set_attribute(module, "forward", original)
        yield
    finally:
        patches.undo()


def is_compiled(model: Any) -> bool:
    """Return whether a model is compiled as a whole, in its own place and not in a wrapper."""
    if getattr(model, "_compiled_call_impl", None) is not None:
        return True
    forwards = getattr(model, "__dict__", {}).get("forward"), getattr(type(model), "forward", None)
    return any(_original(forward) is not None for forward in forwards)


def compiled_as_a_whole(name: str) -> str:
    """Return why a transformer is refused that is, by the pipeline's name for it."""
    return (
        f"{name} is compiled as a whole; enable chipsparse first and compile its blocks with "
        f"pipe.{name}.compile_repeated_blocks()"
    )


def _original(forward: Any) -> Any:
    """The function inside a compiled one; else None."""
    return getattr(forward, "_torchdynamo_orig_callable", None)
