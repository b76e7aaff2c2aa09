"""Cosmos 3 (``Cosmos3OmniTransformer``): images and video, with sound and actions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from chipsparse.layout import Grid, LayerKind
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.packed_rows import video_last
from chipsparse.pipelines.processors import ProcessorTaggingAdapter
from chipsparse.pipelines.tensor_facts import remembered
from chipsparse.skip.position import StepContext

STREAMS = ("vision", "sound", "action")
INDICES = [f"{stream}_{kind}_indexes" for stream in STREAMS for kind in ("sequence", "mse_loss")]
FP8_STEPS = "_cosmos3_mixed_precision_runtime"  # what its pipelines leave on such a transformer
ACTIONS_ALONE = "nothing runs sparse: all frames are given, and only actions are generated"
OTHER_GRIDS = "run dense: they have other videos than the first ones of their steps (control)"


class Cosmos3Adapter(ProcessorTaggingAdapter):
    """Attention and feed-forward layers of the video's rows, behind keys of the prompt.

    The prompt has weights of its own and sees, causally, itself alone: that is left. Keys of
    prompt, sound and actions are always kept, and the rows of sound and actions are computed in
    full. Control videos are grids before the generated one's.

    The model finds rows by indices, so to put them in order is to change those: the video's last,
    in tiles. Outputs follow the indices.
    """

    transformer_class = "Cosmos3OmniTransformer"
    families = "Cosmos 3: text, image and video to video or image, with sound, control and actions"
    sparse_attention = "the video's, to all; the prompt's is left, sound and actions are exact"
    sparse_mlp = "feed-forward (gated) of the video tokens"
    why_whole = "it finds rows of text, sound and video by their places among all rows"
    timestep_argument = "vision_timesteps"
    block_list = "layers"
    attention_name = "self_attn"
    mlp_name = "mlp_moe_gen"
    mlp_parts = MLPParts("up_proj", "down_proj", "gate_proj", "act_fn")
    text_place = "first"  # and whatever else is no row of a video
    exact_text = True
    shares_keys = True

    _orders = remembered(video_last)
    _began: tuple[int, tuple[Grid, ...]] = (0, ())  # a generation and its first grids

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        layers = config["num_hidden_layers"]
        width = config["intermediate_size"]
        linears = 3 if config["hidden_act"] == "silu" else 2
        shared = config["num_key_value_heads"] / config["num_attention_heads"]
        projections = math.ceil(2 + 2 * shared)
        return (LayerKind("layer", layers, width, mlp_linears=linears, projections=projections),)

    @classmethod
    def heads(cls, config: Mapping[str, Any]) -> tuple[int, int]:
        return config["num_attention_heads"], config["head_dim"]

    @classmethod
    def grids(cls, config: Mapping[str, Any], latents: Grid) -> tuple[Grid, ...]:
        """That of one video, whose last patches are filled up."""
        rows, columns = (math.ceil(edge / config["latent_patch_size"]) for edge in latents[1:])
        return ((latents[0], rows, columns),)

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        return tuple((t, h, w) for t, h, w in arguments["vision_token_shapes"])

    def text_tokens(self, arguments: dict[str, Any]) -> int:
        tokens = sum(map(math.prod, self.called_grids(arguments)))
        return int(arguments["sequence_length"]) - tokens

    def latents(self, arguments: dict[str, Any]) -> torch.Tensor:
        """The video that is generated, ``[1, C, F, H, W]``."""
        video: torch.Tensor = arguments["vision_tokens"][-1]
        return video.reshape(1, *video.shape[-4:])

    def held_output(self, result: Any) -> torch.Tensor:
        streams = result if isinstance(result, tuple) else result.to_tuple()
        return torch.cat([part.flatten() for stream in streams for part in stream or ()])

    def wrap_output(self, output: torch.Tensor, arguments: dict[str, Any]) -> Any:
        """A list for each stream, None for those that are not there, as the model does it."""
        streams: list[Any] = [arguments.get(f"{stream}_tokens") for stream in STREAMS]
        for place, samples in enumerate(streams):
            parts = []
            for sample in samples or ():
                part, output = output.tensor_split([sample.numel()])
                parts.append(part.view(sample.shape))
            streams[place] = parts or None
        if not arguments.get("return_dict", True):
            return tuple(streams)
        # Not in the oldest diffusers that we support.
        from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformerOutput

        return Cosmos3OmniTransformerOutput(*streams)

    # What runs as without chipsparse.

    def knows(self, context: StepContext, arguments: dict[str, Any]) -> bool:
        """Return whether a call makes frames, of the grids that the generation began with."""
        grids = self.called_grids(arguments)
        if context.generation != self._began[0]:
            self._began = context.generation, grids
        return makes_frames(arguments) and grids == self._began[1]

    def observe(self, context: StepContext, arguments: dict[str, Any]) -> None:
        if makes_frames(arguments):
            self.session.report.fall_back(f"calls of branch {context.branch} {OTHER_GRIDS}")
            return
        self.reset()
        self.session.report.run_dense(ACTIONS_ALONE)
        for site in self.feed_forward_sites:
            site.run_as(None)

    def _not_captured_reason(self) -> str | None:
        """Also where first and last steps compute with weights in FP8 in another way."""
        if getattr(self.transformer, FP8_STEPS, None) is not None:
            return "its linears in FP8 compute in another precision at some steps"
        return super()._not_captured_reason()

    # Tile order.

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        tiles = (self.session.tile_order or ())[:1]
        video = arguments["vision_sequence_indexes"]
        positions = arguments["position_ids"]
        order, place = self._orders(positions, video, *tiles)
        arguments["position_ids"] = positions.index_select(-1, order)
        for name in INDICES:
            if arguments.get(name) is not None:
                arguments[name] = place.index_select(0, arguments[name])


def makes_frames(arguments: Mapping[str, Any]) -> bool:
    """Return whether the report is to say anything of a video in this call."""
    return bool(arguments["vision_mse_loss_indexes"].numel() > 0)
