"""Gluon under one set of names: its interface moves between Triton releases (3.6 to 3.9 so far).

Kernels import what moved from here and the rest from Triton itself. A release that nobody has tried
is asked, once, to compile one of each module; where it cannot, plain Triton runs in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton

from chipsparse.kernels.launch import compile_only

# Those with which all Gluon kernels were compiled; benchmarks/compile_report.py tries another one.
TESTED_RELEASES = ("3.6", "3.7", "3.8", "3.9")

_missing: str | None = None
try:
    from triton.experimental import gluon  # noqa: F401, which all kernels import
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # A copy of addressed elements to shared memory, and of a described tile: renamed in 3.8.
    async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
    tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    mbarrier_arrive_on_copies = async_copy.mbarrier_arrive

    # The barrier among the warps of one partition: renamed in 3.7.
    partition_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
except (ImportError, AttributeError) as error:
    _missing = str(error)  # kernels cannot be imported either; `missing_reason` says so


def missing_reason() -> str | None:
    """Return what the installed Triton lacks that all Gluon kernels need, or None."""
    if _missing is None:
        return None
    return f"Triton {triton.__version__} lacks what the Gluon kernels need: {_missing}"


def not_compiled_reason(
    device: torch.device,
    load: Callable[[], Callable[[torch.device], object]],
) -> str | None:
    """Return why the installed Triton does not compile a Gluon kernel for a GPU; tried once.

    What is loaded launches the kernel on such a device. A tested release is not asked.
    """
    return _not_compiled_reason(triton.__version__, device, load)


@functools.cache
def _not_compiled_reason(
    version: str,
    device: torch.device,
    load: Callable[[], Callable[[torch.device], object]],
) -> str | None:
    if ".".join(version.split(".")[:2]) in TESTED_RELEASES:
        return None
    try:
        with compile_only():
            load()(device)
    except Exception as error:  # whatever an unknown compiler may raise
        line = (str(error).strip().splitlines() or [""])[0]
        return f"Triton {version} does not compile the kernel: {type(error).__name__}: {line}"
    return None


def descriptor(
    known: dict[Any, Any],
    name: object,
    tensor: torch.Tensor,
    *block: int,
) -> TensorDescriptor:
    """Return the descriptor by which the copy engine loads blocks; past the end zeros arrive.

    To make one takes longer than a launch. So all but the tensor is kept in what is known of a kind
    of calls, under a name.
    """
    if name not in known:
        elements = {
            torch.bfloat16: gl.bfloat16,
            torch.float16: gl.float16,
            torch.float8_e4m3fn: gl.float8e4nv,
            torch.int8: gl.int8,
        }
        layout = gl.NVMMASharedLayout.get_default_for(list(block), elements[tensor.dtype])
        described = TensorDescriptor.from_tensor(tensor, list(block), layout)
        known[name] = {**vars(described), "base": None}
    made = TensorDescriptor.__new__(TensorDescriptor)
    vars(made).update(known[name], base=tensor)
    return made
