"""Z-Image and Qwen-Image 2.1: calls that are refused, dense, or called apart."""

import pytest
import torch

import chipsparse
from tests.pipelines.families import qwen_image21, z_image
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, generate
from tests.tiny_models import random

CHANNELS = z_image.CHANNELS


def call_arguments(*images):
    texts = [random(7, z_image.TEXT_DIM, seed=i) for i, _ in enumerate(images)]
    return {"x": list(images), "t": torch.full((len(images),), 0.3), "cap_feats": texts}


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([random(CHANNELS, 1, 8, 8, seed=1), random(CHANNELS, 1, 8, 6, seed=2)], "one size, got"),
        ([[random(CHANNELS, 1, 8, 8, seed=1)]], "does not serve Z-Image Omni"),
    ],
)
def test_z_image_calls_that_are_refused(images, reason):
    pipe = z_image.pipeline()
    with chipsparse.enable(pipe, SPARSE), torch.no_grad(), pytest.raises(ValueError, match=reason):
        pipe.transformer(**call_arguments(*images))


def test_z_image_prompts_of_two_lengths_are_branches_of_their_own():
    pipe = z_image.pipeline()
    call = {
        **z_image.IMAGE,
        **z_image.prompts(40),
        **z_image.prompts(9, prefix="negative_", seed=5),
        "guidance_scale": 3.0,
        "num_inference_steps": 3,
    }
    with chipsparse.enable(pipe, EXACT) as handle:
        generate(pipe, call)
    assert {record.branch for record in handle.report.steps} == {"call 0", "call 1"}
    assert handle.report.fallbacks == []


def test_qwen_image_21_without_kept_keys_is_dense_and_warns():
    pipe = qwen_image21.loop()
    call = {**qwen_image21.IMAGE, "keeps": False, "num_inference_steps": 3}
    expected = generate(pipe, call)
    with (
        chipsparse.enable(pipe, SPARSE) as handle,
        pytest.warns(chipsparse.DenseWarning, match="leave use_kv_cache on"),
    ):
        assert torch.equal(generate(pipe, call), expected)
    assert set(handle.report.actions()) == {"dense"}


def test_qwen_image_21_masks_the_padding_of_a_prompt_by_itself():
    pipe = qwen_image21.loop()
    call = {**qwen_image21.IMAGE, "padding": 2, "num_inference_steps": 4}
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT) as handle:
        found = generate(pipe, call)
    assert_close(found, expected)
    assert handle.report.fallbacks == [
        "attention runs dense: the prompts of the batch differ in length, so the shorter ones need "
        "a mask"
    ]
    unmasked = generate(pipe, {**call, "padding": 0})
    assert not torch.allclose(unmasked, expected, rtol=1e-2, atol=1e-3)
