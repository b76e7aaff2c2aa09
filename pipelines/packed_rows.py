"""The places of text, audio, conditions and the video in a packed sequence of them all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from chipsparse.layers.tile_order import inverse_order
from chipsparse.layout import Grid
from chipsparse.pipelines.token_grids import grids_at

DISABLE = "call chipsparse.disable(pipe) to run the model as it is"


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The rows of one packed sequence; all tensors int64, on the host."""

    grid: Grid  # of the video that is generated
    video: torch.Tensor  # [V], where its tokens are, in raster order
    others: torch.Tensor  # [S], where everything else is, in the sequence's order
    conditions: torch.Tensor  # [C], those of the others that are rows of other videos and images


def read_rows(position_ids: torch.Tensor, video_indices: torch.Tensor) -> PackedRows:
    """The rows of a sequence of N; waits for the device.

    The position ids ``[N, 3]`` are time, row and column of each row, in any unit. The video's
    indices ``[V + C]`` name conditions first: the video that is generated is the last full grid of
    rows that follow each other. Raises `ValueError` where the last video rows form no grid.
    """
    positions, video = position_ids.cpu(), video_indices.cpu()
    if video.numel() == 0:
        raise ValueError(
            f"the packed sequence has no video rows, so nothing can run sparse; {DISABLE}"
        )
    breaks = (video.diff() != 1).nonzero()
    first = int(breaks[-1]) + 1 if breaks.numel() else 0
    last_rows = video[first:]
    grids = grids_at(positions[last_rows].T)
    if grids is None:
        raise ValueError(
            f"the packed rows are in an order that is not known: the video's last "
            f"{last_rows.numel()}, from row {int(last_rows[0])} on, form no grid of frames, rows "
            f"and columns by their position_ids; {DISABLE}"
        )
    own = video[-math.prod(grids[-1]) :]
    rest = torch.ones(len(positions), dtype=torch.bool)
    rest[own] = False
    return PackedRows(grids[-1], own, rest.nonzero()[:, 0], video[: -own.numel()])


def video_last(
    positions: torch.Tensor,
    video: torch.Tensor,
    others: torch.Tensor,
    tiles: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of a sequence with its video behind all others, on the device of the positions.

    The video's rows ``[V]`` are in raster order, the others ``[S]``; the tiles ``[V]`` are the
    order to put the video's rows in, None for theirs. Returned are the row at each place, and the
    place of each row; int64 ``[S + V]``.
    """
    video = video.to(positions.device)
    if tiles is not None:
        video = video[tiles.to(video.device)]
    order = torch.cat([others.to(video.device), video])
    return order, inverse_order(order)


def check_noise(rows: PackedRows, timestep: torch.Tensor, timestep_indices: torch.Tensor) -> None:
    """Raises `ValueError` where conditions are noisier than the video; waits for the device.

    The timesteps go from 0 (noise) to 1 (clean); ``timestep_indices`` ``[N]`` name each row's.
    """
    if rows.conditions.numel() == 0:
        return
    times = timestep.cpu()[timestep_indices.cpu()]
    conditions, video = (float(times[part].min()) for part in (rows.conditions, rows.video))
    if conditions < video:
        raise ValueError(
            "the packed rows are in an order that is not known: the last grid of video rows, at "
            f"timestep {video:g}, is cleaner than rows before it, at {conditions:g}, which can "
            f"then be no conditions; {DISABLE}"
        )
