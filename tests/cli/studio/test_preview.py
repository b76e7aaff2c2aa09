"""The preview of latents: their order, what is left without noise, and their colours."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

from chipsparse.cli.studio.preview import Colours, Preview, arrange, noise_levels, spread

CHANNELS, GRID = 4, (3, 2, 5)
EXPECTED = torch.randn(*GRID, CHANNELS, generator=torch.Generator().manual_seed(0))


def batch(latents):
    """With a second sample, which is not to be seen."""
    return torch.stack([latents, torch.full_like(latents, torch.nan)])


@pytest.mark.parametrize(
    ("latents", "grid", "expected"),
    [
        (EXPECTED.permute(3, 0, 1, 2), GRID, EXPECTED),
        (EXPECTED.permute(0, 3, 1, 2), GRID, EXPECTED),  # as CogVideoX has them
        (EXPECTED.flatten(0, 2), GRID, EXPECTED),
        (EXPECTED[0].permute(2, 0, 1), None, EXPECTED[:1]),
        (EXPECTED.flatten(0, 2), None, None),
        (EXPECTED.flatten(0, 2), (3, 2, 4), None),
    ],
    ids=["channels first", "frames first", "tokens", "image", "no grid", "another grid"],
)
def test_latents_are_arranged_where_their_order_is_known(latents, grid, expected):
    arranged = arrange(batch(latents), grid, CHANNELS)
    if expected is None:
        assert arranged is None
        assert Preview(grid, CHANNELS, Colours()).pictures(batch(latents), None) is None
    else:
        assert torch.equal(arranged, expected)
    assert Preview(grid, CHANNELS, Colours()).pictures(None, None) is None


def test_latents_that_flux_packed_are_unpacked():
    image = torch.randn(1, CHANNELS, 6, 10)
    packed = FluxPipeline._pack_latents(image, 1, CHANNELS, 6, 10)
    assert torch.equal(arrange(packed, (1, 3, 5), CHANNELS)[0], image[0].permute(1, 2, 0))


@pytest.mark.parametrize("rising", [False, True])
def test_the_noise_is_taken_off(rising):
    """Along the straight path of flow matching the guess is exact, whatever the noise.

    What is put right at a step is no part of the path.
    """
    clean, noise = EXPECTED, torch.randn_like(EXPECTED)
    scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=rising)
    scheduler.set_timesteps(sigmas=[1.0, 0.8, 0.7, 0.5, 0.25])
    colours = Colours()
    preview, seen = Preview(GRID, CHANNELS, colours), []
    colours.of = lambda latents: seen.append(latents)
    shift = 0.5 * torch.randn_like(EXPECTED)
    for step, after in enumerate([0.8, 0.7, 0.5, 0.25, 0.0]):
        noisy = (1 - after) * clean + after * noise + (step >= 3) * shift
        preview.pictures(batch(noisy.permute(3, 0, 1, 2)), noise_levels(scheduler, step))
    assert np.abs(seen[0] - clean.numpy()).max() > 0.5
    for step, latents in enumerate(seen[1:], start=1):
        expected = clean + (step >= 3) * shift
        np.testing.assert_allclose(latents, expected.numpy(), atol=1e-5)


def test_colours_are_those_of_the_vae():
    """A decoder that is a linear map is learnt as it is."""
    matrix, bias = np.array([[9, -5, 3], [2, 8, -4], [-6, 1, 7], [0, 3, 2]]), 120
    latents = EXPECTED.numpy().astype(np.float64)
    pixels = np.rint((latents @ matrix + bias).clip(0, 255)).astype(np.uint8)
    colours = Colours()
    colours.learn(latents, pixels.repeat(4, axis=1).repeat(4, axis=2))
    assert np.abs(colours.of(latents).astype(int) - pixels).max() <= 1
    assert colours.of(latents[..., :3]).std() > 0  # another model's are false colours


def test_false_colours_show_what_differs_and_stay_the_same():
    latents = np.zeros((1, 6, 6, CHANNELS), np.float32)
    latents[0, 2:4, 2:4, 1] = 5
    first, again = Colours().of(latents), Colours().of(latents)
    assert np.array_equal(first, again)
    shape = first[0, 2:4, 2:4].reshape(-1, 3)
    assert (shape == shape[0]).all()
    assert (first[0, 0, 0] != shape[0]).any()
    assert Colours().of(latents[..., :1]).shape == (1, 6, 6, 3)


@pytest.mark.parametrize(
    ("sigmas", "expected"),
    [
        (torch.tensor([1.0, 0.75, 0.0]), (0.75, 0.0)),
        (torch.tensor([0.0, 0.75, 1.0]), (0.25, 0.0)),
        (torch.tensor([14.6, 0.75, 0.0]), None),
        (torch.tensor([1.0, 0.75]), None),
        (None, None),
    ],
)
def test_noise_levels_of_flow_matching_are_known(sigmas, expected):
    assert noise_levels(SimpleNamespace(sigmas=sigmas), 1) == expected


def test_frames_are_spread_from_the_first_to_the_last():
    assert [spread(33, 3), spread(9, 9), spread(5, 1)] == [[0, 16, 32], list(range(9)), [2]]
