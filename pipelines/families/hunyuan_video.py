"""HunyuanVideo (``HunyuanVideoTransformer3DModel``), SkyReels, FramePack's variant, and 1.5."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb

from chipsparse.layout import Grid
from chipsparse.pipelines.call_reader import Arguments, remembered
from chipsparse.pipelines.double_and_single import (
    ATTENTION,
    BLOCKS,
    DoubleAndSingle,
    SingleBeside,
)
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.family_facts import (
    AttentionFacts,
    Config,
    GuidanceFacts,
    ModuleNames,
    Patches,
    SameBlocks,
    Sharing,
    SparseParts,
    TextPlace,
)
from chipsparse.pipelines.feed_forward import ParallelFeedForward
from chipsparse.pipelines.history import WHY_WHOLE, History, PresentFrames
from chipsparse.pipelines.padded_text import PaddedTextOrder, PaddedTextReader
from chipsparse.pipelines.processors import JointProcessor
from chipsparse.pipelines.token_grids import patch_of

TOKEN_REPLACE = "token_replace"


def grids(config: Config, latents: Grid) -> tuple[Grid, ...]:
    """The grid of a video; with token replace, the first frame has a grid of its own."""
    ((frames, rows, columns),) = Patches()(config, latents)
    if config["image_condition_type"] == TOKEN_REPLACE and frames > 1:
        return (1, rows, columns), (frames - 1, rows, columns)
    return ((frames, rows, columns),)


def why_not_shared(config: Config) -> str | None:
    """Return the reason of models with token replace."""
    if config["image_condition_type"] == TOKEN_REPLACE:
        return "it modulates the tokens of the first frame otherwise (token replace)"
    return None


# Joint attention and video feed-forward layers of all blocks; double blocks come first. Text
# columns are always kept, and the text's feed-forward layers in the double blocks stay dense. The
# text is cut before the token refiner: its attention and its pooled mean leave padding out as well,
# and the model counts what is valid and takes that many tokens from the first on. Where an image
# replaces the tokens of the first frame ("token replace"), the blocks modulate the first tokens
# otherwise, so those of the first frame stay in front of the others.
HUNYUAN_VIDEO = Family(
    transformer_class="HunyuanVideoTransformer3DModel",
    title="HunyuanVideo: text and image to video; SkyReels",
    sparse=SparseParts(
        attention=ATTENTION,
        mlp="feed-forward of the video tokens in double blocks, of all tokens in single ones",
    ),
    modules=ModuleNames(blocks=BLOCKS, rotary="rope", last="norm_out"),
    feed_forward=SingleBeside(ParallelFeedForward),
    kinds=DoubleAndSingle(),
    grids=grids,
    attention=AttentionFacts(tags_over_masks=True),
    # Its blocks count the text from the end of the sequence.
    text=TextPlace(cut_at_blocks=True, needed=True),
    guidance=GuidanceFacts("true_cfg_scale"),
    sharing=Sharing(tokens=True, why_not=why_not_shared),
    reader=PaddedTextReader,
    tokens=PaddedTextOrder,
)


def framepack_patch(config: Config, factor: int) -> Grid:
    """The patch of frames; that of earlier ones is fixed in the model's code."""
    return patch_of(config) if factor == 1 else (factor, 2 * factor, 2 * factor)


FRAMEPACK_HISTORY = History(
    present_indices="indices_latents",
    earlier={
        "latents_clean": (1, 2),
        "latents_history_2x": (2, 2),
        "latents_history_4x": (4, 16),
    },
    patch=framepack_patch,
)


