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


def _original(forward: Any) -> Any:
    """What a compiled function compiles; None where it is none."""
    return getattr(forward, "_torchdynamo_orig_callable", None)
