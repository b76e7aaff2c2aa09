"""Stable Diffusion 3 and 3.5 (``SD3Transformer2DModel``), medium and large."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from chipsparse.layout import Grid, LayerKind
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
    neurons,
)
from chipsparse.pipelines.processors import JointProcessor

CLIP_TOKENS = 77  # which stand in the sequence before those of T5
PROJECTIONS = 4  # of an attention layer


class StableDiffusion3Reader(CallReader):
    """Notes dual layers."""

    def notes(self, arguments: Arguments) -> list[str]:
        """Return a note on the second attention."""
        blocks = self.model.transformer_blocks
        dual = sum(block.attn2 is not None for block in blocks)
        if dual == 0 or not (self.session.caching and self.session.config.attention.is_sparse):
            return []
        return [
            f"the second attention (attn2) of {dual} of {len(blocks)} layers runs dense: "
            "only the joint one is sparse",
        ]


def kinds(config: Config) -> tuple[LayerKind, ...]:
    """The kinds of blocks, dual ones and others, as they follow each other."""
    dual = [layer in config["dual_attention_layers"] for layer in range(config["num_layers"])]
    return tuple(
        LayerKind(
            "dual" if is_dual else "joint",
            len(list(layers)),
            neurons(config),
            mlp_sees_text=False,
            projections=2 * PROJECTIONS if is_dual else PROJECTIONS,
        )
        for is_dual, layers in groupby(dual)
    )


def planned_text(text_tokens: int, _latents: Grid) -> int:
    """The text tokens of both encoders; the pipeline's length of the prompt is that of T5 alone."""
    return CLIP_TOKENS + text_tokens


def further_branches(argument: Callable[[str], Any]) -> int:
    """Count guidance that passes some layers over, a call of its own."""
    guided = (argument("guidance_scale") or 0.0) > 1
    return int(guided and argument("skip_guidance_layers") is not None)


def why_not_shared(config: Config) -> str | None:
    """Return the reason of models with dual layers."""
    if config["dual_attention_layers"]:
        return "its second attention (attn2, in dual layers) is not exchanged between them"
    return None


# Joint attention and image feed-forward layers of all blocks, the text after the image. The text's
# columns are always kept, and its feed-forward layers stay dense. So does the second attention of
# the dual layers of 3.5 medium (``attn2``), which sees the image alone. The patch embedding adds
# the positions of the image tokens.
STABLE_DIFFUSION_3 = Family(
    transformer_class="SD3Transformer2DModel",
    title="Stable Diffusion 3 and 3.5: text and image to image, inpainting, ControlNet",
    sparse=SparseParts(
        attention="joint attention; the second one of 3.5 medium (attn2) is left dense",
        mlp="feed-forward of the image tokens",
    ),
    modules=ModuleNames(embedding="pos_embed", last="norm_out"),
    kinds=kinds,
    default_latents=128,
    attention=AttentionFacts(
        tags_over_masks=True,  # which the stock processor does not read
        processors={"JointAttnProcessor2_0": JointProcessor},
    ),
    text=TextPlace(planned=planned_text, cut_at_blocks=True),
    guidance=GuidanceFacts(in_batch=True, further_branches=further_branches),
    per_token=PerToken({"block_controlnet_hidden_states": 1}),
    sharing=Sharing(tokens=True, why_not=why_not_shared),
    reader=StableDiffusion3Reader,
)
