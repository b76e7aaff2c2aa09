"""Full attention that also returns its log-sum-exp, through PyTorch's own kernels."""

from __future__ import annotations

import torch

from chipsparse.kernels import ops
from chipsparse.kernels.checks import check_attention_inputs
from chipsparse.kernels.dense_attention import library, reference
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.kernels.dispatch import Backend, Choice, choose, runs_anywhere

BACKENDS = (
    Backend("library", library.dense_attention, library.why_not),
    Backend("reference", reference.dense_attention, runs_anywhere),
)


def select(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, force: str | None = None
) -> Choice:
    """The backend that `dense_attention` would use for these tensors."""
    return choose("dense_attention", BACKENDS, query, key, value, force=force)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    kernels: FastestKernel | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of every query row over every key, without mask or dropout.

    The log-sum-exp of a row is ``log Σ_j exp(scale · q_i · k_j)``, the softmax constant that
    FlashAttention (Dao et al., 2022) keeps for its backward pass.

    Args:
        query: ``[B, H, N, D]`` fp16, bf16, fp32 or fp64; any strides, such as a view of
            ``[B, N, H, D]``.
        key: ``[B, H, M, D]``, dtype and device of query.
        value: ``[B, H, M, D]``, likewise.
        scale: factor of the scores; None for ``D ** -0.5``.
        kernels: measures which library kernel is fastest for tensors of this kind, once, with the
            host waiting, and remembers it; None takes the first that can run, as does compiled
            code.
        backend: forces ``library`` (cuDNN, flash or memory-efficient attention; flash on a CPU) or
            ``reference``; None takes the first that can run.

    Returns:
        The output ``[B, H, N, D]`` in query's dtype, and the natural log-sum-exp ``[B, H, N]`` in
        float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the forced backend cannot run.
    """
    if torch.compiler.is_dynamo_compiling():
        return ops.dense_attention(query, key, value, scale, backend)
    check_attention_inputs("dense_attention", query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    choice = select(query, key, value, force=backend)
    return choice.backend.launch(query, key, value, scale=scale, kernels=kernels)
