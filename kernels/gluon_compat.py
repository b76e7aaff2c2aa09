"""Gluon under one set of names: its interface moves between Triton releases (3.6 to 3.9 so far).

Kernels import what moved from here and the rest from Triton itself. A release that nobody has tried
is asked, once, to compile them; if it cannot, plain Triton runs in their place.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

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
    _missing = str(error)  # kernels cannot be imported either; `unsupported_reason` says so


def unsupported_reason(device: torch.device) -> str | None:
    """Return why the installed Triton cannot compile the Gluon kernels for a GPU; tried once."""
    return _unsupported_reason(triton.__version__, device)


@functools.cache
def _unsupported_reason(version: str, device: torch.device) -> str | None:
    if _missing is not None:
        return f"Triton {version} lacks what the Gluon kernels need: {_missing}"
    if ".".join(version.split(".")[:2]) in TESTED_RELEASES:
        return None
    try:
        _compile_kernels(device)
    except Exception as error:  # whatever an unknown compiler may raise
        line = (str(error).strip().splitlines() or [""])[0]
        return f"Triton {version} does not compile the kernels: {type(error).__name__}: {line}"
    return None


def _compile_kernels(device: torch.device) -> None:
    """Compiles a kernel of each operation that has one here, as it is launched, and runs none."""
    # These modules import this one.
    from chipsparse.kernels.column_sparse_attention import ColumnSparseAttention
    from chipsparse.kernels.column_sparse_attention.gluon_sm90 import column_sparse_attention
    from chipsparse.kernels.dense_attention import DenseAttention
    from chipsparse.kernels.dense_attention_column_sums.gluon_sm90 import dense_attention
    from chipsparse.kernels.launch import compile_only
    from chipsparse.kernels.sparse_mlp_down import SparseMLPDown
    from chipsparse.kernels.sparse_mlp_down.gluon_sm90 import sparse_mlp_down
    from chipsparse.kernels.sparse_mlp_up import SparseMLPUp
    from chipsparse.kernels.sparse_mlp_up.gluon_sm90 import sparse_mlp_up
    from chipsparse.kernels.token_layout import empty_token_contiguous

    hidden = torch.empty(1, 128, 256, dtype=torch.bfloat16, device=device)
    weight = torch.empty(512, 256, dtype=torch.bfloat16, device=device)
    heads = hidden.unflatten(2, (2, 128)).transpose(1, 2)
    lists = torch.empty(1, 2, 1, 64, dtype=torch.int32, device=device)
    cache = empty_token_contiguous(hidden, 1, 128, 512)
    with compile_only():
        attention = ColumnSparseAttention(heads, heads, heads, lists, lists[..., 0])
        column_sparse_attention(attention)
        dense_attention(DenseAttention(heads, heads, heads))
        first = SparseMLPUp(hidden, weight, None, lists[:, 0], cache, activation="gelu-tanh")
        change = sparse_mlp_up(first)
        sparse_mlp_down(SparseMLPDown(change, weight.t(), lists[:, 0], hidden))


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
