"""Configs for pictures of a few tokens, and a short generation with them."""

import torch

from chipsparse import SparsityConfig

STEPS = 6
SPARSE = SparsityConfig().override(
    {
        "attention.density": 0.25,
        "block_size": 16,
        "mlp.density": 0.3,
        "schedule.periodic.refresh_every": 3,
        "tile": [2, 2, 2],
    },
)
EVERYTHING = {"attention.density": 1.0, "mlp.density": 1.0}
EXACT = SPARSE.override(EVERYTHING)


def generate(pipe, call, *, seed=0, **changes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some encode pictures without the generator
        return pipe(
            **{"num_inference_steps": STEPS, "output_type": "latent", **call, **changes},
            generator=torch.Generator().manual_seed(seed),
            return_dict=False,
        )[0]


def error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def assert_close(found, expected, tolerance=1e-4):
    """Equal but for the rounding of another order of summation."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def first_step(pipe):
    """Around a call of the transformer by itself: names it as the first of several steps."""
    return pipe.transformer.cache_context("cond", step_index=0, num_inference_steps=STEPS)
