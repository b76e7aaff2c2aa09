"""`dense_attention` through the attention kernels that PyTorch ships.

`torch.nn.functional.scaled_dot_product_attention` drops the log-sum-exp, so the aten operations
beneath it are called. On a CPU there is one (flash); on CUDA there are cuDNN, flash and
memory-efficient attention, as far as PyTorch's own predicates let them run on the given tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from chipsparse.kernels.dense_attention.call import DenseAttention

aten = torch.ops.aten


def unsupported_reason(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Return why no library kernel takes these tensors, or None."""
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return "the head dimension of query, key or value is not contiguous"
    if query.device.type not in ("cpu", "cuda"):
        return f"no library kernel with a log-sum-exp is known for {query.device.type} tensors"
    if not usable_kernels(query, key, value):
        return f"no CUDA kernel for {query.dtype} with head size {query.shape[-1]}"
    return None


def dense_attention(call: DenseAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a checked `DenseAttention`; `unsupported_reason` must be None."""
    query = call.query
    key = call.key
    value = call.value
    kernels = call.kernels
    known = call.known()
    if "usable" not in known:
        known["usable"] = usable_kernels(query, key, value)
    runs = {
        name: functools.partial(KERNELS[name], query, key, value, scale=call.softmax_scale)
        for name in known["usable"]
    }
    assert runs
    name = next(iter(runs)) if kernels is None else kernels.pick(runs, query, key, value)
    output, lse, *_ = runs[name]()
    # The log-sum-exp comes padded to a multiple of 32 rows (memory-efficient) or with a trailing
    # dimension of one (cuDNN).
    lse = lse.squeeze(-1) if lse.dim() == 4 else lse
    return output, lse[:, :, : query.shape[2]].contiguous()


def usable_kernels(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[str, ...]:
    """Names of the `KERNELS` that take these tensors, in order of preference."""
    if query.device.type == "cpu":
        return ("cpu",)
    if query.shape[-1] % 8 != 0:  # the operations beneath F.scaled_dot_product_attention never pad
        return ()
    cuda = torch.backends.cuda
    params = cuda.SDPAParams(query, key, value, None, 0.0, False, False)
    usable = {
        "cudnn": cuda.can_use_cudnn_attention(params),
        "flash": cuda.can_use_flash_attention(params),
        "efficient": cuda.can_use_efficient_attention(params),
    }
    return tuple(name for name, can_run in usable.items() if can_run)


# Each gives the output, the log-sum-exp, and more. Two are told: no bias, and keep the log-sum-exp.
KERNELS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "cpu": aten._scaled_dot_product_flash_attention_for_cpu,
    "cudnn": lambda query, key, value, *, scale: aten._scaled_dot_product_cudnn_attention(
        query,
        key,
        value,
        None,
        True,
        scale=scale,
    ),
    "flash": aten._scaled_dot_product_flash_attention,
    "efficient": lambda query, key, value, *, scale: aten._scaled_dot_product_efficient_attention(
        query,
        key,
        value,
        None,
        True,
        scale=scale,
    ),
}
