"""Every kernel in the forms that launchers choose from, compiled without a GPU.

The operations are called on tensors without memory that say they are on a GPU, and
`chipsparse.kernels.launch.compile_only` compiles what they launch. A new kernel needs a call here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.kernels.fp8_dense_attention import fp8_dense_attention
from chipsparse.kernels.fp8_dequantization import fp8_dequantization
from chipsparse.kernels.fp8_quantization import FP8, fp8_quantization
from chipsparse.kernels.fp8_rows import fp8_rows
from chipsparse.kernels.mask_packing import pack_mask, packed_to_indices, unpack_mask
from chipsparse.kernels.neuron_selection import neuron_selection
from chipsparse.kernels.piece_copies import copy_pieces
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import FP8_HEADROOM, dense_activation, sparse_mlp_up
from chipsparse.kernels.token_layout import empty_token_contiguous

HOPPER = 90
AMPERE = 80
ADA = 89  # for FP8, besides Hopper
BLACKWELL = 100  # likewise
BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
HEAD_DIMS = (64, 128)
SPARSE_FORMS: tuple[dict[str, Any], ...] = (
    *({"residual": precision} for precision in ("none", "full", "fp8")),
    {"residual": "full", "means": 11},
)
# Of attention. A multiple of 16 would be compiled in.
HEADS = 3
TOKENS = 1337
KEPT = 333


@dataclass(frozen=True)
class CompiledCase:
    """The kernels of one call."""

    launch: partial[Any]  # calls the operation
    capability: int  # compute capability in tenths, 90 for Hopper

    @property
    def name(self) -> str:
        """The name of the launch with its arguments; unique among the cases."""
        options = (f"{name}={value}" for name, value in self.launch.keywords.items())
        named = (self.launch.func.__name__, *self.launch.args, *options)
        return " ".join(str(part).removeprefix("torch.") for part in named)

    def compile(self) -> list[tuple[Any, Any]]:
        """Each kernel that is launched, and the result of Triton's compiler."""
        from chipsparse.kernels.launch import compile_only

        with pretended_gpu(self.capability), compile_only() as compiled:
            self.launch()
        return compiled


@contextmanager
def pretended_gpu(capability: int) -> Iterator[None]:
    """A context in which tensors are on a GPU that is not there, and have no memory."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    # The number of the device tells the GPUs apart for all who remember facts about a device.
    device = torch.device("cuda", capability)
    triton_driver = SimpleNamespace(
        get_current_device=lambda: capability,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    replaced: dict[str, Any] = {
        "device_of": lambda _: nullcontext(),
        "get_device_capability": lambda _: divmod(capability, 10),
        "get_device_properties": lambda _: SimpleNamespace(multi_processor_count=132),
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **replaced))
        stack.enter_context(mock.patch.object(driver, "_active", triton_driver))
        stack.enter_context(_MetaTensors(device))
        yield


class _MetaTensors(TorchFunctionMode):
    """Tensors are made on the meta device, and answer that they are on another one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function == torch.Tensor.device.__get__:
            return self.device
        if function == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def case(
    launch: Callable[..., Any],
    *arguments: Any,
    capability: int = HOPPER,
    **options: Any,
) -> CompiledCase:
    """The case of a launch with these arguments, by default for Hopper."""
    return CompiledCase(partial(launch, *arguments, **options), capability)


def cases() -> Iterator[CompiledCase]:
    """All cases that are compiled without a GPU."""
    yield from attention_cases()
    yield from rounding_cases()
    yield from index_cases()
    yield from mlp_cases()


def attention_cases() -> Iterator[CompiledCase]:
    """Dense and sparse attention in all head sizes, dtypes and block sizes."""
    sizes = ((128, BF16), (64, BF16), (192, BF16), (128, FP16))
    for head_dim, (rows, dtype) in product(HEAD_DIMS, sizes):
        for form in SPARSE_FORMS:
            yield case(sparse, "gluon", head_dim, rows, dtype, **form)
        if rows != 192:
            yield case(sums, "gluon", head_dim, rows, dtype)
            yield case(in_8_bits, "gluon", head_dim, True, rows, dtype)
    for head_dim in HEAD_DIMS:
        yield case(dense, head_dim)
        yield case(in_8_bits, "gluon", head_dim, False)
        for capability in (HOPPER, AMPERE):
            for form in SPARSE_FORMS:
                yield case(sparse, "triton", head_dim, **form, capability=capability)
            yield case(sums, "triton", head_dim, capability=capability)
        for capability in (HOPPER, ADA, BLACKWELL):
            for with_sums in (True, False):
                yield case(in_8_bits, "triton", head_dim, with_sums, capability=capability)
            yield case(quantized, head_dim, rotate=True, capability=capability)


