"""MiniMax-H3 through diffusers' own modular pipeline: without conditions, keyframes, references.

The blocks that encode prompts and pictures and decode latents are left out.
"""

import functools

import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import (
    MiniMaxH3CoreDenoiseStep,
    MiniMaxH3FL2VACoreDenoiseStep,
    MiniMaxH3Ref2VACoreDenoiseStep,
)

import chipsparse
from tests.pipelines import small_sparse
from tests.pipelines.families.minimax_h3 import TEXT, TEXT_DIM, random, tiny_h3_transformer
from tests.pipelines.model_state import actions, state_of
from tests.pipelines.test_families import EXACT, assert_close
from tests.schedules import listed
from tests.variants import slow_unless

CHANNELS, SOUND_CHANNELS = 24, 32  # of the latents, where the pipeline has no VAEs to ask
STEPS = 6
HEIGHT, WIDTH, FRAMES = 64, 96, 124  # the fewest frames that it makes: 37 latent ones
GRID, SOUND = (37, 2, 3), 414
SPARSE = small_sparse.SPARSE.override(
    {
        "attention.density": 0.8,  # most tokens are of the sound here
        "attention.random_fraction": 0.02,
        **listed("DRSKRS"),
    }
)
CALL = {
    "prompt_embeds": random(1, TEXT, TEXT_DIM, seed=3),
    "text_token_tags": torch.ones(TEXT, dtype=torch.long),
    "height": HEIGHT,
    "width": WIDTH,
    "num_frames": FRAMES,
    "num_inference_steps": STEPS + 1,  # its scheduler counts the end as one
}
KEYFRAMES = {
    "keyframe_anchors": ("first", "last"),
    "condition_latents": [random(1, CHANNELS, 1, 4, 6, seed=seed) for seed in (5, 6)],
}
REFERENCES = {
    "normalized_references": [
        MiniMaxH3ImageReference(image=None),
        MiniMaxH3AudioReference(audio=None, sample_rate=32_000),
        MiniMaxH3VideoReference(frames=None),
    ],
    "condition_latents": [
        random(1, CHANNELS, 1, 6, 4, seed=5),
        random(1, CHANNELS, 2, 4, 4, seed=6),
    ],
    "audio_condition_latents": [random(14, SOUND_CHANNELS, seed=7)],
}
# The blocks of each workflow, its name of the transformer, what else its call has, and how many
# rows are conditions.
WORKFLOWS = {
    "t2va": (MiniMaxH3CoreDenoiseStep, "transformer", {}, 0),
    "fl2va": (MiniMaxH3FL2VACoreDenoiseStep, "transformer", KEYFRAMES, 12),
    "ref2va": (MiniMaxH3Ref2VACoreDenoiseStep, "transformer_ref", REFERENCES, 6 + 14 + 8),
}
each_workflow = pytest.mark.parametrize("name", slow_unless(("ref2va",), WORKFLOWS))


def make(name):
    blocks, transformer, _, _ = WORKFLOWS[name]
    pipe = blocks().init_pipeline()
    pipe.set_progress_bar_config(disable=True)
    model = tiny_h3_transformer(in_channels=CHANNELS, audio_in_channels=SOUND_CHANNELS)
    pipe.update_components(
        scheduler=MiniMaxH3Scheduler(12.0),
        audio_scheduler=MiniMaxH3Scheduler(3.0),
        **{transformer: model},
    )
    return pipe


def generate(pipe, name):
    """Video and audio latents, in one row."""
    state = pipe(**CALL, **WORKFLOWS[name][2], generator=torch.Generator().manual_seed(0))
    assert state.get("latents").shape == (1, CHANNELS, 37, 4, 6)
    return torch.cat([state.get(part).flatten() for part in ("latents", "audio_latents")])


@functools.cache
def dense(name):
    return generate(make(name), name)


@each_workflow
def test_keeping_everything_is_the_dense_result(name):
    pipe = make(name)
    with chipsparse.enable(pipe, EXACT, strict=True) as handle:
        assert_close(generate(pipe, name), dense(name))
        assert handle.report.actions()["sparse"] > 0


@each_workflow
def test_sparse_steps_leave_no_trace(name):
    pipe = make(name)
    before = state_of(getattr(pipe, WORKFLOWS[name][1]))
    with chipsparse.enable(pipe, SPARSE, strict=True) as handle:
        found = generate(pipe, name)
        assert torch.equal(generate(pipe, name), found)
        report = handle.report
        assert {record.transformer for record in report.steps} == {WORKFLOWS[name][1]}
        assert {record.branch for record in report.steps} == {"cond"}
        assert actions(handle, "cond") == [
            "dense",
            "refresh",
            "sparse",
            "skip",
            "refresh",
            "sparse",
        ]
        assert report.fallbacks == []
        (note,) = report.notes
        assert note.startswith("skipped steps are not corrected: MiniMaxH3Scheduler is none of ")
        layout = report.plans[WORKFLOWS[name][1]].layout
        assert layout.grids == (GRID,)
        assert layout.text_tokens == TEXT + SOUND + WORKFLOWS[name][3]
    assert not torch.equal(found, dense(name))
    assert state_of(getattr(pipe, WORKFLOWS[name][1])) == before
    assert torch.equal(generate(pipe, name), dense(name))
