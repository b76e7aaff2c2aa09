"""Attention processors: for models whose own ones dispatch no attention, or pass no mask on.

A family's processor computes what the stock one does, but hands q, k and v to diffusers'
dispatcher, and so to our backend. It does that for tagged calls only: all others are the stock
processor's, which it keeps. Where a stock processor takes no mask, or reshapes it, its
``_parallel_config`` carries the tag.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.patches import TAG


class DispatchingProcessor:
    """The part that these processors share."""

    # PyTorch's own attention, as in the stock processor, until somebody names another one.
    _attention_backend: Any = AttentionBackendName.NATIVE
    _parallel_config: Any = None

    def __init__(self, stock: Any) -> None:
        self.stock = stock


class MaskTaggedProcessor(DispatchingProcessor):
    """A processor of joint attention whose tag comes as the attention mask."""

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
        if encoder_hidden_states is None or not is_tag(attention_mask):
            return self.stock(attn, *stated)
        return self.attend(attn, *stated)

    def attend(
        self, attn: Any, hidden: torch.Tensor, text: torch.Tensor, tag: torch.Tensor, rotary: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


def dispatch(
    processor: Any, *states: torch.Tensor, tag: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of q, k and v ``[B, N, H, D]`` on a processor's backend, as ``[B, N, H * D]``."""
    output = dispatch_attention_fn(
        *states,
        attn_mask=tag,
        backend=processor._attention_backend,
        parallel_config=processor._parallel_config,
    )
    return output.flatten(2, 3)


def is_tag(mask: torch.Tensor | None) -> bool:
    """Return whether a mask is a layer's tag (`make_tag`): masks have more dimensions."""
    return mask is not None and mask.ndim == 1


def split_heads(states: torch.Tensor, attention: Any) -> torch.Tensor:
    """``[B, N, H * D]`` as ``[B, N, H, D]``."""
    return states.unflatten(2, (attention.heads, -1))


def joint_attention(
    processor: Any,
    attention: Any,
    hidden: torch.Tensor,
    text: torch.Tensor,
    tag: torch.Tensor | None,
    turned: Callable[[torch.Tensor], torch.Tensor] = lambda states: states,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two streams after attention to each other, each with linears of its own.

    Video or image tokens ``[B, N, C]`` stand before text ``[B, T, C']``. `turned` applies the
    rotary embedding to queries and keys of the first stream.
    """

    def stream(states: torch.Tensor, linears: list[Any], norms: list[Any]) -> list[torch.Tensor]:
        return [
            normed(split_heads(linear(states), attention), norm)
            for linear, norm in zip(linears, norms, strict=True)
        ]

    query, key, value = stream(
        hidden,
        [attention.to_q, attention.to_k, attention.to_v],
        [attention.norm_q, attention.norm_k, None],
    )
    others = stream(
        text,
        [attention.add_q_proj, attention.add_k_proj, attention.add_v_proj],
        [attention.norm_added_q, attention.norm_added_k, None],
    )
    own = [turned(query), turned(key), value]
    query, key, value = (torch.cat(pair, dim=1) for pair in zip(own, others, strict=True))
    output = dispatch(processor, query, key, value, tag=tag).to(query.dtype)
    first, behind = output.split([hidden.shape[1], text.shape[1]], dim=1)
    project, dropout = attention.to_out
    project_text = getattr(attention, "to_add_out", None)  # the last block has no use for the text
    return dropout(project(first)), behind if project_text is None else project_text(behind)


def normed(states: torch.Tensor, norm: Any | None) -> torch.Tensor:
    """Queries or keys behind the norm of each head, if there is one."""
    return states if norm is None else norm(states)


class ProcessorTaggingAdapter(ModelAdapter):
    """An adapter whose tags travel as the ``_parallel_config`` of the processors.

    Processors hand it to the attention backend as it is. Each module gets a processor of its own
    for that, a copy, because several modules may share one.
    """

    def hook_attention(self, module: Any) -> None:
        """Leaves the arguments as they are."""

    def claim_attention(self) -> None:
        patches = self._attention_patches
        for module in self.self_attentions():
            tagged = copy.copy(module.processor)
            # It is undone, too: somebody may have kept the copy.
            patches.set_attribute(tagged, "_parallel_config", getattr(module, TAG))
            patches.replace_attribute(module, "processor", tagged)
        super().claim_attention()
