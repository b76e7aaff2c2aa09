"""Tile order: a permutation for every grid, compact where the tile divides it."""

import pytest
import torch

from chipsparse.layers.tile_order import grids_order, inverse_order, tile_order


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 7, 5), (9, 16, 16), (3, 5, 17), (4, 4, 8)])
@pytest.mark.parametrize("tile", [(4, 4, 8), (1, 1, 1), (2, 3, 5), (100, 100, 100)])
def test_is_a_permutation_and_its_inverse_undoes_it(grid, tile):
    tokens = grid[0] * grid[1] * grid[2]
    order = tile_order(grid, tile)
    assert torch.equal(order.sort().values, torch.arange(tokens))
    values = torch.randn(tokens)
    assert torch.equal(values[order][inverse_order(order)], values)


def test_groups_are_tiles():
    order = tile_order((8, 8, 16), (4, 4, 8)).view(-1, 4 * 4 * 8)
    frame, row, column = order // 128, order // 16 % 8, order % 16
    for axis, size in ((frame, 4), (row, 4), (column, 8)):
        assert torch.equal(axis.amax(1) - axis.amin(1), torch.full((8,), size - 1))


def test_ragged_grids_keep_tiles_together():
    order = tile_order((5, 5, 9), (4, 4, 8))
    tile_of = (order // 45 // 4, order // 9 % 5 // 4, order % 9 // 8)
    key = tile_of[0] * 4 + tile_of[1] * 2 + tile_of[2]
    assert torch.equal(key, key.sort().values)


def test_a_tile_of_one_token_and_one_of_everything_are_raster_order():
    for tile in ((1, 1, 1), (9, 9, 9)):
        assert torch.equal(tile_order((3, 4, 5), tile), torch.arange(60))


def test_several_grids_follow_each_other():
    grids = [(1, 4, 6), (1, 3, 5), (2, 2, 2)]
    order = grids_order(grids, (1, 2, 2))
    assert torch.equal(order.sort().values, torch.arange(24 + 15 + 8))
    assert torch.equal(order[:24], tile_order((1, 4, 6), (1, 2, 2)))
    assert torch.equal(order[24:39], 24 + tile_order((1, 3, 5), (1, 2, 2)))
    assert torch.equal(grids_order([(2, 2, 2)], (1, 1, 2)), tile_order((2, 2, 2), (1, 1, 2)))
