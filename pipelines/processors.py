"""Attention processors for models whose own ones call PyTorch's attention directly.

A family's processor computes what the stock one does, but hands q, k and v to diffusers'
dispatcher, and so to our backend. It does that for tagged calls only: all others are the stock
processor's, which it keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn


class DispatchingProcessor:
    """What these processors share.

    Args:
        stock: the processor whose place it takes.
    """

    # PyTorch's own attention, as in the stock processor, until somebody names another one.
    _attention_backend: Any = AttentionBackendName.NATIVE
    _parallel_config: Any = None

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    def dispatch(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tag: torch.Tensor
    ) -> torch.Tensor:
        """Attention of ``[B, N, H, D]``; the heads stand side by side in the result."""
        output: torch.Tensor = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=tag,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        return output.flatten(2, 3)


def is_tag(mask: torch.Tensor | None) -> bool:
    """Whether an attention mask is a layer's tag (`make_tag`): masks have more dimensions."""
    return mask is not None and mask.ndim == 1


def heads_apart(states: torch.Tensor, attention: Any) -> torch.Tensor:
    """``[B, N, H * D]`` as ``[B, N, H, D]``."""
    return states.unflatten(2, (attention.heads, -1))


def normed(states: torch.Tensor, norm: Any | None) -> torch.Tensor:
    """What a norm of each head, if there is one, makes of queries or keys."""
    return states if norm is None else norm(states)
