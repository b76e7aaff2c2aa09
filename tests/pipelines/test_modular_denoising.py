"""Newer families in modular pipelines of diffusers, by the blocks that denoise alone.

Their prompts come as embeddings, in the form that each pipeline's own blocks make of them.
"""

import diffusers
import pytest
import torch
from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler

import chipsparse
from tests.pipelines.families import flux3, ltx2, z_image
from tests.pipelines.test_families import EXACT, SPARSE, assert_close
from tests.tiny_models import random

STEPS = 6


def modular(blocks, guider=True, **components):
    """A modular pipeline of these blocks, of which only what denoises is left."""
    blocks = getattr(diffusers, blocks)()
    for name in [*blocks.sub_blocks]:
        if name != "denoise":
            blocks.sub_blocks.pop(name)
    pipe = blocks.init_pipeline()
    pipe.set_progress_bar_config(disable=True)
    components["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=3.0)
    if guider:
        components["guider"] = ClassifierFreeGuidance(guidance_scale=3.0)
    pipe.update_components(**components)
    return pipe


def both(make, *names, **more):
    """Inputs of the prompt and of the negative one; `make` gets another seed for each."""
    inputs = {}
    for seed, prefix in enumerate(("", "negative_"), start=3):
        inputs |= {prefix + name: make(seed + len(name)) for name in names}
        inputs |= {prefix + name: value for name, value in more.items()}
    return inputs


def flux_3():
    prompts = both(lambda seed: random(1, 6, 16, seed=seed), "prompt_embeds")
    pipe = modular("Flux3AutoBlocks", transformer=flux3.loop().transformer)
    return pipe, {**flux3.IMAGE, **prompts}


def ltx_2():
    """Its guider also computes a branch with streams apart, and one with blocks passed over."""
    plain = ltx2.pipeline()
    pipe = modular(
        "LTX2AutoBlocks",
        guider=False,  # one of its own
        transformer=plain.transformer,
        vae=plain.vae,
        audio_vae=plain.audio_vae,
    )
    prompts = both(
        lambda seed: random(1, 5, 16, seed=seed),
        "connector_prompt_embeds",
        "connector_audio_prompt_embeds",
        connector_attention_mask=torch.ones(1, 5, dtype=torch.long),
    )
    size = {"height": 32, "width": 64, "num_frames": 5}
    return pipe, {**size, "batch_size": 1, "dtype": torch.float32, **prompts}


def z_image_base():
    prompts = both(lambda seed: [random(7 + seed, 16, seed=seed)], "prompt_embeds")
    pipe = modular("ZImageAutoBlocks", transformer=z_image.transformer())
    return pipe, {"height": 128, "width": 96, **prompts}


# Each with the guidance branches that it has.
FAMILIES = {
    "flux3": (flux_3, {"cond", "uncond"}),
    "ltx-2": (ltx_2, {"cond", "uncond", "cond_stg", "cond_modality"}),
    "z-image": (z_image_base, {"cond", "uncond"}),
}


def generate(pipe, call):
    return pipe(
        **call,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(0),
        output="latents",
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "flux3" else pytest.mark.slow) for n in FAMILIES]
)
def test_a_modular_pipeline_runs_sparse_in_all_its_branches(name):
    make, branches = FAMILIES[name]
    pipe, call = make()
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, call), expected)
    sparse = {record.branch for record in handle.report.steps if record.action == "sparse"}
    assert sparse == branches
    assert handle.report.fallbacks == []
    with chipsparse.enable(pipe, SPARSE, strict=True) as handle:
        found = generate(pipe, call)
        assert torch.equal(generate(pipe, call), found)
        assert handle.report.actions()["skip"] == 1
    assert found.isfinite().all()
    assert not torch.equal(found, expected)
    assert torch.equal(generate(pipe, call), expected)
