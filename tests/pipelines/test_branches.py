"""Guidance in batches, and by calls that pass layers over."""

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

import chipsparse
from chipsparse.pipelines.families.stable_diffusion3 import STABLE_DIFFUSION_3
from tests.pipelines.changes import at_step
from tests.pipelines.families import cogvideox, ltx, stable_diffusion3
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, generate
from tests.schedules import listed

CONFIG = SPARSE.override({"attention.density": 0.5, "mlp.density": "dense", **listed("DRS")})
PICTURE = stable_diffusion3.PICTURE
GUIDED = stable_diffusion3.GUIDED
SKIPPING = {
    **PICTURE,
    **GUIDED,
    "num_inference_steps": 10,
    "skip_guidance_layers": [1],
    "skip_layer_guidance_start": 0.15,
    "skip_layer_guidance_stop": 0.75,
}


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("module", [ltx, cogvideox, stable_diffusion3])
def test_branches_in_one_batch_keep_the_same_columns_and_samples_keep_their_own(module, scale):
    family = module.FAMILIES[0]
    pipe = family.make()
    kept = []

    def look():
        caches = handle._runners[0].sparse.session._caches
        branch = handle.report.steps[-1].branch
        kept.append(caches[branch, 0].attention.columns.clone())

    with chipsparse.enable(pipe, CONFIG) as handle:
        call = {**family.call, **module.prompts(2), "guidance_scale": scale}
        generate(pipe, call, num_inference_steps=3, callback_on_step_end=at_step(1, look))
    (columns,) = kept
    first = columns[:2]
    second = columns[-2:]
    assert len(columns) == (4 if scale > 1 else 2)
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


def test_what_the_enabled_pipeline_did_before_says_nothing_of_another_one():
    """Which may be guided or not: of its batches nobody knows whether halves belong together."""
    found = []
    for before in (PICTURE, GUIDED):
        pipe = stable_diffusion3.tiny_pipeline()
        other = StableDiffusion3Pipeline(**pipe.components)
        with chipsparse.enable(pipe, SPARSE):
            generate(pipe, {**PICTURE, **before}, num_inference_steps=2)
            found.append(generate(other, {**PICTURE, **GUIDED}))
    assert torch.equal(*found)


def test_skip_layer_guidance_is_a_branch_of_its_own():
    """Its calls have one sample and pass a layer over, between calls with two samples."""
    branches = STABLE_DIFFUSION_3.guidance.further_branches
    for call, more in ((SKIPPING, 1), ({**SKIPPING, "guidance_scale": 1.0}, 0), (GUIDED, 0)):
        assert branches(call.get) == more
    pipe = stable_diffusion3.tiny_pipeline()
    expected = generate(pipe, SKIPPING)
    assert not torch.equal(expected, generate(pipe, {**SKIPPING, "skip_guidance_layers": None}))
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, SKIPPING), expected)
        assert handle.report.fallbacks == []
        assert (
            handle._runners[0].sparse.session.cache_bytes() == 0
        )  # the pipeline says when it is done
    whole, skipping = (
        {record.step: record for record in handle.report.steps if record.branch == branch}
        for branch in ("call0", "call1")
    )
    assert list(whole) == list(range(10))
    assert list(skipping) == list(range(2, 8))
    assert [whole[step].action for step in range(3)] == ["dense", "refresh", "sparse"]
    # The step behind its first one is a refresh anyway.
    assert [skipping[n].action for n in range(2, 6)] == ["dense", "dense", "refresh", "sparse"]
    assert (len(whole[5].fractions("attention")), len(skipping[5].fractions("attention"))) == (3, 2)
    with chipsparse.enable(pipe, SPARSE):
        sparse = generate(pipe, SKIPPING)
        assert torch.equal(generate(pipe, SKIPPING), sparse)
