"""FLUX.3 (``Flux3Transformer2DModel``): base and step-distilled."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from chipsparse.layout import Grid, LayerKind
from chipsparse.pipelines.feed_forward import FeedForwardModule, FeedForwardSite
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.models.flux import FluxAdapter
from chipsparse.pipelines.tensor_facts import TensorFacts
from chipsparse.pipelines.token_grids import fitting, grids_of

REFERENCES, REFERENCE_IDS = "image_cond_hidden_states", "image_cond_ids"


class Flux3Adapter(FluxAdapter):
    """Joint attention and feed-forward layers of the single blocks.

    The blocks before them see the image, the references or the text alone, and stay dense. In the
    joint sequence the text stands first, then the image, then the references, which have grids of
    their own.
    """

    transformer_class = "Flux3Transformer2DModel"
    families = "FLUX.3, step-distilled too: text to image, reference images"
    sparse_attention = "joint attention of the single blocks"
    sparse_mlp = "feed-forward (gated) of all tokens in single blocks"
    guidance_argument = "guidance_scale"
    drops_last_grids = True
    mlp_parts = MLPParts("linear_in", "linear_out", None, "act_fn")
    why_whole = "blocks before the joint ones see the image or the text alone, and stay as they are"

    _grids_of = cached_property(lambda _: TensorFacts(lambda ids: grids_of(unscaled(ids))))

    def blocks(self) -> list[Any]:
        return list(self._model.single_transformer_blocks)

    def feed_forwards(self) -> list[FeedForwardSite]:
        return [FeedForwardModule(block, "ff", self.mlp_parts) for block in self.blocks()]

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        layers, width = config["num_single_layers"], cls.neurons(config)
        return (LayerKind("single", layers, width, mlp_linears=3),)

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        grids = super().called_grids(arguments)
        if arguments.get(REFERENCES) is not None:
            tokens = arguments[REFERENCES].shape[1]
            grids += fitting(self._grids_of(arguments[REFERENCE_IDS]), tokens)
        return grids

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        if self.session.tile_order is None:
            return
        order, _ = self.session.tile_order
        image = arguments["hidden_states"].shape[1]
        parts = {"hidden_states": order[:image], "img_ids": order[:image]}
        if arguments.get(REFERENCES) is not None:
            parts |= dict.fromkeys((REFERENCES, REFERENCE_IDS), order[image:] - image)
        for name, part in parts.items():
            arguments[name] = arguments[name].index_select(-2, part.to(arguments[name].device))


def unscaled(ids: torch.Tensor) -> torch.Tensor:
    """Position ids ``[N, 4]`` in whole rows and columns; pipelines multiply these by a factor."""
    ids = ids.cpu().clone()
    places = ids[:, 1:3]
    steps = places[places > 0]
    if steps.numel() > 0:
        ids[:, 1:3] = (places / steps.min()).round()
    return ids
