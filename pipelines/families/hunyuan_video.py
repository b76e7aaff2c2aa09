"""HunyuanVideo (``HunyuanVideoTransformer3DModel``), SkyReels, FramePack's variant, and 1.5."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb

from chipsparse.layout import Grid
from chipsparse.pipelines.double_and_single import DoubleAndSingleBlocks
from chipsparse.pipelines.history import HistoryAdapter
from chipsparse.pipelines.padded_text import PaddedTextAdapter
from chipsparse.pipelines.processors import JointProcessor
from chipsparse.pipelines.tensor_facts import remembered
from chipsparse.pipelines.token_grids import patch_of

TOKEN_REPLACE = "token_replace"


class HunyuanVideoAdapter(DoubleAndSingleBlocks, PaddedTextAdapter):
    """Joint attention and video feed-forward layers of all blocks; double blocks come first.

    Text columns are always kept, and the text's feed-forward layers in the double blocks stay
    dense. The text is cut before the token refiner: its attention and its pooled mean leave padding
    out as well, and the model counts what is valid and takes that many tokens from the first on.
    Where an image replaces the tokens of the first frame ("token replace"), the blocks modulate
    the first tokens otherwise, so those of the first frame stay in front of the others.
    """

    transformer_class = "HunyuanVideoTransformer3DModel"
    families = "HunyuanVideo: text and image to video; SkyReels"
    sparse_mlp = "feed-forward of the video tokens in double blocks, of all tokens in single ones"
    shares_tokens = True
    guidance_argument = "true_cfg_scale"
    needs_text = True  # its blocks count the text from the end of the sequence

    @classmethod
    def why_not_split(cls, config: Mapping[str, Any]) -> str | None:
        if config["image_condition_type"] != TOKEN_REPLACE:
            return super().why_not_split(config)
        return "it modulates the tokens of the first frame otherwise (token replace)"

    @classmethod
    def grids(cls, config: Mapping[str, Any], latents: Grid) -> tuple[Grid, ...]:
        ((frames, rows, columns),) = super().grids(config, latents)
        if config["image_condition_type"] == TOKEN_REPLACE and frames > 1:
            return (1, rows, columns), (frames - 1, rows, columns)
        return ((frames, rows, columns),)


class FramePackAdapter(HistoryAdapter, HunyuanVideoAdapter):
    """HunyuanVideo behind earlier frames in patches of three sizes; sections are generations.

    The embedding of an image stands before the text, and counts as text.
    """

    transformer_class = "HunyuanVideoFramepackTransformer3DModel"
    families = "HunyuanVideo FramePack: image to video, section by section"
    sparse_mlp = (
        "feed-forward of the video tokens, earlier frames included, in double blocks, of all "
        "tokens in single ones"
    )
    present_indices = "indices_latents"
    history = MappingProxyType(
        {"latents_clean": (1, 2), "latents_history_2x": (2, 2), "latents_history_4x": (4, 16)},
    )

    @classmethod
    def patch(cls, config: Mapping[str, Any], factor: int) -> Grid:
        # That of earlier frames is fixed in the model's code.
        return patch_of(config) if factor == 1 else (factor, 2 * factor, 2 * factor)

    def kept_text(self, arguments: dict[str, Any]) -> dict[str, int]:
        return {**super().kept_text(arguments), "image_embeds": arguments["image_embeds"].shape[1]}

    def ordered_places(self, output: Any, order: torch.Tensor) -> Any:
        """Orders cosines and sines, both ``[N, D]``."""
        return tuple(part.index_select(0, order.to(part.device)) for part in output)


class HunyuanVideo15Processor(JointProcessor):
    """Joint attention of a processor that makes a mask of all pairs of whatever it is given."""

    _attention_backend = None  # as in the stock processor: the one that is active in diffusers

    def rotated(self, states: torch.Tensor, rotary: Any) -> torch.Tensor:
        return apply_rotary_emb(states, rotary, sequence_dim=1)


class HunyuanVideo15Adapter(PaddedTextAdapter):
    """Joint attention and video feed-forward layers of all blocks.

    The text is that of a multimodal language model, a glyph encoder's, and the embedding of an
    image; the model puts what is valid of each in front of all padding. Each is cut before it
    enters the model, the image's embedding to nothing where there is no image (all zeros).
    Text columns are always kept, and the text's feed-forward layers stay dense.
    """

    transformer_class = "HunyuanVideo15Transformer3DModel"
    families = "HunyuanVideo 1.5: text and image to video (from Python only)"
    sparse_attention = "joint attention"
    sparse_mlp = "feed-forward of the video tokens"
    shares_tokens = True
    mlp_sees_text = False
    own_processors = MappingProxyType({"HunyuanVideo15AttnProcessor2_0": HunyuanVideo15Processor})
    text_masks = MappingProxyType(
        {
            "encoder_hidden_states": "encoder_attention_mask",
            "encoder_hidden_states_2": "encoder_attention_mask_2",
        },
    )

    # True unless an embedding ``[B, N, C]`` is all zeros; waits for the device.
    _holds_image = remembered(lambda embeds: bool(embeds.any()))

    @classmethod
    def is_guided(cls, pipe: Any, arguments: Mapping[str, Any]) -> bool:
        """Plain pipelines of this family have a guider."""
        return getattr(getattr(pipe, "guider", None), "num_conditions", 1) > 1

    def kept_text(self, arguments: dict[str, Any]) -> dict[str, int]:
        image = arguments["image_embeds"]
        tokens = image.shape[1] if self._holds_image(image) else 0
        return {**super().kept_text(arguments), "image_embeds": tokens}
