"""FLUX.3 (``Flux3Transformer2DModel``): base and step-distilled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from chipsparse.layout import Grid, LayerKind, ModelLayout
from chipsparse.pipelines.adapter import tagged
from chipsparse.pipelines.feed_forward import FeedForwardModule, FeedForwardSite
from chipsparse.pipelines.flux import FluxAdapter, grids_of
from chipsparse.pipelines.tensor_facts import TensorFacts

ATTENTION_ARGUMENTS = ("hidden_states", "attention_mask", "image_rotary_emb")
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
    shared_mlp_kinds = frozenset()
    why_whole = "blocks before the joint ones see the image or the text alone, and stay as they are"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grids_of = TensorFacts(lambda ids: grids_of(unscaled(ids)))

    def self_attentions(self) -> list[Any]:
        """``attn`` of every single block."""
        return [block.attn for block in self._single_blocks]

    def feed_forwards(self) -> list[FeedForwardSite]:
        """``ff`` of every single block."""
        return [FeedForwardModule(block, "ff") for block in self._single_blocks]

    @classmethod
    def _sizes(
        cls, config: Mapping[str, Any], *, grids: tuple[Grid, ...], text_tokens: int, batch: int
    ) -> ModelLayout:
        heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
        width = int(heads * head_dim * config["mlp_ratio"])
        return ModelLayout(
            kinds=(LayerKind("single", config["num_single_layers"], width, mlp_linears=3),),
            heads=heads,
            head_dim=head_dim,
            batch=batch,
            grids=grids,
            text_tokens=text_tokens,
            text_first=True,
        )

    def layout(self, arguments: dict[str, Any]) -> ModelLayout:
        """As `FluxAdapter`, with the grids of the references behind the image's."""
        grids = self._grids(arguments["img_ids"], arguments["hidden_states"].shape[1])
        if arguments.get(REFERENCES) is not None:
            grids += self._grids(arguments[REFERENCE_IDS], arguments[REFERENCES].shape[1])
        return self._sizes(
            self._model.config,
            grids=grids,
            text_tokens=arguments["encoder_hidden_states"].shape[1],
            batch=arguments["hidden_states"].shape[0],
        )

    def _grids(self, ids: torch.Tensor, tokens: int) -> tuple[Grid, ...]:
        grids = self._grids_of(ids)
        if grids is None or sum(math.prod(grid) for grid in grids) != tokens:
            return ((1, 1, tokens),)  # the model says itself what does not fit
        return grids

    @staticmethod
    def tag_attention(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Passes the tag as the attention mask, which a FLUX.3 block never sets."""
        return tagged(module, args, kwargs, ATTENTION_ARGUMENTS)

    def _order_inputs(
        self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.session.tile_order is None:
            return None
        arguments = {**dict(zip(self._argument_names, args, strict=False)), **kwargs}
        order, _ = self.session.tile_order
        image = arguments["hidden_states"].shape[1]
        parts = {"hidden_states": order[:image], "img_ids": order[:image]}
        if arguments.get(REFERENCES) is not None:
            parts |= dict.fromkeys((REFERENCES, REFERENCE_IDS), order[image:] - image)
        for name, part in parts.items():
            arguments[name] = arguments[name].index_select(-2, part.to(arguments[name].device))
        return (), arguments

    def restore_order(self, _module: Any, args: tuple[torch.Tensor, ...]) -> Any:
        """As in `ModelAdapter`, of the image alone, which comes out."""
        if self.session.tile_order is None:
            return None
        hidden, *rest = args
        inverse = self.session.tile_order[1][: hidden.shape[1]]
        return (hidden.index_select(1, inverse.to(hidden.device)), *rest)


def unscaled(ids: torch.Tensor) -> torch.Tensor:
    """Position ids ``[N, 4]`` in whole rows and columns; pipelines multiply these by a factor."""
    ids = ids.cpu().clone()
    places = ids[:, 1:3]
    steps = places[places > 0]
    if steps.numel() > 0:
        ids[:, 1:3] = (places / steps.min()).round()
    return ids
