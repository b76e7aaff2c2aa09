"""`dense_attention` through the attention kernels that PyTorch ships.

`torch.nn.functional.scaled_dot_product_attention` drops the log-sum-exp, so the aten operations
beneath it are called. On a CPU there is one (flash); on CUDA the first usable of cuDNN, flash and
memory-efficient attention, as PyTorch's own predicates say for the given tensors.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten


def why_not(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Why no library kernel takes these tensors, or None."""
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return "the head dimension of query, key or value is not contiguous"
    if query.device.type == "cpu":
        return None
    if query.device.type != "cuda":
        return f"no library kernel with a log-sum-exp is known for {query.device.type} tensors"
    if _cuda_kernel(query, key, value) is None:
        return f"no CUDA kernel for {query.dtype} with head size {query.shape[-1]}"
    return None


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `chipsparse.kernels.dense_attention.dense_attention`; `why_not` must be None."""
    if query.device.type == "cpu":
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, scale=scale
        )
        return output, lse
    kernel = _cuda_kernel(query, key, value)
    assert kernel is not None
    if kernel == "flash":
        results = aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)
    elif kernel == "cudnn":
        results = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, scale=scale
        )
    else:
        results = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, scale=scale
        )
    # The log-sum-exp comes padded to a multiple of 32 rows (memory-efficient) or with a trailing
    # dimension of one (cuDNN).
    lse = results[1]
    lse = lse.squeeze(-1) if lse.dim() == 4 else lse
    return results[0], lse[:, :, : query.shape[2]]


def _cuda_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """The name of the first CUDA kernel that takes these tensors, fastest first, or None."""
    if query.shape[-1] % 8 != 0:  # the operations beneath F.scaled_dot_product_attention never pad
        return None
    cuda = torch.backends.cuda
    params = cuda.SDPAParams(query, key, value, None, 0.0, False, False)
    if cuda.can_use_cudnn_attention(params):
        return "cudnn"
    if cuda.can_use_flash_attention(params):
        return "flash"
    if cuda.can_use_efficient_attention(params):
        return "efficient"
    return None
