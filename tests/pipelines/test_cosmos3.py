"""Cosmos 3: keys of a prompt that nothing here changes, and rows that stand where indices say."""

import pytest
import torch

import chipsparse
from chipsparse.pipelines.models.cosmos3 import FP8_STEPS, OTHER_GRIDS
from tests.pipelines.families import cosmos3
from tests.pipelines.model_state import actions
from tests.pipelines.modular_families import Both
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close

SOUND = {**cosmos3.VIDEO, "enable_sound": True}
# The real modular pipeline, which alone has control; what decodes is left out.
MODULAR = Both("Cosmos3OmniBlocks", cosmos3.pipeline, cosmos3.VIDEO)
CONTROL = {"control_videos": {"edge": cosmos3.picture(9)}, "num_video_frames_per_chunk": 9}


def generate(pipe, call, steps=4):
    """All that the pipeline returns, but for Nones, in a row."""
    options = {"output_type": "latent", "return_dict": False, "num_inference_steps": steps}
    found = pipe(**call, **options, generator=torch.Generator().manual_seed(0))
    streams = [each[0] if isinstance(each, list) else each for each in found]
    return torch.cat([each.flatten() for each in streams if each is not None])


@pytest.fixture
def pipe():
    return cosmos3.pipeline()


@pytest.mark.parametrize("name", ["sound", "policy"])
def test_keeping_everything_gives_sound_and_actions_as_well(pipe, name):
    given = {**cosmos3.VIDEO, **cosmos3.VARIANTS[name]}
    expected = generate(pipe, given)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, given), expected)
        assert handle.report.actions()["sparse"] > 0


@pytest.mark.parametrize("changes", [{}, {**CONTROL, "control_guidance": 2.0}])
def test_modular_pipelines_run_sparse(changes):
    pipe = MODULAR.modular(left_out=("decode", "after_decode"))
    expected = MODULAR.generate(pipe, **changes)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(MODULAR.generate(pipe, **changes), expected)
    for branch in ("cond", "uncond"):
        assert {"refresh", "sparse"} <= set(actions(handle, branch))
    without = set(actions(handle, "cond_no_control"))
    said = [f"calls of branch cond_no_control {OTHER_GRIDS}"] if without else []
    assert without == ({"dense"} if "control_guidance" in changes else set())
    assert handle.report.fallbacks == said


def test_captured_steps_give_the_same(pipe, request):
    """Also of prompts that differ in length, whose branches have orders of their own."""
    steps = ["dense", "refresh", *["sparse"] * 4]
    config = SPARSE.override({"schedule.actions": steps, "cuda_graphs": "always"})
    given = {**SOUND, "add_resolution_template": True}
    with chipsparse.enable(pipe, config):
        expected = generate(pipe, given, 6)
    request.getfixturevalue("recorder")
    with chipsparse.enable(pipe, config) as handle:
        assert torch.equal(generate(pipe, given, 6), expected)
        replayed = [record.step for record in handle.report.steps if record.replayed]
        assert replayed == [3, 3, 4, 4, 5, 5]
        # Weights in FP8 are computed with in another way at some steps.
        setattr(pipe.transformer, FP8_STEPS, object())
        generate(pipe, given, 6)
        assert not any(record.replayed for record in handle.report.steps)


def test_an_activation_without_a_kernel_leaves_the_feed_forward_dense():
    pipe = cosmos3.pipeline(hidden_act="relu2", qk_norm_for_text=False, use_und_k_norm_for_gen=True)
    expected = generate(pipe, cosmos3.VIDEO)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, cosmos3.VIDEO), expected)
    (said,) = handle.report.fallbacks
    assert said.startswith("MLP runs dense in 2 of 2 layers")
    assert said.endswith("its activation relu2 is not supported")
