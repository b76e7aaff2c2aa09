"""Guidance branches in one batch keep the same columns; the samples of a batch keep their own."""

import pytest
import torch

import chipsparse
from chipsparse import SparsityConfig
from tests.pipelines.families import cogvideox, ltx, stable_diffusion3

CONFIG = SparsityConfig().override(
    {
        "attention.density": 0.5,
        "block_size": 16,
        "mlp.density": "dense",
        "schedule.actions": ["dense", "refresh", "sparse"],
    }
)
FAMILIES = {
    "ltx": (ltx.FAMILIES[0], ltx.prompts),
    "cogvideox": (cogvideox.FAMILIES[0], cogvideox.prompts),
    "sd3": (stable_diffusion3.FAMILIES[0], stable_diffusion3.prompts),
}


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_kept_in_a_batch(name, scale):
    family, prompts = FAMILIES[name]
    pipe, kept = family.make(), []

    def look(pipe, step, time, tensors):
        if step == 1:
            (adapter,) = handle._adapters
            branch = handle.report.steps[-1].branch
            kept.append(adapter.session._caches[branch, 0].attention.columns.clone())
        return tensors

    with chipsparse.enable(pipe, CONFIG) as handle:
        pipe(
            **{**family.call, **prompts(2), "guidance_scale": scale},
            num_inference_steps=3,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            callback_on_step_end=look,
        )
    columns = kept[0]
    first, second = columns[:2], columns[-2:]
    assert len(columns) == (4 if scale > 1 else 2)
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
