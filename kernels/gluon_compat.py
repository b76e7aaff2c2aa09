"""Gluon under one set of names: its interface moves between Triton releases (3.6 to 3.9 so far).

Kernels import what moved from here and the rest from Triton itself. A release that nobody has tried
is asked, once, to compile them; if it cannot, plain Triton runs in their place.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import triton

# Those with which all Gluon kernels were compiled; benchmarks/compile_report.py tries another one.
TESTED_RELEASES = ("3.6", "3.7", "3.8", "3.9")

_missing: str | None = None
try:
    from triton.experimental import gluon
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

__all__ = [
    "async_load",
    "compile_column_sparse_attention",
    "compile_dense_attention_column_sums",
    "compile_fp8_dense_attention",
    "compile_kernel",
    "compile_sparse_mlp_down",
    "compile_sparse_mlp_up",
    "descriptor",
    "gl",
    "gluon",
    "mbarrier_arrive_on_copies",
    "partition_barrier",
    "tma_load",
    "unsupported_reason",
]

# Types of arguments by patterns of their names, as in triton/tools/compile.py: 16 behind a colon
# for a multiple of 16, which the kernels' callers see to for the strides of rows.
ARGUMENT_TYPES = {
    "(q|k|v|o|residual)_ptr": "*{half}:16",
    "(lse|lse_dense|previous|mass|scale|factor|shift|v_scale|v_mean)_ptr": "*fp32:16",
    "(indices|counts)_ptr": "*i32:16",
    "sums_ptr": "*bf16:16",
    "stride_[qkvor][bhn]|stride_g|M": "i32:16",
    "items|row_tiles|H|N|capacity|blocks|parts": "i32",
    "scale_log2|rounding": "fp32",
}

# Names of the elements of described tensors.
ELEMENTS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
}

MLP_ARGUMENT_TYPES = {
    "(w|bias|cache|delta|addend|out)_ptr": "*{half}:16",
    "stride_[ca]b": "i32:16",
    "whole|tiles|list_count|at_once|rows|channels8|padded8|stride_(w|cf|cn|an)8": "i32",
} | ARGUMENT_TYPES


def unsupported_reason() -> str | None:
    """Why the installed Triton cannot compile the Gluon kernels, or None; tried once, if ever."""
    return _unsupported_reason(triton.__version__)


@functools.cache
def _unsupported_reason(version: str) -> str | None:
    """As the public function: a fact about the installed package, whose version this is."""
    if _missing is not None:
        return f"Triton {version} lacks what the Gluon kernels need: {_missing}"
    if ".".join(version.split(".")[:2]) in TESTED_RELEASES:
        return None
    try:
        compile_column_sparse_attention(64, 64)
        compile_dense_attention_column_sums(128, with_column_sums=False)
        compile_sparse_mlp_up()
        compile_sparse_mlp_down()
    except Exception as error:  # whatever an unknown compiler may raise
        line = (str(error).strip().splitlines() or [""])[0]
        return f"Triton {version} does not compile the kernels: {type(error).__name__}: {line}"
    return None


def compile_column_sparse_attention(
    head_dim: int,
    tile_rows: int,
    delta_rule: str | None = None,
    half: str = "bf16",
    *,
    in_fp8: bool = False,
) -> Any:
    """Compiles ``column_sparse_attention.gluon_sm90`` for query tiles of so many rows."""
    module = importlib.import_module("chipsparse.kernels.column_sparse_attention.gluon_sm90")
    config = module.CONFIGS[head_dim, tile_rows]
    constants = {name.upper(): value for name, value in asdict(config).items()}
    constants |= {
        "D": head_dim,
        "TILES_PER_BLOCK": 1,
        "BLOCK_SIZE_Q": tile_rows,
        "RULE": module.RULES[delta_rule],
        "IN_FP8": in_fp8,
        "WIDE_ROWS": False,
        "num_warps": 4,
    }
    options = {"num_warps": 4, "maxnreg": 128 if config.blocks_per_sm == 2 else None}
    types = {"residual_ptr": "*fp8e4nv:16"} if in_fp8 else {}
    return compile_kernel(
        module._column_sparse_attention_kernel,
        types | ARGUMENT_TYPES,
        constants,
        half=half,
        options=options,
    )


def compile_dense_attention_column_sums(
    head_dim: int, *, with_column_sums: bool = True, part_rows: int = 128, half: str = "bf16"
) -> Any:
    """Compiles ``dense_attention_column_sums.gluon_sm90`` as it is launched."""
    module = importlib.import_module("chipsparse.kernels.dense_attention_column_sums.gluon_sm90")
    constants = {
        "TILE": module.TILE,
        "STAGES": module.STAGES[head_dim],
        "D": head_dim,
        "PART_ROWS": part_rows,
        "SUMS": with_column_sums,
        "CONSUMER_REGISTERS": module.CONSUMER_REGISTERS,
        "HELPER_REGISTERS": module.HELPER_REGISTERS,
        "num_warps": 4,
    }
    types = {"sums_ptr": "*bf16:16" if with_column_sums else "*fp32:16"}  # unused: any pointer
    for name, rows in {"q_desc": 64, "k_desc": module.TILE, "v_desc": module.TILE}.items():
        types[name] = _descriptor_type([1, 1, rows, head_dim], half)
    return compile_kernel(
        module._dense_attention_column_sums_kernel,
        ARGUMENT_TYPES | types,
        constants,
        half=half,
        options={"num_warps": 4},
    )


def compile_fp8_dense_attention(
    head_dim: int, *, with_column_sums: bool = True, part_rows: int = 128, half: str = "bf16"
) -> Any:
    """Compiles ``fp8_dense_attention.gluon_sm90`` as it is launched; ``half`` is the output's."""
    module = importlib.import_module("chipsparse.kernels.fp8_dense_attention.gluon_sm90")
    constants = {
        "TILE": module.TILE,
        "STAGES": module.STAGES[head_dim],
        "D": head_dim,
        "PART_ROWS": part_rows,
        "SUMS": with_column_sums,
        "CONSUMER_REGISTERS": module.CONSUMER_REGISTERS,
        "HELPER_REGISTERS": module.HELPER_REGISTERS,
        "num_warps": 4,
    }
    types = {"sums_ptr": "*bf16:16" if with_column_sums else "*fp32:16"}  # unused: any pointer
    types["q_desc"] = _descriptor_type([1, 1, 64, head_dim], "i8")
    types["k_desc"] = _descriptor_type([1, 1, module.TILE, head_dim], "i8")
    types["v_desc"] = _descriptor_type([1, 1, head_dim, module.TILE], "fp8e4nv")
    return compile_kernel(
        module._fp8_dense_attention_kernel,
        ARGUMENT_TYPES | types,
        constants,
        half=half,
        options={"num_warps": 4},
    )


