"""CogVideoX 1.0 and 1.5 (``CogVideoXTransformer3DModel``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb

from chipsparse.layout import Grid
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.processors import JointProcessor, dispatch, normed, split_heads
from chipsparse.pipelines.token_grids import patch_of, patched

MASKED = "the call has a mask of its own"


class CogVideoXProcessor(JointProcessor):
    """Joint attention of the text and, behind it, the video, whose rows alone are rotated."""

    def attend(
        self,
        attn: Any,
        hidden: torch.Tensor,
        text: torch.Tensor,
        tag: torch.Tensor,
        rotary: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = text.shape[1]
        states = torch.cat([text, hidden], dim=1)
        query = normed(split_heads(attn.to_q(states), attn), attn.norm_q)
        key = normed(split_heads(attn.to_k(states), attn), attn.norm_k)
        value = split_heads(attn.to_v(states), attn)
        if rotary is not None:
            for turned in (query, key):
                turned[:, first:] = apply_rotary_emb(turned[:, first:], rotary, sequence_dim=1)
        output = dispatch(self, query, key, value, tag=tag)
        output = attn.to_out[1](attn.to_out[0](output))
        return output[:, first:], output[:, :first]


class CogVideoXAdapter(ModelAdapter):
    """Joint attention and feed-forward layers of all blocks, the text before the video tokens.

    The text's columns are always kept; its tokens go through the same feed-forward layers. The
    patch embedding adds the positions of the video tokens, and the pipeline makes their rotary
    embeddings. In front of the last norm the text has left.
    """

    transformer_class = "CogVideoXTransformer3DModel"
    families = "CogVideoX 1.0 and 1.5: text, image and video to video, Fun control"
    sparse_attention = "joint attention"
    sparse_mlp = "feed-forward, text tokens included"
    shares_tokens = True
    guides_in_batch = True
    cuts_at_blocks = True
    attention_name = "attn1"
    own_processors = MappingProxyType({"CogVideoXAttnProcessor2_0": CogVideoXProcessor})
    text_place = "first"
    embedding_name = "patch_embed"
    last_name = "norm_final"
    token_arguments = MappingProxyType({"image_rotary_emb": 0})

    @classmethod
    def is_guided(cls, pipe: Any, arguments: Mapping[str, Any]) -> bool:
        """Pipelines of this family tell their scale alone."""
        return (getattr(pipe, "guidance_scale", None) or 0) > 1

    @classmethod
    def grids(cls, config: Mapping[str, Any], latents: Grid) -> tuple[Grid, ...]:
        """Pipelines fill up the last patch of frames."""
        frames, rows, columns = latents
        patch = patch_of(config)
        return patched((frames + patch[0] - 1, rows, columns), patch)

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        """The grid of latents ``[B, F, C, H, W]``."""
        _, frames, _, rows, columns = arguments["hidden_states"].shape
        return self.grids(self._model.config, (frames, rows, columns))

    def why_attention_is_dense(self, arguments: dict[str, Any]) -> str | None:
        mask = (arguments.get("attention_kwargs") or {}).get("attention_mask")
        return None if mask is None else MASKED

    def order_embedded(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return self.ordered_beside_text(output, 1)
