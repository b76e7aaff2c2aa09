"""Tile order: a permutation for every grid, compact where the tile divides it."""

import pytest
import torch

from chipsparse.sparse.layers.token_permutation import (
    grids_permutation,
    inverse_permutation,
    tile_permutation,
)


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 7, 5), (9, 16, 16), (3, 5, 17), (4, 4, 8)])
@pytest.mark.parametrize("tile", [(4, 4, 8), (1, 1, 1), (2, 3, 5), (100, 100, 100)])
def test_is_a_permutation_that_keeps_tiles_together_and_its_inverse_undoes_it(grid, tile):
    frames, height, width = grid
    order = tile_permutation(grid, tile)
    assert torch.equal(order.sort().values, torch.arange(frames * height * width))
    values = torch.randn(len(order))
    assert torch.equal(values[order][inverse_permutation(order)], values)
    places = (order // (height * width), order // width % height, order % width)
    tiles = torch.stack([axis // size for axis, size in zip(places, tile, strict=True)], 1)
    # Tiles follow each other in raster order, and so do the tokens within one.
    keys = [(*tiles[n].tolist(), int(order[n])) for n in range(len(order))]
    assert keys == sorted(keys)


def test_several_grids_follow_each_other():
    order = grids_permutation([(1, 4, 6), (1, 3, 5), (2, 2, 2)], (1, 2, 2))
    assert torch.equal(order.sort().values, torch.arange(24 + 15 + 8))
    assert torch.equal(order[:24], tile_permutation((1, 4, 6), (1, 2, 2)))
    assert torch.equal(order[24:39], 24 + tile_permutation((1, 3, 5), (1, 2, 2)))
