"""Latents whose patches stand in another order, for models that cut them within a compiled block.

A hook behind such a patch embedding would be part of its graph. So the patches change places before
the model cuts them: the embedding treats all alike, and its tokens come out in that order.
"""

from __future__ import annotations

import torch

from chipsparse.layout import Grid


def reorder_patches(latents: torch.Tensor, patch: Grid, order: torch.Tensor) -> torch.Tensor:
    """Moves patches, each as a whole.

    Args:
        latents: ``[B, C, F, H, W]``.
        patch: frames, rows and columns of one patch; what does not fill one is left out.
        order: int64 ``[N]``: the ``i``-th place in raster order gets the patch ``order[i]``.

    Returns:
        ``[B, C, F', H', W']`` of whole patches.
    """
    batch, channels = latents.shape[:2]
    grid = [size // edge for size, edge in zip(latents.shape[2:], patch, strict=True)]
    edges = [count * edge for count, edge in zip(grid, patch, strict=True)]
    whole = latents[:, :, : edges[0], : edges[1], : edges[2]]
    split = [size for pair in zip(grid, patch, strict=True) for size in pair]
    patches = whole.reshape(batch, channels, *split).permute(0, 1, 2, 4, 6, 3, 5, 7).flatten(2, 4)
    moved = patches.index_select(2, order.to(latents.device)).unflatten(2, grid)
    return moved.permute(0, 1, 2, 5, 3, 6, 4, 7).reshape(batch, channels, *edges)
