"""LTX-2 (``LTX2VideoTransformer3DModel``): video and sound."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx2 import AudioVisualModelOutput

from chipsparse.pipelines.models.ltx import LTXAdapter
from chipsparse.pipelines.streams import flattened, unflattened

MASK = "video_self_attention_mask"


class LTX2Adapter(LTXAdapter):
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

    # References of IC-LoRA may be seen by some tokens more than by others.
    dense_arguments = MappingProxyType({MASK: "the pipeline masks the video's self-attention"})
    projections = 10  # as LTX-Video; q and out to the sound, k and v from it

    @classmethod
    def further_branches(cls, argument: Callable[[str], Any]) -> int:
        """One without the attention of some blocks, and one with separate streams."""
        scales = {
            name: max(argument(name) or 0.0, argument(f"audio_{name}") or 0.0)
            for name in ("stg_scale", "modality_scale")
        }
        return (scales["stg_scale"] > 0) + (scales["modality_scale"] > 1)

    @staticmethod
    def places(coordinates: torch.Tensor) -> torch.Tensor:
        """The beginnings of the patches ``[B, 3, N, 2]``."""
        return coordinates[0, ..., 0]

    def install_tile_order(self) -> None:
        """Hooks the transformer's inputs and output."""
        self.hook_inputs(self.order_arguments)
        self._patches.add_hook(self._model.register_forward_hook(self._restore_output))

    def order_arguments(self, arguments: dict[str, Any]) -> None:
        """Puts the tokens in order, their coordinates and all else that is per token."""
        if not self.moves_tokens:
            return
        if arguments.get("video_coords") is None:
            arguments["video_coords"] = self._model.rope.prepare_video_coords(
                arguments["hidden_states"].shape[0],
                *(arguments[name] for name in ("num_frames", "height", "width")),
                arguments["hidden_states"].device,
                fps=arguments.get("fps", 24.0),
            )
        super().order_arguments(arguments)
        arguments["video_coords"] = self.ordered(arguments["video_coords"], 2)
        if arguments.get("video_keyframes_mask") is not None:
            arguments["video_keyframes_mask"] = self.ordered(arguments["video_keyframes_mask"], 1)
        if arguments.get(MASK) is not None:
            arguments[MASK] = self.ordered(self.ordered(arguments[MASK], 1), 2)

    def held_output(self, result: Any) -> torch.Tensor:
        """Video and sound side by side, ``[B, all numbers of a sample]``."""
        return flattened((result[0], result[1]))

    def wrap_output(self, output: torch.Tensor, arguments: dict[str, Any]) -> Any:
        """Video and sound, both ``[B, N, C]``."""
        config, tokens = self._model.config, arguments["hidden_states"].shape[1]
        sound = arguments["audio_hidden_states"]
        shapes = (
            (tokens, config.out_channels or config.in_channels),
            (sound.shape[1], config.audio_out_channels or config.audio_in_channels),
        )
        video, sound = unflattened(output, shapes)
        if not arguments.get("return_dict", True):
            return (video, sound)
        return AudioVisualModelOutput(sample=video, audio_sample=sound)

    def _restore_output(self, module: Any, _args: Any, output: Any) -> Any:
        restored = self.restore_order(module, (output[0],))
        if restored is None:
            return None
        (video,), sound = restored, output[1]
        if isinstance(output, tuple):
            return (video, sound)
        return AudioVisualModelOutput(sample=video, audio_sample=sound)