def rounding_cases() -> Iterator[CompiledCase]:
    """Conversions to and from 8 bits, also on GPUs without FP8."""
    for capability, flag in product((HOPPER, ADA, AMPERE, BLACKWELL), (False, True)):
        yield case(weight_of_8_bits, turned=flag, capability=capability)
    for capability, dtype in product((HOPPER, ADA, BLACKWELL), (BF16, FP16)):
        yield case(rounded_rows, 4096, dtype, capability=capability)
    for capability in (HOPPER, AMPERE):  # which cannot convert FP8 itself
        yield case(rounded_rows, 128, BF16, capability=capability)
    for capability, flag in product((HOPPER, AMPERE), (False, True)):
        yield case(rounded_activations, by_tokens=flag, capability=capability)


def index_cases() -> Iterator[CompiledCase]:
    """Selection and packing of columns, and copies between processes."""
    for dtype, columns in product((BF16, FP32), (1352, 1337)):
        yield case(selected, dtype, columns)
    yield case(selected, BF16, 1352, static=True)
    for columns in (1352, 1337):
        yield case(packed, columns)
    yield case(pieces, dim=2, count=3)  # query, key and value there
    yield case(pieces, dim=1, count=1)  # the output back


def mlp_cases() -> Iterator[CompiledCase]:
    """Both halves of a sparse MLP, in all activations and even or odd sizes."""
    for activation in ("gelu-tanh", "gelu"):
        yield case(up, "gluon", activation=activation)
    yield case(up, "gluon", activation="silu", even=False)
    yield case(up, "gluon", even=False, dtype=FP16)
    for flag in (False, True):
        yield case(down, "gluon", addend=flag)
    yield case(down, "gluon", even=False, dtype=FP16)
    for capability in (HOPPER, AMPERE):
        for gated, in_fp8 in product((False, True), (False, True)):
            yield case(up, "triton", gated=gated, fp8=in_fp8, capability=capability)
        yield case(down, "triton", capability=capability)
        for blocks, gated in product((32, 64, 256), (False, True)):
            yield case(neurons, blocks, gated=gated, capability=capability)
    yield case(activated)
    yield case(neurons, 32, channels=256)
    for blocks, width in ((1, 2048), (1, 16384), (256, 16384), (1, 65536), (256, 65536)):
        yield case(neurons, blocks, width)


