"""Launches kernels with little work of the host.

At every launch Triton reads all arguments to find out which compiled kernel fits them. That takes
longer than some of our kernels run, and a step launches hundreds. The calls of one layer differ in
their pointers only, so here the compiled kernel is found by the arguments as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from triton.runtime.jit import JITFunction

# Compiled kernels and the constants that they are launched with, by kernel, device and arguments.
# Like Triton's own cache this holds facts about kernels, not about any caller.
_known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
MOST_KNOWN = 4096

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


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run ``kernel[grid](*arguments, **constants)`` on the current device and stream.

    Numbers must be the same in most calls. Constants, which are the kernel's last parameters and
    options of the compiler, come always in the same order.
    """
    known_here = isinstance(kernel, JITFunction) and torch.version.hip is None
    if not known_here or _compiled.get() is not None:
        launch_changing(kernel, grid, *arguments, **constants)
        return
    key: list[Any] = [id(kernel), torch.cuda.current_device(), *constants.values()]
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            key += (argument.dtype, argument.data_ptr() % 16)
        elif hasattr(argument, "block_shape"):
            key += (argument.base.dtype, *argument.block_shape)
        else:
            key.append(argument)
    known = _known.get(tuple(key))
    if known is None:
        compiled = kernel[grid](*arguments, **constants)
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        last = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        _known[tuple(key)] = compiled, last
    else:
        compiled, last = known
        compiled[(*grid, 1, 1)](*arguments, *last)


def launch_changing(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel with numbers that change from call to call, such as seeds."""
    compiled = _compiled.get()
    if compiled is None:
        kernel[grid](*arguments, **constants)
    else:
        compiled.append((kernel, kernel.warmup(*arguments, grid=grid, **constants)))
