"""Helios (``HeliosTransformer3DModel``): text, image and video to video, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from chipsparse.layout import Grid
from chipsparse.pipelines.history import HistoryAdapter
from chipsparse.pipelines.models.wan import WanAdapter


class HeliosAdapter(HistoryAdapter, WanAdapter):
    """Wan behind earlier frames in patches of three sizes; each chunk is a generation."""

    transformer_class = "HeliosTransformer3DModel"
    families = "Helios, pyramid and distilled too: text, image and video to video"
    sparse_attention = "self-attention, earlier frames included; cross-attention is left"
    sparse_mlp = "feed-forward, earlier frames included"
    present_indices = "indices_hidden_states"
    history: ClassVar[Mapping[str, tuple[int, int]]] = MappingProxyType(
        {
            "latents_history_short": (1, 2),
            "latents_history_mid": (2, 2),
            "latents_history_long": (4, 16),
        }
    )

    @classmethod
    def patch(cls, config: Mapping[str, Any], factor: int) -> Grid:
        """Grows in all directions."""
        frames, rows, columns = config["patch_size"]
        return frames * factor, rows * factor, columns * factor

    def install_tile_order(self) -> None:
        """Hooks the inputs, the present frames' patch and rotary embedding, and the output norm."""
        model, add = self._model, self._patches.add_hook
        self.hook_inputs(self._note_indices)
        add(model.patch_embedding.register_forward_hook(self._order_latents))
        add(model.rope.register_forward_hook(self._order_present, with_kwargs=True))
        add(model.norm_out.register_forward_pre_hook(self.restore_order))

    def _order_latents(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return self.ordered_places(output, self.video_order())

    def ordered_places(self, output: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """Orders the places of ``[B, D, T, H, W]``."""
        if order is None:
            return output
        return output.flatten(2).index_select(2, order.to(output.device)).view(output.shape)
