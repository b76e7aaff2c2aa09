"""CogVideoX 1.0 and 1.5 (``CogVideoXTransformer3DModel``)."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb

from chipsparse.layout import Grid
from chipsparse.pipelines.call_reader import Arguments, CallReader
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.family_facts import (
    AttentionFacts,
    Config,
    GuidanceFacts,
    ModuleNames,
    PerToken,
    Sharing,
    SparseParts,
    TextPlace,
)
from chipsparse.pipelines.processors import JointProcessor, dispatch, normed, split_heads
from chipsparse.pipelines.token_grids import patch_of, patched
from chipsparse.pipelines.token_order import TokenOrder

MASKED = "the call has a mask of its own"


class CogVideoXProcessor(JointProcessor):
    """Joint attention of the text and, after it, the video, whose rows alone are rotated."""

    def attend(
        self,
        attn: Any,
        hidden: torch.Tensor,
        text: torch.Tensor,
        tag: torch.Tensor,
        rotary: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the video and the text after joint attention, for which the text is put first."""
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


class CogVideoXReader(CallReader):
    """Reads latents ``[B, F, C, H, W]``."""

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the grid of the video."""
        _, frames, _, rows, columns = arguments["hidden_states"].shape
        return self.family.grids(self.model.config, (frames, rows, columns))

    def dense_because(self, arguments: Arguments) -> str | None:
        """Return the reason of a call with a mask."""
        mask = (arguments.get("attention_kwargs") or {}).get("attention_mask")
        return None if mask is None else MASKED


class CogVideoXOrder(TokenOrder):
    """Orders the video after the patch embedding, which adds positions, with the text before it."""

    def order_embedded(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Order the video's tokens among both."""
        return self.ordered_beside_text(output, 1)


def grids(config: Config, latents: Grid) -> tuple[Grid, ...]:
    """The grid of a video, whose last patch of frames pipelines fill up."""
    frames, rows, columns = latents
    patch = patch_of(config)
    return patched((frames + patch[0] - 1, rows, columns), patch)


def told_by_scale(pipe: Any) -> bool:
    """Return whether a pipeline guides; pipelines of this family tell their scale alone."""
    return (getattr(pipe, "guidance_scale", None) or 0) > 1


# Joint attention and feed-forward layers of all blocks, the text before the video tokens. The
# text's columns are always kept; its tokens go through the same feed-forward layers. The pipeline
# makes the rotary embeddings. Before the last norm the text has left.
COGVIDEOX = Family(
    transformer_class="CogVideoXTransformer3DModel",
    title="CogVideoX 1.0 and 1.5: text, image and video to video, Fun control",
    sparse=SparseParts(attention="joint attention", mlp="feed-forward, text tokens included"),
    modules=ModuleNames(attention="attn1", embedding="patch_embed", last="norm_final"),
    grids=grids,
    attention=AttentionFacts(processors={"CogVideoXAttnProcessor2_0": CogVideoXProcessor}),
    text=TextPlace("first", cut_at_blocks=True),
    guidance=GuidanceFacts(in_batch=True, told=told_by_scale),
    per_token=PerToken({"image_rotary_emb": 0}),
    sharing=Sharing(tokens=True),
    reader=CogVideoXReader,
    tokens=CogVideoXOrder,
)
