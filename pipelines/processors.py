"""Attention processors: for models whose own ones dispatch no attention, or pass no mask on.

A family's mixin of the stock processor computes what that does, but hands q, k and v to diffusers'
dispatcher, and so to our backend. It does that for tagged calls only: all others are the stock
processor's. If a stock processor takes no mask, or reshapes it, its ``_parallel_config`` carries
the tag.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn


class DispatchingProcessor:
    """The part that mixins of processors without a backend share."""

    # PyTorch's own attention, as in the stock processor, until somebody names another one.
    _attention_backend: Any = AttentionBackendName.NATIVE
    _parallel_config: Any = None


class JointProcessor(DispatchingProcessor):
    """Mixin of a processor of joint attention; the tag comes as the attention mask.

    Video or image tokens come before the text, and each stream has linears of its own.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Video or image ``[B, N, C]`` and text ``[B, T, C']``, of which it returns the same."""
        stated: Any = (hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        # Masks have more dimensions than a tag (`make_tag`).
        is_tagged = attention_mask is not None and attention_mask.ndim == 1
        if encoder_hidden_states is None or not is_tagged:
            return super().__call__(attn, *stated)  # type: ignore[misc]
        return self.attend(attn, *stated)

    def attend(
        self,
        attn: Any,
        hidden: torch.Tensor,
        text: torch.Tensor,
        tag: torch.Tensor,
        rotary: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both streams after attention to each other."""
        query, key, value = _stream(
            hidden,
            attn,
            [attn.to_q, attn.to_k, attn.to_v],
            [attn.norm_q, attn.norm_k, None],
        )
        others = _stream(
            text,
            attn,
            [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj],
            [attn.norm_added_q, attn.norm_added_k, None],
        )
        own = [self.rotated(query, rotary), self.rotated(key, rotary), value]
        query, key, value = (torch.cat(pair, dim=1) for pair in zip(own, others, strict=True))
        output = dispatch(self, query, key, value, tag=tag).to(query.dtype)
        first, behind = output.split([hidden.shape[1], text.shape[1]], dim=1)
        project, dropout = attn.to_out
        project_text = getattr(attn, "to_add_out", None)  # the last block has no use for the text
        return dropout(project(first)), behind if project_text is None else project_text(behind)

    def rotated(self, states: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Return queries or keys of the first stream after the rotary embedding, if any."""
        return states


def dispatch(
    processor: Any,
    *states: torch.Tensor,
    tag: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q, k and v ``[B, N, H, D]`` on a processor's backend, as ``[B, N, H * D]``."""
    output = dispatch_attention_fn(
        *states,
        attn_mask=tag,
        backend=processor._attention_backend,
        parallel_config=processor._parallel_config,
    )
    return output.flatten(2, 3)


def split_heads(states: torch.Tensor, attention: Any) -> torch.Tensor:
    """``[B, N, H * D]`` as ``[B, N, H, D]``."""
    return states.unflatten(2, (attention.heads, -1))


def normed(states: torch.Tensor, norm: Any | None) -> torch.Tensor:
    """Return queries or keys after the norm of each head, if there is one."""
    return states if norm is None else norm(states)


def _stream(
    states: torch.Tensor,
    attention: Any,
    linears: list[Any],
    norms: list[Any],
) -> list[torch.Tensor]:
    """Return query, key and value of one stream, after their norms."""
    return [
        normed(split_heads(linear(states), attention), norm)
        for linear, norm in zip(linears, norms, strict=True)
    ]
