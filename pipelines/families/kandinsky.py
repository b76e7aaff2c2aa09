"""Kandinsky 5 and 6 (``Kandinsky5Transformer3DModel``, ``Kandinsky6Transformer3DModel``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from chipsparse.layout import Grid, LayerKind
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.processors import ProcessorTaggingAdapter
from chipsparse.pipelines.streams import VideoWithSound
from chipsparse.pipelines.token_grids import frame_by_frame

NABLA = "sparse_params"


class Kandinsky5Adapter(ProcessorTaggingAdapter):
    """Self-attention and feed-forward layers of the visual blocks; cross-attention is left.

    Latents have their channels last. The tokens are put in order behind their embedding, the rotary
    embeddings where they are made, and in raster order again before the output layer. Larger models
    come with sparse attention of their own (NABLA), which stays.
    """

    transformer_class = "Kandinsky5Transformer3DModel"
    families = "Kandinsky 5: text and image to video, text and image to image"
    sparse_attention = "self-attention, unless it is the model's own NABLA; cross-attention is left"
    shares_tokens = True
    default_latents = 128
    block_list = "visual_transformer_blocks"
    attention_name = "self_attention"
    mlp_name = "feed_forward"
    mlp_parts: ClassVar[MLPParts | None] = MLPParts("in_layer", "out_layer", None, "activation")
    text_place = "cross-attention"
    # For the masks of NABLA the model was trained.
    dense_arguments = MappingProxyType({NABLA: "the model's own sparse attention (NABLA) masks it"})
    projections = 6  # q, k, v and out of self-attention; q and out of the other
    embedding_name = "visual_embeddings"
    rotary_name = "visual_rope_embeddings"
    last_name = "out_layer"

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        layers = config["num_visual_blocks"]
        width = config["ff_dim"]
        return (LayerKind("visual", layers, width, projections=cls.projections),)

    @classmethod
    def heads(cls, config: Mapping[str, Any]) -> tuple[int, int]:
        head_dim = sum(config["axes_dims"])
        return config["model_dim"] // head_dim, head_dim

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        """The grids of latents ``[B, F, H, W, C]``; one row of tokens where NABLA orders them."""
        _, frames, rows, columns, _ = arguments["hidden_states"].shape
        (grid,) = self.grids(self._model.config, (frames, rows, columns))
        return ((1, 1, math.prod(grid)),) if arguments.get(NABLA) is not None else (grid,)

    def install_tile_order(self) -> None:
        super().install_tile_order()
        rotary = self._model.visual_rope_embeddings
        self._patches.add_hook(rotary.register_forward_pre_hook(self._name_whole_grid))

    def order_embedded(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Orders ``[B, T, H, W, ...]``; a process's part of it is one row of tokens."""
        tokens = self.ordered(output.flatten(1, 3), 1)
        return tokens.unflatten(1, (-1, 1, 1)) if self.split else tokens.view(output.shape)

    def _name_whole_grid(self, _module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.split is None:
            return None
        (batch, *_), *rest = args
        return ((batch, *self._grid()), *rest)

    ordered_rotary = order_embedded

    def restored(self, hidden: torch.Tensor) -> torch.Tensor:
        """The tokens ``[B, T, H, W, C]``, of which a process had a part as one row."""
        tokens = super().restored(hidden.flatten(1, 3))
        shape = hidden.shape[1:4] if self.split is None else self._grid()
        return tokens.unflatten(1, shape)

    def _grid(self) -> Grid:
        assert self.session.plan is not None
        (grid,) = self.session.plan.layout.grids
        return grid

    def held_output(self, result: Any) -> torch.Tensor:
        """The model returns no tuple where it returns no output class."""
        return result if isinstance(result, torch.Tensor) else result.sample

    def wrap_output(self, output: torch.Tensor, arguments: dict[str, Any]) -> Any:
        if not arguments.get("return_dict", True):
            return output
        return super().wrap_output(output, arguments)


class Kandinsky6Adapter(VideoWithSound, Kandinsky5Adapter):
    """Kandinsky 5 with a stream of sound, which is left, as is attention between both.

    Where frames have types of their own, which the model adds to the tokens behind their embedding,
    each frame is put in order by itself.
    """

    transformer_class = "Kandinsky6Transformer3DModel"
    families = "Kandinsky 6: text and image to video with sound"
    sparse_attention = "self-attention of the video; the sound's and cross-attention are left"
    sparse_mlp = "feed-forward of the video tokens"
    why_whole = "its sound attends to all tokens of the video"
    mlp_parts = None  # diffusers' own class
    output_class = "transformer_kandinsky6", "Kandinsky6TransformerOutput"
    projections = 10  # as Kandinsky 5; q and out to the sound, k and v from it

    def blocks(self) -> list[Any]:
        return [block.video_dec_block for block in super().blocks()]

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        grids = super().called_grids(arguments)
        typed = arguments.get("visual_token_type_ids") is not None
        return frame_by_frame(*grids) if typed else grids

    def ordered_rotary(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Orders ``[T, H, W, ...]``, the same for all samples."""
        return self.ordered(output.flatten(0, 2), 0).view(output.shape)

    def stream_shapes(self, arguments: dict[str, Any]) -> list[Sequence[int]]:
        config = self._model.config
        sound = arguments.get("audio_hidden_states")
        video = (*arguments["hidden_states"].shape[1:-1], config.out_visual_dim)
        return [video] if sound is None else [video, (sound.shape[1], config.out_audio_dim)]
