"""The arguments of `dense_attention`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import torch

from chipsparse.kernels.calls import AttentionCall
from chipsparse.kernels.dense_attention.measure import FastestKernel


def settings() -> tuple[bool, ...]:
    """The settings of PyTorch that decide which of its kernels run; any of them may change."""
    cuda = torch.backends.cuda
    enabled = (cuda.cudnn_sdp_enabled, cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled)
    others = (torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled)
    return tuple(setting() for setting in (*enabled, *others))


@dataclass(slots=True, eq=False)
class DenseAttention(AttentionCall[tuple[torch.Tensor, torch.Tensor]]):
    """Softmax attention of every query row over every key, without mask or dropout.

    The log-sum-exp of a row is ``log Σ_j exp(scale · q_i · k_j)``, the softmax constant that
    FlashAttention (Dao et al., 2022) keeps for its backward pass.

    Args (and those of `AttentionCall`):
        kernels: measures which library kernel is fastest for tensors of this kind, once, with the
            host waiting, and remembers it; None takes the first that can run.
        backend: forces ``gluon`` (ours, on Hopper), ``library`` (cuDNN, flash or memory-efficient
            attention; flash on a CPU) or ``reference``; None takes the first that can run, ours
            only where it is faster.

    Returns:
        The output ``[B, H, N, D]`` in query's dtype, and the natural log-sum-exp ``[B, H, N]`` in
        float32 (float64 for float64 inputs).
    """

    _: KW_ONLY
    kernels: FastestKernel | None = field(default=None, compare=False)
    _settings: tuple[bool, ...] = field(default_factory=settings, init=False, repr=False)

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes or devices do not fit."""
        self.check_attention()
