"""The kernels in all configurations that launchers choose from, to compile without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any
from unittest import mock

import torch

from chipsparse.kernels.dense_attention import FASTER_HEAD_DIM

HOPPER, AMPERE = 90, 80
ADA, BLACKWELL = 89, 100  # for FP8, besides Hopper

# Types of arguments by name, for plain Triton; Gluon's are in `gluon_compat`, which explains them.
TRITON_TYPES = {
    "(query|key|value|output|kept|residual)_ptr": "*{half}:16",
    "(lse|lse_dense|lse_previous|kept_lse|kept_mass|residual_scale)_ptr": "*fp32:16",
    "column_sums_ptr": "*bf16:16",
    "(query|key|value|output|kept|residual)_stride_[bhnm]": "i32:16",
    "indices_stride_[bhg]": "i32",
    "(indices_stride_k|residual_stride_d)": "i32:1",
    "(indices|counts|static_counts)_ptr": "*i32:16",
    "(mask|packed|static)_ptr": "*u8:16",
    "sums_ptr": "*{half}:16",
    "static_stride_[bhg]": "i32",
    "heads|rows|row_tiles|blocks|first_unit|columns|num_columns": "i32",
    "row_bytes|keep_count|capacity": "i32",
    "block_size_q": "i32:16",
    "strata|seed_state|first_head|first_block|turns|loose": "i32",
    "(first|second|third|buffer)_ptr": "*{half}:16",
    "pieces_ptr": "*i32:16",
    "(first|second|third)_stride_[bnh]": "i32:16",
    "batch|tokens": "i32",
    "scale|rounding": "fp32",
}

# As for all sizes of the MLPs in the named cases, whose blocks have 128 rows.
MLP_TYPES = {
    "(hidden|weight|gate|bias|gate_bias|cache|delta|addend|result|parts|up)_ptr": "*{half}:16",
    "(means|scores|cache_scale)_ptr": "*fp32:16",
    "(cache|addend)_stride_c": "i32:1",
    "(hidden|weight|gate|cache|delta|addend)_stride_[bnfk]|stride_[bf]": "i32:16",
    "indices_stride_[bg]": "i32:16",
    "rows|channels|neurons|capacity|block_size": "i32:16",
    "all_blocks|keep": "i32",
} | TRITON_TYPES
FP8_TYPES = {
    "(row_factor|row_shift|value_mean|value_scale|noted|made)_ptr": "*fp32:16",
    "(query8|key8)_ptr": "*i8:16",
    "value8_ptr": "*fp8e4nv:16",
    "query8_stride_[bhn]|value_stride_d": "i32:16",
    "chunks": "i32",
    "stored": "i32:16",
}
QUANTIZED_TYPES = {"(query|key)_ptr": "*i8:16", "value_ptr": "*fp8e4nv:16"}
RESIDUAL_BYTES = {"residual_ptr": "*u8:16"}  # of FP8, for plain Triton
WEIGHT_TYPES = {
    "data_ptr": "*u8:16",
    "scale_ptr": "*fp32:16",
    "result_ptr": "*{half}:16",
    "(data_stride|rows|columns)": "i32:16",
    "scale_stride": "i32",
}
ROW_TYPES = {
    "rows_ptr": "*{half}:16",
    "data_ptr": "*fp8e4nv:16",
    "scale_ptr": "*fp32:16",
    "(stride|width)": "i32:16",
}
ACTIVATION_TYPES = {
    "activation_ptr": "*{half}:16",
    "data_ptr": "*u8:16",
    "largest_ptr": "*i32:16",
    "scale_ptr": "*fp32:16",
    "(data_)?stride_b": "i32:16",
    "data_stride_f": "i32",
    "tokens": "i32",
    "neurons": "i32:16",
}
TOP_TYPES = {"cache_ptr": "*fp32:16", "cache_stride_g": "i32:16", "cache_stride_f": "i32:1"}


@dataclass(frozen=True)
class CompiledCase:
    """One kernel as some launch compiles it.

    Attributes:
        operation: folder of the kernel.
        backend: as it is named there.
        variant: what tells the cases of one backend apart.
        default: launched by default: for a block of 128 rows, and the default delta rule.
        compile: to what Triton returns for a compiled kernel.
        capability: 90 for Hopper.
    """

    operation: str
    backend: str
    variant: str
    default: bool
    compile: Callable[[], Any]
    capability: int = HOPPER

    def __str__(self) -> str:
        return f"{self.operation} {self.backend} sm_{self.capability} {self.variant}"


def cases() -> list[CompiledCase]:
    """Every kernel in all configurations that the launchers choose from."""
    attention = (_gluon, _attention, _fp8, _selection, _packing, _residuals, _pieces)
    makers = (*attention, _mlp, _activations, _weights, _rows, _neurons)
    return [case for make in makers for case in make()]


def _gluon() -> Iterator[CompiledCase]:
    from chipsparse.kernels import gluon_compat

    def case(operation: str, variant: str, default: bool, *args: Any, **options: Any) -> Any:
        compile_ = getattr(gluon_compat, f"compile_{operation}")
        made = partial(compile_, *args, **options)
        return CompiledCase(operation, "gluon_sm90", variant, default, made)

    sparse = import_module("chipsparse.kernels.column_sparse_attention.gluon_sm90")
    rules: list[Any] = [(None, "bf16", False), ("merge", "bf16", False), ("merge", "fp16", False)]
    rules += [("merge", "bf16", True), ("difference", "bf16", True)]
    for (head_dim, rows), (rule, half, in_fp8) in product(sparse.CONFIGS, rules):
        if half == "bf16" or (head_dim, rows) == (128, 128):
            variant = f"D{head_dim} rows{rows} {rule or 'none'}{' fp8' * in_fp8} {half}"
            default, arguments = rows == 128 and half == "bf16", (head_dim, rows, rule, half)
            yield case("column_sparse_attention", variant, default, *arguments, in_fp8=in_fp8)
    sizes = ((True, 128, "bf16"), (True, 64, "bf16"), (False, 128, "bf16"), (True, 128, "fp16"))
    for head_dim, (sums, rows, half) in product((64, 128), sizes):
        variant = f"D{head_dim} rows{rows} {'sums' if sums else 'no sums'} {half}"
        options: dict[str, Any] = {"with_column_sums": sums, "part_rows": rows, "half": half}
        default = rows == 128 and half == "bf16"
        # Without sums this is the kernel of `dense_attention`, for heads of this size.
        in_sums = default and (sums or head_dim == FASTER_HEAD_DIM)
        yield case("dense_attention_column_sums", variant, in_sums, head_dim, **options)
        yield case("fp8_dense_attention", variant, default, head_dim, **options)
    ups = (("gelu-tanh", True, "bf16"), ("gelu", True, "bf16"), ("silu", False, "bf16"))
    for activation, even, half in (*ups, ("gelu-tanh", False, "fp16")):
        variant = f"{activation}{' ragged' * (not even)} {half}"
        default = even and activation == "gelu-tanh"
        yield case("sparse_mlp_up", variant, default, activation, even=even, half=half)
    for addend, even, half in ((False, True, "bf16"), (True, True, "bf16"), (True, False, "fp16")):
        variant = f"{'addend' if addend else 'alone'}{' ragged' * (not even)} {half}"
        yield case("sparse_mlp_down", variant, even, addend=addend, even=even, half=half)


def _attention() -> Iterator[CompiledCase]:
    class Query:
        device = torch.device("cuda", 0)
        shape: tuple[int, ...] = ()

    sparse, dense = "column_sparse_attention", "dense_attention_column_sums"
    rules = {"none": ("none", False), "merge": ("merge", False), "merge fp8": ("merge", True)}
    variants: list[tuple[str, bool, str, dict[str, Any]]] = [
        (sparse, True, text, {"RULE": rule, "IN_FP8": in_fp8, "WIDE_OFFSETS": False})
        for text, (rule, in_fp8) in rules.items()
    ]
    variants.append((dense, True, "sums", {"WITH_COLUMN_SUMS": True}))
    variants.append((dense, False, "no sums", {"WITH_COLUMN_SUMS": False}))
    for capability, head_dim, variant in product((HOPPER, AMPERE), (64, 128), variants):
        operation, default, text, constants = variant
        Query.shape = (1, 1, 1, head_dim)
        module = _module(operation)
        pretended: dict[str, Any] = {"return_value": divmod(capability, 10), "create": True}
        with mock.patch.object(module, "compute_capability", **pretended):
            config = module.CONFIGS[module.default_config(Query)]
        constants = {"HEAD_DIM": head_dim, "WIDE_PRODUCTS": False, **constants, **config}
        types = RESIDUAL_BYTES | TRITON_TYPES if "fp8" in text else TRITON_TYPES
        kernel, name = f"_{operation}_kernel", f"D{head_dim} {text} bf16"
        yield _triton(operation, kernel, name, default, constants, capability, types=types)


def _fp8() -> Iterator[CompiledCase]:
    quantization, dense = _module("fp8_quantization"), _module("fp8_dense_attention")
    usual = {"num_warps": quantization.WARPS}
    parts = {
        "note": ((False, True), usual),
        "make": ((False,), {"num_warps": quantization.MAKE_WARPS}),
        "round": ((False, True), usual | {"num_stages": quantization.ROUND_STAGES}),
    }
    sizes = {"TILE": quantization.TILE_TOKENS, "CHUNK": quantization.CHUNK_TOKENS}
    sizes |= {"PART": quantization.PART_TOKENS}
    types, own = FP8_TYPES | TRITON_TYPES, QUANTIZED_TYPES | FP8_TYPES | TRITON_TYPES
    for capability, head_dim in product((HOPPER, ADA, BLACKWELL), (64, 128)):
        fixed: dict[str, Any] = {"HEAD_DIM": head_dim, "WIDE_PRODUCTS": False}
        for part, (rotations, options) in parts.items():
            for rotate in rotations:
                constants = {**fixed, "ROTATE": rotate, **sizes, **options}
                name = f"{part} D{head_dim}{' rotated' * rotate} bf16"
                operation, kernel = "fp8_quantization", f"_{part}_kernel"
                yield _triton(operation, kernel, name, True, constants, capability, types=types)
        for sums in (True, False):
            constants = {**fixed, "WITH_COLUMN_SUMS": sums, **dense.CONFIG}
            operation, name = "fp8_dense_attention", f"D{head_dim} {'' if sums else 'no '}sums bf16"
            kernel = f"_{operation}_kernel"
            yield _triton(operation, kernel, name, True, constants, capability, types=own)


def _selection() -> Iterator[CompiledCase]:
    module, operation = _module("column_selection"), "column_selection"
    kinds = (("bf16", True, False), ("bf16", True, True), ("bf16", False, False))
    for half, even, static in (*kinds, ("fp32", True, False)):
        packed = even and half != "fp32"  # compares two 16-bit sums by one instruction
        constants = {"INFINITY": 0x7F80, "EVEN": even, "STATIC": static, "PACKED": packed}
        constants["BYTES"] = module.TILE_BYTES if even else module.TILE_BYTES // 2
        constants |= {"SAMPLE": module.SAMPLE_BYTES, "num_warps": module.SELECT_WARPS}
        constants |= module.OCCUPANCY if packed else {}
        name = f"select {half}{' ragged' * (not even)}{' static' * static}"
        default = half == "bf16" and even
        yield _triton(operation, "_select_kernel", name, default, constants, half=half)
    for wide in (False, True):
        constants = {"WIDE": wide, "STRATA": module.STRATA, "num_warps": module.DRAW_WARPS}
        yield _triton(operation, "_draw_kernel", f"draw{' wide' * wide}", not wide, constants)


def _packing() -> Iterator[CompiledCase]:
    module = _module("mask_packing")
    pack = {"BYTES": module.PACK_BYTES, "num_warps": module.PACK_WARPS}
    count = {"WORDS": module.COUNT_WORDS, "num_warps": module.COUNT_WARPS}
    constants = {
        **{
            f"{kernel}{' ragged' * (not even)}": {"EVEN": even, **pack}
            for kernel, even in product(("pack", "unpack"), (True, False))
        },
        **{"count": count, "list": {"STAGED": True, "num_warps": 1}},
    }
    for name, values in constants.items():
        yield _triton("mask_packing", f"_{name.split()[0]}_kernel", name, True, values)


def _residuals() -> Iterator[CompiledCase]:
    module = _module("attention_residual")
    kinds = (
        *(("bf16", HOPPER, "merge", False), ("fp32", HOPPER, "merge", False)),
        *(("bf16", HOPPER, "difference", False), ("bf16", HOPPER, "merge", True)),
        ("bf16", AMPERE, "merge", True),  # which cannot convert FP8 itself
        ("bf16", HOPPER, "difference", True),
    )
    for (half, capability, rule, in_fp8), width in product(kinds, (64, 128)):
        constants = {"MERGES": rule == "merge", "IN_FP8": in_fp8, "WIDTH": width}
        constants |= {"ROWS": module.TILE_ELEMENTS // width, "COLUMNS": width}
        constants |= {"num_warps": module.WARPS}
        types = RESIDUAL_BYTES | TRITON_TYPES if in_fp8 else TRITON_TYPES
        name = f"D{width} {rule}{' fp8' * in_fp8} {half}"
        named = "attention_residual", "_residual_kernel", name, True
        yield _triton(*named, constants, capability, half=half, types=types)


def _pieces() -> Iterator[CompiledCase]:
    module = _module("rank_pieces")
    for packs, cuts_heads in product((True, False), (True, False)):
        # q, k and v there, the output back
        constants = {"TENSORS": 3 if packs == cuts_heads else 1, "CUTS_HEADS": cuts_heads}
        constants |= {"PACKS": packs, "WIDTH": 128, "ROWS": module.TILE_ELEMENTS // 128}
        constants |= {"COLUMNS": 128, "num_warps": module.WARPS}
        variant = f"{'pack' if packs else 'unpack'} {'heads' if cuts_heads else 'tokens'}"
        yield _triton("rank_pieces", "_copy_kernel", variant, True, constants)


def _weights() -> Iterator[CompiledCase]:
    module = _module("fp8_dequantization")
    sizes = {"ROWS": module.TILE_ROWS, "COLUMNS": module.TILE_COLUMNS, "num_warps": module.WARPS}
    for capability, turned in product((HOPPER, ADA, AMPERE, BLACKWELL), (False, True)):
        kernel = "fp8_dequantization", "_dequantize_kernel", "turned" if turned else "as it lies"
        yield _triton(*kernel, True, {"TURNED": turned, **sizes}, capability, types=WEIGHT_TYPES)


def _rows() -> Iterator[CompiledCase]:
    module = _module("fp8_rows")
    constants = {"TILE": module.TILE, "INTERPRETED": False, "num_warps": module.WARPS}
    for capability, half in product((HOPPER, ADA, BLACKWELL), ("bf16", "fp16")):
        kernel = "fp8_rows", "_round_rows_kernel", half, half == "bf16"
        yield _triton(*kernel, constants, capability, half=half, types=ROW_TYPES)


def _activations() -> Iterator[CompiledCase]:
    module = _module("fp8_activations")
    sizes = {"TOKENS": module.TOKENS, "NEURONS": module.NEURONS, "num_warps": module.WARPS}
    for capability, contiguous in product((HOPPER, AMPERE), ("tokens", "neurons")):
        eight = {"EIGHT_AT_ONCE": contiguous == "tokens"}
        first, second = ("i32:1", "i32") if contiguous == "tokens" else ("i32:16", "i32:1")
        types = {"stride_n": first, "stride_f": second} | ACTIVATION_TYPES
        converts = {"CONVERTS": capability >= HOPPER}
        for name, constants in (("largest", sizes | eight), ("round", converts | sizes | eight)):
            kernel = "fp8_activations", f"_{name}_kernel", f"{name}, {contiguous} contiguous bf16"
            yield _triton(*kernel, True, constants, capability, types=types)


def _mlp() -> Iterator[CompiledCase]:
    up, down = _module("sparse_mlp_up"), _module("sparse_mlp_down")
    even = {"COUNTS": False, "EVEN_CHANNELS": True, "WIDE_PRODUCTS": False}
    full = {"IN_FP8": False, "CONVERTS": False}
    first = "sparse_mlp_up", "_sparse_mlp_up_kernel"
    second = "sparse_mlp_down", "_sparse_mlp_down_kernel"
    for capability in (HOPPER, AMPERE):
        with _pretended(up, capability), _pretended(down, capability):
            defaults, rounding = (
                {g: up.default_config(_OnGpu, gated=g, **fp8) for g in (False, True)}
                for fp8 in ({}, {"in_fp8": True})
            )
            down_default = down.default_config(_OnGpu)
        for (name, config), gated in product(up.CONFIGS.items(), (False, True)):
            if _sums_fit(config, 1 + gated, capability):
                text, default = f"{name}{' gated' * gated} bf16", name == defaults[gated]
                constants = {**_first_layer(gated), **full, **even, **config}
                yield _triton(*first, text, default, constants, capability, types=MLP_TYPES)
        in_fp8, bytes_ = {"IN_FP8": True, "CONVERTS": capability >= HOPPER}, {"cache_ptr": "*u8:16"}
        for gated, name in rounding.items():
            text = f"{name}{' gated' * gated} bf16, cache in fp8"
            constants = {**_first_layer(gated), **in_fp8, **even, **up.CONFIGS[name]}
            yield _triton(*first, text, True, constants, capability, types=bytes_ | MLP_TYPES)
        for name, config in down.CONFIGS.items():
            if _sums_fit(config, 1, capability):
                constants = {"ADDEND": True, "EVEN_NEURONS": True, "WIDE_OFFSETS": False}
                constants |= {**even, **config}
                named = *second, f"{name} bf16", name == down_default
                yield _triton(*named, constants, capability, types=MLP_TYPES)
    sizes = {"TOKENS": up.ACTIVATE_TOKENS, "NEURONS": up.ACTIVATE_NEURONS}
    constants = {**_first_layer(False), **sizes, "num_warps": up.ACTIVATE_WARPS}
    named = "sparse_mlp_up", "_activate_kernel", "activate bf16", True
    yield _triton(*named, constants, types=MLP_TYPES)


def _neurons() -> Iterator[CompiledCase]:
    module, operation = _module("neuron_selection"), "neuron_selection"
    types = TOP_TYPES | MLP_TYPES
    fixed = {"SCORES": True, "EVEN_CHANNELS": True, "WIDE_PRODUCTS": False}
    for capability in (HOPPER, AMPERE):
        with _pretended(module, capability):
            defaults = {
                (module.default_product_config(_OnGpu, blocks, gated=gated), gated)
                for blocks, gated in product((32, 64, 256), (False, True))
            }
        for (name, config), gated in product(module.PRODUCT_CONFIGS.items(), (False, True)):
            default = (name, gated) in defaults
            if default or not gated:  # two weights at a time leave the larger tiles no room
                constants = {**_first_layer(gated, alone="none"), **fixed, **config}
                named = operation, "_product_kernel", f"product {name}{' gated' * gated} bf16"
                yield _triton(*named, default, constants, capability, types=types)
    for name, config in module.MEAN_CONFIGS.items():
        named = operation, "_means_kernel", f"means {name} bf16"
        yield _triton(*named, True, config, types=MLP_TYPES)
    for block, warps in module.TOP_WARPS:
        for part in sorted({min(block, module.TOP_PART), block}):
            constants = {"BLOCK": block, "PART": part, "num_warps": warps}
            named = operation, "_top_kernel", f"top {part} of {block}"
            yield _triton(*named, block <= 16384, constants, types=types)


def _first_layer(gated: bool, *, alone: str = "gelu-tanh") -> dict[str, Any]:
    """Constants of a first layer with biases; without a gate its activation is the other one."""
    activation = "silu" if gated else alone
    return {"ACTIVATION": activation, "GATED": gated, "BIAS": True, "GATE_BIAS": gated}


def _sums_fit(config: Mapping[str, int], products: int, capability: int) -> bool:
    """Whether a configuration is meant for that: Ampere keeps factors in registers as well."""
    sums = products * config["BLOCK_M"] * config["BLOCK_N"] // (32 * config["num_warps"])
    return sums <= config.get("maxnreg", 256) // (2 if capability >= HOPPER else 4)


class _OnGpu:
    """A tensor of a device that is not there, as a choice of a configuration looks at it."""

    device = None


def _pretended(module: Any, capability: int) -> Any:
    """A context in which the module takes the GPU for another."""
    return mock.patch.object(module, "has_large_shared_memory", return_value=capability >= HOPPER)


def _module(operation: str) -> Any:
    return import_module(f"chipsparse.kernels.{operation}.triton_kernel")


def _triton(
    operation: str,
    kernel: str,
    variant: str,
    default: bool,
    constants: Mapping[str, Any],
    capability: int = HOPPER,
    *,
    half: str = "bf16",
    types: Mapping[str, str] = TRITON_TYPES,
) -> CompiledCase:
    made = partial(_compile, operation, kernel, types, dict(constants), half, capability)
    return CompiledCase(operation, "triton", variant, default, made, capability)


def _compile(
    operation: str,
    kernel: str,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    half: str,
    capability: int,
) -> Any:
    from chipsparse.kernels.gluon_compat import compile_kernel

    return compile_kernel(
        getattr(_module(operation), kernel),
        types,
        constants,
        options={name: constants.get(name) for name in ("num_warps", "num_stages", "maxnreg")},
        half=half,
        capability=capability,
    )
