"""Launches kernels with little work of the host.

At every launch Triton reads all arguments to find out which compiled kernel fits them. That takes
longer than some of our kernels run, and a step launches hundreds. Calls of one kind differ in their
pointers only, so here a launch is found by the kind of the call, or by its arguments as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime.jit import JITFunction

from chipsparse.kernels.kinds import known_of

if TYPE_CHECKING:
    from triton.runtime.jit import KernelInterface

_compiled: ContextVar[list[tuple[Any, Any]] | None] = ContextVar("compiled", default=None)


@contextmanager
def compile_only() -> Iterator[list[tuple[Any, Any]]]:
    """Launches compile for Triton's device and run nothing; yields kernels and what they became."""
    compiled: list[tuple[Any, Any]] = []
    token = _compiled.set(compiled)
    try:
        yield compiled
    finally:
        _compiled.reset(token)


class Launch:
    """A launch of which all but the first arguments is known.

    These are tensors and descriptors of the same dtypes and alignment in every call. Numbers follow
    them, and constants are the kernel's last parameters and options of the compiler.
    """

    def __init__(
        self,
        kernel: KernelInterface,
        grid: tuple[int, ...],
        *numbers: Any,
        **constants: Any,
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._numbers = numbers
        self._constants = constants
        # Where it ran, and the launch of what was compiled there with all that it takes at the end.
        self._device: int | None = None
        self._again: tuple[Callable[..., None], tuple[Any, ...]] | None = None

    def __call__(self, *arguments: Any) -> None:
        """Run the kernel on the device of the first argument and on its current stream."""
        if self._device is not None and torch.cuda.current_device() == self._device:
            self._run(arguments)
        else:
            first = getattr(arguments[0], "base", arguments[0])  # the tensor of a descriptor
            with torch.cuda.device_of(first):
                self._run(arguments)

    def _run(self, arguments: tuple[Any, ...]) -> None:
        compiled = _compiled.get()
        if compiled is None and self._again is not None:
            run, rest = self._again
            run(*arguments, *rest)
            return
        kernel = self._kernel
        grid = self._grid
        constants = self._constants
        arguments = (*arguments, *self._numbers)
        if compiled is not None:
            compiled.append((kernel, kernel.warmup(*arguments, grid=grid, **constants)))
            return
        launched = kernel[grid](*arguments, **constants)
        if isinstance(kernel, JITFunction) and torch.version.hip is None:
            last = [constants[name] for name in kernel.arg_names[len(arguments) :]]
            self._again = launched[(*grid, 1, 1)], (*self._numbers, *last)
            self._device = torch.cuda.current_device()


def launch(
    kernel: KernelInterface,
    grid: tuple[int, ...],
    *arguments: Any,
    **constants: Any,
) -> None:
    """Run ``kernel[grid](*arguments, **constants)``, where arguments are the same in most calls.

    Constants come always in the same order.
    """
    key: list[Any] = [id(kernel), grid, arguments[0].device, *constants.values()]
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            key += (argument.dtype, argument.data_ptr() % 16)
        else:
            key.append(argument)
    known = known_of(tuple(key))
    if "launch" not in known:
        known["launch"] = Launch(kernel, grid, **constants)
    known["launch"](*arguments)


def launch_changing(
    kernel: KernelInterface,
    grid: tuple[int, ...],
    *arguments: Any,
    **constants: Any,
) -> None:
    """Run a kernel with numbers that change from call to call, such as counts."""
    Launch(kernel, grid, **constants)(*arguments)
