"""FLUX.1, FLUX.2 and FLUX.3, and Chroma, LongCat-Image, Bria 3 and Ovis-Image with their blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from chipsparse.layout import Grid
from chipsparse.pipelines.call_reader import Arguments, CallReader, remembered
from chipsparse.pipelines.double_and_single import (
    ATTENTION,
    BLOCKS,
    DoubleAndSingle,
    SingleBeside,
)
from chipsparse.pipelines.family import Family, own_module
from chipsparse.pipelines.family_facts import (
    AttentionFacts,
    GuidanceFacts,
    ModuleNames,
    Patches,
    PerToken,
    SameBlocks,
    Sharing,
    SparseParts,
    TextPlace,
    TimestepFacts,
)
from chipsparse.pipelines.feed_forward import (
    FusedParallelFeedForward,
    GatedParallelFeedForward,
    ParallelFeedForward,
)
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.token_grids import fitting, grids_of
from chipsparse.pipelines.token_order import TokenOrder

REFERENCES = "image_cond_hidden_states"
REFERENCE_IDS = "image_cond_ids"
MASKED = "the pipeline passes an attention mask"
GATED = "feed-forward (gated) of the image tokens in double blocks, of all tokens in single ones"
GATED_PARTS = MLPParts("linear_in", "linear_out", None, "act_fn")


class FluxReader(CallReader):
    """Reads packed latents ``[B, N, C]`` with position ids."""

    _grids_of = remembered(grids_of)

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the grids at the positions that ``img_ids`` names."""
        tokens = arguments["hidden_states"].shape[1]
        return fitting(self._grids_of(arguments["img_ids"]), tokens)

    def notes(self, arguments: Arguments) -> list[str]:
        """Return a note if position ids form no grids."""
        if self._grids_of(arguments["img_ids"]) is not None or self.session.tile_order is None:
            return []
        return ["image tokens stay in the pipeline's order: their img_ids form no full grids"]


class FluxOrder(TokenOrder):
    """Orders image tokens as they enter the transformer, with all that it is given for each.

    No hook is on a linear, which an adapter may wrap.
    """

    def order_inputs(self, arguments: Arguments) -> None:
        """Order the image's tokens and the mask of all, and cut the text."""
        super().order_inputs(arguments)
        if (mask := arguments.get("attention_mask")) is not None:
            arguments["attention_mask"] = self.ordered_beside_text(mask, 1)
        arguments["encoder_hidden_states"] = self.own_text(arguments["encoder_hidden_states"], 1)
        arguments["txt_ids"] = self.own_text(arguments["txt_ids"], -2)


# Joint attention and image feed-forward layers of all blocks; double blocks come first. The text's
# columns are always kept, and its feed-forward layers in the double blocks stay dense.
FLUX = Family(
    transformer_class="FluxTransformer2DModel",
    title="FLUX.1: text and image to image, inpainting, Fill, control, ControlNet, Kontext",
    sparse=SparseParts(
        attention=ATTENTION,
        mlp="feed-forward of the image tokens in double blocks, of all tokens in single ones",
    ),
    modules=ModuleNames(blocks=BLOCKS, last="norm_out"),
    feed_forward=SingleBeside(ParallelFeedForward),
    kinds=DoubleAndSingle(),
    grids=Patches((1, 2, 2)),
    default_latents=128,
    attention=AttentionFacts(dense_arguments={"attention_mask": MASKED}),
    text=TextPlace("first"),
    guidance=GuidanceFacts("true_cfg_scale"),
    timestep=TimestepFacts(scale=1000),
    per_token=PerToken(
        {
            "hidden_states": 1,
            "img_ids": -2,
            "controlnet_block_samples": 1,
            "controlnet_single_block_samples": 1,
        },
    ),
    sharing=Sharing(tokens=True),
    reader=FluxReader,
    tokens=FluxOrder,
)

# FLUX with a prompt mask in all calls, so that only the feed-forward layers run sparse.
CHROMA = replace(
    FLUX,
    transformer_class="ChromaTransformer2DModel",
    title="Chroma: text and image to image, inpainting",
    sparse=replace(FLUX.sparse, masked={"attention": MASKED}),
    guidance=GuidanceFacts("guidance_scale"),
    sharing=Sharing(why_whole=MASKED),
)

# FLUX with guidance by calls of its own.
LONGCAT_IMAGE = replace(
    FLUX,
    transformer_class="LongCatImageTransformer2DModel",
    title="LongCat-Image: text to image, editing",
    guidance=GuidanceFacts("guidance_scale"),
    sharing=Sharing(tokens=True, guidance=True),
)

