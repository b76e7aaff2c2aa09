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
    """Raises a fault at some tensor operation of this thread, also within our layers.

    Attributes:
        struck: whether it was raised.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.struck = False
        self._left: int | None = None  # operations until then; None: it does not strike

    def step_ended(self, step: int) -> None:
        """Strikes after this step, at once or so many operations later; -1 is before the first."""
        if step == self.fault.step:
            self._left = self.fault.after
            if self._left is None:
                self._strike()

    def _strike(self) -> None:
        self._left, self.struck = None, True
        raise exception(self.fault)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._strike()
        if function.namespace == "chipsparse":  # or nothing within them would be seen
            with self:
                return function._op_dk(EXPLICIT, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))
