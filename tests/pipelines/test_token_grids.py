"""Latents with their patches in another order give tokens in that order."""

import pytest
import torch

from chipsparse.pipelines.token_grids import reorder_patches


@pytest.mark.parametrize("patch", [(1, 2, 2), (2, 2, 1), (1, 1, 1)])
def test_the_tokens_of_an_embedding_follow(patch):
    random = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 3, 4, 6, 8, generator=random)
    embed = torch.nn.Conv3d(3, 5, kernel_size=patch, stride=patch)
    tokens = embed(latents).flatten(2)
    order = torch.randperm(tokens.shape[2], generator=random)
    moved = reorder_patches(latents, patch, order)
    assert moved.shape == latents.shape
    torch.testing.assert_close(embed(moved).flatten(2), tokens[:, :, order])


def test_what_fills_no_patch_is_left_out():
    latents = torch.arange(2.0 * 3 * 5).view(1, 1, 2, 3, 5)
    moved = reorder_patches(latents, (1, 2, 2), torch.arange(2 * 1 * 2))
    assert torch.equal(moved, latents[:, :, :, :2, :4])
