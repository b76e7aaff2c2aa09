"""The rows of the video in a packed sequence of text, audio, conditions and itself."""

from __future__ import annotations

import math

import torch

from chipsparse.layout import Grid
from chipsparse.pipelines.token_grids import grids_at
from chipsparse.sparse.layers.token_permutation import inverse_permutation

DISABLE = "call chipsparse.disable(pipe) to run the model as it is"


def read_video(
    position_ids: torch.Tensor,
    video_indices: torch.Tensor,
) -> tuple[Grid, torch.Tensor]:
    """The grid of the video that is generated, and its rows; waits for the device.

    The position ids ``[N, 3]`` are time, row and column of each row of the sequence, in any unit.
    The video's indices ``[V + C]`` name conditions first: the video that is generated is the last
    full grid of rows that follow each other. Its rows are int64 ``[V]`` in raster order, on the
    host. Raises `ValueError` where the last video rows form no grid.
    """
    positions = position_ids.cpu()
    video = video_indices.cpu()
    if video.numel() == 0:
        raise ValueError(
            f"the packed sequence has no video rows, so nothing can run sparse; {DISABLE}",
        )
    breaks = (video.diff() != 1).nonzero()
    first = int(breaks[-1]) + 1 if breaks.numel() else 0
    last_rows = video[first:]
    grids = grids_at(positions[last_rows].T)
    if grids is None:
        raise ValueError(
            f"the packed rows are in an order that is not known: the video's last "
            f"{last_rows.numel()}, from row {int(last_rows[0])} on, form no grid of frames, rows "
            f"and columns by their position_ids; {DISABLE}",
        )
    return grids[-1], video[-math.prod(grids[-1]) :]


def video_last(
    positions: torch.Tensor,
    video: torch.Tensor,
    tiles: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order of a sequence with its video after all else; waits for the device.

    The positions ``[..., N]`` are those of all rows, the video's rows ``[V]`` in raster order. The
    tiles ``[V]`` are the order to put the video's rows in, None for theirs. Returned are the row at
    each place, and the place of each row, int64 ``[N]`` on the device of the positions.
    """
    is_other = torch.ones(positions.shape[-1], dtype=torch.bool, device="cpu")
    is_other[video.cpu()] = False
    video = video.to(positions.device)
    if tiles is not None:
        video = video[tiles.to(video.device)]
    order = torch.cat([is_other.nonzero()[:, 0].to(video.device), video])
    return order, inverse_permutation(order)