# FLUX with pipelines that pass the scheduler's timesteps.
BRIA = replace(
    FLUX,
    transformer_class="BriaTransformer2DModel",
    title="Bria 3: text to image",
    guidance=GuidanceFacts("guidance_scale", in_batch=True),
    timestep=TimestepFacts(),
    sharing=Sharing(tokens=True),
)

# FLUX with gated feed-forward layers.
OVIS_IMAGE = replace(
    FLUX,
    transformer_class="OvisImageTransformer2DModel",
    title="Ovis-Image: text to image",
    sparse=replace(FLUX.sparse, mlp=GATED),
    feed_forward=SingleBeside(GatedParallelFeedForward),
    kinds=DoubleAndSingle(mlp_linears=3),
    guidance=GuidanceFacts("guidance_scale"),
    sharing=Sharing(),
)


class Flux2Reader(FluxReader):
    """Reads results that have a cache besides."""

    def repeated(self, result: Any) -> Any:
        """Return the result without the cache of keys, which only a pipeline's first call gives."""
        if isinstance(result, tuple):
            return result[:1]
        has_cache = getattr(result, "kv_cache", None) is not None
        return replace(result, kv_cache=None) if has_cache else result


# FLUX with gated feed-forward layers, which in single blocks are one with the rest. Reference
# images stand after the image and have grids of their own. Where the pipeline keeps their keys and
# values after the first step, the attention is left to its processors; the feed-forward layers run
# sparse from the third step on, when the caches are filled anew.
FLUX2 = replace(
    FLUX,
    transformer_class="Flux2Transformer2DModel",
    title="FLUX.2 dev and Klein: text to image, reference images",
    sparse=replace(FLUX.sparse, mlp=GATED),
    modules=replace(FLUX.modules, mlp_parts=GATED_PARTS),
    feed_forward=SingleBeside(FusedParallelFeedForward),
    kinds=DoubleAndSingle(mlp_linears=3),
    # Some Klein pipelines compute keys and values of their reference images only once.
    attention=AttentionFacts(
        dense_arguments={
            "kv_cache_mode": "the pipeline keeps the keys and values of its reference images",
        },
    ),
    # Klein's guidance_scale is that of classifier-free guidance, dev's is an input of the model.
    guidance=GuidanceFacts("true_cfg_scale"),
    sharing=Sharing(tokens=True, guidance=True),
    reader=Flux2Reader,
)


class Flux3Reader(FluxReader):
    """Reads the grids of references, too."""

    _grids_of = remembered(lambda ids: grids_of(unscaled(ids)))

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the image's grids, then those of the references."""
        grids = super().grids(arguments)
        if arguments.get(REFERENCES) is not None:
            tokens = arguments[REFERENCES].shape[1]
            grids += fitting(self._grids_of(arguments[REFERENCE_IDS]), tokens)
        return grids


class Flux3Order(TokenOrder):
    """Orders the tokens of the image and the references, which enter apart."""

    def order_inputs(self, arguments: Arguments) -> None:
        """Order the tokens and position ids of both."""
        if self.session.tile_order is None:
            return
        order, _ = self.session.tile_order
        image = arguments["hidden_states"].shape[1]
        parts = {"hidden_states": order[:image], "img_ids": order[:image]}
        if arguments.get(REFERENCES) is not None:
            parts |= dict.fromkeys((REFERENCES, REFERENCE_IDS), order[image:] - image)
        for name, part in parts.items():
            arguments[name] = arguments[name].index_select(-2, part.to(arguments[name].device))


# Joint attention and feed-forward layers of the single blocks. In the joint sequence the text
# stands first, then the image, then the references, which have grids of their own.
FLUX3 = replace(
    FLUX,
    transformer_class="Flux3Transformer2DModel",
    title="FLUX.3, step-distilled too: text to image, reference images",
    sparse=SparseParts(
        attention="joint attention of the single blocks",
        mlp="feed-forward (gated) of all tokens in single blocks",
    ),
    modules=ModuleNames(
        blocks=("single_transformer_blocks",),
        last="norm_out",
        mlp_parts=GATED_PARTS,
    ),
    feed_forward=own_module,
    kinds=SameBlocks("single", mlp_linears=3, count="num_single_layers"),
    guidance=GuidanceFacts("guidance_scale"),
    per_token=PerToken(drops_last_grids=True),
    sharing=Sharing(
        why_whole="blocks before the joint ones see the image or the text alone, and stay as they "
        "are",
    ),
    reader=Flux3Reader,
    tokens=Flux3Order,
)


def unscaled(ids: torch.Tensor) -> torch.Tensor:
    """Position ids ``[N, 4]`` in whole rows and columns; pipelines multiply these by a factor."""
    ids = ids.cpu().clone()
    places = ids[:, 1:3]
    steps = places[places > 0]
    if steps.numel() > 0:
        ids[:, 1:3] = (places / steps.min()).round()
    return ids
