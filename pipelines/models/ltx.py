"""LTX-Video (``LTXVideoTransformer3DModel``)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from chipsparse.layout import Grid
from chipsparse.pipelines.processors import ProcessorTaggingAdapter
from chipsparse.pipelines.tensor_facts import TensorFacts
from chipsparse.pipelines.token_grids import fitting, grids_at


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
    projections = 6  # q, k, v and out of self-attention; q and out of cross-attention

    @cached_property
    def _grids_at(self) -> TensorFacts[tuple[Grid, ...] | None]:
        return TensorFacts(lambda coordinates: grids_at(self.places(coordinates)))

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

    @staticmethod
    def places(coordinates: torch.Tensor) -> torch.Tensor:
        """Time, row and column ``[3, N]`` of the tokens, from what a call names for all samples."""
        return coordinates[0]

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        if not self.moves_tokens:
            return
        batch, tokens, _ = arguments["hidden_states"].shape
        arguments["hidden_states"] = self.ordered(arguments["hidden_states"], 1)
        if arguments["timestep"].numel() == batch * tokens:
            arguments["timestep"] = self.ordered(arguments["timestep"].view(batch, tokens), 1)

    def _restore_output(self, module: Any, _args: Any, output: Any) -> Any:
        restored = self.restore_order(module, (output[0],))
        if restored is None:
            return None
        if isinstance(output, tuple):
            return (*restored, *output[1:])
        return replace(output, sample=restored[0])
