"""LTX-Video (``LTXVideoTransformer3DModel``), and LTX-2 with sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from chipsparse.layout import Grid
from chipsparse.pipelines.call_reader import Arguments, CallReader, remembered
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.family_facts import (
    AttentionFacts,
    GuidanceFacts,
    ModuleNames,
    PerToken,
    SameBlocks,
    Sharing,
    SparseParts,
    TextPlace,
)
from chipsparse.pipelines.token_grids import fitting, grids_at
from chipsparse.pipelines.token_order import TokenOrder

MASK = "video_self_attention_mask"


class LTXReader(CallReader):
    """Reads packed latents ``[B, N, C]`` with their sizes or coordinates."""

    _grids_at = remembered(lambda coordinates: grids_at(coordinates[0]))

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the grids at the positions that the call names."""
        return fitting(self._read_grids(arguments), arguments["hidden_states"].shape[1])

    def notes(self, arguments: Arguments) -> list[str]:
        """Return a note if coordinates form no grids."""
        if self._read_grids(arguments) is not None or self.session.tile_order is None:
            return []
        return ["video tokens stay in the pipeline's order: their video_coords form no full grids"]

    def _read_grids(self, arguments: Arguments) -> tuple[Grid, ...] | None:
        coordinates = arguments.get("video_coords")
        if coordinates is None:
            return ((arguments["num_frames"], arguments["height"], arguments["width"]),)
        return self._grids_at(coordinates)


class LTXOrder(TokenOrder):
    """Orders tokens as they enter the transformer, with a timestep of each where there is one.

    They leave the transformer in raster order: before the output norm would be too early, since the
    modulation after it may be per token, too.
    """

    def install(self) -> None:
        """Hook the transformer's output."""
        super().install()
        self.hook_output("", self._restore_output)

    def order_inputs(self, arguments: Arguments) -> None:
        """Order the tokens, and their timesteps."""
        if not self.moves_tokens:
            return
        batch, tokens, _ = arguments["hidden_states"].shape
        super().order_inputs(arguments)
        if arguments["timestep"].numel() == batch * tokens:
            arguments["timestep"] = self.ordered(arguments["timestep"].view(batch, tokens), 1)

    def _restore_output(self, _module: Any, _args: Any, output: Any) -> Any:
        restored = self.restored(output[0])
        if isinstance(output, tuple):
            return (restored, *output[1:])
        return replace(output, sample=restored)


# Self-attention (``attn1``) and feed-forward layers of every block run sparse.
LTX = Family(
    transformer_class="LTXVideoTransformer3DModel",
    title="LTX-Video: text and image to video, conditions",
    sparse=SparseParts(attention="self-attention; cross-attention is left"),
    modules=ModuleNames(attention="attn1", rotary="rope"),
    kinds=SameBlocks(projections=6),  # q, k, v and out of self-attention; q and out of the other
    attention=AttentionFacts("processor"),
    text=TextPlace("cross-attention"),
    guidance=GuidanceFacts(in_batch=True),
    per_token=PerToken({"hidden_states": 1}, rotary_dim=1),
    sharing=Sharing(tokens=True),
    reader=LTXReader,
    tokens=LTXOrder,
)


class LTX2Reader(LTXReader):
    """Reads coordinates ``[B, 3, N, 2]``, of which the first are where patches begin."""

    _grids_at = remembered(lambda coordinates: grids_at(coordinates[0, ..., 0]))


class LTX2Order(LTXOrder):
    """Orders the video's coordinates with its tokens: two rotary embeddings are made of them."""

    def order_inputs(self, arguments: Arguments) -> None:
        """Make the coordinates if the call has none, and order all that is per token."""
        if not self.moves_tokens:
            return
        if arguments.get("video_coords") is None:
            arguments["video_coords"] = self.model.rope.prepare_video_coords(
                arguments["hidden_states"].shape[0],
                *(arguments[name] for name in ("num_frames", "height", "width")),
                arguments["hidden_states"].device,
                fps=arguments.get("fps", 24.0),
            )
        super().order_inputs(arguments)
        if arguments.get(MASK) is not None:
            arguments[MASK] = self.ordered(self.ordered(arguments[MASK], 1), 2)


def further_branches(argument: Callable[[str], Any]) -> int:
    """Count guidance by blocks without attention, and guidance by separate streams."""
    scales = {
        name: max(argument(name) or 0.0, argument(f"audio_{name}") or 0.0)
        for name in ("stg_scale", "modality_scale")
    }
    return [scales["stg_scale"] > 0, scales["modality_scale"] > 1].count(True)


# LTX-Video with sound; the sound, its attention and that between both streams are left. A layer
# that passes its attention over in a branch of guidance has nothing to record there.
LTX2 = replace(
    LTX,
    transformer_class="LTX2VideoTransformer3DModel",
    title="LTX-2: text and image to video with sound, conditions",
    sparse=SparseParts(
        attention="self-attention of the video; the sound's and cross-attention are left",
        mlp="feed-forward of the video tokens",
    ),
    modules=replace(LTX.modules, rotary=""),
    kinds=SameBlocks(projections=10),  # as LTX-Video; q and out to the sound, k and v from it
    # References of IC-LoRA may be seen by some tokens more than by others.
    attention=AttentionFacts(
        "processor",
        dense_arguments={MASK: "the pipeline masks the video's self-attention"},
    ),
    guidance=GuidanceFacts(in_batch=True, further_branches=further_branches),
    per_token=PerToken({"hidden_states": 1, "video_coords": 2, "video_keyframes_mask": 1}),
    sharing=Sharing(why_whole="its sound attends to all tokens of the video"),
    reader=LTX2Reader,
    tokens=LTX2Order,
)
