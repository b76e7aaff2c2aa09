"""Newer families in modular pipelines of diffusers, by the blocks that denoise alone.

Their prompts come as embeddings, in the form that each pipeline's own blocks make of them.
"""

from functools import partial

import diffusers
import pytest
import torch
from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, MiniMaxH3Scheduler
from diffusers.modular_pipelines import minimax_h3 as h3_pipelines
from diffusers.modular_pipelines.minimax_h3 import modular_blocks_minimax_h3 as h3_blocks

import chipsparse
from tests.pipelines.families import flux2, ltx, minimax_h3, z_image
from tests.pipelines.families.family import IMAGE
from tests.pipelines.model_state import state_of
from tests.pipelines.test_families import EXACT, SPARSE, assert_close
from tests.tiny_models import quiet, random
from tests.variants import slow_unless

STEPS = 6


def modular(blocks, guider=True, **components):
    """A modular pipeline of these blocks, of which only what denoises is left."""
    blocks = getattr(diffusers, blocks)()
    for name in [*blocks.sub_blocks]:
        if name != "denoise":
            blocks.sub_blocks.pop(name)
    pipe = quiet(blocks.init_pipeline())
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
    pipe = modular("Flux3AutoBlocks", transformer=flux2.flux3().transformer)
    return pipe, {**IMAGE, **prompts}


def ltx_2():
    """Its guider also computes a branch with separate streams, and one that passes blocks over."""
    plain = ltx.ltx2_pipeline()
    parts = {name: getattr(plain, name) for name in ("transformer", "vae", "audio_vae")}
    prompts = both(
        lambda seed: random(1, 5, 16, seed=seed),
        "connector_prompt_embeds",
        "connector_audio_prompt_embeds",
        connector_attention_mask=torch.ones(1, 5, dtype=torch.long),
    )
    size = {"height": 32, "width": 64, "num_frames": 5}
    pipe = modular("LTX2AutoBlocks", guider=False, **parts)  # it has one of its own
    return pipe, {**size, "batch_size": 1, "dtype": torch.float32, **prompts}


def z_image_base():
    prompts = both(lambda seed: [random(7 + seed, 16, seed=seed)], "prompt_embeds")
    pipe = modular("ZImageAutoBlocks", transformer=z_image.transformer())
    return pipe, {"height": 128, "width": 96, **prompts}


# Latents of MiniMax-H3, where there are no VAEs to ask.
CHANNELS = 24
SOUND_CHANNELS = 32
KEYFRAMES = {
    "keyframe_anchors": ("first", "last"),
    "condition_latents": [random(1, CHANNELS, 1, 4, 6, seed=seed) for seed in (5, 6)],
}
REFERENCES = {
    "normalized_references": [
        h3_pipelines.MiniMaxH3ImageReference(image=None),
        h3_pipelines.MiniMaxH3AudioReference(audio=None, sample_rate=32_000),
        h3_pipelines.MiniMaxH3VideoReference(frames=None),
    ],
    "condition_latents": [random(1, CHANNELS, *size, seed=5) for size in ((1, 6, 4), (2, 4, 4))],
    "audio_condition_latents": [random(14, SOUND_CHANNELS, seed=7)],
}


def h3(workflow, conditions):
    """The fewest frames that it makes; its scheduler counts the end as a step."""
    pipe = quiet(getattr(h3_blocks, f"MiniMaxH3{workflow}CoreDenoiseStep")().init_pipeline())
    model = minimax_h3.tiny_h3_transformer(in_channels=CHANNELS, audio_in_channels=SOUND_CHANNELS)
    pipe.update_components(
        scheduler=MiniMaxH3Scheduler(12.0),
        audio_scheduler=MiniMaxH3Scheduler(3.0),
        **{"transformer_ref" if "Ref" in workflow else "transformer": model},
    )
    text = minimax_h3.TEXT
    prompt = {
        "prompt_embeds": random(1, text, minimax_h3.TEXT_DIM, seed=3),
        "text_token_tags": torch.ones(text, dtype=torch.long),
    }
    size = {"height": 64, "width": 96, "num_frames": 124}
    return pipe, {**size, **prompt, **conditions, "num_inference_steps": STEPS + 1}


GUIDED = {"cond", "uncond"}
# Each with the guidance branches that it has.
FAMILIES = {
    "flux3": (flux_3, GUIDED),
    "ltx-2": (ltx_2, {*GUIDED, "cond_stg", "cond_modality"}),
    "z-image": (z_image_base, GUIDED),
    "minimax h3": (partial(h3, "", {}), {"cond"}),
    "minimax h3, keyframes": (partial(h3, "FL2VA", KEYFRAMES), {"cond"}),
    "minimax h3, references": (partial(h3, "Ref2VA", REFERENCES), {"cond"}),
}


def generate(pipe, call):
    options = {"num_inference_steps": STEPS, **call}
    state = pipe(**options, generator=torch.Generator().manual_seed(0))
    streams = [state.get(name) for name in ("latents", "audio_latents")]
    return torch.cat([stream.flatten() for stream in streams if stream is not None])


@pytest.mark.parametrize("name", slow_unless(("flux3", "minimax h3, references"), FAMILIES))
def test_a_modular_pipeline_runs_sparse_in_all_its_branches(name):
    make, branches = FAMILIES[name]
    pipe, call = make()
    (model,) = (each for part, each in pipe.components.items() if part.startswith("transformer"))
    expected = generate(pipe, call)
    before = state_of(model)
    with chipsparse.enable(pipe, EXACT, strict=True) as handle:
        assert_close(generate(pipe, call), expected)
    sparse = {record.branch for record in handle.report.steps if record.action == "sparse"}
    assert sparse == branches
    with chipsparse.enable(pipe, SPARSE, strict=True) as handle:
        found = generate(pipe, call)
        assert torch.equal(generate(pipe, call), found)
        assert handle.report.actions()["skip"] == 1
    assert found.isfinite().all()
    assert not torch.equal(found, expected)
    assert state_of(model) == before
    assert torch.equal(generate(pipe, call), expected)
