"""Exceptions that end a call: at any of its tensor operations, or in the user's callback."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.soak.choices import Fault

EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd


class Injected(RuntimeError):
    """An error of the model or of the user's own code."""


def exception(fault: Fault) -> BaseException:
    """What is raised."""
    if fault.name == "Ctrl-C":
        return KeyboardInterrupt("of the soak")
    if fault.name == "out of memory":
        return torch.OutOfMemoryError("CUDA out of memory, says the soak")
    return Injected("of the soak")


class Striking(TorchDispatchMode):
    """Raises an exception at some tensor operation of this thread, also within our layers.

    Args:
        error: the exception.

    Attributes:
        left: operations until then; None: it does not strike.
        struck: whether it was raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error
        self.left: int | None = None
        self.struck = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left, self.struck = None, True
                raise self._error
        if function.namespace == "chipsparse":  # or nothing within them would be seen
            with self:
                return function._op_dk(EXPLICIT, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))