class FramePackReader(PaddedTextReader):
    """Reads the sizes of earlier frames, and the embedding of an image, which counts as text."""

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the grids of earlier and present frames."""
        return FRAMEPACK_HISTORY.called(self.model.config, arguments)

    def kept_text(self, arguments: Arguments) -> dict[str, int]:
        """Return the tokens of the text and of the image before it."""
        return {**super().kept_text(arguments), "image_embeds": arguments["image_embeds"].shape[1]}


class FramePackOrder(PaddedTextOrder):
    """Orders the patches and the rotary embedding of the present frames."""

    def install(self) -> None:
        """Hook the rotary embedding, which the model calls for each part."""
        super().install()
        self._present = PresentFrames(FRAMEPACK_HISTORY, self, ordered_rows)

    def order_inputs(self, arguments: Arguments) -> None:
        """Make sure that the present frames have numbers."""
        super().order_inputs(arguments)
        self._present.number(arguments)

    def video_order(self) -> torch.Tensor | None:
        """Return the order of the present frames' tokens, or None."""
        return self._present.order()


def ordered_rows(output: Any, order: torch.Tensor) -> Any:
    """Cosines and sines, both ``[N, D]``, in an order."""
    return tuple(part.index_select(0, order.to(part.device)) for part in output)


# HunyuanVideo with earlier frames in patches of three sizes before the present ones; sections are
# generations. The embedding of an image stands before the text.
FRAMEPACK = replace(
    HUNYUAN_VIDEO,
    transformer_class="HunyuanVideoFramepackTransformer3DModel",
    title="HunyuanVideo FramePack: image to video, section by section",
    sparse=SparseParts(
        attention=ATTENTION,
        mlp="feed-forward of the video tokens, earlier frames included, in double blocks, of all "
        "tokens in single ones",
    ),
    modules=replace(HUNYUAN_VIDEO.modules, rotary=""),  # hooked otherwise
    grids=FRAMEPACK_HISTORY,
    sharing=Sharing(why_whole=WHY_WHOLE),
    reader=FramePackReader,
    tokens=FramePackOrder,
)


class HunyuanVideo15Processor(JointProcessor):
    """Joint attention of a processor that makes a mask of all pairs of whatever it is given."""

    _attention_backend = None  # as in the stock processor: the one that is active in diffusers

    def rotated(self, states: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Return queries or keys ``[B, N, H, D]`` of the video, rotated by cosines and sines."""
        return apply_rotary_emb(states, rotary, sequence_dim=1)


class HunyuanVideo15Reader(PaddedTextReader):
    """Reads two texts and the embedding of an image.

    The text is that of a multimodal language model, and a glyph encoder's; the model puts what is
    valid of each in front of all padding. Each is cut before it enters the model, the image's
    embedding to nothing where there is no image (all zeros).
    """

    text_masks = MappingProxyType(
        {
            "encoder_hidden_states": "encoder_attention_mask",
            "encoder_hidden_states_2": "encoder_attention_mask_2",
        },
    )

    # True unless an embedding ``[B, N, C]`` is all zeros; waits for the device.
    _holds_image = remembered(lambda embeds: bool(embeds.any()))

    def kept_text(self, arguments: Arguments) -> dict[str, int]:
        """Return the tokens of both texts and of the image."""
        image = arguments["image_embeds"]
        tokens = image.shape[1] if self._holds_image(image) else 0
        return {**super().kept_text(arguments), "image_embeds": tokens}


def told_by_guider(pipe: Any) -> bool:
    """Return whether a pipeline guides; plain pipelines of this family have a guider."""
    return getattr(getattr(pipe, "guider", None), "num_conditions", 1) > 1


# Joint attention and video feed-forward layers of all blocks. Text columns are always kept, and the
# text's feed-forward layers stay dense.
HUNYUAN_VIDEO_15 = Family(
    transformer_class="HunyuanVideo15Transformer3DModel",
    title="HunyuanVideo 1.5: text and image to video (from Python only)",
    sparse=SparseParts(attention="joint attention", mlp="feed-forward of the video tokens"),
    modules=ModuleNames(rotary="rope", last="norm_out"),
    kinds=SameBlocks(mlp_sees_text=False),
    attention=AttentionFacts(
        tags_over_masks=True,
        processors={"HunyuanVideo15AttnProcessor2_0": HunyuanVideo15Processor},
    ),
    text=TextPlace(cut_at_blocks=True),
    guidance=GuidanceFacts(told=told_by_guider),
    sharing=Sharing(tokens=True),
    reader=HunyuanVideo15Reader,
    tokens=PaddedTextOrder,
)
