"""The requirements of the Triton and Gluon kernels, and facts about devices."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

HALF_PRECISION = (torch.float16, torch.bfloat16)
NO_TRITON = "Triton is not installed"
NOT_ON_CPU = "written for Hopper GPUs; the interpreter does not run Gluon"


def triton_unsupported_reason(tensor: torch.Tensor, *_: object) -> str | None:
    """Return why plain Triton kernels cannot run on the device of a tensor, or None."""
    device = tensor.device
    if not triton_installed():
        return NO_TRITON
    if device.type == "cpu":
        return None if interpreting() else "CPU tensors need Triton's interpreter"
    if device.type != "cuda":
        return f"no Triton kernels for {device.type} tensors"
    if torch.version.hip is None and compute_capability(device) < (8, 0):
        major, minor = compute_capability(device)
        return f"compute capability {major}.{minor} is below 8.0 (Ampere)"
    return None


def not_auto_reason(tensor: torch.Tensor, *_: object) -> str | None:
    """Return why Triton's interpreter runs only when it is forced: it is slow."""
    if tensor.device.type == "cpu":
        return "Triton's interpreter runs only when it is asked for"
    return None


def not_half_reason(tensor: torch.Tensor, *_: object) -> str | None:
    """Return why kernels for fp16 and bf16 cannot run on a tensor, or None."""
    return None if tensor.dtype in HALF_PRECISION else f"needs fp16 or bf16, got {tensor.dtype}"


def float64_reason(tensor: torch.Tensor, *_: object) -> str | None:
    """Return why kernels that compute in float32 cannot run on a tensor, or None."""
    return None if tensor.dtype != torch.float64 else "computes in float32, got torch.float64"


def unaligned_reason(**tensors: torch.Tensor | None) -> str | None:
    """Return why kernels that read the rows of these tensors by 16 bytes cannot run, or None."""
    for name, tensor in tensors.items():
        if tensor is not None and (
            tensor.stride(-1) != 1 or any(stride % 8 for stride in tensor.stride()[:-1])
        ):
            return f"rows of {name} are not contiguous or not aligned to 16 bytes"
    return None


def attention_unsupported_reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: object,
) -> str | None:
    """Return why the attention kernels cannot run on these tensors, or None."""
    if (reason := not_half_reason(query) or _head_size_reason(query)) is not None:
        return reason
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if (reason := unaligned_reason(**{name: tensor})) is not None:
            return reason
        if tensor.data_ptr() % 16:
            return f"{name} does not start at a multiple of 16 bytes"
    return None


def fp8_unsupported_reason(query: torch.Tensor, dtype: torch.dtype, *_: object) -> str | None:
    """Return why attention in FP8 cannot run on a query's device and head size, or None.

    The dtype is that of what is quantized.
    """
    if dtype not in HALF_PRECISION:
        return f"needs fp16 or bf16, got {dtype}"
    return _head_size_reason(query) or no_fp8_reason(query.device)


def _head_size_reason(query: torch.Tensor) -> str | None:
    head_dim = query.shape[-1]
    return None if head_dim in (64, 128) else f"needs head size 64 or 128, got {head_dim}"


def block_rows_reason(*facts: Any) -> str | None:
    """Return why Gluon attention cannot run with these rows in a query block, the last fact."""
    return f"needs blocks of a multiple of 64 rows, got {facts[-1]}" if facts[-1] % 64 else None


def no_fp8_reason(device: torch.device) -> str | None:
    """Return why a GPU cannot convert to FP8 and multiply in it, or None."""
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return "written for NVIDIA GPUs"
    if compute_capability(device) < (8, 9):
        major, minor = compute_capability(device)
        return f"compute capability {major}.{minor} has no FP8: it came with 8.9 (Ada)"
    return None


def converts_fp8(device: torch.device) -> bool:
    """Return True where an instruction converts FP8; the interpreter does it wrong."""
    return device.type != "cpu" and no_fp8_reason(device) is None


def hopper_unsupported_reason(device: torch.device) -> str | None:
    """Return why no Gluon kernel can run on a device with the installed Triton, or None."""
    if device.type != "cuda":
        return NOT_ON_CPU
    if torch.version.hip is not None or compute_capability(device)[0] != 9:
        return "written for Hopper GPUs (compute capability 9.0)"
    if not triton_installed():
        return NO_TRITON
    from chipsparse.kernels import gluon_compat  # here, because Triton may be missing

    return gluon_compat.missing_reason()


def mlp_unsupported_reason(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    gate_weight: torch.Tensor | None,
    *_: object,
) -> str | None:
    """Return why the kernels of an MLP's first layer cannot run on its tensors, or None."""
    if (reason := not_half_reason(hidden)) is not None:
        return reason
    if hidden.shape[-1] % 8:
        return f"needs a multiple of 8 channels, got {hidden.shape[-1]}"
    return unaligned_reason(hidden=hidden, weight=weight, gate_weight=gate_weight)


def with_positive_scale(query: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Return a query and a scale above 0 of the same scores: kernels scale after the maximum."""
    smallest = 1e-30  # for a scale of 0: every weight is 1 all the same
    return (-query if scale < 0 else query), max(abs(scale), smallest)


# Triton's functions of these names may be called from kernels too, and take longer than a launch.


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient of whole numbers, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The lowest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def interpreting() -> bool:
    """Return True where Triton was set (TRITON_INTERPRET=1) to run its kernels on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@functools.cache
def triton_installed() -> bool:
    """Return True where Triton can be imported; looked up once, as that takes a while."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Major and minor compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def has_large_shared_memory(device: torch.device) -> bool:
    """Return True where a block may have 227 KiB, as on data-center Hopper and Blackwell."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return compute_capability(device)[0] in (9, 10)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
