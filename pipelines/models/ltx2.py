"""LTX-2 (``LTX2VideoTransformer3DModel``): video and sound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch

from chipsparse.pipelines.models.ltx import LTXAdapter
from chipsparse.pipelines.streams import VideoWithSound

MASK = "video_self_attention_mask"


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
    output_class = "transformer_ltx2", "AudioVisualModelOutput"
    # References of IC-LoRA may be seen by some tokens more than by others.
    dense_arguments = MappingProxyType({MASK: "the pipeline masks the video's self-attention"})
    projections = 10  # as LTX-Video; q and out to the sound, k and v from it

    @classmethod
    def further_branches(cls, argument: Callable[[str], Any]) -> int:
        scales = {
            name: max(argument(name) or 0.0, argument(f"audio_{name}") or 0.0)
            for name in ("stg_scale", "modality_scale")
        }
        return (scales["stg_scale"] > 0) + (scales["modality_scale"] > 1)

    @staticmethod
    def places(coordinates: torch.Tensor) -> torch.Tensor:
        """The beginnings of the patches ``[B, 3, N, 2]``."""
        return coordinates[0, ..., 0]

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
        arguments["video_coords"] = self.ordered(arguments["video_coords"], 2)
        if arguments.get("video_keyframes_mask") is not None:
            arguments["video_keyframes_mask"] = self.ordered(arguments["video_keyframes_mask"], 1)
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