def compile_sparse_mlp_up(
    activation: str = "gelu-tanh", *, even: bool = True, half: str = "bf16"
) -> Any:
    """Compiles ``sparse_mlp_up.gluon_sm90`` as it is launched; not ``even`` for ragged sizes."""
    module = importlib.import_module("chipsparse.kernels.sparse_mlp_up.gluon_sm90")
    config = module.CONFIG
    constants = {name.upper(): value for name, value in asdict(config).items()} | {
        "HAS_COUNTS": not even,
        "HAS_BIAS": True,
        "ACTIVATION": module.ACTIVATIONS[activation],
        "EVEN_CHANNELS": even,
        "WIDE_ROWS": False,
        "LAG": module.LAG,
        "num_warps": 4,
    }
    types = {"x_desc": _descriptor_type([64, config.depth], half)}
    return compile_kernel(
        module._sparse_mlp_up_kernel,
        types | MLP_ARGUMENT_TYPES,
        constants,
        half=half,
        options={"num_warps": 4},
    )


def compile_sparse_mlp_down(*, addend: bool = False, even: bool = True, half: str = "bf16") -> Any:
    """Compiles ``sparse_mlp_down.gluon_sm90`` as it is launched; not ``even`` for ragged sizes."""
    module = importlib.import_module("chipsparse.kernels.sparse_mlp_down.gluon_sm90")
    config = module.CONFIG
    constants = {name.upper(): value for name, value in asdict(config).items()} | {
        "HAS_COUNTS": not even,
        "HAS_ADDEND": addend,
        "EVEN_CHANNELS": even,
        "WIDE_ROWS": False,
        "num_warps": 4,
    }
    types = {"delta_desc": _descriptor_type([1, config.depth, 64], half)}
    return compile_kernel(
        module._sparse_mlp_down_kernel,
        types | MLP_ARGUMENT_TYPES,
        constants,
        half=half,
        options={"num_warps": 4},
    )


def descriptor(tensor: torch.Tensor, block: list[int]) -> Any:
    """What the copy engine needs to load blocks of a tensor; past its end zeros arrive."""
    return TensorDescriptor.from_tensor(
        tensor, block, _block_layout(tuple(block), ELEMENTS[tensor.dtype])
    )


@functools.cache
def _block_layout(block: tuple[int, ...], element: str) -> Any:
    """Where the elements of a loaded block lie; to ask Gluon takes longer than a launch."""
    types = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp8e4nv": gl.float8e4nv, "i8": gl.int8}
    return gl.NVMMASharedLayout.get_default_for(list(block), types[element])


def _descriptor_type(block: list[int], element: str) -> str:
    """The type of a `descriptor` for blocks of this shape."""
    layout = _block_layout(tuple(block), element)
    return f"tensordesc<{element}[{','.join(map(str, block))}],{layout!r}>"


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    options: Mapping[str, Any],
    half: str = "bf16",
    capability: int = 90,
) -> Any:
    """Compiles a Triton or Gluon kernel for an NVIDIA GPU; no GPU is needed.

    Args:
        kernel: the decorated function.
        types: as `ARGUMENT_TYPES`; the first pattern that matches a whole name counts.
        constants: values of the parameters that are compiled in; others may be among them.
        options: such as ``num_warps``; those that are None keep Triton's default.
        half: what ``{half}`` stands for.
        capability: 90 for Hopper.

    Raises:
        ValueError: a parameter is neither among the types nor the constants.
    """
    from triton.backends.compiler import GPUTarget

    signature: dict[str, str] = {}
    values: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            if name not in constants:
                raise ValueError(f"no value is known for the constant {name!r} of {kernel}")
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        kind = next((kind for key, kind in types.items() if re.fullmatch(key, name)), None)
        if kind is None:
            raise ValueError(f"no type is known for the parameter {name!r} of {kernel}")
        if not kind.startswith("tensordesc"):
            kind, _, hint = kind.format(half=half).partition(":")
            if hint == "1" and not parameter.do_not_specialize:
                signature[name], values[(index,)] = "constexpr", 1
                continue
            if hint == "16" and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    return triton.compile(
        Source(kernel, signature=signature, constexprs=values, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options={name: value for name, value in options.items() if value is not None},
    )
