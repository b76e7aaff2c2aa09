"""The CogVideoX adapter: the text before the video, masks of the user's own, further pipelines."""

import pytest
import torch
from diffusers import CogVideoXFunControlPipeline, CogVideoXVideoToVideoPipeline
from PIL import Image

import chipsparse
from chipsparse.pipelines.cogvideox import CogVideoXAdapter
from chipsparse.pipelines.feed_forward_forms import feed_forward_form
from tests.pipelines.families.cogvideox import (
    BOTH,
    ROTARY,
    TEXT,
    TRANSFORMER,
    V15,
    VIDEO,
    random,
    tiny_pipeline,
)
from tests.pipelines.model_state import actions
from tests.pipelines.small_sparse import EXACT, STEPS, assert_close, generate

TOKENS = 3 * 4 * 3
FRAMES = (random(9, 64, 48, 3, seed=2).sigmoid() * 255).to(torch.uint8)
CLIP = [Image.fromarray(frame.numpy()) for frame in FRAMES]
WITHOUT_FRAMES = {name: value for name, value in VIDEO.items() if name != "num_frames"}
PIPELINES = {
    "video to video": (
        lambda: tiny_pipeline(CogVideoXVideoToVideoPipeline, **ROTARY),
        {**WITHOUT_FRAMES, "video": CLIP, "strength": 0.7, "num_inference_steps": 8},
        list(range(3, 8)),
    ),
    "control": (
        lambda: tiny_pipeline(CogVideoXFunControlPipeline, **ROTARY, **BOTH),
        {**WITHOUT_FRAMES, "control_video": CLIP},
        list(range(STEPS)),
    ),
}


@pytest.mark.parametrize(("name", "guidance_scale"), [*zip(PIPELINES, [1.0, 6.0], strict=True)])
def test_further_pipelines_keep_their_result(name, guidance_scale):
    make, call, steps = PIPELINES[name]
    pipe, call = make(), {**call, "guidance_scale": guidance_scale}
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, call), expected)
        assert handle.report.fallbacks == []
        assert {record.branch for record in handle.report.steps} == {"cond_uncond"}
        assert [record.step for record in handle.report.steps] == steps
        assert actions(handle, "cond_uncond")[:3] == ["dense", "refresh", "sparse"]


def test_a_mask_of_the_users_own_is_the_stock_processors():
    pipe = tiny_pipeline(**ROTARY)
    mask = torch.zeros(1, 1, TEXT + TOKENS)
    mask[..., 3:TEXT] = -1e4
    call = {**VIDEO, "attention_kwargs": {"attention_mask": mask}}
    expected = generate(pipe, call)
    assert not torch.equal(expected, generate(pipe, VIDEO))
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, call), expected)
        assert handle.report.fallbacks == ["attention runs dense: the call has a mask of its own"]
        assert {record.attention_kept for record in handle.report.steps} == {None}


def test_frames_that_fill_no_patch_are_counted_as_a_patch():
    config = {**TRANSFORMER, **V15, "patch_size": 2}
    for frames, patches in ((1, 1), (2, 1), (3, 2), (4, 2), (21, 11)):
        layout = CogVideoXAdapter.planned_layout(config, latents=(frames, 8, 6), text_tokens=226)
        assert layout.grids == ((patches, 4, 3),)
        assert layout.tokens == 226 + 12 * patches


def test_a_dropout_behind_the_second_linear_is_no_reason_to_run_dense():
    block = tiny_pipeline().transformer.transformer_blocks[0]
    assert [type(layer).__name__ for layer in block.ff.net[2:]] == ["Linear", "Dropout"]
    assert feed_forward_form(block.ff).activation == "gelu-tanh"
    block.ff.net[3] = torch.nn.Tanh()
    assert isinstance(feed_forward_form(block.ff), str)
