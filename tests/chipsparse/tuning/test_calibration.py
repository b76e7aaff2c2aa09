"""The trajectory of a dense generation, read at its scheduler."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from chipsparse.tuning.calibration import effect, watched_scheduler

SHAPE = 1, 3, 4, 4


def through(scheduler, outputs):
    """The latents behind a loop with these outputs."""
    scheduler.set_timesteps(len(outputs))
    latents = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    for time, output in zip(scheduler.timesteps, outputs, strict=True):
        latents = scheduler.step(output, time, latents, return_dict=False)[0]
    return latents


@pytest.fixture
def outputs():
    return torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(1))


def test_outputs_effects_and_times_are_those_of_the_loop(outputs, monkeypatch):
    monkeypatch.setattr("chipsparse.tuning.calibration.CHUNK", 7)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    expected = through(scheduler, outputs)
    with watched_scheduler(scheduler) as trajectory:
        assert torch.equal(through(scheduler, outputs), expected)
    with pytest.raises(KeyboardInterrupt), watched_scheduler(scheduler):
        raise KeyboardInterrupt
    assert type(scheduler) is FlowMatchEulerDiscreteScheduler  # its step is its own again
    result = trajectory()
    wide = outputs.double().flatten(1)
    np.testing.assert_allclose(result.products, (wide @ wide.T).numpy(), rtol=1e-12)
    np.testing.assert_allclose(result.effects, scheduler.sigmas.diff().numpy(), rtol=1e-4)
    np.testing.assert_array_equal(result.times, scheduler.timesteps.numpy())


def test_effects_of_a_scheduler_that_also_scales_the_latents(outputs):
    scheduler = DDIMScheduler(clip_sample=False)
    with watched_scheduler(scheduler) as trajectory:
        through(scheduler, outputs)
    alphas = [scheduler.alphas_cumprod[time] for time in scheduler.timesteps]
    alphas.append(scheduler.final_alpha_cumprod)
    expected = [
        (1 - after) ** 0.5 - (after * (1 - before) / before) ** 0.5
        for before, after in pairwise(alphas)
    ]
    np.testing.assert_allclose(trajectory().effects, expected, rtol=1e-3)
    ones = torch.ones(4)
    assert effect(ones, 2 * ones, 3 * ones) == 0  # latents along the output tell nothing
