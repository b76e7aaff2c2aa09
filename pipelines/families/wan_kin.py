"""Models with the blocks of Wan: VACE, Animate, SkyReels V2, ChronoEdit and Helios."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from chipsparse.layout import Grid, LayerKind
from chipsparse.pipelines.families.wan import WanAdapter
from chipsparse.pipelines.history import HistoryAdapter
from chipsparse.pipelines.token_grids import frame_by_frame

MASKED = "the model masks later blocks of frames"


class ChronoEditAdapter(WanAdapter):
    """Wan with another rotary embedding where two frames stand for more."""

    transformer_class = "ChronoEditTransformer3DModel"
    families = "ChronoEdit: edits of an image, with or without frames in between"
    shares_tokens = True
    shares_guidance = True


class WanVACEAdapter(WanAdapter):
    """Wan with the blocks that see the control video besides, which run first."""

    transformer_class = "WanVACETransformer3DModel"
    families = "Wan VACE 2.1 and 2.2: text, references, masks and control to video"
    shares_tokens = True
    shares_guidance = True

    def blocks(self) -> list[Any]:
        return [*self._model.vace_blocks, *super().blocks()]

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        layers = len(config["vace_layers"])
        width = cls.neurons(config)
        control = LayerKind("control", layers, width, projections=cls.projections + 1)
        return (control, *super().kinds(config))

    def install_tile_order(self) -> None:
        super().install_tile_order()
        self.hook_output("vace_patch_embedding", self.order_embedded)


class WanAnimateAdapter(WanAdapter):
    """Wan whose frames are each put in order, since faces are seen frame by frame."""

    transformer_class = "WanAnimateTransformer3DModel"
    families = "Wan 2.2 Animate: a character follows a video, or takes a place in it"
    shares_guidance = True
    why_whole = "its blocks see faces frame by frame, and a process would have parts of frames"

    @classmethod
    def grids(cls, config: Mapping[str, Any], latents: Grid) -> tuple[Grid, ...]:
        return frame_by_frame(*super().grids(config, latents))

    def install_tile_order(self) -> None:
        super().install_tile_order()
        self.hook_output("pose_patch_embedding", self._order_pose)

    def _order_pose(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Poses ``[B, C, T, H, W]`` of fewer frames than the video has, each ordered alike."""
        if self.session.tile_order is None:
            return output
        tokens = output.flatten(2)
        order = self.session.tile_order[0][: tokens.shape[2]]
        return tokens.index_select(2, order.to(tokens.device)).view(output.shape)


class SkyReelsV2Adapter(WanAdapter):
    """Wan with diffusion forcing, where each frame is put in order by itself.

    Then frames have timesteps of their own, which the model repeats for their tokens where no hook
    can order them.
    """

    transformer_class = "SkyReelsV2Transformer3DModel"
    families = "SkyReels V2: text, image and video to video, diffusion forcing"
    shares_tokens = True
    shares_guidance = True

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        grids = super().called_grids(arguments)
        if arguments.get("enable_diffusion_forcing"):
            self._refuse_split(
                "with diffusion forcing it repeats timesteps for all tokens of a frame",
            )
        if arguments.get("enable_diffusion_forcing") or self.needs_mask(arguments):
            return frame_by_frame(*grids)
        return grids

    def row_of_loop(self) -> tuple[int | None, int | None]:
        """With diffusion forcing, the row of the pipeline's matrix of timesteps ``[rows, frames]``.

        A block of frames may wait for the one before, so no timestep tells the row. The pipeline's
        ``current_timestep`` does: it is a view of the matrix.
        """
        row = getattr(self._loop.pipe, "current_timestep", None)
        if not (self._loop.runs and isinstance(row, torch.Tensor) and row.ndim == 1):
            return None, None
        rows: int = self._loop.pipe.num_timesteps
        if row.untyped_storage().nbytes() != rows * row.nbytes:  # no view of the matrix
            return None, None
        return row.storage_offset() // row.numel(), rows

    def why_attention_is_dense(self, arguments: dict[str, Any]) -> str | None:
        return MASKED if masks_frames(self._model.config) else None

    @classmethod
    def why_not_split(cls, config: Mapping[str, Any]) -> str | None:
        return MASKED if masks_frames(config) else super().why_not_split(config)

    def _order_timesteps(self, _module: Any, _args: Any, output: tuple[Any, ...]) -> Any:
        """Leaves them: they are for all tokens, or for frames."""
        return output


class HeliosAdapter(HistoryAdapter, WanAdapter):
    """Wan behind earlier frames in patches of three sizes; each chunk is a generation."""

    transformer_class = "HeliosTransformer3DModel"
    families = "Helios, pyramid and distilled too: text, image and video to video"
    sparse_attention = "self-attention, earlier frames included; cross-attention is left"
    sparse_mlp = "feed-forward, earlier frames included"
    present_indices = "indices_hidden_states"
    history = MappingProxyType(
        {
            "latents_history_short": (1, 2),
            "latents_history_mid": (2, 2),
            "latents_history_long": (4, 16),
        },
    )

    @classmethod
    def patch(cls, config: Mapping[str, Any], factor: int) -> Grid:
        frames, rows, columns = config["patch_size"]
        return frames * factor, rows * factor, columns * factor

    def order_embedded(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return self.ordered_places(output, self.video_order())

    def ordered_places(self, output: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """Orders the places of ``[B, D, T, H, W]``."""
        if order is None:
            return output
        return output.flatten(2).index_select(2, order.to(output.device)).view(output.shape)


def masks_frames(config: Mapping[str, Any]) -> bool:
    """Return whether a SkyReels V2 generates block by block."""
    return bool(config.get("num_frame_per_block", 1) > 1)
