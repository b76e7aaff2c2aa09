"""Models with the blocks of Wan: VACE, Animate, SkyReels V2, ChronoEdit and Helios."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from chipsparse.layout import Grid, LayerKind
from chipsparse.pipelines.call_reader import Arguments, CallReader
from chipsparse.pipelines.families.wan import WAN, WanOrder
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.family_facts import Config, Patches, Sharing, SparseParts, neurons
from chipsparse.pipelines.history import WHY_WHOLE, History, PresentFrames
from chipsparse.pipelines.token_grids import frame_by_frame
from chipsparse.pipelines.token_order import TokenOrder

MASKED = "the model masks later blocks of frames"


# Wan with another rotary embedding where two frames stand for more.
CHRONO_EDIT = replace(
    WAN,
    transformer_class="ChronoEditTransformer3DModel",
    title="ChronoEdit: edits of an image, with or without frames in between",
    sharing=Sharing(tokens=True, guidance=True),
)


class VACEOrder(WanOrder):
    """Orders the control video's tokens, too."""

    def install(self) -> None:
        """Hook the patch embedding of the control video."""
        super().install()
        self.hook_output("vace_patch_embedding", self.order_embedded)


def vace_kinds(config: Config) -> tuple[LayerKind, ...]:
    """The kinds of the blocks that see the control video, which come first, and of the others."""
    layers = len(config["vace_layers"])
    width = neurons(config)
    (usual,) = WAN.kinds(config)
    control = LayerKind("control", layers, width, projections=usual.projections + 1)
    return control, usual


# Wan with the blocks that see the control video besides, which run first.
WAN_VACE = replace(
    WAN,
    transformer_class="WanVACETransformer3DModel",
    title="Wan VACE 2.1 and 2.2: text, references, masks and control to video",
    modules=replace(WAN.modules, blocks=("vace_blocks", "blocks")),
    kinds=vace_kinds,
    sharing=Sharing(tokens=True, guidance=True),
    tokens=VACEOrder,
)


class AnimateOrder(WanOrder):
    """Orders the tokens of poses, too, frame by frame."""

    def install(self) -> None:
        """Hook the patch embedding of poses."""
        super().install()
        self.hook_output("pose_patch_embedding", self._order_pose)

    def _order_pose(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Poses ``[B, C, T, H, W]`` of fewer frames than the video has, each ordered alike."""
        if self.session.tile_order is None:
            return output
        tokens = output.flatten(2)
        order = self.session.tile_order[0][: tokens.shape[2]]
        return tokens.index_select(2, order.to(tokens.device)).view(output.shape)


def each_frame(config: Config, latents: Grid) -> tuple[Grid, ...]:
    """A grid for each frame."""
    return frame_by_frame(*Patches()(config, latents))


# Wan whose frames are each put in order, since faces are seen frame by frame.
WAN_ANIMATE = replace(
    WAN,
    transformer_class="WanAnimateTransformer3DModel",
    title="Wan 2.2 Animate: a character follows a video, or takes a place in it",
    grids=each_frame,
    sharing=Sharing(
        why_whole="its blocks see faces frame by frame, and a process would have parts of frames",
        guidance=True,
    ),
    tokens=AnimateOrder,
)


class SkyReelsReader(CallReader):
    """Reads calls with diffusion forcing, where frames have timesteps of their own.

    The model repeats these for the tokens of each frame where no hook can order them, so each frame
    is a grid.
    """

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the video's grid, or one for each frame."""
        grids = super().grids(arguments)
        if arguments.get("enable_diffusion_forcing") or self.needs_mask(arguments):
            return frame_by_frame(*grids)
        return grids

    def why_whole(self, arguments: Arguments) -> str | None:
        """Return why several processes cannot share a call with diffusion forcing."""
        if arguments.get("enable_diffusion_forcing"):
            return "with diffusion forcing it repeats timesteps for all tokens of a frame"
        return None

    def row_of_loop(self) -> tuple[int | None, int | None]:
        """Return the row of the pipeline's matrix of timesteps ``[rows, frames]``, if it has one.

        A block of frames may wait for the one before, so no timestep tells the row. The pipeline's
        ``current_timestep`` does: it is a view of the matrix.
        """
        row = getattr(self.loop.pipe, "current_timestep", None)
        if not (self.loop.runs and isinstance(row, torch.Tensor) and row.ndim == 1):
            return None, None
        rows: int = self.loop.pipe.num_timesteps
        if row.untyped_storage().nbytes() != rows * row.nbytes:  # no view of the matrix
            return None, None
        return row.storage_offset() // row.numel(), rows

    def dense_because(self, arguments: Arguments) -> str | None:
        """Return the reason of models that generate block by block."""
        return why_masked(self.model.config)


class SkyReelsOrder(WanOrder):
    """Leaves timesteps as they are: for all tokens, or for frames."""

    def _order_timesteps(self, _module: Any, _args: Any, output: tuple[Any, ...]) -> Any:
        return output


def why_masked(config: Config) -> str | None:
    """Return why a SkyReels V2 that generates block by block has masks, or None for others."""
    return MASKED if config.get("num_frame_per_block", 1) > 1 else None


# Wan with diffusion forcing.
SKYREELS_V2 = replace(
    WAN,
    transformer_class="SkyReelsV2Transformer3DModel",
    title="SkyReels V2: text, image and video to video, diffusion forcing",
    sharing=Sharing(tokens=True, why_not=why_masked, guidance=True),
    reader=SkyReelsReader,
    tokens=SkyReelsOrder,
)


def helios_patch(config: Config, factor: int) -> Grid:
    """The patch of frames, larger by a factor in all directions."""
    frames, rows, columns = config["patch_size"]
    return frames * factor, rows * factor, columns * factor


HELIOS_HISTORY = History(
    present_indices="indices_hidden_states",
    earlier={
        "latents_history_short": (1, 2),
        "latents_history_mid": (2, 2),
        "latents_history_long": (4, 16),
    },
    patch=helios_patch,
)


class HeliosReader(CallReader):
    """Reads the sizes of earlier frames."""

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the grids of earlier and present frames."""
        return HELIOS_HISTORY.called(self.model.config, arguments)


class HeliosOrder(TokenOrder):
    """Orders the tokens and the rotary embedding of the present frames."""

    def install(self) -> None:
        """Hook the rotary embedding, which the model calls for each part."""
        super().install()
        self._present = PresentFrames(HELIOS_HISTORY, self, ordered_places)

    def order_inputs(self, arguments: Arguments) -> None:
        """Make sure that the present frames have numbers."""
        super().order_inputs(arguments)
        self._present.number(arguments)

    def order_embedded(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Order the present frames ``[B, C, T, H, W]``."""
        order = self._present.order()
        return output if order is None else ordered_places(output, order)


def ordered_places(output: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the positions of ``[B, D, T, H, W]`` in an order."""
    return output.flatten(2).index_select(2, order.to(output.device)).view(output.shape)


# Wan with earlier frames in patches of three sizes before the present ones; each chunk is a
# generation.
HELIOS = Family(
    transformer_class="HeliosTransformer3DModel",
    title="Helios, pyramid and distilled too: text, image and video to video",
    sparse=SparseParts(
        attention="self-attention, earlier frames included; cross-attention is left",
        mlp="feed-forward, earlier frames included",
    ),
    modules=replace(WAN.modules, rotary=""),  # hooked otherwise
    kinds=WAN.kinds,
    grids=HELIOS_HISTORY,
    text=WAN.text,
    sharing=Sharing(why_whole=WHY_WHOLE),
    reader=HeliosReader,
    tokens=HeliosOrder,
)