def _tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _rows_of(head_dim: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return _tensor(1, HEADS, TOKENS, head_dim, dtype=dtype)


def sparse(
    backend: str,
    head_dim: int,
    rows: int = 128,
    dtype: Any = BF16,
    *,
    residual: str = "none",  # its precision, full or fp8
    means: int = 0,
) -> None:
    """`column_sparse_attention`, with a residual and with means where asked for."""
    query = _rows_of(head_dim, dtype)
    in_fp8 = residual == "fp8"
    lists = _tensor(1, HEADS, -(-TOKENS // rows), KEPT, dtype=torch.int32)
    mean = _tensor(1, HEADS, means, head_dim, dtype=dtype) if means else None
    column_sparse_attention(
        query,
        query,
        query,
        lists,
        _tensor(*lists.shape[:3], dtype=torch.int32),
        block_size_q=rows,
        residual=None if residual == "none" else _rows_of(head_dim, FP8 if in_fp8 else dtype),
        residual_scale=_tensor(1, HEADS, TOKENS, dtype=FP32) if in_fp8 else None,
        mean_key=mean,
        mean_value=mean,
        mean_weight=40.0,
        backend=backend,
    )


def dense(head_dim: int) -> None:
    """`dense_attention`, which Gluon alone has."""
    query = _rows_of(head_dim)
    dense_attention(query, query, query, backend="gluon")


def sums(backend: str, head_dim: int, rows: int = 128, dtype: Any = BF16) -> None:
    """`dense_attention_column_sums` by query blocks of n rows."""
    query = _rows_of(head_dim, dtype)
    lse = _tensor(1, HEADS, TOKENS, dtype=FP32)
    options: dict[str, Any] = {"block_size_q": rows, "backend": backend}
    dense_attention_column_sums(query, query, query, lse, **options)


def quantized(head_dim: int, dtype: Any = BF16, *, rotate: bool = False) -> Any:
    """Query, key and value in 8 bits, each head rotated before if asked for."""
    query = _rows_of(head_dim, dtype)
    return fp8_quantization(query, query, query, rotate=rotate, backend="triton")


def in_8_bits(backend: str, head_dim: int, sums: bool, rows: int = 128, dtype: Any = BF16) -> None:
    """`fp8_dense_attention`, and what rounds to 8 bits."""
    lse = _tensor(1, HEADS, TOKENS, dtype=FP32) if sums else None
    rounded = quantized(head_dim, dtype)
    fp8_dense_attention(rounded, lse_previous=lse, block_size_q=rows, backend=backend)


def weight_of_8_bits(*, turned: bool) -> None:
    """`fp8_dequantization` of a weight with a scale for each row."""
    data = _tensor(512, 1024, dtype=FP8)
    scale = _tensor(512, 1, dtype=FP32)
    fp8_dequantization(data, scale, dtype=BF16, turned=turned, backend="triton")


def rounded_rows(width: int, dtype: Any) -> None:
    """`fp8_rows` of a linear's input of this width."""
    fp8_rows(_tensor(256, width, dtype=dtype), backend="triton")


def rounded_activations(*, by_tokens: bool) -> None:
    """`fp8_rows` of activations, of contiguous tokens or neurons."""
    rows = _tensor(1, TOKENS, 1024)
    activation = empty_token_contiguous(rows, *rows.shape) if by_tokens else rows
    fp8_rows(activation, headroom=FP8_HEADROOM, turned=True, backend="triton")


def selected(dtype: Any, columns: int, *, static: bool = False) -> None:
    """`column_selection`, and what packs and counts static columns."""
    sums = _tensor(1, HEADS, 11, columns, dtype=dtype)
    mask = _tensor(columns, dtype=torch.bool) if static else None
    column_selection(sums, keep_count=KEPT, static_columns=mask, backend="triton")


def packed(columns: int) -> None:
    """`pack_mask` and what reads packed columns."""
    bits = pack_mask(_tensor(1, HEADS, 11, columns, dtype=torch.bool), backend="triton")
    unpack_mask(bits, columns, backend="triton")
    packed_to_indices(bits, columns, capacity=KEPT, backend="triton")


def pieces(*, dim: int, count: int) -> None:
    """`copy_pieces` of so many tensors."""
    tensors = tuple(_tensor(1, TOKENS, 2 * HEADS, 128) for _ in range(count))
    half = tensors[0].shape[dim] // 2
    cut = (range(half), range(half, 2 * half))
    places = [tuple(tensor.narrow(dim, 0, half) for tensor in tensors) for _ in cut]
    copy_pieces(tensors, cut, places, dim=dim, backend="triton")


def _layer(even: bool, dtype: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden, weight ``[F, C]`` and lists of kept neurons, of sizes that are ragged or not."""
    rows, channels = (1024, 512) if even else (1026, 520)
    lists = _tensor(1, -(-rows // 128), 320 if even else KEPT, dtype=torch.int32)
    return _tensor(1, rows, channels, dtype=dtype), _tensor(1024, channels, dtype=dtype), lists


def up(
    backend: str,
    *,
    activation: Any = "gelu-tanh",
    gated: bool = False,
    fp8: bool = False,
    even: bool = True,
    dtype: Any = BF16,
) -> None:
    """`sparse_mlp_up`, with a cache in e4m3 where that is asked for."""
    hidden, weight, lists = _layer(even, dtype)
    rows = hidden.shape[1]
    width = weight.shape[0]
    bias = _tensor(width, dtype=dtype)
    sparse_mlp_up(
        hidden,
        weight,
        bias,
        lists,
        empty_token_contiguous(hidden, 1, rows, width, dtype=FP8 if fp8 else dtype),
        activation="silu" if gated else activation,
        gate_weight=weight if gated else None,
        gate_bias=bias if gated else None,
        cache_scale=_tensor(1, rows, 1, dtype=FP32) if fp8 else None,
        backend=backend,
    )


def down(backend: str, *, addend: bool = True, even: bool = True, dtype: Any = BF16) -> None:
    """`sparse_mlp_down`, by default added to another summand."""
    hidden, weight, lists = _layer(even, dtype)
    sparse_mlp_down(
        empty_token_contiguous(hidden, 1, hidden.shape[1], lists.shape[2]),
        weight.t(),
        lists,
        hidden,
        addend=hidden if addend else None,
        backend=backend,
    )


def activated() -> None:
    """`dense_activation` of a whole layer."""
    hidden, weight, _ = _layer(True, BF16)
    dense_activation(hidden, weight, weight[:, 0], activation="gelu-tanh", backend="triton")


def neurons(blocks: int, width: int = 1024, channels: int = 512, *, gated: bool = False) -> None:
    """`neuron_selection` of so many blocks and neurons."""
    weight = _tensor(width, channels)
    bias = _tensor(width)
    options: dict[str, Any] = {"keep_count": 320, "backend": "triton"}
    if gated:
        options |= {"gate_weight": weight, "gate_bias": bias, "activation": "silu"}
    means = _tensor(1, blocks, width, dtype=FP32)
    neuron_selection(_tensor(1, blocks * 128, channels), weight, bias, means, **options)
