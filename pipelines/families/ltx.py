"""LTX-Video (``LTXVideoTransformer3DModel``), and LTX-2 with sound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from chipsparse.layout import Grid
from chipsparse.pipelines.processors import ProcessorTaggingAdapter
from chipsparse.pipelines.streams import VideoWithSound
from chipsparse.pipelines.tensor_facts import remembered
from chipsparse.pipelines.token_grids import fitting, grids_at

MASK = "video_self_attention_mask"


class LTXAdapter(ProcessorTaggingAdapter):
    """Self-attention (``attn1``) and feed-forward layers of every block; cross-attention is left.

    The tokens are put in order as they enter the transformer, with their timesteps where each has
    one of its own, and so are the rotary embeddings. They leave the transformer in raster order: in
    front of the output norm would be too early, for the modulation behind it may be per token, too.
    """

    transformer_class = "LTXVideoTransformer3DModel"
    families = "LTX-Video: text and image to video, conditions"
    sparse_attention = "self-attention; cross-attention is left"
    sparse_mlp = "feed-forward"
    shares_tokens = True
    guides_in_batch = True
    attention_name = "attn1"
    text_place = "cross-attention"
    rotary_dim = 1
    rotary_name = "rope"
    token_arguments = MappingProxyType({"hidden_states": 1})
    projections = 6  # q, k, v and out of self-attention; q and out of cross-attention

    _grids_at = remembered(lambda coordinates: grids_at(coordinates[0]))

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        """The grids of packed latents ``[B, N, C]`` at the places that the call names."""
        return fitting(self._read_grids(arguments), arguments["hidden_states"].shape[1])

    def install_tile_order(self) -> None:
        super().install_tile_order()
        self.hook_output("", self._restore_output)  # of the transformer itself

    def notes(self, arguments: dict[str, Any]) -> list[str]:
        if self._read_grids(arguments) is not None or self.session.tile_order is None:
            return []
        return ["video tokens stay in the pipeline's order: their video_coords form no full grids"]

    def _read_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...] | None:
        coordinates = arguments.get("video_coords")
        if coordinates is None:
            return ((arguments["num_frames"], arguments["height"], arguments["width"]),)
        return self._grids_at(coordinates)

    def order_inputs(self, arguments: dict[str, Any]) -> None:
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


class LTX2Adapter(VideoWithSound, LTXAdapter):
    """LTX-Video with sound; the sound, its attention and that between both streams are left.

    The video's coordinates are put in order with its tokens, as two rotary embeddings are made of
    them. Guidance by blocks without attention and by separate streams are branches of their own; a
    layer that passes its attention over in one of them has nothing to record there.
    """

    transformer_class = "LTX2VideoTransformer3DModel"
    families = "LTX-2: text and image to video with sound, conditions"
    sparse_attention = "self-attention of the video; the sound's and cross-attention are left"
    sparse_mlp = "feed-forward of the video tokens"
    why_whole = "its sound attends to all tokens of the video"
    rotary_name = ""
    token_arguments = MappingProxyType(
        {"hidden_states": 1, "video_coords": 2, "video_keyframes_mask": 1},
    )
    output_class = "transformer_ltx2", "AudioVisualModelOutput"
    # References of IC-LoRA may be seen by some tokens more than by others.
    dense_arguments = MappingProxyType({MASK: "the pipeline masks the video's self-attention"})
    projections = 10  # as LTX-Video; q and out to the sound, k and v from it

    # Of the coordinates ``[B, 3, N, 2]``, the beginnings of the patches.
    _grids_at = remembered(lambda coordinates: grids_at(coordinates[0, ..., 0]))

    @classmethod
    def further_branches(cls, argument: Callable[[str], Any]) -> int:
        scales = {
            name: max(argument(name) or 0.0, argument(f"audio_{name}") or 0.0)
            for name in ("stg_scale", "modality_scale")
        }
        return [scales["stg_scale"] > 0, scales["modality_scale"] > 1].count(True)

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        if not self.moves_tokens:
            return
        if arguments.get("video_coords") is None:
            arguments["video_coords"] = self._model.rope.prepare_video_coords(
                arguments["hidden_states"].shape[0],
                *(arguments[name] for name in ("num_frames", "height", "width")),
                arguments["hidden_states"].device,
                fps=arguments.get("fps", 24.0),
            )
        super().order_inputs(arguments)
        if arguments.get(MASK) is not None:
            arguments[MASK] = self.ordered(self.ordered(arguments[MASK], 1), 2)

    def stream_shapes(self, arguments: dict[str, Any]) -> list[Sequence[int]]:
        config = self._model.config
        names = ("hidden_states", "audio_hidden_states")
        video, sound = (arguments[name].shape[1] for name in names)
        return [
            (video, config.out_channels or config.in_channels),
            (sound, config.audio_out_channels or config.audio_in_channels),
        ]
